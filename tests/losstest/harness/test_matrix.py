"""Which runs are planned, in which order, and what is announced of them."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from brokerless.core.errors import ConfigError
from brokerless.core.presence import present
from brokerless.losstest import Options, Promise, Transport, read_run, resolve
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.matrix import Progress, _Permits, plan, run_matrix


def test_plan_has_controls_first_and_once() -> None:
    """Controls come before everything else, are not repeated, and cannot be left out."""
    chosen = {"udp": resolve("udp")}
    cells = plan(Options(transports=("udp",), scenarios=("kill",), repeat=3), chosen)
    assert [cell.scenario for cell in cells] == ["none", "seeded", "kill", "kill", "kill"]
    assert [cell.seed for cell in cells[2:]] == [1, 2, 3]
    assert len({cell.run for cell in cells}) == 5


def test_a_run_is_announced_and_its_processes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console shows how far it is and what came out; what is broken on purpose looks like no outage."""
    directory = tmp_path / "presence"
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(directory))
    seen: list[Any] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            seen.extend(present(directory))

    watcher = threading.Thread(target=look)
    watcher.start()
    options = Options(
        transports=("zmq-fanout-memory",), scenarios=("stop",), lead_s=0.2, offline_s=0.2, tail_s=1.5, jobs=1
    )
    try:
        result = asyncio.run(
            run_matrix(options, {"zmq-fanout-memory": resolve("zmq-fanout-memory")}, tmp_path / "run")
        )
    finally:
        done.set()
        watcher.join()
    assert not result.control_failed
    assert {component.kind for component in seen} == {"losstest.run"}
    rows = max((component.state.get("rows", []) for component in seen), key=len)
    assert rows
    assert all(transport == "zmq-fanout-memory" and verdict == "pass" for transport, *_, verdict in rows)
    assert max(component.state["counters"]["planned"] for component in seen if component.state) >= 3


def spans(out: Path) -> list[tuple[int, int]]:
    """When each run of a directory began and ended, in the order of their beginnings."""
    logs = (path.read_text().splitlines() for path in out.glob("cells/*/*/*/supervisor.jsonl"))
    return sorted((json.loads(lines[0])["t"], json.loads(lines[-1])["t"]) for lines in logs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_only_waits_leaves_its_place(tmp_path: Path, jobs: int) -> None:
    """The next one begins while it waits in silence for what may come late; one at a time is one at a time."""
    chosen = {name: resolve(name) for name in ("pipe", "tcp")}
    options = Options(
        transports=tuple(chosen), scenarios=("none",), lead_s=0.1, offline_s=0.1, tail_s=0.1, jobs=jobs
    )
    result = asyncio.run(run_matrix(options, chosen, tmp_path / "run"))
    assert [row.verdict for row in result.rows] == ["pass"] * 4
    assert len(result.control_rounds) == 1
    found = spans(tmp_path / "run")
    at_once = max(sum(begin <= t < end for begin, end in found) for t, _ in found)
    assert at_once == 1 if jobs == 1 else at_once > jobs


def test_heavy_runs_go_first_and_never_more_at_once_than_may() -> None:
    """Two of three places for them while there are any; a place that is left early does not let a third one in."""

    async def play() -> list[str]:
        permits, begun = _Permits(3, 2), []

        async def one(name: str, ends: asyncio.Event) -> None:
            async with permits.take(name.startswith("heavy")) as permit:
                begun.append(name)
                await ends.wait()
                permit.leave()
                permit.leave()  # twice is once

        ends = {f"{kind}-{i}": asyncio.Event() for kind in ("light", "heavy") for i in range(4)}
        tasks = [asyncio.create_task(one(name, end)) for name, end in ends.items()]
        for name in ("light-0", "light-1", "light-2", "heavy-0"):
            await asyncio.sleep(0)
            while name not in begun:
                await asyncio.sleep(0)
            assert len(begun) <= 3 + sum(end.is_set() for end in ends.values())
            running = [one for one in begun if one.startswith("heavy") and not ends[one].is_set()]
            assert len(running) <= 2
            ends[name].set()
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert (permits.free, permits.free_heavy, permits.waiting) == (3, 2, [])
        return begun

    begun = asyncio.run(play())
    assert begun[:5] == ["light-0", "light-1", "light-2", "heavy-0", "heavy-1"]
    assert sorted(begun[5:7]) == ["heavy-2", "light-3"]
    assert len(begun) == 8


def test_compressed_time() -> None:
    """The same events in a shorter time, for transports whose timers can be set; the others are refused."""
    asked = {"scenarios": ("kill",), "rate": 2.0, "lead_s": 60.0, "offline_s": 600.0, "tail_s": 60.0}
    options = Options(transports=("zmq-group-disk",), compress=60.0, **asked)  # type: ignore[arg-type]
    cell = next(c for c in plan(options, {"zmq-group-disk": resolve("zmq-group-disk")}) if not c.control)
    assert (cell.rate, cell.offline_s, cell.events, cell.compress) == (120.0, 10.0, 1440, 60.0)
    with pytest.raises(ConfigError, match="timers of udp"):
        plan(options, {"udp": resolve("udp")})


def test_a_run_whose_fault_came_too_late_is_run_again(tmp_path: Path) -> None:
    """A supervisor that got no time until all was sent has shown nothing."""

    class Stalling(Progress):
        stalled = started_kills = 0

        def started(self, run: CellRun) -> None:
            self.started_kills += run.cell.scenario == "kill"

        def tick(self, running: Sequence[CellRun], done: int, total: int) -> None:
            if not self.stalled and any(one.phase == "steady" and not one.cell.control for one in running):
                self.stalled = 1
                time.sleep(3.0)  # the loop of all runs stands still

    times = {"rate": 200.0, "lead_s": 1.5, "offline_s": 0.2, "tail_s": 0.2, "drain_s": 20.0}
    options = Options(transports=("udp",), scenarios=("kill",), **times)  # type: ignore[arg-type]
    progress = Stalling()
    result = asyncio.run(run_matrix(options, {"udp": resolve("udp")}, tmp_path / "run", progress))
    assert progress.stalled
    assert progress.started_kills == 2
    assert [row.verdict for row in result.rows] == ["pass"] * 3


def test_fixed_buffers_that_hold_all_need_not_lose() -> None:
    """What must be lost because the scenario makes buffers too small, may be lost if the user fixes them."""

    def promise(name: str, scenario: str, **fixed: int) -> Promise:
        found: dict[str, Transport] = {name: resolve(name)}
        options = Options(transports=(name,), scenarios=(scenario,), rate=400.0, offline_s=1.0, **fixed)  # type: ignore[arg-type]
        return next(c for c in plan(options, found) if c.scenario == scenario).promise

    assert promise("udp", "pause-long").loss == "must"
    assert promise("udp", "pause-long", buffer=20).loss == "must"  # smaller than the scenario's own
    assert promise("udp", "pause-long", buffer=1000).loss == "may"
    assert promise("zmq-fanout-disk", "beyond-retention").loss == "must"
    assert promise("zmq-fanout-disk", "beyond-retention", retention=1 << 30).loss == "may"
    assert promise("udp", "kill", buffer=1000, retention=1 << 30).loss == "must"  # nothing to do with either
    assert promise("zmq-fanout-disk", "kill", retention=1 << 30).loss == "none"


@pytest.mark.parametrize("keep", ["failed", "rows"])
def test_what_is_kept_of_runs_that_passed(tmp_path: Path, keep: str) -> None:
    """Their rows, and not their witnesses: the report is the same as before."""
    options = Options(
        transports=("tcp",),
        scenarios=("kill",),
        lead_s=0.3,
        offline_s=0.3,
        tail_s=0.3,
        keep=keep,  # type: ignore[arg-type]
    )
    result = asyncio.run(run_matrix(options, {"tcp": resolve("tcp")}, tmp_path / "run"))
    assert [row.verdict for row in result.rows] == ["pass"] * 3
    assert not list((tmp_path / "run").rglob("*.wit"))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name in ("state", "logs")]
    assert read_run(tmp_path / "run").rows == result.rows


def test_of_runs_that_failed_everything_is_kept(tmp_path: Path) -> None:
    """To be looked at: a promise that was broken on purpose."""
    strict = msgspec.structs.replace(
        resolve("udp"), traits=msgspec.structs.replace(resolve("udp").traits, promises={})
    )
    options = Options(
        transports=("udp",),
        scenarios=("late",),
        lead_s=0.3,
        offline_s=0.3,
        tail_s=0.3,
        drain_s=3.0,
        keep="failed",
    )
    result = asyncio.run(run_matrix(options, {"udp": strict}, tmp_path / "run"))
    assert {row.scenario: row.verdict for row in result.rows} == {
        "none": "pass",
        "seeded": "pass",
        "late": "fail",
    }
    kept = {path.parents[1].name for path in (tmp_path / "run").rglob("*.wit")}
    assert kept == {"late"}
