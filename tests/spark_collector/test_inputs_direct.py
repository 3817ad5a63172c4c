"""The collector with real publishers over real sockets."""

import time
from pathlib import Path
from typing import Any

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.event import MAX_EVENT_BYTES
from brokerless.direct import Publisher
from brokerless.spark_collector.collector import Collector
from brokerless.spark_collector.config import CollectorConfig, DirectIn, SpoolConfig
from brokerless.spark_collector.options import parse_options
from brokerless.spark_collector.places import Gone, JournalPlace
from brokerless.spark_collector.planning import Piece, read_piece
from brokerless.spark_collector.replay import EndpointPlace
from tests.conftest import Until
from tests.spark_collector.test_collector import spooled

BIG = Retention(max_bytes=1 << 28)


def collector(tmp_path: Path, *addresses: str, **options: object) -> Collector:
    entry = DirectIn(addresses=list(addresses), words_every_s=0.2, **options)  # type: ignore[arg-type]
    spool = SpoolConfig(path=str(tmp_path / "spool"), sync_interval_s=0.02)
    return Collector(CollectorConfig(name="c", spool=spool, input=[entry], status=None))


def test_two_publishers_land_once(tmp_path: Path, until: Until) -> None:
    """What was published before, during and between two lives of the collector is in the spool once."""
    journals = [MemoryJournal(retention=BIG) for _ in range(2)]
    with (
        Publisher("tcp://127.0.0.1:0", source="p0", journal=journals[0]) as p0,
        Publisher("tcp://127.0.0.1:0", source="p1", journal=journals[1]) as p1,
    ):
        expected = 0
        for life in range(2):
            for p in (p0, p1):
                p.publish_many("a", [b"before"] * 100)
            with collector(tmp_path, p0.address, p1.address) as c:
                for p in (p0, p1):
                    p.publish_many("b", [b"during"] * 100)
                    p.publish("a", b"one")
                until(lambda c=c: c.counters.events == 402, what="all events of this life")
                until(lambda c=c: c.counters.words >= 2, what="the producers' words")
                assert c.counters.duplicates == 0, life
            expected += 201
        assert sorted(spooled(tmp_path / "spool")) == [(s, n) for s in ("p0", "p1") for n in range(expected)]
        account = c.ledger.account()
        assert (account.delivered, account.lost, account.pending) == (402, 0, 0)


def test_topics_are_filtered(tmp_path: Path, until: Until) -> None:
    """With topics only those events are in the spool, with their own offsets."""
    with Publisher("tcp://127.0.0.1:0", source="p", journal=MemoryJournal(retention=BIG)) as p:
        for n in range(50):
            p.publish(("keep.x", "drop")[n % 2], b"%d" % n)
        p.flush()
        with collector(tmp_path, p.address, topics=["keep."]) as c:
            until(lambda: c.counters.events == 25, what="the matching half")
    assert spooled(tmp_path / "spool") == [("p", n) for n in range(0, 50, 2)]


def test_evicted_events_are_noted(tmp_path: Path, until: Until) -> None:
    """What the publisher's journal dropped while the collector was away is noted as lost, once."""
    small = MemoryJournal(retention=Retention(max_events=100))
    with Publisher("tcp://127.0.0.1:0", source="p", journal=small) as p:
        with collector(tmp_path, p.address) as c:
            p.publish_many("a", [b"x"] * 10)
            until(lambda: c.counters.events == 10)
        for _ in range(100):
            p.publish_many("a", [b"y"] * 10)
        with collector(tmp_path, p.address) as c:
            until(lambda: c.counters.events >= 100)
            lost = 1010 - 10 - c.counters.events
            assert c.counters.lost == lost > 0
    assert len(spooled(tmp_path / "spool")) == 1010 - lost


def test_a_publisher_that_comes_later_and_returns(tmp_path: Path, until: Until) -> None:
    """The collector waits for a publisher that is not there.

    And follows it over a restart with its disk journal.
    """

    def publisher(address: str) -> Publisher:
        journal = DiskJournal(tmp_path / "j", retention=BIG, fsync="never")
        return Publisher(address, source="p", journal=journal)

    with publisher("tcp://127.0.0.1:0") as first:
        address = first.address
        first.publish_many("a", [b"x"] * 10)
    with collector(tmp_path, address) as c:
        time.sleep(0.2)
        for n in range(2):
            with publisher(address) as p:
                p.publish_many("a", [b"x"] * 10)
                until(lambda n=n: c.counters.events == 20 + 10 * n, what="events after a restart")
    assert spooled(tmp_path / "spool") == [("p", n) for n in range(30)]


def test_an_endpoint_can_be_read_like_a_journal(tmp_path: Path) -> None:
    """Ranges of offsets come from the publisher's address; a publisher that is away is None, not an error."""
    with Publisher("tcp://127.0.0.1:0", source="p", journal=MemoryJournal(retention=BIG)) as p:
        for n in range(300):
            p.publish("ab"[n % 2], b"%d" % n)
        p.flush()
        place = EndpointPlace(p.address)
        extent = place.extent()
        assert extent is not None
        assert (extent.oldest, extent.next, extent.source) == (0, 300, "p")
        parts = list(place.frames(90, 210))
        assert not any(isinstance(part, Gone) for part in parts)
        found = {e.offset: e.data for part in parts for e in part.events()}  # type: ignore[union-attr]
        assert {n: found[n] for n in range(90, 210)} == {n: b"%d" % n for n in range(90, 210)}
    assert place.extent() is None


def test_the_largest_event_passes_with_its_neighbours(tmp_path: Path, until: Until) -> None:
    """16 MiB, all that a publisher accepts: it gets through the spool into a row, and nothing beside it is lost."""
    large = bytes(range(256)) * (MAX_EVENT_BYTES // 256)
    with (
        Publisher("tcp://127.0.0.1:0", source="p", journal=MemoryJournal(retention=BIG)) as publisher,
        collector(tmp_path, publisher.address) as c,
    ):
        for data in (b"before", large, b"after"):
            publisher.publish("t", data, key="k" * 200, content_type="application/octet-stream")
        until(lambda: c.counters.events == 3, 60, what="all three events")
        assert (c.counters.refused, c.counters.restarts) == (0, 0)
    place = JournalPlace(str(tmp_path / "spool"))
    extent = place.extent()
    assert extent is not None
    piece = Piece(place.key, extent.oldest, extent.next, extent.source, extent.epoch)
    batches: list[Any] = list(read_piece(place, piece, parse_options({"path": place.key})))
    rows = [row for batch in batches for row in batch.to_pylist() if row["kind"] == "event"]
    assert [row["data"] for row in rows] == [b"before", large, b"after"]
