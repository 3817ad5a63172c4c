"""Where to go on, what to read next, how it is divided: without Spark."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal, JournalReader
from brokerless.core.errors import ConfigError, Fault
from brokerless.spark_collector.source.counting import event_counts
from brokerless.spark_collector.source.locations import (
    DataLoss,
    Extent,
    LocationMissing,
    LocationOffset,
    resume_at,
)
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner
from tests.spark_collector.spools import BIG, fill, fill_journal, open_spool

Factory = pytest.TempPathFactory


def planner(*paths: object, **options: str) -> Planner:
    return Planner(parse_options({"path": ",".join(map(str, paths)), **options}))


def test_resume() -> None:
    """After the mark; at the cut if the journal was cut before it; at the oldest of another journal."""
    epochs = [(1, 0), (5, 100)]
    extent = Extent("id", 10, 200, epochs, "s")
    assert resume_at(LocationOffset("id", 5, 150), extent) == 150
    assert resume_at(LocationOffset("id", 1, 90), extent) == 90, "the old epoch's rest comes first"
    assert resume_at(LocationOffset("id", 1, 130), extent) == 100, "events at the reused offsets are new ones"
    assert resume_at(LocationOffset("other", 1, 130), extent) == 10


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 40))
def test_pieces_cover_the_range_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, parts: int, limit: int
) -> None:
    """For any size, number of tasks and limit: batch after batch, each offset is in exactly one partition."""
    path = tmp_path_factory.mktemp("s")
    with open_spool(path / "s") as spool:
        fill(spool, "p", 0, count, per_frame=3)
        end = spool.next
    plan = planner(path / "s", numPartitions=str(parts))
    offsets, seen = plan.initial(), []
    for _ in range(count + 1):
        after = plan.latest(offsets, limit)
        partitions = plan.partitions(offsets, after)
        assert len(partitions) <= parts or parts == 1
        seen += [n for partition in partitions for n in range(partition.first, partition.stop)]
        assert after == offsets or partitions
        offsets = after
    assert seen == list(range(end))


def test_small_journals_are_one_task(tmp_path: Path) -> None:
    """Few single events are not worth several tasks."""
    fill_journal(tmp_path / "j", "p", 500)
    plan = planner(tmp_path / "j", numPartitions="8")
    start = plan.initial()
    assert len(plan.partitions(start, plan.latest(start))) == 1


def test_a_replaced_journal_is_loss(tmp_path: Path) -> None:
    """Another journal at the same path: an error, or a row that says so and then all of the new one."""
    fill_journal(tmp_path / "j", "p", 50)
    plan = planner(tmp_path / "j")
    offsets = plan.latest(plan.initial())
    (tmp_path / "j").rename(tmp_path / "old")
    fill_journal(tmp_path / "j", "p", 20)
    after = plan.latest(offsets)
    with pytest.raises(DataLoss, match="another journal"):
        plan.partitions(offsets, after)
    lost, rest = planner(tmp_path / "j", failOnDataLoss="false").partitions(offsets, after)
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
    """A batch that was planned before comes again: without the location nobody knows where it begins."""
    away = str(tmp_path / "away")
    plan = planner(away, failOnDataLoss="false")
    assert [
        (p.first, p.stop)
        for p in plan.partitions({away: LocationOffset("a", 1, 5)}, {away: LocationOffset("a", 1, 6)})
    ] == [(5, 6)]
    for before, after in [
        (LocationOffset("old", 1, 100), LocationOffset("new", 1, 10)),
        (LocationOffset("a", 1, 100), LocationOffset("a", 2, 90)),
        (LocationOffset("a", 1, 100), LocationOffset("a", 2, 100)),
    ]:
        with pytest.raises(Fault, match="cannot be reached"):
            plan.partitions({away: before}, {away: after})


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_offsets_of_a_path_as_spark_writes_it(tmp_path: Path, prefix: str) -> None:
    """A location is the same with Spark's prefix and without, in every option."""
    fill_journal(tmp_path / "j", "p", 30)
    name = f"{prefix}{tmp_path / 'j'}"
    plan = planner(name, startingOffsets=json.dumps({name: 10}))
    assert {mark.next for mark in plan.initial().values()} == {10}


def test_a_large_backlog_gets_what_the_others_leave(tmp_path: Path) -> None:
    """Among fifty spools with a few new events each, one with a backlog is read at the rate that is left."""
    for n in range(50):
        with open_spool(tmp_path / f"s{n}") as spool:
            fill(spool, f"p{n}", 0, 2000 if n == 7 else 10)
    plan = planner(tmp_path / "s*")
    start = plan.initial()
    after = plan.latest(start, 1000)
    read = {key: after[key].next - start[key].next for key in start}
    assert sum(read.values()) == 100, "frames of ten events"
    assert read.pop(str(tmp_path / "s7")) == 51
    assert set(read.values()) == {1}


def test_locations_that_are_not_there(tmp_path: Path) -> None:
    """Never there: a mistake. Known from the checkpoint and away: behind."""
    fill_journal(tmp_path / "j", "p", 10)
    for missing in ("none", "none*"):
        with pytest.raises(LocationMissing):
            planner(tmp_path / missing).initial()
        with pytest.raises(LocationMissing):
            planner(tmp_path / missing).everything()
    with pytest.raises(ConfigError, match="endingOffsets"):
        planner(tmp_path / "j", endingOffsets=json.dumps({"/x": 1})).everything()
    for url in ("ftp://b/x", "hdfs://h/x", "tcp://127.0.0.1:5555"):
        with pytest.raises(ConfigError, match="path"):
            planner(url)
    known = planner(tmp_path / "j").latest({})
    (tmp_path / "j").rename(tmp_path / "away")
    assert planner(tmp_path / "j").latest(known) == known


def test_large_backlogs_share_in_proportion(tmp_path: Path) -> None:
    """Of two backlogs the larger one gets more, so that both end at about the same time; small ones never wait."""
    sizes = {"small": 10, "middle": 3000, "large": 9000}
    for name, count in sizes.items():
        with open_spool(tmp_path / name) as spool:
            fill(spool, name, 0, count)
    plan = planner(tmp_path / "*")
    start = plan.initial()
    after = plan.latest(start, 1210)
    read = {Path(key).name: after[key].next - start[key].next for key in start}
    assert read == {"small": 1, "middle": 30, "large": 90}, "frames of ten events"


def test_a_batch_has_a_limit_in_bytes(tmp_path: Path) -> None:
    """With maxBytesPerTrigger, of spools and of journals; at least one frame comes."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 1000, size=100)
    fill_journal(tmp_path / "j", "p", 1000)
    for name in "sj":
        plan = planner(tmp_path / name)
        start = plan.initial()
        (held,) = plan.extents({}).values()
        at, batches = start, 0
        while (after := plan.latest(at, 0, 20_000)) != at:
            (first,), (last,) = at.values(), after.values()
            with JournalReader(tmp_path / name) as reader:
                size = sum(s for _, _, s in event_counts(reader, first.next, last.next, in_bytes=True) or ())
            assert size <= 20_000
            at, batches = after, batches + 1
        assert at == {str(tmp_path / name): held.at(held.next)}
        assert batches > (4 if name == "s" else 0)
        (one,) = plan.latest(start, 0, 1).values()
        assert one.next > 0


def test_a_time_is_an_offset(tmp_path: Path) -> None:
    """startingTimestamp and endingTimestamp bound a batch by when events were received or accepted."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for n in range(100):
            journal.append("a", b"x", time=1_700_000_000_000_000 + n * 1_000_000)
    from_ms, to_iso = str(1_700_000_010_000), "2023-11-14T22:13:40+00:00"  # 20 s after the first
    plan = planner(tmp_path / "j", startingTimestamp=from_ms, endingTimestamp=to_iso)
    found = plan.everything()
    assert (min(p.first for p in found), max(p.stop for p in found)) == (10, 20)
    (late,) = planner(tmp_path / "j", startingTimestamp="2099-01-01T00:00:00Z").initial().values()
    assert late.next == 100
    with pytest.raises(ConfigError, match="endingTimestamp"):
        plan.initial()
    for wrong in ("yesterday", "2023-11-14T22:13:40", "--5", "²"):
        with pytest.raises(ConfigError, match="startingTimestamp"):
            planner(tmp_path / "j", startingTimestamp=wrong)


def test_as_many_tasks_as_asked_for(tmp_path: Path) -> None:
    """minPartitions holds for small batches, too, over all locations together."""
    fill_journal(tmp_path / "j1", "p", 100)
    fill_journal(tmp_path / "j2", "q", 300)
    plan = planner(tmp_path / "j*", minPartitions="8")
    found = plan.everything()
    assert len(found) >= 8
    assert sum(p.stop - p.first for p in found) == 400
