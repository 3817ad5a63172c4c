"""The loss table of a real run: real sockets, real collectors, a real SparkSession, and faults that are known."""

import contextlib
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brokerless.core import JournalReader, MemoryJournal, Position, Retention
from brokerless.direct import Publisher
from brokerless.spark_collector import (
    Collector,
    CollectorConfig,
    DirectIn,
    LedgerTable,
    SparkInput,
    SpoolConfig,
    Windows,
    run_stream,
)
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.collector.spool import as_items
from brokerless.spark_collector.tier.uploader import TierUploader
from tests.conftest import Until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(240)]
WINDOW_US = 10_000_000
WINDOWS = Windows(10.0, 3600.0)
KEEP = 50
Stream = tuple[str, int, str]


class Source:
    """A publisher whose journal keeps few events, and the truth about what it accepted."""

    def __init__(self, name: str, first_window_us: int) -> None:
        self.name, self.base = name, first_window_us
        self.address = "tcp://127.0.0.1:*"
        self.times: dict[Stream, list[int]] = defaultdict(list)
        self.order: dict[int, list[tuple[Stream, int]]] = {}
        self.open()

    def open(self) -> None:
        """Start, or start again: with nothing of the old journal, so with a new epoch."""
        journal = MemoryJournal(retention=Retention(max_events=KEEP))
        self.publisher = Publisher(self.address, source=self.name, journal=journal, heartbeat_s=0.1)
        self.address = self.publisher.address
        self.epoch = self.publisher.journal.epoch
        self.order[self.epoch] = []
        self._n = 0

    def send(self, window: int, *topics: str) -> None:
        """One event of each topic, with times in this window."""
        for topic in topics:
            self._n += 1
            stream = (self.name, self.epoch, topic)
            when = self.base + window * WINDOW_US + self._n * 1000
            self.publisher.journal.append_many(topic, [b"%d" % self._n], times=[when])
            self.order[self.epoch].append((stream, len(self.times[stream])))
            self.times[stream].append(when)

    @property
    def next(self) -> int:
        """The next offset of this epoch."""
        return len(self.order[self.epoch])

    def offsets(self, first: int, stop: int) -> Counter[tuple[Stream, int]]:
        """The events at these offsets of this epoch."""
        return Counter(self.order[self.epoch][first:stop])


class Site:
    """A collector that is there or away, and the truth about what it received."""

    def __init__(self, location: Path, name: str, sources: list[Source], until: Until) -> None:
        self.location, self.name, self.sources, self.until = location, name, sources, until
        self.received: Counter[tuple[Stream, int]] = Counter()
        self._had: dict[tuple[str, int], int] = {}

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Collect within the block; at its end everything that is still to be had is in the spool."""
        config = CollectorConfig(
            name=self.name,
            spool=SpoolConfig(path=str(self.location), sync_interval_s=0.05),
            # Rarely enough that the events have come: counts that are ahead of them are dated by our clock, two
            # minutes after the events of this test, and what is lost in between has no certain window.
            input=[DirectIn(addresses=[s.address for s in self.sources], sent_counts_every_s=1.0)],
            status=None,
        )
        with Collector(config) as collector:
            self._have_all(collector)
            yield
            self._have_all(collector)

    def _have_all(self, collector: Collector) -> None:
        """Everything is received, and the producers have said after it what they had sent."""
        for source in self.sources:
            self._catch_up(collector, source)
        for source in self.sources:
            if source.next:
                self.until(lambda s=source: self._said(s), 60, f"the sent counts of {source.name}")

    def _said(self, source: Source) -> bool:
        """Whether the spool has the producer's sent counts about all that it has sent."""
        wanted = ("sent", source.name, source.epoch, source.next)
        with JournalReader(self.location) as reader:
            at = reader.oldest
            while at < reader.next:
                chunk = reader.read(at, max_bytes=1 << 20)
                for outer in chunk.frames:
                    for item in as_items(outer, at, outer.next_offset):
                        f = item.frame
                        if (item.kind, f.source, f.epoch, f.first_offset) == wanted:
                            return True
                at = chunk.next
        return False

    def _catch_up(self, collector: Collector, source: Source) -> None:
        first = max(self._had.get((source.name, source.epoch), 0), source.publisher.journal.oldest)
        wanted = Position(source.epoch, source.next)
        self.until(
            lambda: collector.positions().get(source.name) == wanted or not source.next, 60, str(wanted)
        )
        self.received += source.offsets(first, source.next)
        self._had[(source.name, source.epoch)] = source.next


def truth(sources: list[Source], sites: list[Site]) -> dict[tuple[Stream, int], dict[str, int]]:
    """Per stream and window: what was sent, received, repeated and lost; what was late, because it is hours old."""
    copies: Counter[tuple[Stream, int]] = Counter()
    for site in sites:
        copies += site.received
    table: dict[tuple[Stream, int], dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("sent", "received", "lost", "duplicates", "healed"), 0)
    )
    for source in sources:
        late = source.base < time.time_ns() // 1000 - 2 * 3600 * 1_000_000
        for stream, times in source.times.items():
            for seq, when in enumerate(times):
                entry, came = table[(stream, when - when % WINDOW_US)], copies[(stream, seq)]
                entry["sent"] += 1
                entry["received"] += came > 0
                entry["lost"] += came == 0
                entry["duplicates"] += max(0, came - 1)
                entry["healed"] += came > 0 and late
    return dict(table)


def found(spark: "SparkSession", ledger: LedgerTable) -> dict[tuple[Stream, int], dict[str, int]]:
    """The loss table in the same form; nothing in it may be uncertain or pending."""
    table = {}
    for r in ledger.loss(spark, settle_s=0).collect():
        assert (r.uncertain, r.pending) == (0, 0), r
        counts = {n: r[n] for n in ("sent", "received", "lost", "duplicates", "healed")}
        if any(counts.values()):
            table[((r.source, r.epoch, r.topic), round(r.window.timestamp() * 1e6))] = counts
    return table


def upload(spool: Path, tier: Path) -> None:
    """Make the remote tier of a spool."""
    uploader = TierUploader(
        str(spool), f"file://{tier / spool.name}", counters=CollectorCounters(), part_bytes=4096
    )
    uploader.start()
    uploader.stop()


@pytest.mark.parametrize("where", ["spools", "tiers"])
def test_the_loss_table_of_a_real_run_is_the_truth(
    spark: "SparkSession", tmp_path: Path, until: Until, where: str
) -> None:
    """Gaps, a burst, a lost tail, a new epoch, duplicates, events hours old: exact per window, then healed."""
    now = time.time_ns() // 1000
    here = (now - 120_000_000) // WINDOW_US * WINDOW_US
    near, old = Source("near", here), Source("old", here - 5 * 3600 * 1_000_000 // WINDOW_US * WINDOW_US)
    with contextlib.ExitStack() as stack:
        for source in (near, old):
            stack.callback(lambda s=source: s.publisher.close())
        spools = tmp_path / "spools"
        one = Site(spools / "one", "one", [near, old], until)
        two = Site(tmp_path / "two", "two", [near, old], until)
        with one.there(), two.there():
            near.send(0, *"ab" * 20)
            old.send(0, *"ab" * 10)
            near.send(1, *"ab")
            old.send(1, *"ab")
        with two.there():  # a gap at `one`, which `two` does not have
            old.send(1, *"ab" * 20)
        old.send(1, *"ab" * 20)
        near.send(1, *"ab" * 40)  # a gap of 30, for both
        with one.there():
            near.send(2, *"ab")
        near.send(2, *"aab" * 90)  # a burst of 220
        with one.there():
            near.send(3, *"tttt")
        near.send(3, *"t" * 20, *"ab" * 25)  # the last of topic t: known by the producer's sent counts alone
        with one.there():
            near.send(4, *"ab" * 5)
        near.publisher.close()
        near.open()  # a new epoch
        with one.there(), two.there():  # `two` has what is still there, which `one` has too
            near.send(5, *"ab" * 15)
            old.send(2, *"ab" * 5)

    expected = truth([near, old], [one])
    lost = Counter(stream[0] for (stream, _), r in expected.items() for _ in range(r["lost"]))
    assert lost["near"] == 30 + 220 + 20, "the faults are those that were meant"
    assert lost["old"] > 0
    ledger = LedgerTable(str(tmp_path / "ledger"), WINDOWS)
    tiers = tmp_path / "tiers"
    rows = SparkInput(paths=(f"file://{tiers}/*" if where == "tiers" else str(spools / "*"),))
    if where == "tiers":
        upload(one.location, tiers)
    run_stream(rows.stream(spark), ledger, checkpoint=ledger.table.checkpoint)
    assert found(spark, ledger) == expected

    # The other collector's spool turns up hours later, and the same stream goes on with it.
    if where == "tiers":
        upload(two.location, tiers)
    else:
        shutil.move(two.location, spools / "two")
    run_stream(rows.stream(spark), ledger, checkpoint=ledger.table.checkpoint)
    healed = truth([near, old], [one, two])
    assert all(r["lost"] == 0 for (stream, _), r in healed.items() if stream[0] == "old")
    assert sum(r["duplicates"] for r in healed.values()) > 50
    assert found(spark, ledger) == healed
