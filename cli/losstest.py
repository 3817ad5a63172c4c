"""`brokerless losstest`: what each transport loses when consumers go offline, with real processes."""

import asyncio
import datetime
import math
import shlex
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from brokerless.cli.exit_codes import CONTROL_FAILED, FAILED, INTERRUPTED
from brokerless.cli.losstest_progress import make_progress
from brokerless.cli.options import Json
from brokerless.cli.output import print_json
from brokerless.core.errors import ConfigError
from brokerless.losstest import Expectation, Options, Transport, read_run, resolve, transport_names
from brokerless.losstest.harness import quantities
from brokerless.losstest.harness.matrix import QUICK, Result, run_matrix
from brokerless.losstest.harness.run_directory import Run, document, exit_code
from brokerless.losstest.harness.scenarios import SCENARIOS
from brokerless.losstest.model import Promise
from brokerless.losstest.registry import why_missing
from brokerless.losstest.report.html import page
from brokerless.losstest.report.junit import junit
from brokerless.losstest.report.table import comparison, details, matrix_tables
from brokerless.spark_collector.session.java import find_java
from brokerless.spark_collector.session.session import require_pyspark

MOST_DETAILS = 5  # repeats of one cell that are shown in full; `report --full` shows all
SOAK_ROUND = "10m"  # of random faults: short enough to be run again when it was interrupted

app = App(
    name="losstest",
    help="Measure what each transport loses when consumers go offline.",
    help_epilogue="Example: brokerless losstest run --quick",
)


def _many(text: str) -> Parameter:
    return Parameter(help=text, negative="", consume_multiple=(1, None))


@app.command(
    help_epilogue="Example: brokerless losstest run --quick --transport zmq-fanout-disk --scenario kill"
)
def run(
    *,
    transport: Annotated[list[str] | None, _many("name, or module:object; all if not given")] = None,
    scenario: Annotated[list[str] | None, _many("name; all if not given")] = None,
    rate: Annotated[float | None, Parameter(help="events per second (500)")] = None,
    size: Annotated[int, Parameter(help="bytes per event")] = 200,
    duration: Annotated[str | None, Parameter(help="time of sending: lead + fault + tail (4s)")] = None,
    offline: Annotated[str | None, Parameter(help="time of the fault: 2s, 10m, 1h (2s)")] = None,
    drain: Annotated[
        str | None,
        Parameter(
            help="give up when nothing new happened for so long (15s; as long as the fault, if longer)"
        ),
    ] = None,
    compress: Annotated[
        float, Parameter(help="run so many seconds in one: shorter times and timers, higher rate")
    ] = 1.0,
    buffer: Annotated[int, Parameter(help="events in each buffer; 0: what the scenario needs")] = 0,
    retention: Annotated[str, Parameter(help="size of each journal, 1GiB; 0: what the scenario needs")] = "0",
    keep: Annotated[
        Literal["all", "failed", "rows"],
        Parameter(help="witnesses that stay: of all runs, of failed ones, none"),
    ] = "all",
    soak: Annotated[
        str | None, Parameter(help="random faults for so long: 24h; rounds of 10m, one after the other")
    ] = None,
    seed: Annotated[int, Parameter(help="of the first repeat; each further one adds 1")] = 1,
    repeat: Annotated[int, Parameter(help="runs of each cell")] = 1,
    jobs: Annotated[int, Parameter(help="runs at once; 0: eight per core")] = 0,
    quick: Annotated[bool, Parameter(help="main scenarios, short times", negative="")] = False,
    out: Annotated[Path | None, Parameter(help="run directory (build/losstest/TIME)")] = None,
    json_file: Annotated[Path | None, Parameter(help="write the rows as JSON")] = None,
    html: Annotated[Path | None, Parameter(help="write the report as one HTML file")] = None,
    junit_file: Annotated[Path | None, Parameter(help="write the runs as JUnit XML")] = None,
    brokers: Annotated[
        bool, Parameter(help="also brokers and other libraries that are here, for comparison", negative="")
    ] = False,
    network: Annotated[
        Literal["relay", "kernel"],
        Parameter(help="what drops packets: a relay, or nft in namespaces of the runs (needs root)"),
    ] = "relay",
    spark: Annotated[bool, Parameter(help="also land in Spark; its loss must agree", negative="")] = False,
    expect: Annotated[
        list[str] | None, _many("'lost == 0 when scenario == kill and journal == disk'")
    ] = None,
    progress: Annotated[
        Literal["auto", "live", "lines", "cells", "none"],
        Parameter(help="live display, a line per second and run, a line per finished run"),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Run transports through scenarios and report what was lost.

    Exit codes: 0 as promised and expected, 1 not so, 2 wrong arguments, 4 a control failed (no report),
    5 some run is unknown.
    """
    expectations = [Expectation(text) for text in expect or []]
    chosen = _transports(transport, brokers)
    if spark:  # better to hear now that something is not installed than after the run
        require_pyspark()
        find_java()
    if soak is not None:
        offline, scenario, jobs = offline or SOAK_ROUND, scenario or ["random"], jobs or 1
    given = {
        "rate": rate,
        "duration": _seconds(duration, "--duration"),
        "offline_s": _seconds(offline, "--offline"),
        "drain_s": _seconds(drain, "--drain"),
    }
    times = _times(given, quick, max(1.0, compress))
    if soak is not None:
        repeat = _rounds(soak, times)
    options = Options(
        transports=tuple(chosen),
        scenarios=tuple(scenario or ()),
        size=size,
        seed=seed,
        repeat=repeat,
        jobs=jobs,
        quick=quick,
        spark=spark,
        network=network,
        buffer=buffer,
        compress=compress,
        retention=quantities.size(retention, "--retention"),
        keep=keep,
        **times,
    )
    for target in (json_file, html, junit_file):
        _check_writable(target)
    now = datetime.datetime.now(datetime.UTC)
    started = now.isoformat(timespec="seconds")
    directory = out or Path("build/losstest") / now.strftime("%Y%m%d-%H%M%S.%f")
    console = Console(stderr=True)
    shown = make_progress(progress, console)
    made = {"command": shlex.join(["brokerless", *sys.argv[1:]]), "started": started}
    _run(lambda: run_matrix(options, chosen, directory, shown, made), directory, shown, console)
    code = _report(read_run(directory), expectations, json_file, html, junit_file, as_json)
    # After the report: whatever becomes of Spark, what was measured is there.
    sys.exit(FAILED if spark and not _agrees_with_spark(directory, console) else code)


def _run(
    matrix: Callable[[], Coroutine[Any, Any, Result]],
    directory: Path,
    shown: AbstractContextManager[object],
    console: Console,
) -> None:
    """Run the matrix with its progress shown; exits if it is interrupted or a control fails."""
    began = time.monotonic()
    try:
        with shown:
            result = asyncio.run(matrix())
    except KeyboardInterrupt:
        console.print(
            f"interrupted; what was finished: brokerless losstest report {directory}; "
            f"to go on: brokerless losstest resume {directory}",
            markup=False,
            soft_wrap=True,
        )
        sys.exit(INTERRUPTED)
    took = time.monotonic() - began
    console.print(
        f"{len(result.rows)} runs in {took:.0f} s; witnesses in {directory}", markup=False, soft_wrap=True
    )
    if result.control_failed:
        _refuse(console, result)


@app.command(help_epilogue="Example: brokerless losstest resume build/losstest/20261118-080000.000000")
def resume(
    directory: Annotated[Path, Parameter(help="directory of a run that was interrupted or killed")],
    /,
    *,
    json_file: Annotated[Path | None, Parameter(help="write the rows as JSON")] = None,
    html: Annotated[Path | None, Parameter(help="write the report as one HTML file")] = None,
    junit_file: Annotated[Path | None, Parameter(help="write the runs as JUnit XML")] = None,
    expect: Annotated[list[str] | None, _many("as for run")] = None,
    progress: Annotated[
        Literal["auto", "live", "lines", "cells", "none"], Parameter(help="as for run")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Go on with a run, with its own options: what is finished is kept, the rest is run."""
    expectations = [Expectation(text) for text in expect or []]
    for target in (json_file, html, junit_file):
        _check_writable(target)
    options = msgspec.convert(read_run(directory).options, Options)
    chosen = _transports(list(options.transports), brokers=True)
    console = Console(stderr=True)
    shown = make_progress(progress, console)
    _run(lambda: run_matrix(options, chosen, directory, shown, resume=True), directory, shown, console)
    sys.exit(_report(read_run(directory), expectations, json_file, html, junit_file, as_json))


@app.command(name="list", help_epilogue="Example: brokerless losstest list --json")
def list_(*, as_json: Json = False) -> None:
    """Show transports, scenarios, and what each transport promises to lose and why."""
    if as_json:
        for name in transport_names():
            found = resolve(name)
            promises_by_scenario = {
                scenario: msgspec.to_builtins(promise) for scenario, promise in found.traits.promises.items()
            }
            print_json(
                {
                    "transport": name,
                    "journal": found.traits.journal,
                    "summary": found.traits.summary,
                    "missing": why_missing(found),
                    "promises": promises_by_scenario,
                }
            )
        return
    console = _console()
    scenarios = Table(title="scenarios", show_header=False)
    for item in SCENARIOS.values():
        scenarios.add_row(item.name, item.text, "control" if item.control else "main" if item.main else "")
    console.print(scenarios)
    promises = Table(title="transports (what is not listed promises to lose nothing)")
    for column in ("transport", "journal", "scenario", "loses", "which and why"):
        promises.add_column(column)
    for name in transport_names():
        found = resolve(name)
        missing = why_missing(found)
        what = found.traits.summary + (f" — not on this machine: {missing}" if missing else "")
        promises.add_row(Text(name), found.traits.journal, "", "", Text(what), style="bold")
        for promise, names in _grouped(found).items():
            if promise.loss != "none":
                why = f"{', '.join(promise.reasons)}: {promise.why}"
                promises.add_row("", "", ", ".join(names), promise.loss, Text(why))
    console.print(promises)


@app.command(help_epilogue="Example: brokerless losstest report build/losstest/latest --html report.html")
def report(
    directory: Annotated[Path, Parameter(help="run directory")],
    /,
    *,
    json_file: Annotated[Path | None, Parameter(help="write the rows as JSON")] = None,
    html: Annotated[Path | None, Parameter(help="write the report as one HTML file")] = None,
    junit_file: Annotated[Path | None, Parameter(help="write the runs as JUnit XML")] = None,
    expect: Annotated[list[str] | None, _many("as for run")] = None,
    full: Annotated[bool, Parameter(help="every measure of every run", negative="")] = False,
    as_json: Json = False,
) -> None:
    """Report again from the witnesses, with nothing running. Reads interrupted and killed runs too."""
    expectations = [Expectation(text) for text in expect or []]
    found = read_run(directory)
    if found.unfinished:
        print(f"{found.unfinished} of {len(found.planned)} runs were not finished", file=sys.stderr)
    if found.failed_controls:
        _refuse(Console(stderr=True), Result(found.rows, found.failed_controls))
    if full:
        for row in found.rows:
            _console().print(details(row))
    sys.exit(_report(found, expectations, json_file, html, junit_file, as_json))


@app.command(help_epilogue="Example: brokerless losstest compare build/losstest/old build/losstest/new")
def compare(
    old: Annotated[Path, Parameter(help="run directory before")],
    new: Annotated[Path, Parameter(help="run directory after")],
    /,
    *,
    html: Annotated[
        Path | None, Parameter(help="write the report of NEW, with what each cell was before")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two run directories cell by cell; exit 1 if anything has become worse."""
    _check_writable(html)
    before, after = read_run(old), read_run(new)
    table, worse = comparison(before, after)
    _write(html, lambda: page(after, before).encode())
    if as_json:
        print_json({"old": str(old), "new": str(new), "worse": worse})
    (Console(stderr=True, width=160) if as_json else _console()).print(table)
    sys.exit(FAILED if worse else 0)


def _console() -> Console:
    """Wide where there is no terminal: a log file does not wrap."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _transports(names: list[str] | None, brokers: bool) -> dict[str, Transport]:
    chosen = {}
    for name in names or transport_names():
        found = resolve(name)
        if not names and found.traits.family in ("broker", "peer") and not brokers:
            continue
        missing = why_missing(found)
        if not missing:
            # It keeps the name that it was given by, so that the workers find it again.
            chosen[name] = msgspec.structs.replace(found, name=name)
        elif names:
            raise ConfigError("--transport", f"{name} cannot run here: {missing}")
    return chosen


def _seconds(text: str | None, option: str) -> float | None:
    return None if text is None else quantities.seconds(text, option)


def _times(given: dict[str, float | None], quick: bool, compress: float) -> dict[str, float]:
    """Rate and times: as given, or as the profile has them."""
    defaults: dict[str, float] = {
        name: getattr(Options(transports=()), name)
        for name in ("rate", "lead_s", "offline_s", "tail_s", "drain_s")
    }
    times = defaults | (QUICK if quick else {})
    duration = given.pop("duration")
    times |= {name: value for name, value in given.items() if value is not None}
    if given["drain_s"] is None:  # what backs off while nobody answers may wait as long again
        times["drain_s"] = max(times["drain_s"], times["offline_s"] / compress)
    if duration is not None:
        rest = duration - times["offline_s"]
        if not 0.2 <= rest <= 86_400:
            raise ConfigError(
                "--duration", f"must be 0.2 s to 24 h longer than the fault ({times['offline_s']:g} s)"
            )
        # Two fifths before the fault, three after: recovery is what there is to see.
        times |= {"lead_s": rest * 0.4, "tail_s": rest * 0.6}
    return times


def _rounds(soak: str, times: dict[str, float]) -> int:
    """How many runs fill that time."""
    length_s = times["lead_s"] + times["offline_s"] + times["tail_s"]
    return max(1, math.ceil(quantities.seconds(soak, "--soak") / length_s))


def _grouped(transport: Transport) -> dict[Promise, list[str]]:
    groups: dict[Promise, list[str]] = {}
    for name in SCENARIOS:
        if name in transport.traits.promises and SCENARIOS[name].fits(transport.traits):
            groups.setdefault(transport.traits.promises[name], []).append(name)
    return groups


def _check_writable(target: Path | None) -> None:
    """Better to hear it now than after the run."""
    if target is None:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = not target.exists()
        with open(target, "ab"):
            pass
        if new:
            target.unlink()  # it appears when there is something to write
    except OSError as error:
        raise ConfigError(str(target), f"cannot be written: {error.strerror}") from None


def _refuse(console: Console, result: Result) -> None:
    for row in result.control_failed:
        said = "; ".join(row.problems) or row.verdict
        console.print(
            f"control failed: {row.transport} · {row.scenario}: {said}",
            style="bold red",
            markup=False,
            soft_wrap=True,
        )
    console.print("A tool that fails its controls must not be believed: there is no report.")
    sys.exit(CONTROL_FAILED)


def _agrees_with_spark(directory: Path, console: Console) -> bool:
    from brokerless.losstest.analysis.spark_check import check_with_spark

    differences = check_with_spark(directory, say=console.print)
    for text in differences:
        console.print(f"Spark differs: {text}", style="bold red")
    return not differences


def _report(
    found: Run,
    expectations: list[Expectation],
    json_file: Path | None,
    html: Path | None,
    junit_file: Path | None,
    as_json: bool,
) -> int:
    """Print and write everything; returns the exit code."""
    console = Console(stderr=True, width=160) if as_json else _console()
    rows = found.measured
    for number, failed in enumerate(found.control_rounds[:-1]):
        then = found.control_rounds[number + 1]["at_once"]
        console.print(
            f"controls failed with {failed['at_once']} runs at once, and were run again with {then}:"
        )
        for text in failed["failed"]:
            console.print(f"  {text}", markup=False)
    one_cell = len(found.rows) == 1 or len({(row.transport, row.scenario) for row in rows}) == 1
    if one_cell and len(rows) <= MOST_DETAILS:
        for row in rows or found.rows:
            console.print(details(row))
    for table in matrix_tables(found):
        console.print(table)
    for row in found.rows:
        for problem in row.problems:
            console.print(
                f"{row.verdict}: {row.transport} · {row.scenario} · seed {row.seed}: {problem}", markup=False
            )
        for finding in row.findings:
            console.print(
                f"finding: {row.transport} · {row.scenario} · seed {row.seed}: {finding}", markup=False
            )
    outcomes = [expectation.check(rows) for expectation in expectations]
    for outcome in outcomes:
        console.print(f"expect {outcome.text}: {outcome.word} ({outcome.rows} runs)", markup=False)
        for row in outcome.unmet[:20]:
            console.print(
                f"  {row.transport} · {row.scenario} · seed {row.seed}: lost {row.lost}", markup=False
            )
    balanced = sum(row.balanced for row in found.rows)
    lost = sum(row.lost for row in rows)
    unattributed = sum(row.lost_by_reason.get("unattributed", 0) for row in rows)
    console.print(
        f"{len(found.rows)} runs, {balanced} balanced; lost {lost:,} of {sum(r.accepted for r in rows):,} "
        f"accepted, {unattributed} of them unattributed"
    )
    if as_json:
        print(document(found).decode())
    _write(json_file, lambda: document(found))
    _write(html, lambda: page(found).encode())
    _write(junit_file, lambda: junit(found, outcomes))
    unmet = any(outcome.word == "NOT MET" for outcome in outcomes)
    undecided = bool(found.unfinished) or any(outcome.undecided for outcome in outcomes)
    return exit_code(found.rows, unmet, undecided)


def _write(target: Path | None, content: Callable[[], bytes]) -> None:
    if target is not None:
        target.write_bytes(content())
        print(f"written: {target}", file=sys.stderr)
