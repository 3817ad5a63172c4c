"""Spools and journals with known content, for tests of the data source."""

import time
from pathlib import Path

from brokerless.core import DiskJournal, JournalReader, Retention, encode_frame
from brokerless.spark_collector.collector.spool import NESTED, as_items

BIG = Retention(max_bytes=1 << 30)


def open_spool(
    path: Path, *, source: str = "collector", segment_bytes: int = 0, retention: Retention = BIG
) -> DiskJournal:
    """A spool that a test fills by itself."""
    return DiskJournal(path, source=source, retention=retention, fsync="never", segment_bytes=segment_bytes)


def fill(
    spool: DiskJournal, source: str, first: int, count: int, *, per_frame: int = 10, size: int = 8
) -> None:
    """Events `first` to `first+count-1` of one source (topics a and b alternate; each fourth has a header).

    `per_frame` in each frame.
    """
    now = time.time_ns() // 1000
    for at in range(first, first + count, per_frame):
        n = min(per_frame, first + count - at)
        frame = encode_frame(
            source,
            1,
            at,
            topics=[("a", (at + 1) // 2), ("b", at // 2)] if n > 1 else [("ab"[at % 2], at // 2)],
            topic_index=[(at + i) % 2 for i in range(n)],
            times=[now - 1000 + i for i in range(n)],
            datas=[str(at + i).encode().ljust(size) for i in range(n)],
            headers=[{"n": str(at + i)} if (at + i) % 4 == 0 else {} for i in range(n)],
        )
        spool.append("direct/event", frame.raw, NESTED, time=now)


def fill_journal(path: Path, source: str, count: int) -> None:
    """A producer's own journal."""
    with DiskJournal(path, source=source, retention=BIG, fsync="never") as journal:
        for at in range(0, count, 100):
            journal.append_many("a", [str(i).encode() for i in range(at, min(count, at + 100))])


def spooled(path: Path, kind: str = "event") -> list[tuple[str, int]]:
    """(source, offset) of everything in a spool, in order."""
    with JournalReader(path) as reader:
        at, found = reader.oldest, []
        while at < reader.next:
            chunk = reader.read(at)
            for outer in chunk.frames:
                for item in as_items(outer, at, outer.next_offset):
                    if item.kind == kind:
                        found += [(e.source, e.offset) for e in item.frame.events()]
            at = chunk.next
    return found
