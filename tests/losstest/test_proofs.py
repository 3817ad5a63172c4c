"""The tool is proven: transports that are wrong in known ways are reported exactly so."""

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


def play(tmp_path: Path, variant: str, scenario: str, drain_s: float = 20.0) -> tuple[Row, Path]:
    """One run of one variant; returns its row and its directory."""
    name = f"{HERE}:{variant}"
    transport = msgspec.structs.replace(resolve(name), name=name)
    options = Options(transports=(name,), scenarios=(scenario,), **(SHORT | {"drain_s": drain_s}))
    cell = next(c for c in plan(options, {name: transport}) if c.scenario == scenario)

    async def go() -> None:
        async with Workers(library=shim()) as workers:
            await CellRun(cell, tmp_path, workers, Ports()).run()

    asyncio.run(go())
    return judge_directory(tmp_path), tmp_path


def truth(directory: Path) -> list[int]:
    """What the variant itself wrote down as dropped; `-n` takes it back."""
    numbers: set[int] = set()
    for line in (directory / "state/shared/truth").read_text().split():
        if line.startswith("-"):
            numbers.discard(int(line[1:]))
        else:
            numbers.add(int(line))
    return sorted(numbers)


def reported(row: Row) -> list[int]:
    """The lost event numbers of a row."""
    return [n for first, last, _ in row.lost_ranges for n in range(first, last + 1)]


@pytest.mark.parametrize("scenario", ["stop", "kill", "pause-long", "late", "producer-kill", "clock-jump"])
def test_a_perfect_transport_loses_nothing(tmp_path: Path, scenario: str) -> None:
    """Without a cause there is no loss in any scenario, and every event is committed."""
    row, _ = play(tmp_path, "perfect", scenario)
    assert (row.verdict, row.lost, row.pending, row.unexpected) == ("pass", 0, 0, 0), row.problems
    assert row.committed == row.accepted > 200
    assert row.balanced


@pytest.mark.parametrize("reason", ["evicted", "gave_up", "overflow_sender", "overflow_receiver"])
def test_claims_without_evidence_are_findings(tmp_path: Path, reason: str) -> None:
    """Nothing was in the way: the exact events are lost for no known reason, and what the product says is a finding."""
    row, directory = play(tmp_path, reason, "none")
    assert reported(row) == truth(directory) != []
    assert row.lost_by_reason == {"unattributed": row.lost}
    assert row.findings == [f"says {reason} of {row.lost} events, and nothing that was observed supports it"]
    assert row.balanced


def test_silent_loss_is_unattributed_and_fails(tmp_path: Path) -> None:
    """A drop that nothing explains is reported exactly, as unattributed, and is never a pass."""
    row, directory = play(tmp_path, "silent", "none")
    assert reported(row) == truth(directory) != []
    assert row.lost_by_reason == {"unattributed": row.lost}
    assert row.verdict == "fail"


def test_loss_while_offline(tmp_path: Path) -> None:
    """Drops while no consumer was there are exactly the ones reported as offline."""
    row, directory = play(tmp_path, "forgetful", "kill")
    assert reported(row) == truth(directory) != []
    assert row.lost_by_reason == {"offline": row.lost}
    assert row.verdict == "pass", row.problems


def test_loss_of_a_late_joiner(tmp_path: Path) -> None:
    """What was sent before a late joiner came is offline."""
    row, directory = play(tmp_path, "forgetful", "late")
    assert reported(row) == truth(directory) != []
    assert row.lost_by_reason == {"offline": row.lost}


def test_loss_by_a_producer_crash(tmp_path: Path) -> None:
    """What was in the producer's memory when it was killed is exactly what is reported as producer_crash."""
    row, directory = play(tmp_path, "buffering", "producer-kill")
    unknown = set(truth(directory)) - set(reported(row))
    # An event whose send() was under way may be in memory and not accepted: it is `unknown`, not lost.
    assert len(unknown) <= row.unknown
    assert set(reported(row)) <= set(truth(directory))
    assert row.lost_by_reason == {"producer_crash": row.lost}
    assert row.lost > 0


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


def test_loss_by_overflow(tmp_path: Path) -> None:
    """Drops because the stopped consumer was too far behind are exactly the ones reported as overflow."""
    row, directory = play(tmp_path, "bounded", "pause-long")
    assert reported(row) == truth(directory) != []
    assert row.lost_by_reason == {"overflow_sender": row.lost}


def test_loss_in_flight(tmp_path: Path) -> None:
    """A consumer that acknowledges twenty events and dies before their effect loses exactly these."""
    row, directory = play(tmp_path, "perfect", "ack-then-die")
    assert row.lost_by_reason == {"in_flight": 20}
    acked = {r.n for log in load(directory).consumers for r in read(log.records.path).records if r.kind == 14}
    assert set(reported(row)) <= acked


def test_seeded_control_is_exact_and_can_fail(tmp_path: Path) -> None:
    """The control passes for a perfect transport, and fails when another event is missing, too."""
    row, _ = play(tmp_path / "a", "perfect", "seeded")
    assert (row.verdict, row.lost_by_reason) == ("pass", {"in_flight": row.lost})
    assert row.lost > 0
    row, _ = play(tmp_path / "b", "silent", "seeded")
    assert row.verdict == "fail"
    assert any("control" in problem for problem in row.problems)


def test_duplicates_are_counted(tmp_path: Path) -> None:
    """Every tenth event given twice is that many duplicates, and no loss."""
    row, _ = play(tmp_path, "doubling", "none")
    assert row.duplicates == (row.accepted + 9) // 10
    assert (row.lost, row.verdict) == (0, "pass"), row.problems


def test_what_an_orderly_stop_still_brings_is_delivered(tmp_path: Path) -> None:
    """A consumer that gives its last event while it is being stopped has lost nothing."""
    row, _ = play(tmp_path, "holding", "stop")
    assert (row.lost, row.duplicates, row.verdict) == (0, 0, "pass"), row.problems


def test_reordering_is_counted(tmp_path: Path) -> None:
    """Every tenth event given after its successor is that many reordered."""
    row, _ = play(tmp_path, "swapping", "none")
    assert row.reordered == (row.accepted - 1 + 9) // 10
    assert (row.lost, row.duplicates) == (0, 0)


def test_inventions_are_noticed(tmp_path: Path) -> None:
    """Events never offered, damaged ones and those of another run are all unexpected, and fail the run."""
    row, _ = play(tmp_path, "inventing", "none")
    assert row.unexpected == 3 * ((row.accepted + 19) // 20)
    assert row.verdict == "fail"
    assert row.committed == row.accepted


@pytest.mark.parametrize("variant", ["endless", "promising"])
def test_what_never_rests_is_unknown(tmp_path: Path, variant: str) -> None:
    """Deliveries without end, or a promise of more without end, give no verdict; nothing is called lost."""
    row, _ = play(tmp_path, variant, "none", drain_s=1.5)
    assert row.verdict == "unknown"
    assert row.lost == 0
    assert row.balanced
    assert (row.pending > 0) == (variant == "promising")


@pytest.mark.skipif(not shim(), reason="the compiled part was not built")
def test_a_power_cut_costs_what_was_not_synced(tmp_path: Path) -> None:
    """A journal that is not synced loses what only it had, as `producer_crash`, and the run fails."""
    row, _ = play(tmp_path, "careless", "power-cut")
    assert row.lost > 0
    assert row.lost_by_reason["producer_crash"] > 0
    assert row.verdict == "fail"
