"""The collector with real publishers over real sockets."""

import time
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.event import MAX_EVENT_BYTES
from brokerless.direct import Mirror, Publisher
from brokerless.losstest.harness.ports import Ports
from brokerless.spark_collector import DataLoss, Windows, local
from brokerless.spark_collector.collector.collector import Collector
from brokerless.spark_collector.collector.config import CollectorConfig, DirectIn, SpoolConfig
from brokerless.spark_collector.source.locations import (
    JournalLocation,
    LocationOffset,
    MissingRange,
    Replaced,
)
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Partition, Planner, read_partition
from brokerless.spark_collector.source.replay import ANSWER_TIMEOUT_S, EndpointLocation, PublisherAway
from tests.conftest import Until
from tests.spark_collector.spools import spooled

BIG = Retention(max_bytes=1 << 28)


def collector(tmp_path: Path, *addresses: str, **options: object) -> Collector:
    entry = DirectIn(addresses=list(addresses), sent_counts_every_s=0.2, **options)  # type: ignore[arg-type]
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
                until(lambda c=c: c.counters.sent_counts >= 2, what="the producers' sent counts")
                assert c.counters.duplicates == 0, life
            expected += 201
        assert sorted(spooled(tmp_path / "spool")) == [(s, n) for s in ("p0", "p1") for n in range(expected)]
        account = c.ledger.account()
        assert (account.delivered, account.lost, account.pending) == (402, 0, 0)


@pytest.mark.parametrize("group", ["", "collectors"])
def test_publishers_are_discovered(
    tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """One that comes after the collector, and the same one at another address: every event once."""
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))
    with collector(tmp_path, "discover:orders-*", group=group) as c:
        for life in range(2):
            journal = DiskJournal(tmp_path / "j", retention=BIG)
            with Publisher("tcp://127.0.0.1:0", source="orders-1", journal=journal) as p:
                p.publish_many("a", [b"x"] * 100)
                until(lambda life=life: c.counters.events == 100 * (life + 1), timeout=60)
    assert sorted(spooled(tmp_path / "spool")) == [("orders-1", n) for n in range(200)]
    assert (c.counters.lost, c.counters.duplicates) == (0, 0)


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
        location = EndpointLocation(p.address)
        extent = location.extent()
        assert extent is not None
        assert (extent.oldest, extent.next, extent.source) == (0, 300, "p")
        parts = list(location.frames(90, 210))
        assert not any(isinstance(part, MissingRange) for part in parts)
        found = {e.offset: e.data for part in parts for e in part.events()}  # type: ignore[union-attr]
        assert {n: found[n] for n in range(90, 210)} == {n: b"%d" % n for n in range(90, 210)}
    assert location.extent() is None


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
    location = JournalLocation(str(tmp_path / "spool"))
    extent = location.extent()
    assert extent is not None
    partition = Partition(location.key, extent.oldest, extent.next, extent.source, extent.epoch)
    batches: list[Any] = list(read_partition(location, partition, parse_options({"path": location.key})))
    rows = [row for batch in batches for row in batch.to_pylist() if row["kind"] == "event"]
    assert [row["data"] for row in rows] == [b"before", large, b"after"]


def test_what_was_evicted_before_the_first_join_is_accounted_for(tmp_path: Path, until: Until) -> None:
    """A publisher that forgot its first events before any collector came: they are lost, with range and reason."""
    small = MemoryJournal(retention=Retention(max_bytes=64 * 1024))
    with Publisher("tcp://127.0.0.1:0", source="p", journal=small) as p:
        for _ in range(40):
            p.publish_many("a", [b"x" * 1000] * 10)
        p.flush()
        oldest = small.oldest
        assert 0 < oldest < 400
        with collector(tmp_path, p.address) as c:
            until(lambda: c.counters.events == 400 - oldest, what="what the publisher still has")
            until(lambda: c.counters.sent_counts >= 1, what="the producer's sent counts")
    (row,) = local.loss({"path": str(tmp_path / "spool")}, settle_s=0, windows=Windows(3600)).to_pylist()
    assert (row["sent"], row["received"], row["lost"]) == (400, 400 - oldest, oldest)
    assert dict(row["reasons"]) == {"evicted": oldest}
    assert c.counters.lost == oldest


def test_an_endpoint_that_was_restarted_without_its_journal_is_data_loss(tmp_path: Path) -> None:
    """What the memory journal of the old process held is gone: an error, or a row that says so."""

    def publisher(address: str) -> Publisher:
        return Publisher(address, source="p", journal=MemoryJournal(retention=BIG))

    with publisher("tcp://127.0.0.1:0") as p:
        address = p.address
        p.publish_many("a", [b"x"] * 500)
        p.flush()
        plan = Planner(parse_options({"endpoint": address}))
        start = plan.initial()
        known = plan.latest(start, 100)
        assert [(x.first, x.stop) for x in plan.partitions(start, known)] == [(0, 100)]
    with publisher(address) as p:
        p.publish_many("a", [b"y"] * 50)
        p.flush()
        plan = Planner(parse_options({"endpoint": address}))
        after = plan.latest(known)
        with pytest.raises(DataLoss, match="another journal"):
            plan.partitions(known, after)
        lenient = Planner(parse_options({"endpoint": address, "failOnDataLoss": "false"}))
        lost, rest = lenient.partitions(known, after)
        assert (lost.lost, rest.first, rest.stop) == ("replaced", 0, 50)
        with pytest.raises(Replaced):
            list(EndpointLocation(address).frames(0, 50, id="p", epoch=known[address].epoch))


def test_publishers_that_are_away_are_asked_at_the_same_time() -> None:
    """Ten of them cost as much as one, and nothing while they are known to be away."""
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(9, 19)]
    plan = Planner(parse_options({"endpoint": ",".join(addresses)}))
    known = {address: LocationOffset("p", 1, 5) for address in addresses}
    began = time.monotonic()
    assert plan.latest(known) == known
    assert time.monotonic() - began < 5 * ANSWER_TIMEOUT_S
    began = time.monotonic()
    assert plan.latest(known) == known
    assert time.monotonic() - began < ANSWER_TIMEOUT_S


def test_a_collector_reads_on_from_a_mirror(tmp_path: Path, until: Until, ports: Ports) -> None:
    """The publisher's host is gone while the collector is down: a mirror has the rest, and what comes when promoted."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    with Mirror(a, journal=tmp_path / "copy", serve=b) as mirror:
        with Publisher(a, source="p", journal=tmp_path / "j", mirrors=[b]) as p:
            with collector(tmp_path, a) as c:
                p.publish_many("t", [b"x"] * 50, wait="mirrored", timeout=60)
                until(lambda: c.counters.events == 50, 60, what="what the publisher sent")
            p.publish_many("t", [b"x"] * 50, wait="mirrored", timeout=60)
        with collector(tmp_path, a) as c:
            until(lambda: c.counters.events == 50, 60, what="the rest, of the mirror")
            with mirror.promote() as p:
                p.publish_many("t", [b"x"] * 50)
                until(lambda: c.counters.events == 100, 60, what="what the promoted mirror sent")
            assert (c.counters.lost, c.counters.duplicates) == (0, 0)
    assert spooled(tmp_path / "spool") == [("p", n) for n in range(150)]


def test_an_endpoint_goes_on_at_a_mirror(tmp_path: Path, ports: Ports) -> None:
    """With the mirror's address instead of the publisher's: what a batch planned at the other address lacks comes from
    there, each offset once, also after a promotion; a range that the mirror has not got is waited for."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))

    def read(plan: Planner, start: dict[str, LocationOffset], end: dict[str, LocationOffset]) -> list[int]:
        found: list[int] = []
        for part in plan.partitions(start, end):
            batches: list[Any] = list(read_partition(EndpointLocation(part.key), part, plan.options))
            found += [row["offset"] for batch in batches for row in batch.to_pylist()]
        return found

    with Mirror(a, journal=tmp_path / "copy", serve=b) as mirror:
        with Publisher(a, source="p", journal=tmp_path / "j", mirrors=[b]) as p:
            p.publish_many("t", [b"x"] * 100, wait="mirrored", timeout=60)
            before = Planner(parse_options({"endpoint": a}))
            start = before.initial()
            middle, end = before.latest(start, 60), before.latest(start)
            assert read(before, start, middle) == list(range(60))
        after = Planner(parse_options({"endpoint": b}))
        assert read(after, middle, end) == list(range(60, 100))  # planned when the publisher was there
        assert Planner(parse_options({"endpoint": b})).latest(end) == {b: end[a]}
        with pytest.raises(PublisherAway):
            list(EndpointLocation(b).frames(90, 101, id="p", epoch=end[a].epoch))
        with mirror.promote() as p:
            p.publish_many("t", [b"x"] * 50)
            p.flush()
            after = Planner(parse_options({"endpoint": b}))
            assert read(after, end, after.latest(end)) == list(range(100, 150))
            with pytest.raises(Replaced):  # the old publisher may have had another event there
                list(EndpointLocation(b).frames(90, 101, id="p", epoch=end[a].epoch))
