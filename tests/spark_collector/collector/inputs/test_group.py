"""Collectors as workers of one group."""

from pathlib import Path

from brokerless.core import MemoryJournal, Retention
from brokerless.direct import Publisher
from brokerless.spark_collector import Collector, CollectorConfig, DirectIn, SpoolConfig
from tests.conftest import Until
from tests.direct.conftest import have_room
from tests.spark_collector.spools import spooled


def member(tmp_path: Path, name: str, address: str) -> Collector:
    spool = SpoolConfig(path=str(tmp_path / name), sync_interval_s=0.02)
    entry = DirectIn(addresses=[address], group="spark")
    return Collector(CollectorConfig(name=name, spool=spool, input=[entry], status=None))


def test_two_collectors_share_a_group(tmp_path: Path, until: Until) -> None:
    """Each event is in one of the two spools, acknowledged only after the sync, and the group's seen balance."""
    journal = MemoryJournal(retention=Retention(max_bytes=1 << 26))
    with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as p:
        with member(tmp_path, "c1", p.address) as one, member(tmp_path, "c2", p.address) as two:
            # Or one of them may have all before the other begins.
            until(lambda: have_room(p, 2), 60, "both workers")
            for n in range(50):
                p.publish_many("ab"[n % 2], [b"x"] * 200)
            until(
                lambda: one.counters.events + two.counters.events == 10_000,
                60,
                "all events in the two spools",
            )
            until(lambda: p.groups()["spark"].acked == 10_000, 30, "all acknowledged")
            assert min(one.counters.events, two.counters.events) > 0
        seen = p.groups()["spark"]
        assert seen.balanced
        assert seen.pending == 0
    both = spooled(tmp_path / "c1") + spooled(tmp_path / "c2")
    assert sorted(both) == [("p", n) for n in range(10_000)]


def test_what_was_not_acknowledged_comes_again(tmp_path: Path, until: Until) -> None:
    """A collector that goes away and returns gets the rest, and what it had appended is not appended again."""
    journal = MemoryJournal(retention=Retention(max_bytes=1 << 26))
    with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as p:
        for _ in range(3):
            p.publish_many("a", [b"x"] * 1000)
            with member(tmp_path, "c", p.address) as c:
                until(lambda c=c: c.counters.events >= 1, 30)
        with member(tmp_path, "c", p.address):
            until(lambda: p.groups()["spark"].acked == 3000, 60, "all acknowledged")
    assert sorted(spooled(tmp_path / "c")) == [("p", n) for n in range(3000)]
