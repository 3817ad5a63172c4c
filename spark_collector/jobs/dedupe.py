"""De-duplication with a state of a few intervals, however many events there were.

What was landed is remembered as islands of offsets per (source, epoch). A batch is compared with them by
its own
islands; only where they overlap are single rows looked at.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from brokerless.core import IntervalSet
from brokerless.spark_collector.table import Table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_ISLANDS = "source string, epoch bigint, lo bigint, hi bigint, rows bigint"


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


Known = dict[tuple[str, int], IntervalSet]


def overlaps(islands: list[Island], known: Known) -> tuple[bool, list[tuple[str, int, int, int]]]:
    """Whether rows repeat within the batch, and which ranges `(source, epoch, lo, hi)` were known before.

    Pure.
    """
    inside = any(i.rows > i.hi - i.lo + 1 for i in islands)
    own: Known = {}
    before = []
    for i in islands:
        key = (i.source, i.epoch)
        inside = own.setdefault(key, IntervalSet()).add(i.lo, i.hi) < i.hi - i.lo + 1 or inside
        before += [(*key, lo, hi) for lo, hi in known[key].overlap(i.lo, i.hi)] if key in known else []
    return inside, before


def drop_seen(rows: "DataFrame", islands: list[Island], known: Known) -> "DataFrame":
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


class Seen:
    """What was landed, kept in a table of its own: files of batch N lie under `batch=N`."""

    def __init__(self, table: Table) -> None:
        self.table = table
        table.recover()
        self._known: Known = {}
        self._upto = -1
        self._loaded = False

    def before(self, batch: int) -> Known:
        """What all batches before this one landed."""
        if not self._loaded or self._upto >= batch:
            self._load(batch)
        return self._known

    def _load(self, batch: int) -> None:
        import pyarrow.parquet as pq

        self._known = {}
        for path in self.table.paths():
            number = int(path.split("/batch=")[1].split("/")[0])
            if number < batch:
                for row in pq.read_table(path, partitioning=None).to_pylist():
                    self._remember(row["source"], row["epoch"], row["lo"], row["hi"])
        self._upto = batch - 1
        self._loaded = True

    def _remember(self, source: str, epoch: int, lo: int, hi: int) -> None:
        self._known.setdefault((source, epoch), IntervalSet()).add(lo, hi)

    def add(self, spark: "SparkSession", islands: list[Island], batch: int, query: str) -> None:
        """Remember a batch that was landed."""
        del spark
        if self.table.batches().get(query, -1) < batch:
            _write_islands(self.table, islands, batch, query)
        for i in islands:
            self._remember(i.source, i.epoch, i.lo, i.hi)
        self._upto = max(self._upto, batch)


def _write_islands(table: Table, islands: list[Island], batch: int, query: str) -> None:
    import os

    import pyarrow as pa
    import pyarrow.parquet as pq

    merged: Known = {}
    for i in islands:
        merged.setdefault((i.source, i.epoch), IntervalSet()).add(i.lo, i.hi)
    rows = [
        {"source": source, "epoch": epoch, "lo": lo, "hi": hi}
        for (source, epoch), intervals in merged.items()
        for lo, hi in intervals
    ]
    staged = table.stage()
    folder = os.path.join(staged, f"batch={batch}")
    os.makedirs(folder)
    schema = pa.schema(
        [("source", pa.string()), ("epoch", pa.int64()), ("lo", pa.int64()), ("hi", pa.int64())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), os.path.join(folder, "seen.parquet"))
    table.commit(staged, query=query, batch=batch)
