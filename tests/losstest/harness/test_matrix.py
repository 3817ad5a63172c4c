"""Which runs are planned, in which order, and what is announced of them."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import ConfigError
from brokerless.core.presence import present
from brokerless.losstest import Options, resolve
from brokerless.losstest.harness.matrix import plan, run_matrix


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


def test_compressed_time() -> None:
    """The same events in a shorter time, for transports whose timers can be set; the others are refused."""
    asked = {"scenarios": ("kill",), "rate": 2.0, "lead_s": 60.0, "offline_s": 600.0, "tail_s": 60.0}
    options = Options(transports=("zmq-group-disk",), compress=60.0, **asked)  # type: ignore[arg-type]
    cell = next(c for c in plan(options, {"zmq-group-disk": resolve("zmq-group-disk")}) if not c.control)
    assert (cell.rate, cell.offline_s, cell.events, cell.compress) == (120.0, 10.0, 1440, 60.0)
    with pytest.raises(ConfigError, match="timers of udp"):
        plan(options, {"udp": resolve("udp")})
