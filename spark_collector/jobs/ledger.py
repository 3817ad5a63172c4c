"""From events to ledger rows: which sequence numbers came, per stream and window, as islands.

An *island* is a run of consecutive sequence numbers of one stream (source, epoch, topic) within one window.
A batch of a million events becomes a handful of them, in one pass and without a shuffle. Islands of several
batches, collectors and years can be put together in any order: all counting is done on their union.

A producer's sent counts that it had sent `n` events by time `t` is an *empty island* at `n` (`lo = n`, `hi = n -
1`):
it covers nothing, and bounds in time whatever is missing on both of its sides.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.collector.spool import LedgerNote
from brokerless.spark_collector.source.schema import KIND_EVENT, KIND_LEDGER, KIND_LOST, KIND_SENT

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# `slot_low` and `slot_high` are starts of windows, in microseconds: what is beyond this island on the right
# is not before slot_low, what is missing on its left is not after slot_high. `seen` is when it was received.
LEDGER_SCHEMA = (
    "source string, epoch bigint, topic string, kind string, late boolean, "
    "slot_low bigint, slot_high bigint, lo bigint, hi bigint, "
    "off_lo bigint, off_hi bigint, rows bigint, seen bigint, reason string"
)
KIND_BEGIN = "begin"
# Stands for a missing number in numpy columns.
NULL = -(1 << 62)


class Windows(msgspec.Struct, frozen=True):
    """How time is cut: windows of `window_s`.

    What is received later than `late_after_s` after its window is late.
    """

    window_s: float = 60.0
    late_after_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise ConfigError("window_s", "must be more than 0")
        if self.late_after_s < 0:
            raise ConfigError("late_after_s", "must not be negative")

    @property
    def window_us(self) -> int:
        """The window in microseconds."""
        return max(1, round(self.window_s * 1_000_000))

    @property
    def late_us(self) -> int:
        """The allowance in microseconds."""
        return round(self.late_after_s * 1_000_000)


def ledger_rows(events: "DataFrame", windows: Windows) -> "DataFrame":
    """The ledger rows of these event rows (batch or stream); no shuffle, one pass in Arrow."""
    wanted = events.select(
        "source", "epoch", "topic", "seq", "offset", "time", "received", "kind",
        _notes_only(),
    )  # fmt: skip

    def convert(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for batch in batches:
            if batch.num_rows:
                yield batch_to_ledger(batch, windows)

    return wanted.mapInArrow(convert, LEDGER_SCHEMA)


def _notes_only() -> Any:
    """The payload of ledger rows only: the others' need not travel to Python."""
    from pyspark.sql import functions as F

    return F.when(F.col("kind").isin(KIND_LEDGER, KIND_LOST), F.col("data")).alias("data")


def batch_to_ledger(batch: "pa.RecordBatch", windows: Windows) -> "pa.RecordBatch":
    """Ledger rows of one Arrow batch; pure."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = []
    events = batch.filter(pc.equal(batch.column("kind"), KIND_EVENT))
    if events.num_rows:
        parts.append(_islands(events, windows))
    sent = batch.filter(pc.equal(batch.column("kind"), KIND_SENT))
    if sent.num_rows:
        parts.append(_statements(sent, windows))
    notes = batch.filter(pc.is_in(batch.column("kind"), pa.array([KIND_LEDGER, KIND_LOST])))
    if notes.num_rows:
        parts.append(_notes(notes, windows))
    if not parts:
        return pa.RecordBatch.from_pylist([], ledger_arrow_schema())
    return pa.concat_tables([pa.Table.from_batches([p]) for p in parts]).combine_chunks().to_batches()[0]


def ledger_arrow_schema() -> "pa.Schema":
    """`LEDGER_SCHEMA` for Arrow."""
    import pyarrow as pa

    types = {"string": pa.string(), "bigint": pa.int64(), "boolean": pa.bool_()}
    fields = (part.strip().split(" ") for part in LEDGER_SCHEMA.split(","))
    return pa.schema([(name, types[kind]) for name, kind in fields])


def _islands(events: "pa.RecordBatch", windows: Windows) -> "pa.RecordBatch":
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    count = events.num_rows
    sources = events.column("source").dictionary_encode()
    topics = events.column("topic").dictionary_encode()
    source = sources.indices.to_numpy(zero_copy_only=False)
    topic = topics.indices.to_numpy(zero_copy_only=False)
    epoch, seq, offset = (events.column(c).to_numpy(zero_copy_only=False) for c in ("epoch", "seq", "offset"))
    time, received = (pc.cast(events.column(c), pa.int64()).to_numpy() for c in ("time", "received"))
    slot = time - time % windows.window_us
    late = received > slot + windows.window_us + windows.late_us
    order = np.lexsort((seq, late, slot, topic, epoch, source))
    keys = [column[order] for column in (source, epoch, topic, slot, late)]
    seq = seq[order]
    # A run goes on while all keys stay and the sequence number rises by one, or not at all (a duplicate).
    ends = np.zeros(count, bool)
    ends[0] = True
    for column in keys:
        ends[1:] |= column[1:] != column[:-1]
    ends[1:] |= np.diff(seq) > 1
    starts = np.flatnonzero(ends)
    lasts = np.append(starts[1:], count) - 1
    at = order[starts]
    seen = np.minimum.reduceat(received[order], starts)
    slots = pa.array(slot[at], pa.int64())
    offset = offset[order]
    return pa.RecordBatch.from_arrays(
        [
            sources.dictionary.take(pa.array(source[at])),
            pa.array(epoch[at], pa.int64()),
            topics.dictionary.take(pa.array(topic[at])),
            pa.repeat(KIND_EVENT, len(starts)),
            pa.array(late[at]),
            slots,
            slots,
            pa.array(seq[starts], pa.int64()),
            pa.array(seq[lasts], pa.int64()),
            pa.array(offset[starts], pa.int64()),
            pa.array(offset[lasts], pa.int64()),
            pa.array(lasts - starts + 1, pa.int64()),
            pa.array(seen, pa.int64()),
            pa.nulls(len(starts), pa.string()),
        ],
        schema=ledger_arrow_schema(),
    )


def _statements(sent: "pa.RecordBatch", windows: Windows) -> "pa.RecordBatch":
    import pyarrow as pa
    import pyarrow.compute as pc

    time = pc.cast(sent.column("time"), pa.int64()).to_numpy()
    size = windows.window_us
    seq = sent.column("seq").cast(pa.int64())
    offset = sent.column("offset").cast(pa.int64())
    return pa.RecordBatch.from_arrays(
        [
            sent.column("source"),
            sent.column("epoch"),
            sent.column("topic"),
            pa.repeat(KIND_SENT, sent.num_rows),
            pa.repeat(False, sent.num_rows),
            pa.array(time - time % size, pa.int64()),
            # What was sent before `time` is in the window of the microsecond before it.
            pa.array((time - 1) - (time - 1) % size, pa.int64()),
            seq,
            pc.subtract(seq, 1),
            offset,
            pc.subtract(offset, 1),
            pa.repeat(pa.scalar(0, pa.int64()), sent.num_rows),
            pc.cast(sent.column("received"), pa.int64()),
            pa.nulls(sent.num_rows, pa.string()),
        ],
        schema=ledger_arrow_schema(),
    )


def _notes(notes: "pa.RecordBatch", windows: Windows) -> "pa.RecordBatch":
    import pyarrow as pa
    import pyarrow.compute as pc

    received, times = (pc.cast(notes.column(c), pa.int64()).to_pylist() for c in ("received", "time"))
    rows = []
    named = notes.select(["source", "epoch", "topic", "data"]).to_pylist()
    for row, seen, time in zip(named, received, times, strict=True):
        note = msgspec.json.decode(row.pop("data"), type=LedgerNote)
        begins = note.what == KIND_BEGIN
        # A beginning bounds what follows it from below by its own time; 0 is no bound.
        at = time if begins else seen
        slot = at - at % windows.window_us
        rows.append(
            row
            | {
                "kind": KIND_BEGIN if begins else KIND_LOST,
                "late": False,
                "slot_low": slot,
                "slot_high": slot,
            }
            | {
                "lo": note.first,
                "hi": note.first - 1 if begins else note.last,
                "off_lo": None,
                "off_hi": None,
            }
            | {"rows": 0, "seen": seen, "reason": note.reason or None}
        )
    return pa.RecordBatch.from_pylist(rows, ledger_arrow_schema())


def merge_ledger(ledger: "pa.Table") -> "pa.Table":
    """Ledger rows with the same meaning and as few as possible: adjacent islands of different batches become one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ledger = ledger.select(ledger_arrow_schema().names).cast(ledger_arrow_schema())
    kind = ledger["kind"]
    events = ledger.filter(pc.equal(kind, KIND_EVENT))
    bounds = ledger.filter(pc.is_in(kind, pa.array([KIND_SENT, KIND_BEGIN])))
    declared = ledger.filter(pc.equal(kind, KIND_LOST))
    parts = [
        _join_islands(events),
        _aggregate(
            bounds, ["lo", "hi"], {"slot_low": "max", "slot_high": "min", "off_lo": "max", "off_hi": "max"}
        ),
        _aggregate(
            declared, ["slot_low", "slot_high", "lo", "hi", "reason"], {"off_lo": "max", "off_hi": "max"}
        ),
    ]
    return pa.concat_tables(parts)


def _aggregate(rows: "pa.Table", keys: list[str], how: dict[str, str]) -> "pa.Table":
    """One row per stream, kind and `keys`; `rows` is summed and the earliest `seen` is kept."""
    keys = ["source", "epoch", "topic", "kind", "late", *keys]
    how = {"rows": "sum", "seen": "min", **how}
    if "reason" not in keys:
        how["reason"] = "max"
    grouped = rows.group_by(keys).aggregate(list(how.items())).rename_columns([*keys, *how])
    return grouped.select(ledger_arrow_schema().names).cast(ledger_arrow_schema())


def _join_islands(events: "pa.Table") -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    if not events.num_rows:
        return events
    keys = ["source", "epoch", "topic", "late", "slot_low", "slot_high"]
    events = events.sort_by([(name, "ascending") for name in [*keys, "lo", "hi"]]).combine_chunks()
    changed = np.zeros(events.num_rows, bool)
    for name in keys:
        column = events[name].combine_chunks()
        codes = column.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        changed[1:] |= codes[1:] != codes[:-1]
    lo, hi = (events[name].to_numpy() for name in ("lo", "hi"))
    groups = np.cumsum(changed)
    values, rank = np.unique(hi, return_inverse=True)
    width = len(values)
    reached = values[np.maximum.accumulate(groups * width + rank) - groups * width]
    begins = changed.copy()
    begins[0] = True
    begins[1:] |= lo[1:] > reached[:-1] + 1
    islands = events.append_column("island", pa.array(np.cumsum(begins)))
    how = {"lo": "min", "hi": "max", "off_lo": "min", "off_hi": "max"}
    return _aggregate(islands, ["slot_low", "slot_high", "island"], how)
