"""Where to go on, what to read next, how it is divided: without Spark."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError, Fault
from brokerless.spark_collector.options import parse_options
from brokerless.spark_collector.places import DataLoss, Extent, Mark, resume_at
from brokerless.spark_collector.planning import Planner
from tests.spark_collector.spools import fill, fill_journal, open_spool

Factory = pytest.TempPathFactory


def planner(*paths: object, **options: str) -> Planner:
    return Planner(parse_options({"path": ",".join(map(str, paths)), **options}))


def test_resume() -> None:
    """After the mark; at the cut if the journal was cut before it; at the oldest of another journal."""
    epochs = [(1, 0), (5, 100)]
    extent = Extent("id", 10, 200, epochs, "s")
    assert resume_at(Mark("id", 5, 150), extent) == 150
    assert resume_at(Mark("id", 1, 90), extent) == 90, "the old epoch's rest comes first"
    assert resume_at(Mark("id", 1, 130), extent) == 100, "events at the reused offsets are new ones"
    assert resume_at(Mark("other", 1, 130), extent) == 10


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 40))
def test_pieces_cover_the_range_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, parts: int, limit: int
) -> None:
    """For any size, number of tasks and limit: batch after batch, each offset is in exactly one piece."""
    path = tmp_path_factory.mktemp("s")
    with open_spool(path / "s") as spool:
        fill(spool, "p", 0, count, per_frame=3)
        end = spool.next
    plan = planner(path / "s", numPartitions=str(parts))
    marks, seen = plan.initial(), []
    for _ in range(count + 1):
        after = plan.latest(marks, limit)
        pieces = plan.pieces(marks, after)
        assert len(pieces) <= parts or parts == 1
        seen += [n for piece in pieces for n in range(piece.first, piece.stop)]
        assert after == marks or pieces
        marks = after
    assert seen == list(range(end))


def test_small_journals_are_one_task(tmp_path: Path) -> None:
    """Few single events are not worth several tasks."""
    fill_journal(tmp_path / "j", "p", 500)
    plan = planner(tmp_path / "j", numPartitions="8")
    start = plan.initial()
    assert len(plan.pieces(start, plan.latest(start))) == 1


def test_a_replaced_journal_is_loss(tmp_path: Path) -> None:
    """Another journal at the same path: an error, or a row that says so and then all of the new one."""
    fill_journal(tmp_path / "j", "p", 50)
    plan = planner(tmp_path / "j")
    marks = plan.latest(plan.initial())
    (tmp_path / "j").rename(tmp_path / "old")
    fill_journal(tmp_path / "j", "p", 20)
    after = plan.latest(marks)
    with pytest.raises(DataLoss, match="another journal"):
        plan.pieces(marks, after)
    lost, rest = planner(tmp_path / "j", failOnDataLoss="false").pieces(marks, after)
    assert (lost.lost, rest.first, rest.stop) == ("replaced", 0, 20)


def test_options_are_checked() -> None:
    """Wrong options raise ConfigError that names them."""
    for wrong in (
        {},
        {"path": "x", "nonsense": "1"},
        {"path": "x", "maxEventsPerTrigger": "many"},
        {"path": "x", "numPartitions": "0"},
        {"path": "x", "onCorrupt": "ignore"},
        {"path": "x", "startingOffsets": "sometime"},
        {"path": "x", "startingOffsets": '{"x": "y"}'},
    ):
        with pytest.raises(ConfigError):
            parse_options(wrong)
    assert parse_options({"path": "file:/a, /b", "MAXEVENTSPERTRIGGER": "7"}).max_events == 7


def test_a_place_that_is_away_after_it_was_replaced_or_cut(tmp_path: Path) -> None:
    """A batch that was planned before comes again: without the place nobody knows where it begins."""
    away = str(tmp_path / "away")
    plan = planner(away, failOnDataLoss="false")
    assert [(p.first, p.stop) for p in plan.pieces({away: Mark("a", 1, 5)}, {away: Mark("a", 1, 6)})] == [
        (5, 6)
    ]
    for before, after in [
        (Mark("old", 1, 100), Mark("new", 1, 10)),
        (Mark("a", 1, 100), Mark("a", 2, 90)),
        (Mark("a", 1, 100), Mark("a", 2, 100)),
    ]:
        with pytest.raises(Fault, match="cannot be reached"):
            plan.pieces({away: before}, {away: after})


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_offsets_of_a_path_as_spark_writes_it(tmp_path: Path, prefix: str) -> None:
    """A place is the same with Spark's prefix and without, in every option."""
    fill_journal(tmp_path / "j", "p", 30)
    name = f"{prefix}{tmp_path / 'j'}"
    plan = planner(name, startingOffsets=json.dumps({name: 10}))
    assert {mark.next for mark in plan.initial().values()} == {10}
