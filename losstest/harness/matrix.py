"""The whole matrix: which cells, controls first, as many at once as the machine can wait for."""

import asyncio
import contextlib
import os
import platform
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.presence import announce
from brokerless.losstest.adapters.base import Transport
from brokerless.losstest.analysis.verdict import SHOWS_NOTHING, judge
from brokerless.losstest.evidence.evidence import load
from brokerless.losstest.faults import namespaces, netfilter, small_disk
from brokerless.losstest.faults.power_cut import shim
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers
from brokerless.losstest.harness.scenarios import CONTROLS, MAIN, SCENARIOS, Scenario
from brokerless.losstest.model import Cell, Promise, Row, to_json

VERSIONS_OF = ("brokerless", "pyzmq", "pynng", "msgspec", "statsd", "httpx", "pyspark")


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """What the user asked for. Times in seconds."""

    transports: tuple[str, ...]
    scenarios: tuple[str, ...] = ()
    rate: float = 500.0
    size: int = 200
    lead_s: float = 0.8
    offline_s: float = 2.0
    tail_s: float = 1.2
    drain_s: float = 15.0
    seed: int = 1
    repeat: int = 1
    jobs: int = 0
    quick: bool = False
    spark: bool = False
    compress: float = 1.0  # so many seconds of the transport in one of the run
    network: Literal["relay", "kernel"] = "relay"
    buffer: int = 0  # events in each in-memory buffer; 0: what the scenario needs
    retention: int = 0  # bytes of each journal; 0: what the scenario needs
    keep: Literal["all", "failed", "rows"] = "all"  # whose witnesses stay in the run directory


MOST_TRIES = 3  # of a run whose fault came too late to show anything
_SHOWN = 200  # results that a run announces: the newest
MAX_CONTROL_S = 5.0  # before and after the time of the fault: a control of an hour shows no more
QUICK = {"rate": 400.0, "lead_s": 0.4, "offline_s": 1.0, "tail_s": 0.5, "drain_s": 10.0}


def plan(options: Options, transports: dict[str, Transport]) -> list[Cell]:
    """All cells in the order in which they run; raises ConfigError for what cannot be."""
    _check(options)
    if options.compress > 1 and (
        fixed := [name for name, found in transports.items() if not found.traits.compressible]
    ):
        raise ConfigError("--compress", f"the timers of {', '.join(fixed)} cannot be made shorter")
    labels = Counter(name.rpartition("/")[2] for name in transports)
    if twice := [label for label, count in labels.items() if count > 1]:
        raise ConfigError("--transport", f"two files have the same name, and so the same rows: {twice[0]}")
    names = options.scenarios or (MAIN if options.quick else tuple(SCENARIOS))
    for name in names:
        if name not in SCENARIOS:
            raise ConfigError("--scenario", f"there is no {name!r}; there are: {', '.join(SCENARIOS)}")
    wanted = [*CONTROLS, *(name for name in names if name not in CONTROLS)]
    cells = []
    for name in wanted:
        for transport in transports.values():
            if _fits(SCENARIOS[name], transport):
                repeats = 1 if name in CONTROLS else options.repeat
                cells += [_cell(options, transport, name, options.seed + i) for i in range(repeats)]
    for name in options.scenarios:
        if not any(cell.scenario == name for cell in cells):
            if SCENARIOS[name].fills and (why := _small_disk()):
                raise ConfigError("--scenario", f"{name!r} of a broker needs {why}")
            if SCENARIOS[name].disk and not shim():
                raise ConfigError("--scenario", f"{name!r} needs the compiled part of this package")
            if SCENARIOS[name].relay and not any(found.traits.link for found in transports.values()):
                raise ConfigError(
                    "--scenario",
                    f"{name!r} has no meaning: Traits.link names nothing that a relay can pass on",
                )
            raise ConfigError("--scenario", f"{name!r} has no meaning for any of the transports")
    if not cells:
        raise ConfigError("--transport", "there is no transport to run")
    return cells


def _fits(scenario: Scenario, transport: Transport) -> bool:
    """True if the scenario has a meaning for the transport; a broker that we did not start cannot be killed."""
    if scenario.needs_broker and transport.services is None:
        return False
    if scenario.disk and (
        not shim() or (transport.traits.journal == "broker" and transport.services is None)
    ):
        return False
    if scenario.fills and transport.traits.journal == "broker" and (not transport.services or _small_disk()):
        return False
    return scenario.fits(transport.traits)


@cache
def _small_disk() -> str:
    return small_disk.missing()


def _check(options: Options) -> None:
    if options.network == "kernel" and (why := netfilter.missing()):
        raise ConfigError("--network", f"the kernel's filter needs {why}; --network relay needs nothing")
    for field, low, high in (
        ("rate", 1, 200_000),
        ("size", 40, 60_000),  # one datagram, and the harness's own 28 bytes
        ("offline_s", 0.05, 86_400),
        ("drain_s", 0.1, 86_400),
        ("buffer", 0, 10**9),
        ("retention", 0, 10**15),
        ("repeat", 1, 1000),
        ("compress", 1, 10_000),
        ("jobs", 0, 1000),  # 0: as many as the machine can wait for
        ("lead_s", 0.05, 86_400),
        ("tail_s", 0.05, 86_400),
    ):
        value = getattr(options, field)
        if not low <= value <= high:
            raise ConfigError(f"--{field.removesuffix('_s')}", f"must be from {low} to {high}, not {value:g}")


def _cell(options: Options, transport: Transport, name: str, seed: int) -> Cell:
    scenario = SCENARIOS[name]
    if options.compress > 1:
        options = _compressed(options)
    control = (
        Promise("must", ("in_flight",), "exactly what the seed determines")
        if scenario.seeded_drop
        else Promise()
    )
    rate = min(options.rate, *filter(None, (transport.traits.max_rate, scenario.max_rate)), options.rate)
    during = rate * options.offline_s
    # Controls need no outage: they only have to be long enough to be sure.
    offline = min(options.offline_s, 0.3) if scenario.control else options.offline_s
    lead, tail = options.lead_s, options.tail_s
    if scenario.control:
        lead, tail = min(lead, MAX_CONTROL_S), min(tail, MAX_CONTROL_S)
    size = max(options.size, scenario.size)
    buffer = options.buffer or max(4, int(during * scenario.buffers))
    retention = max(8, options.retention // size if options.retention else int(during * scenario.retention))
    promise = control if scenario.control else _promise(transport, name, during, buffer, retention)
    network = _network(options, scenario, transport)
    return Cell(
        transport=transport.name,
        scenario=name,
        seed=seed,
        run=Random(f"{transport.name}/{name}/{seed}/{time.time_ns()}").getrandbits(63),
        rate=rate,
        size=size,
        lead_s=lead,
        offline_s=offline,
        tail_s=tail,
        drain_s=options.drain_s,
        consumers=scenario.consumers,
        producers=scenario.producers,
        buffer_events=buffer,
        retention_events=retention,
        seeded_drop=scenario.seeded_drop,
        independent=scenario.independent,
        control=scenario.control,
        traits=transport.traits,
        promise=promise,
        network=network,
        enclosed=transport.traits.enclosed and not network and namespaces.network_possible(),
        spool=options.spark,
        sync=scenario.sync,
        compress=options.compress,
    )


def _compressed(options: Options) -> Options:
    """The same events in a shorter time. The drain is not shortened: it is only an upper bound."""
    return msgspec.structs.replace(
        options,
        rate=options.rate * options.compress,
        lead_s=max(0.4, options.lead_s / options.compress),
        offline_s=options.offline_s / options.compress,
        tail_s=max(0.4, options.tail_s / options.compress),
    )


def _promise(transport: Transport, name: str, during: float, buffer: int, retention: int) -> Promise:
    """What the transport promises, with buffers and retention that the user may have fixed below what is needed."""
    promises = transport.traits.promises
    if name == "pause-short" and buffer < during:
        return promises.get("pause-long", Promise())
    found = promises.get(name, Promise())
    if retention < during and name != "beyond-retention" and "beyond-retention" in promises:
        evicted = promises["beyond-retention"]
        reasons = tuple(dict.fromkeys((*found.reasons, *evicted.reasons)))
        return Promise("may", reasons, "; ".join(filter(None, (found.why, evicted.why))))
    sized = SCENARIOS[name]
    roomy = (sized.buffers < 1 and buffer > during * sized.buffers) or (
        sized.retention < 1 and retention > during * sized.retention
    )
    # What the scenario makes too small is larger now, and perhaps large enough.
    return msgspec.structs.replace(found, loss="may") if roomy and found.loss == "must" else found


def _network(options: Options, scenario: Scenario, transport: Transport) -> Literal["", "relay", "nft"]:
    if not scenario.relay:
        return ""
    # A broker stays outside the namespaces of the runs: between it and its consumers there is always the relay.
    filters = options.network == "kernel" and scenario.filters and transport.services is None
    return "nft" if filters else "relay"


def describe_machine(transports: dict[str, Transport]) -> dict[str, Any]:
    """Versions, settings of brokers, and machine, for the run's record."""
    versions = {}
    for package in VERSIONS_OF:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    for transport in transports.values():
        with contextlib.suppress(Exception):  # of a plug-in
            if found := transport.version():
                versions[transport.name] = found
    return {
        "settings": {name: one.traits.settings for name, one in transports.items() if one.traits.settings},
        "versions": {"python": platform.python_version(), **versions},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


class Progress:
    """What the matrix tells while it runs. This one is silent; the command line shows it."""

    def started(self, run: CellRun) -> None: ...
    def finished(self, run: CellRun, row: Row) -> None: ...
    def tick(self, running: Sequence[CellRun], done: int, total: int) -> None: ...


class ControlRound(msgspec.Struct, frozen=True):
    """All controls, run with so many runs at once; `failed` says which failed."""

    at_once: int
    failed: list[str]


class Result(msgspec.Struct):
    """All rows; `control_failed` lists the controls of the last round that failed."""

    rows: list[Row]
    control_failed: list[Row] = []
    control_rounds: list[ControlRound] = []


async def run_matrix(
    options: Options,
    transports: dict[str, Transport],
    out: Path,
    progress: Progress | None = None,
    made: dict[str, str] | None = None,
    *,
    resume: bool = False,
) -> Result:
    """Run everything into the directory `out`. Stops after the controls if one of them failed.

    `made` is kept with the run: by which command, and when. With `resume`, `out` holds an interrupted run with the same
    options: what is finished there is not run again.
    """
    told = progress or Progress()
    cells = plan(options, transports)
    if not resume:
        _prepare(out, options, cells, (made or {}) | describe_machine(transports))
    preload = sorted({module for transport in transports.values() for module in transport.preload})
    watched = any(SCENARIOS[cell.scenario].disk or SCENARIOS[cell.scenario].random for cell in cells)
    async with Workers(preload, shim() if watched else "") as workers:
        runner = _Runner(out, workers, told, len(cells), options.keep)
        began = time.monotonic()
        try:
            with contextlib.closing(announce("losstest.run", out.name, [], runner.state)):
                return await _run_all(runner, cells, options, out)
        finally:
            _remember_part(out, time.monotonic() - began, runner.load)


async def _run_all(runner: "_Runner", cells: list[Cell], options: Options, out: Path) -> Result:
    """Controls first, then the rest if these passed."""
    controls, rounds = await _controls(runner, cells, options.jobs or 8 * (os.cpu_count() or 1))
    _remember(out, control_rounds=rounds)
    if rounds[-1].failed:
        return Result(controls, [row for row in controls if row.verdict != "pass"], rounds)
    rows = await runner.run([cell for cell in cells if not cell.control], rounds[-1].at_once)
    return Result(controls + rows, [], rounds)


async def _controls(runner: "_Runner", cells: list[Cell], jobs: int) -> tuple[list[Row], list[ControlRound]]:
    """Run all controls, as many at once as the other runs will be.

    They show whether the tool can be believed, and whether it can on this machine with so much going on: a
    transport that drops when it is starved fails its control. So all of them are run again with a quarter at
    once, and then one by one; the other runs are made as the round in which every control passed. A control
    that fails in the last round is believed. What failed stays in the run directory and is told.
    """
    rounds: list[ControlRound] = []
    controls = [cell for cell in cells if cell.control]
    for at_once in sorted({jobs, max(1, jobs // 4), 1}, reverse=True):
        if rounds:
            runner.put_aside(controls, len(rounds))
        rows = await runner.run(controls, at_once)
        failed = [row for row in rows if row.verdict != "pass"]
        said = [
            f"{row.transport} · {row.scenario}: {'; '.join(row.problems) or row.verdict}" for row in failed
        ]
        rounds.append(ControlRound(at_once, said))
        if not failed:
            break
    return rows, rounds


def _prepare(out: Path, options: Options, cells: list[Cell], made: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / "run.json").exists():
            raise ConfigError("--out", f"{out} already holds a run; choose another directory")
        record = made | {"options": options, "planned": [cell.key for cell in cells]}
        (out / "run.json").write_bytes(to_json(record))
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be used: {error.strerror}") from None


def _remember(out: Path, **fields: object) -> None:
    """Add to the run's record."""
    path = out / "run.json"
    path.write_bytes(to_json(msgspec.json.decode(path.read_bytes()) | fields))


def _remember_part(out: Path, took_s: float, load: list[float]) -> None:
    """A run that was interrupted has several parts: its time is the sum, and its load that of all of them."""
    earlier = msgspec.json.decode((out / "run.json").read_bytes())
    load = [*earlier.get("load", []), *load]
    _remember(
        out,
        parts=earlier.get("parts", 0) + 1,
        took_s=round(earlier.get("took_s", 0.0) + took_s, 1),
        load=(min(load), max(load)) if load else (0.0, 0.0),
    )


class _Runner:
    def __init__(self, out: Path, workers: Workers, progress: Progress, total: int, keep: str) -> None:
        self._keep = keep
        self._out, self._workers, self._progress = out, workers, progress
        self._ports = Ports()
        self._running: list[CellRun] = []
        self._done, self._total = 0, total
        self._at_once = 1
        self._rows: list[Row] = []
        self.load: list[float] = []  # of the machine, each second

    def state(self) -> dict[str, Any]:
        """What the run announces about itself (see `core.presence`)."""
        return {
            "counters": {"done": self._done, "planned": self._total},
            "running": [f"{run.cell.label} · {run.cell.scenario}" for run in list(self._running)[:_SHOWN]],
            "rows": [
                [row.transport, row.scenario, row.accepted, row.lost, row.lost_by_reason, row.verdict]
                for row in self._rows[-_SHOWN:]
            ],
        }

    async def run(self, cells: list[Cell], at_once: int) -> list[Row]:
        self._at_once = min(at_once, len(cells))
        permits = _Permits(at_once, min(at_once, os.cpu_count() or 1))
        ticker = asyncio.create_task(self._tick())
        tasks = [asyncio.create_task(self._one(cell, permits)) for cell in cells]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in (ticker, *tasks):
                task.cancel()
            await asyncio.gather(ticker, *tasks, return_exceptions=True)

    def put_aside(self, cells: list[Cell], number: int) -> None:
        """Keep what these cells gave under another name: they are run again."""
        for cell in cells:
            directory = self._out / "cells" / cell.key
            aside = directory.with_name(f"{directory.name}.round-{number}")
            shutil.rmtree(aside, ignore_errors=True)  # of the run that is resumed
            directory.rename(aside)
        self._total += len(cells)

    async def _tick(self) -> None:
        while True:
            self._progress.tick(self._running, self._done, self._total)
            self.load.append(round(os.getloadavg()[0], 1))
            await asyncio.sleep(1.0)

    async def _one(self, cell: Cell, permits: "_Permits") -> Row:
        directory = self._out / "cells" / cell.key
        # Of the run that is resumed; a damaged one is run again.
        with contextlib.suppress(OSError, msgspec.DecodeError):
            row = msgspec.json.decode((directory / "verdict.json").read_bytes(), type=Row)
            self._done += 1
            return row
        async with permits.take(cell.traits.heavy) as permit:
            cell = msgspec.structs.replace(cell, at_once=self._at_once)
            # One at a time is for times that nothing disturbs.
            leave = permit.leave if self._at_once > 1 else lambda: None
            for _ in range(MOST_TRIES):
                shutil.rmtree(directory, ignore_errors=True)  # was under way when the run was interrupted
                run = CellRun(cell, directory, self._workers, self._ports, leave)
                self._running.append(run)
                self._progress.started(run)
                try:
                    await run.run()
                finally:
                    self._running.remove(run)
                # In a thread: the supervisor of the other runs must not wait for the verdict of a long one.
                row = await asyncio.to_thread(judge_directory, directory)
                if not (row.verdict == "unknown" and any(SHOWS_NOTHING in text for text in row.problems)):
                    break
            self._done += 1
            if self._keep == "rows" or (self._keep == "failed" and row.verdict == "pass"):
                prune(directory)
            self._progress.finished(run, row)
            self._rows.append(row)
            return row


class _Permits:
    """Places for runs at the same time. The heavy ones go first, so many of them at once: they take the longest."""

    def __init__(self, at_once: int, heavy: int) -> None:
        self.free, self.free_heavy = at_once, heavy
        self.waiting: list[_Permit] = []

    def take(self, heavy: bool) -> "_Permit":
        """A permit that is waited for, as an async context manager."""
        return _Permit(self, heavy)

    def give(self) -> None:
        """Give free permits to those who wait."""
        for permit in sorted(self.waiting, key=lambda one: not one.heavy):
            if not self.free:
                return
            if not permit.heavy or self.free_heavy:
                self.free -= 1
                self.free_heavy -= permit.heavy
                self.waiting.remove(permit)
                permit.taken = True
                permit.ready.set()


class _Permit:
    """One of the permits, which may be left before the run is over: what memory a heavy one has, it has until then."""

    def __init__(self, permits: _Permits, heavy: bool) -> None:
        self._permits, self.heavy = permits, heavy
        self.taken = False
        self.ready = asyncio.Event()

    async def __aenter__(self) -> "_Permit":
        self._permits.waiting.append(self)
        self._permits.give()
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self._permits.waiting = [one for one in self._permits.waiting if one is not self]
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._permits.free_heavy += self.heavy
        self.leave()

    def leave(self) -> None:
        """Let the next one begin."""
        if self.taken:
            self.taken = False
            self._permits.free += 1
        self._permits.give()


def prune(directory: Path) -> None:
    """Remove what is large: witnesses, state of the transport, logs. The row stays in verdict.json."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in (".wit", ".fifo"):
            path.unlink()


def judge_directory(directory: Path) -> Row:
    """The verdict of one run's directory, kept beside the witnesses."""
    try:
        row = judge(load(directory))
    except Exception as error:  # the verdict of one run must not take the others with it
        (directory / "judge.log").write_text(traceback.format_exc())
        cell = msgspec.json.decode((directory / "cell.json").read_bytes(), type=Cell)
        row = Row(
            transport=cell.label,
            scenario=cell.scenario,
            seed=cell.seed,
            problems=[f"the verdict failed: {type(error).__name__}: {error}"],
        )
    (directory / "verdict.json").write_bytes(to_json(row))
    return row
