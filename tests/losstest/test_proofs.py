"""What the corpus of `test_misbehaving.py` has no room for: controls, counters, acknowledgements, power cuts."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from proof import DiesBefore

from brokerless.losstest import Options, Row, load, resolve
from brokerless.losstest.evidence.reader import read
from brokerless.losstest.faults.power_cut import shim
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.matrix import judge_directory, plan
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers

HERE = Path(__file__).parent / "proof.py"
SHORT = {"rate": 300.0, "lead_s": 0.25, "offline_s": 0.5, "tail_s": 0.3, "drain_s": 20.0}


def play(tmp_path: Path, variant: str, scenario: str) -> tuple[Row, Path]:
    """One run of one variant; returns its row and its directory."""
    name = f"{HERE}:{variant}"
    transport = msgspec.structs.replace(resolve(name), name=name)
    options = Options(transports=(name,), scenarios=(scenario,), **SHORT)
    cell = next(c for c in plan(options, {name: transport}) if c.scenario == scenario)

    async def go() -> None:
        async with Workers(library=shim()) as workers:
            await CellRun(cell, tmp_path, workers, Ports()).run()

    asyncio.run(go())
    return judge_directory(tmp_path), tmp_path


def reported(row: Row) -> list[int]:
    """The lost event numbers of a row."""
    return [n for first, last, _ in row.lost_ranges for n in range(first, last + 1)]


@pytest.mark.parametrize("variant", ["dies_before", "dies_after"])
def test_a_lost_increment_is_not_confused_with_one_that_may_not_have_been_sent(
    tmp_path: Path, variant: str
) -> None:
    """A counter is short by a dropped event and perhaps by the one in which its producer died: known which is which."""
    row, _ = play(tmp_path, variant, "none")
    assert (row.accepted, row.unknown) == (DiesBefore.FATAL, 1)
    assert row.unknown_delivered == (variant == "dies_after")
    assert reported(row) == [DiesBefore.DROPPED]
    assert row.lost_by_reason == {"unattributed": 1}
    assert row.balanced


def test_loss_in_flight(tmp_path: Path) -> None:
    """A consumer that acknowledges twenty events and dies before their effect loses exactly these."""
    row, directory = play(tmp_path, "perfect", "ack-then-die")
    assert row.lost_by_reason == {"in_flight": 20}
    acked = {r.n for log in load(directory).consumers for r in read(log.records.path).records if r.kind == 14}
    assert set(reported(row)) <= acked


def test_what_is_promised_has_the_whole_drain_time(tmp_path: Path) -> None:
    """A consumer that is silent for longer than its quiet time, and then delivers all: nothing was lost."""
    row, _ = play(tmp_path, "resting", "kill")
    assert (row.verdict, row.lost) == ("pass", 0), row.problems
    assert row.backlog_clear_s is not None
    assert row.backlog_clear_s > 1.0


def test_seeded_control_is_exact_and_can_fail(tmp_path: Path) -> None:
    """The control passes for a perfect transport, and fails when another event is missing, too."""
    row, _ = play(tmp_path / "a", "perfect", "seeded")
    assert (row.verdict, row.lost_by_reason) == ("pass", {"in_flight": row.lost})
    assert row.lost > 0
    row, _ = play(tmp_path / "b", "silent", "seeded")
    assert row.verdict == "fail"
    assert any("control" in problem for problem in row.problems)


@pytest.mark.skipif(not shim(), reason="the compiled part was not built")
def test_a_power_cut_costs_what_was_not_synced(tmp_path: Path) -> None:
    """A journal that is not synced loses what only it had, as `producer_crash`, and the run fails."""
    row, _ = play(tmp_path, "careless", "power-cut")
    assert row.lost > 0
    assert row.lost_by_reason["producer_crash"] > 0
    assert row.verdict == "fail"
