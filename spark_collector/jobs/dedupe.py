"""De-duplication with a state of a few intervals, however many events there were.

What was landed is remembered as islands of offsets per (source, epoch), in a small Delta table beside the landed one.
A batch is compared with them by its own islands; single rows are looked at only where they overlap.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from brokerless.core import IntervalSet
from brokerless.spark_collector.jobs.table import ExactlyOnceTable, TableError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_ISLANDS = "source string, epoch bigint, lo bigint, hi bigint, rows bigint"
# When there are so many files, one per batch, the islands of all of them are joined and written as one.
MERGE_EVERY = 50
Known = dict[tuple[str, int], IntervalSet]


class Island(msgspec.Struct, frozen=True):
    """A run of consecutive offsets; `rows` is more than its length if some came twice."""

    source: str
    epoch: int
    lo: int
    hi: int
    rows: int


def offset_islands(rows: "DataFrame") -> list[Island]:
    """The islands of offsets of these rows, found in Arrow without a shuffle."""
    wanted = rows.select("source", "epoch", "offset")
    return [Island(*r) for r in wanted.mapInArrow(_convert, _ISLANDS).collect()]


def _convert(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
    import numpy as np
    import pyarrow as pa

    for batch in batches:
        count = batch.num_rows
        if not count:
            continue
        sources = batch.column("source").dictionary_encode()
        source = sources.indices.to_numpy(zero_copy_only=False)
        epoch, offset = (batch.column(c).to_numpy(zero_copy_only=False) for c in ("epoch", "offset"))
        order = np.lexsort((offset, epoch, source))
        source, epoch, offset = source[order], epoch[order], offset[order]
        ends = np.ones(count, bool)
        ends[1:] = (np.diff(offset) > 1) | (np.diff(epoch) != 0) | (np.diff(source) != 0)
        starts = np.flatnonzero(ends)
        lasts = np.append(starts[1:], count) - 1
        yield pa.RecordBatch.from_arrays(
            [
                sources.dictionary.take(pa.array(source[starts])),
                pa.array(epoch[starts]),
                pa.array(offset[starts]),
                pa.array(offset[lasts]),
                pa.array(lasts - starts + 1, pa.int64()),
            ],
            names=["source", "epoch", "lo", "hi", "rows"],
        )


def overlaps(islands: list[Island], known: Known) -> tuple[bool, list[tuple[str, int, int, int]]]:
    """Whether rows repeat within the batch, and which ranges `(source, epoch, lo, hi)` were known before; pure."""
    inside = any(i.rows > i.hi - i.lo + 1 for i in islands)
    own: Known = {}
    before = []
    for i in islands:
        key = (i.source, i.epoch)
        inside = own.setdefault(key, IntervalSet()).add(i.lo, i.hi) < i.hi - i.lo + 1 or inside
        before += [(*key, lo, hi) for lo, hi in known[key].overlap(i.lo, i.hi)] if key in known else []
    return inside, before


def drop_landed(rows: "DataFrame", islands: list[Island], known: Known) -> "DataFrame":
    """The rows without those that are known, and each once."""
    from pyspark.sql import functions as F

    inside, before = overlaps(islands, known)
    if inside:
        rows = rows.dropDuplicates(["source", "epoch", "offset"])
    if before:
        schema = "k_source string, k_epoch bigint, k_lo bigint, k_hi bigint"
        ranges = F.broadcast(rows.sparkSession.createDataFrame(before, schema))
        same = F.expr("source = k_source and epoch = k_epoch and offset between k_lo and k_hi")
        rows = rows.join(ranges, same, "left_anti")
    return rows


class LandedOffsets:
    """What was landed, with the batch that landed it, so that a batch that comes again finds what was known then."""

    def __init__(self, table: ExactlyOnceTable) -> None:
        self.table = table
        self._known: Known = {}
        self._upto: int | None = None
        self._files = 0
        self._version = -1

    def before(self, batch: int, query: str) -> Known:
        """What all batches before this one landed, and those of all other queries (of earlier checkpoints)."""
        if self._upto is None or self._upto >= batch or self.table.version() != self._version:
            self._load(batch, query)
        return self._known

    def _load(self, batch: int, query: str) -> None:
        self._known = {}
        self._version = self.table.version()
        self._files = self.table.files()
        if self._files:
            for row in self.table.read_arrow().to_pylist():
                # Rows of earlier versions have no query; they are taken for this one's.
                if row.get("query") not in (None, query) or row["batch"] < batch:
                    self._remember(row["source"], row["epoch"], row["lo"], row["hi"])
        self._upto = batch - 1

    def _remember(self, source: str, epoch: int, lo: int, hi: int) -> None:
        self._known.setdefault((source, epoch), IntervalSet()).add(lo, hi)

    def add(self, islands: list[Island], batch: int, query: str) -> None:
        """Remember a batch that was landed.

        Raises TableError if a job of another query has landed some of it at the same time: it is there twice.
        """
        self._check_alone(islands, batch, query)
        own: Known = {}
        for i in islands:
            own.setdefault((i.source, i.epoch), IntervalSet()).add(i.lo, i.hi)
        if self.table.last_batch(query) < batch:  # else it is there: merging what was before it would drop it
            if self._files >= MERGE_EVERY:
                # All of it is older than this batch, which is the oldest that can come again.
                self.table.replace_arrow(_rows(self._known, -1, ""))
                self._files = 1
            self.table.append_arrow(_rows(own, batch, query), batch, query)
            self._files += 1
        for i in islands:
            self._remember(i.source, i.epoch, i.lo, i.hi)
        self._upto = batch
        self._version = self.table.version()

    def _check_alone(self, islands: list[Island], batch: int, query: str) -> None:
        """Another job may take turns with this one, but not land the same events while this one does."""
        if self.table.version() == self._version:
            return
        before = _length(overlaps(islands, self._known)[1])
        self._load(batch, query)
        twice = _length(overlaps(islands, self._known)[1]) - before
        if twice > 0:
            raise TableError(
                self.table.path,
                f"another job landed {twice:,} of the events of batch {batch} at the same time: they are in the table "
                "twice. Run one job with --dedupe at a time on one table",
            )


def _length(ranges: list[tuple[str, int, int, int]]) -> int:
    return sum(hi - lo + 1 for _, _, lo, hi in ranges)


def _rows(known: Known, batch: int, query: str) -> "pa.Table":
    import pyarrow as pa

    names = ("source", "epoch", "lo", "hi", "batch", "query")
    types = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.int64(), pa.string())
    rows = [
        {"source": source, "epoch": epoch, "lo": lo, "hi": hi, "batch": batch, "query": query}
        for (source, epoch), intervals in known.items()
        for lo, hi in intervals
    ]
    return pa.Table.from_pylist(rows, pa.schema(list(zip(names, types, strict=True))))
