"""The command as its users meet it: exit codes, files, interruption, SIGKILL."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
import pytest

from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.model import to_json
from tests.command import run_here
from tests.losstest import rows as made

ROOT = Path(__file__).resolve().parents[2]
PROOF = ROOT / "tests/losstest/proof.py"
FIELDS = (
    *(
        "transport",
        "scenario",
        "seed",
        "offered",
        "rejected",
        "unknown",
        "accepted",
        "delivered",
        "committed",
    ),
    *("acked", "lost", "lost_by_reason", "pending", "duplicates", "reordered", "unexpected", "recovered"),
    *("unavailable_s", "recovery_s", "backlog_clear_s", "verdict", "balanced"),
)
SHORT = ["--rate", "200", "--duration", "0.9", "--offline", "0.4", "--drain", "6"]


def losstest(
    *arguments: str | Path, cwd: Path, timeout: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brokerless.cli", "losstest", *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_run_its_files_and_the_report_of_it(tmp_path: Path) -> None:
    """`run` writes JSON with the documented fields and HTML; `report` gives the same rows from the witnesses."""
    done = losstest(
        *("run", "--transport", "udp", "--transport", "tcp", "--scenario", "kill", *SHORT),
        *("--out", "run", "--json-file", "a.json", "--html", "a.html"),
        *("--expect", "unattributed == 0", "--expect", "lost > 0 when transport == udp"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["schema"] == 1
    assert {(row["transport"], row["scenario"]) for row in document["rows"]} == {
        (t, s) for t in ("udp", "tcp") for s in ("none", "seeded", "kill")
    }
    for row in document["rows"]:
        assert set(FIELDS) <= set(row)
        assert row["balanced"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    again = run_here("losstest", "report", "run", "--json-file", "b.json", cwd=tmp_path)
    assert again.returncode == 0
    assert json.loads((tmp_path / "b.json").read_text())["rows"] == document["rows"]
    same = run_here("losstest", "compare", "run", "run", cwd=tmp_path)
    assert same.returncode == 0
    assert "worse" not in same.stdout


def test_a_spark_that_fails_does_not_take_the_report_with_it(tmp_path: Path) -> None:
    """Whatever becomes of the check with Spark, table and files are there; the exit code is 1 and says why."""
    words = ("run", "--transport", "tcp", "--scenario", "kill", *SHORT, "--spark", "--json-file", "a.json")
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "17.0.1"\' && exit 0\n'
        "echo this Java cannot run anything >&2\nexit 1\n"
    )
    java.chmod(0o755)
    done = losstest(*words, cwd=tmp_path, JAVA_HOME=str(tmp_path / "home"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this Java cannot run anything" in done.stderr
    assert "Traceback" not in done.stderr
    assert "3 runs, 3 balanced" in done.stdout
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 3


def test_a_java_that_is_not_there_is_told_before_anything_runs(tmp_path: Path) -> None:
    """`--spark` without a usable Java ends at once and names JAVA_HOME; nothing is measured for nothing."""
    words = ("run", "--transport", "tcp", "--scenario", "kill", *SHORT, "--spark", "--out", "run")
    done = losstest(*words, cwd=tmp_path, JAVA_HOME=str(tmp_path / "nothing"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "JAVA_HOME" in done.stderr
    assert not (tmp_path / "run").exists()


def test_expectations_decide(tmp_path: Path) -> None:
    """What was promised is not enough: an unmet --expect is exit code 1, told with its run."""
    done = losstest(
        *("run", "--transport", "udp", "--scenario", "late", *SHORT, "--expect", "lost == 0"), cwd=tmp_path
    )
    assert done.returncode == 1
    assert "NOT MET" in done.stdout


def test_a_control_that_was_asked_for_is_measured(tmp_path: Path) -> None:
    """`--scenario none` is in the table and can be expected of; the other control only proves the tool."""
    words = ("--scenario", "none", *SHORT, "--expect", "lost == 0 and accepted > 0")
    done = losstest("run", "--transport", "udp", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(1 runs)" in done.stdout
    assert "2 runs, 2 balanced; lost 0 of " in done.stdout
    assert "of 0 accepted" not in done.stdout


def test_a_run_that_does_not_rest_is_exit_5(tmp_path: Path) -> None:
    """`unknown` is not success; here the controls rest and the scenario does not."""
    done = losstest(
        *("run", "--transport", f"{PROOF}:restless", "--scenario", "clock-jump", *SHORT[:-1], "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 5, done.stdout + done.stderr


def test_a_failed_control_means_no_report(tmp_path: Path) -> None:
    """A transport that loses without a fault fails its control, also one by one: exit 4, no table, no files."""
    done = losstest(
        *("run", "--transport", f"{PROOF}:silent", "--scenario", "kill", *SHORT, "--json-file", "x.json"),
        *("--out", "run"),
        cwd=tmp_path,
    )
    rounds = json.loads((tmp_path / "run/run.json").read_text())["control_rounds"]
    assert rounds[-1]["at_once"] == 1
    assert all(one["failed"] for one in rounds)
    assert not (tmp_path / "run/cells/proof.py:silent/kill").exists()
    assert losstest("report", "run", cwd=tmp_path).returncode == 4
    assert done.returncode == 4, done.stdout + done.stderr
    assert "control failed" in done.stderr
    assert "lost, of what was accepted" not in done.stdout
    assert not (tmp_path / "x.json").exists()


def test_controls_that_fail_are_all_run_again_with_less_going_on(tmp_path: Path) -> None:
    """A control that failed is told and kept; the report is made as the round in which all controls passed."""
    done = losstest(
        *("run", "--transport", f"{PROOF}:moody", "--scenario", "kill", *SHORT, "--jobs", "8"),
        *("--out", "run", "--json-file", "m.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "controls failed with 8 runs at once, and were run again with 2" in done.stdout
    rounds = json.loads((tmp_path / "m.json").read_text())["run"]["control_rounds"]
    assert [(one["at_once"], bool(one["failed"])) for one in rounds] == [(8, True), (2, False)]
    for control in ("none", "seeded"):
        kept = sorted(path.name for path in (tmp_path / f"run/cells/proof.py:moody/{control}").iterdir())
        assert kept == ["1", "1.round-1"]
    again = run_here("losstest", "report", "run", cwd=tmp_path)
    assert "controls failed with 8 runs at once" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "--transport", "nonsense"], "nonsense"),
        (["run", "--scenario", "nonsense", "--transport", "udp"], "nonsense"),
        (["run", "--rate", "0", "--transport", "udp"], "--rate"),
        (["run", "--rate", "many"], "--rate"),
        (["run", "--size", "10", "--transport", "udp"], "--size"),
        (["run", "--repeat", "0", "--transport", "udp"], "--repeat"),
        (["run", "--jobs", "-1", "--transport", "udp"], "--jobs"),
        (["run", "--duration", "nan", "--transport", "udp"], "--duration"),
        (["run", "--duration", "1", "--offline", "2", "--transport", "udp"], "--duration"),
        (["run", "--expect", "lots == 0", "--transport", "udp"], "lots"),
        (["run", "--json-file", "/proc/nothing/x.json", "--transport", "udp"], "/proc/nothing"),
        (["run", "--out", "/proc/nothing", "--transport", "udp"], "/proc/nothing"),
        (["run", "--transport", "no.such.module:thing"], "no.such.module"),
        (["run", "--nonsense"], "--nonsense"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "nowhere", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments_are_exit_2(tmp_path: Path, arguments: list[str], named: str) -> None:
    """Each mistake is told before anything runs, names the thing, and is exit code 2."""
    done = run_here("losstest", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_list_names_everything(tmp_path: Path) -> None:
    """`list` shows transports and scenarios with what each may lose and why."""
    done = run_here("losstest", "list", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("udp", "zmq-pubsub", "kill-fresh", "beyond-retention", "offline", "rabbitmq", "kafka"):
        assert word in done.stdout
    # One line of many: PUB/SUB must lose by overflow when the consumer is paused for long.
    line = next(line for line in done.stdout.splitlines() if "PUB drops for a subscriber" in line)
    assert "pause-long, slow" in line
    assert "must" in line


def start(tmp_path: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "brokerless.cli",
        "losstest",
        "run",
        "--transport",
        "udp",
        "--transport",
        "tcp",
    ]
    command += ["--scenario", "kill", "--scenario", "pause-long", "--offline", "30", "--rate", "50"]
    command += ["--duration", "31", "--out", "run", "--progress", "lines"]
    return subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def until(condition: object, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def reached_fault(tmp_path: Path) -> bool:
    logs = list((tmp_path / "run/cells").glob("*/*/1/supervisor.jsonl"))
    return sum("fault-begin" in log.read_text() for log in logs) >= 4


def test_sigkill_leaves_no_process_and_a_readable_directory(tmp_path: Path) -> None:
    """Killed in the middle of its faults, with workers stopped and killed: all are gone, `report` still works."""
    running = start(tmp_path)
    try:
        until(lambda: reached_fault(tmp_path))
        children = family(running.pid)
        assert len(children) >= 6
        # A fault is noted before it is done, and a process stops when it has its turn.
        until(
            lambda: any(child.is_running() and child.status() == psutil.STATUS_STOPPED for child in children)
        )
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.communicate(timeout=60)
    until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    )
    done = run_here("losstest", "report", "run", "--json-file", "r.json", cwd=tmp_path)
    # Of what was not finished nothing is known: no contradiction, and no success.
    assert done.returncode == 5, done.stdout + done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["run"]["command"].startswith("brokerless losstest run")
    rows = found["rows"]
    assert {row["scenario"] for row in rows} == {"none", "seeded"}
    assert all(row["verdict"] == "pass" for row in rows)
    assert "4 of 8 runs were not finished" in done.stderr


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """Interrupted it ends within seconds with code 130, says how to see what is there, and leaves no process."""
    running = start(tmp_path)
    until(lambda: (tmp_path / "run/cells").exists() and len(family(running.pid)) >= 3)
    children = family(running.pid)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "losstest report run" in errors
    assert "Traceback" not in errors
    until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    )


def test_the_example_plugin(tmp_path: Path) -> None:
    """The example of the documentation measures its socket: it refuses when nobody is there, and so loses little."""
    done = losstest(
        *("run", "--transport", f"{ROOT}/examples/plain_socket.py:transport", "--scenario", "kill", *SHORT),
        *("--json-file", "p.json", "--expect", "rejected > 0 and lost < 30 when scenario == kill"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_entry_point_is_found(tmp_path: Path) -> None:
    """A transport that an installed package declares is listed and resolved by its name."""
    package = tmp_path / "site/mine-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[brokerless.losstest.transports]\nmine = mine_module:transport\n"
    )
    (tmp_path / "site/mine_module.py").write_text((ROOT / "examples/plain_socket.py").read_text())
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "brokerless.cli", "losstest", "list"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "mine" in done.stdout
    assert "refuses when nobody is there" in done.stdout


def test_a_run_of_nothing_is_no_success(tmp_path: Path) -> None:
    """A scenario that has no meaning for any of the transports is wrong, and not green."""
    done = losstest("run", "--transport", "tcp", "--scenario", "loss", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "has no meaning" in done.stderr


def test_unrelated_runs_cannot_be_compared(tmp_path: Path) -> None:
    """Two runs without a common cell are an error: nothing was compared."""
    for name in ("udp", "tcp"):
        cell = tmp_path / name / "cells" / name / "kill/1"
        cell.mkdir(parents=True)
        (tmp_path / name / "run.json").write_bytes(to_json({"planned": [f"{name}/kill/1"]}))
        (cell / "cell.json").write_text("{}")
        (cell / "verdict.json").write_bytes(to_json(made.row(transport=name, scenario="kill")))
    done = run_here("losstest", "compare", "udp", "tcp", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "in common" in done.stderr


def test_the_documented_expectation_holds(tmp_path: Path) -> None:
    """The line of the documentation, on transports with and without a journal on disk."""
    text = (ROOT / "docs/losstest.md").read_text()
    [line] = [one for one in text.splitlines() if "run --quick --expect" in one]
    words = shlex.split(line.removeprefix("$ brokerless losstest "))
    done = losstest(
        *words,
        "--transport",
        "udp",
        "--transport",
        "zmq-fanout-disk",
        "--transport",
        "mcast-disk",
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": met (" in done.stdout


def test_ctrl_c_during_the_controls_leaves_a_run_that_can_be_reported(tmp_path: Path) -> None:
    """Interrupted controls are unfinished and not failed; no empty file is left behind."""
    command = [
        sys.executable,
        "-m",
        "brokerless.cli",
        "losstest",
        "run",
        "--transport",
        "udp",
        "--scenario",
        "kill",
    ]
    command += [
        "--rate",
        "50",
        "--duration",
        "30",
        "--out",
        "run",
        "--json-file",
        "x.json",
        "--progress",
        "none",
    ]
    running = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    until(lambda: list((tmp_path / "run/cells").glob("udp/none/1/producer-0.1.wit")))
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert not (tmp_path / "x.json").exists()
    done = run_here("losstest", "report", "run", cwd=tmp_path)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "were not finished" in done.stderr


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("transport = 5", "not a Transport"),
        ("transport = make(traits=None)", "Traits"),
        (
            "transport = make(traits=Traits(family='x', promises={'kill': Promise('may', ('magic',))}))",
            "magic",
        ),
        ("transport = make(missing=lambda: 1 / 0)", "its own check failed"),
        ("transport = make(producer=None)", "cannot be called"),
    ],
)
def test_mistakes_of_plugins_are_told_in_words(tmp_path: Path, body: str, named: str) -> None:
    """Whatever is wrong with somebody else's transport: one line that says what, and no traceback."""
    (tmp_path / "mine.py").write_text(
        "from brokerless.losstest import *\n"
        "def make(**changes):\n"
        "    fields = dict(name='m', producer=lambda s: 1, consumer=lambda s: 1, traits=Traits(family='x'))\n"
        "    return Transport(**(fields | changes))\n" + body + "\n"
    )
    words = ("run", "--transport", "mine.py:transport", "--scenario", "kill", *SHORT)
    done = run_here("losstest", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_plugin_that_fails_when_it_runs_fails_its_control(tmp_path: Path) -> None:
    """An end that cannot be made is told with its error, and is no defect of the loss test."""
    (tmp_path / "mine.py").write_text(
        "from brokerless.losstest import *\n"
        "transport = Transport('m', lambda s: 1 / 0, lambda s: 1 / 0, Traits(family='x'),"
        " services=lambda s: 1 / 0)\n"
    )
    done = losstest("run", "--transport", "mine.py:transport", "--scenario", "kill", *SHORT, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_the_redis_example(tmp_path: Path, ports: Ports) -> None:
    """The other example of the documentation, in all scenarios that have a meaning for it, on a server of our own."""
    port = ports.take()
    words = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        until(lambda: redis_answers(port))
        command = [sys.executable, "-m", "brokerless.cli", "losstest", "run", "--quick"]
        command += ["--transport", f"{ROOT}/examples/redis_list.py:transport"]
        env = os.environ | {"REDIS": f"127.0.0.1:{port}"}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    finally:
        server.kill()
        server.wait(20)


def redis_answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
        client.sendall(b"PING\r\n")
        return client.recv(7) == b"+PONG\r\n"
    return False


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """What was finished is kept as it is, the rest is run, and the result is complete; JUnit has every run."""
    arguments = ["run", "--transport", "udp", "--scenario", "kill", *SHORT, "--jobs", "1", "--repeat", "3"]
    command = [sys.executable, "-m", "brokerless.cli", "losstest", *arguments, "--out", "run"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    verdict = tmp_path / "run/cells/udp/kill/1/verdict.json"
    until(verdict.exists)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "losstest resume run" in errors
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("verdict.json")}
    assert 3 <= len(kept) < 5
    done = losstest("resume", "run", "--json-file", "r.json", "--junit-file", "r.xml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["seed"] for row in rows if row["scenario"] == "kill"] == [1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    suite = ET.parse(tmp_path / "r.xml").getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "5",
        "failures": "0",
        "errors": "0",
    }


def test_a_soak_is_rounds_of_random_faults(tmp_path: Path) -> None:
    """`--soak` fills its time with runs of the random scenario, each with its own seed, one after the other."""
    done = losstest(
        *("run", "--transport", "zmq-fanout-disk", "--soak", "3s", "--rate", "200", "--duration", "1.5"),
        *("--offline", "1", "--json-file", "s.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads((tmp_path / "s.json").read_text())["rows"] if not row["control"]]
    assert [(row["scenario"], row["seed"], row["lost"]) for row in rows] == [
        ("random", 1, 0),
        ("random", 2, 0),
    ]


def test_a_compressed_soak(tmp_path: Path) -> None:
    """Ten minutes in three seconds: as many events as in ten minutes, and the transports' timers as much shorter."""
    words = ("--soak", "10m", "--compress", "200", "--rate", "2", "--jobs", "2", "--json-file", "s.json")
    names = ("--transport", "zmq-group-disk", "--transport", "webhooks")
    done = losstest("run", *names, *words, "--keep", "failed", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads((tmp_path / "s.json").read_text())["rows"] if not row["control"]]
    assert [(row["transport"], row["scenario"], row["lost"]) for row in rows] == [
        ("zmq-group-disk", "random", 0),
        ("webhooks", "random", 0),
    ]
    for row in rows:
        assert row["compress"] == 200
        assert row["offered"] >= (
            1200 if row["transport"] == "zmq-group-disk" else 300
        )  # of webhooks 100 a second
