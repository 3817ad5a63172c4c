"""Loss per source, topic and window, exactly, from ledger rows; pure, and the same with and without Spark.

All sequence numbers of a stream are put in order once. What no island covers, between the first number that counts
and the last that is known to have been sent, is missing. Received numbers belong to the window of their own time.
A missing one has no time of its own: it lies between its neighbours, which are received events and producers' sent
counts (see `ledger`). Where both neighbours are in one window, the window is certain. Otherwise the event is booked on
the earlier window and counted in `uncertain`.

A missing number is `pending` while the row that revealed it is younger than `settle_us`, or until it is declared
lost; then it is `lost`. It leaves both when it arrives, however late: `healed` counts those.
`sent = received + pending + lost` holds in every row.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from brokerless.spark_collector.jobs.ledger import KIND_BEGIN, NULL, ledger_arrow_schema
from brokerless.spark_collector.source.schema import KIND_EVENT, KIND_LOST, KIND_SENT

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

COUNTS = ("received", "duplicates", "lost", "pending", "healed", "uncertain")
LOSS_COLUMNS = (
    "source", "epoch", "topic", "window", "sent", "received", "duplicates", "lost", "pending",
    "healed", "uncertain", "reasons",
)  # fmt: skip
LOSS_SCHEMA = (
    "source string, epoch bigint, topic string, window timestamp, sent bigint, received bigint, "
    "duplicates bigint, lost bigint, pending bigint, healed bigint, uncertain bigint, reasons map<string,bigint>"
)
UNATTRIBUTED = "unattributed"


def loss_table(ledger: "pa.Table", *, window_us: int, now_us: int, settle_us: int) -> "pa.Table":
    """The loss table of these ledger rows: one row per stream and window, columns `LOSS_COLUMNS`.

    `window_us` is the ledger's window or a multiple of it. `window` is the start of the window. `reasons` maps the
    declared reasons to counts; what is lost without a reason is `unattributed`.
    """
    import pyarrow as pa

    columns = Columns(ledger)
    table: dict[tuple[int, int], dict[str, int]] = {}
    reasons: dict[tuple[int, int], dict[str, int]] = {}
    for stream, slot, received, duplicates, healed in received_counts(columns, window_us):
        table[(stream, slot)] = {"received": received, "duplicates": duplicates, "healed": healed}
    for gap, reason, declared, amount in _attributed(columns):
        low, high = gap.slot_low, gap.slot_high
        # Without a lower bound in time, the only window that is known is that of the right neighbour.
        slot = _floor(low if low > 0 else high, window_us)
        row = table.setdefault((gap.stream, slot), {})
        is_lost = declared or now_us - gap.seen >= settle_us
        row["lost" if is_lost else "pending"] = row.get("lost" if is_lost else "pending", 0) + amount
        if _floor(low, window_us) != _floor(high, window_us):
            row["uncertain"] = row.get("uncertain", 0) + amount
        if is_lost:
            named = reasons.setdefault((gap.stream, slot), {})
            named[reason] = named.get(reason, 0) + amount
    keys = sorted(table)
    at = columns.first_row([stream for stream, _ in keys])
    counts = {c: pa.array([table[k].get(c, 0) for k in keys], pa.int64()) for c in COUNTS}
    sent = [sum(table[k].get(c, 0) for c in ("received", "lost", "pending")) for k in keys]
    return pa.table(
        {
            **{name: columns.table[name].take(at) for name in ("source", "epoch", "topic")},
            "window": pa.array([slot for _, slot in keys], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "sent": pa.array(sent, pa.int64()),
            **counts,
            "reasons": pa.array(
                [list(reasons.get(k, {}).items()) for k in keys], pa.map_(pa.string(), pa.int64())
            ),
        }
    ).select(list(LOSS_COLUMNS))


def counts_table(ledger: "pa.Table", *, window_us: int) -> "pa.Table":
    """Distinct events, and duplicates, per window, source and topic, over all epochs."""
    import pyarrow as pa

    columns = Columns(ledger)
    found = list(received_counts(columns, window_us))
    at = columns.first_row([stream for stream, *_ in found])
    table = pa.table(
        {
            "window": pa.array([row[1] for row in found], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "source": columns.table["source"].take(at),
            "topic": columns.table["topic"].take(at),
            "events": pa.array([row[2] for row in found], pa.int64()),
            "duplicates": pa.array([row[3] for row in found], pa.int64()),
        }
    )
    keys = ["window", "source", "topic"]
    grouped = table.group_by(keys).aggregate([("events", "sum"), ("duplicates", "sum")])
    grouped = grouped.rename_columns([*keys, "events", "duplicates"])
    return grouped.sort_by([(key, "ascending") for key in keys])


def totals_table(loss: "pa.Table") -> "pa.Table":
    """A loss table summed over its windows: one row per source, epoch and topic."""
    keys = ["source", "epoch", "topic"]
    sums = ["sent", *COUNTS]
    grouped = loss.group_by(keys).aggregate([(c, "sum") for c in sums]).rename_columns([*keys, *sums])
    return grouped.select(
        [*keys, "sent", "received", "duplicates", "lost", "pending", "healed", "uncertain"]
    ).sort_by([(key, "ascending") for key in keys])


# ---- in Spark: the same functions, one group per source and epoch --------------------------------------


def loss_frame(ledger: "DataFrame", *, window_s: float, now_us: int, settle_s: float = 10.0) -> "DataFrame":
    """`loss_table` of a DataFrame of ledger rows, computed by the executors."""
    window_us, settle_us = round(window_s * 1_000_000), round(settle_s * 1_000_000)

    def compute(group):  # type: ignore[no-untyped-def]  # Spark reads hints of grouped functions
        return loss_table(group, window_us=window_us, now_us=now_us, settle_us=settle_us)

    return ledger.groupBy("source", "epoch").applyInArrow(compute, LOSS_SCHEMA)


def counts_frame(ledger: "DataFrame", *, window_s: float) -> "DataFrame":
    """`counts_table` of a DataFrame of ledger rows, computed by the executors."""
    window_us = round(window_s * 1_000_000)

    def compute(group):  # type: ignore[no-untyped-def]  # Spark reads hints of grouped functions
        return counts_table(group, window_us=window_us)

    schema = "window timestamp, source string, topic string, events bigint, duplicates bigint"
    found = ledger.groupBy("source").applyInArrow(compute, schema)
    return found.orderBy("window", "source", "topic")


def totals(loss: "DataFrame") -> "DataFrame":
    """A loss table summed over its windows: one row per source, epoch and topic."""
    from pyspark.sql import functions as F

    keys = ["source", "epoch", "topic"]
    names = ("sent", "received", "duplicates", "lost", "pending", "healed", "uncertain")
    return loss.groupBy(*keys).agg(*(F.sum(c).alias(c) for c in names)).orderBy(*keys)


# ---- the arithmetic --------------------------------------------------------------------------------------


class Columns:
    """Ledger rows as numpy columns, with numbers instead of names: `stream`, and `group` for (source, epoch)."""

    def __init__(self, ledger: "pa.Table") -> None:
        import numpy as np
        import pyarrow.compute as pc

        self.table = ledger.select(ledger_arrow_schema().names).combine_chunks()
        source, topic = (_codes(self.table[name]) for name in ("source", "topic"))
        epoch = np.unique(self._numbers("epoch"), return_inverse=True)[1]
        width = int(epoch.max()) + 1 if len(epoch) else 1
        self.group = np.unique(source * width + epoch, return_inverse=True)[1]
        width = int(topic.max()) + 1 if len(topic) else 1
        _, self._first, self.stream = np.unique(
            self.group * width + topic, return_index=True, return_inverse=True
        )
        kind = self.table["kind"]
        self.is_event, self.is_sent, self.is_begin, self.is_lost = (
            pc.equal(kind, name).to_numpy(zero_copy_only=False)
            for name in (KIND_EVENT, KIND_SENT, KIND_BEGIN, KIND_LOST)
        )
        self.no_topic = pc.equal(self.table["topic"], "").to_numpy(zero_copy_only=False)
        self.late = self.table["late"].to_numpy(zero_copy_only=False).astype(bool)
        names = ("slot_low", "slot_high", "lo", "hi", "off_lo", "off_hi", "rows", "seen")
        self.numbers = {name: self._numbers(name) for name in names}

    def _numbers(self, name: str) -> Any:
        import pyarrow.compute as pc

        return pc.fill_null(self.table[name], NULL).to_numpy(zero_copy_only=False)

    def first_row(self, streams: list[int]) -> Any:
        """A row of each of these streams, to read its names from."""
        import numpy as np

        return self._first[np.array(streams, np.int64)] if streams else np.array([], np.int64)


def _codes(column: "pa.ChunkedArray") -> Any:
    import numpy as np

    encoded = column.combine_chunks().dictionary_encode()
    if hasattr(encoded, "chunks"):
        encoded = encoded.combine_chunks()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def running_max(groups: Any, ranks: Any) -> Any:
    """For each row the largest of `ranks` (≥ 0) among the earlier rows of its group, -1 if there is none.

    Groups are numbered from 0 and rise.
    """
    import numpy as np

    if not len(ranks):
        return ranks
    width = int(ranks.max()) + 1
    reached = np.maximum.accumulate(groups * width + ranks)
    before = np.empty_like(reached)
    before[0] = -1
    before[1:] = reached[:-1] - groups[1:] * width
    before[1:][groups[1:] != groups[:-1]] = -1
    return before


def numbered(*columns: Any) -> Any:
    """Numbers from 0 for the runs of equal values in sorted columns."""
    import numpy as np

    changed = np.zeros(len(columns[0]), bool)
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.cumsum(changed)


def received_counts(columns: Columns, window_us: int) -> Iterator[tuple[int, int, int, int, int]]:
    """`(stream, window, received, duplicates, healed)` of every stream and window with events.

    An event's time never changes, so all its copies are in one window and windows can be counted separately.
    """
    import numpy as np

    mask = columns.is_event
    if not mask.any():
        return
    lo, hi, slot, rows = (columns.numbers[n][mask] for n in ("lo", "hi", "slot_low", "rows"))
    stream, late = columns.stream[mask], columns.late[mask]
    slot = slot - slot % window_us
    order = np.lexsort((hi, lo, slot, stream))
    stream, slot, lo, hi, rows, late = (c[order] for c in (stream, slot, lo, hi, rows, late))
    groups = numbered(stream, slot)
    values, rank = np.unique(hi, return_inverse=True)

    def new(ranks: Any) -> Any:
        """How many numbers an island covers that none before it does; rank 0 is no island."""
        reach = running_max(groups, ranks)
        covered = np.where(reach > 0, values[np.maximum(reach, 1) - 1], lo - 1)
        return np.maximum(0, hi - np.maximum(lo - 1, covered))

    fresh = new(rank + 1)
    timely = np.where(late, 0, new(np.where(late, 0, rank + 1)))
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    received, on_time, seen = (np.add.reduceat(c, starts) for c in (fresh, timely, rows))
    for n, at in enumerate(starts.tolist()):
        total = int(received[n])
        yield int(stream[at]), int(slot[at]), total, int(seen[n]) - total, total - int(on_time[n])


class Gap(NamedTuple):
    """Missing numbers `lo` to `hi` of a stream, between two windows, revealed at `seen`; offsets if known."""

    stream: int
    group: int
    lo: int
    hi: int
    slot_low: int
    slot_high: int
    seen: int
    off_lo: int
    off_hi: int


def missing(columns: Columns) -> list[Gap]:
    """The gaps between islands and sent counts of each stream."""
    import numpy as np

    names = ("lo", "hi", "slot_low", "slot_high", "seen", "off_lo", "off_hi")
    events = [columns.stream[columns.is_event], *(columns.numbers[n][columns.is_event] for n in names)]
    bounds = _bounds(columns)
    stream, lo, hi, slot_low, slot_high, seen, off_lo, off_hi = (
        np.concatenate(pair) for pair in zip(events, bounds, strict=True)
    )
    if not len(stream):
        return []
    order = np.lexsort((slot_low, hi, lo, stream))
    stream, lo, hi, slot_low, slot_high, seen, off_lo, off_hi = (
        c[order] for c in (stream, lo, hi, slot_low, slot_high, seen, off_lo, off_hi)
    )
    furthest = np.lexsort((off_hi, slot_low, hi))
    rank = np.empty(len(furthest), np.int64)
    rank[furthest] = np.arange(len(furthest))
    left = running_max(numbered(stream), rank)
    left_row = furthest[np.maximum(left, 0)]
    found = np.flatnonzero((left >= 0) & (lo > hi[left_row] + 1))
    group_of = dict(zip(columns.stream.tolist(), columns.group.tolist(), strict=True)) if len(found) else {}
    gaps = []
    for at, before in zip(found.tolist(), left_row[found].tolist(), strict=True):
        offsets = (
            int(off_hi[before]) + 1 if off_hi[before] != NULL else NULL,
            int(off_lo[at]) - 1 if off_lo[at] != NULL else NULL,
        )
        numbers = (int(hi[before]) + 1, int(lo[at]) - 1)
        windows = (int(slot_low[before]), int(slot_high[at]))
        owner = int(stream[at])
        gaps.append(Gap(owner, group_of[owner], *numbers, *windows, int(seen[at]), *offsets))
    return gaps


def _bounds(columns: Columns) -> list[Any]:
    """Sent counts and `begin` notes as empty islands. A note without a topic is given to every topic of its epoch."""
    import numpy as np

    numbers, stream = columns.numbers, columns.stream
    plain = columns.is_sent | (columns.is_begin & ~columns.no_topic)
    rows = np.flatnonzero(plain)
    owners = stream[plain]
    general = np.flatnonzero(columns.is_begin & columns.no_topic)
    if len(general):
        known = columns.is_event | columns.is_sent
        streams, first = np.unique(stream[known], return_index=True)
        groups = columns.group[known][first]
        order = np.argsort(groups, kind="stable")
        streams, groups = streams[order], groups[order]
        begin = np.searchsorted(groups, columns.group[general], "left")
        end = np.searchsorted(groups, columns.group[general], "right")
        repeats = end - begin
        rows = np.concatenate([rows, np.repeat(general, repeats)])
        spread = [streams[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        owners = np.concatenate([owners, *spread])
    taken = {name: column[rows] for name, column in numbers.items()}
    order = np.lexsort((taken["hi"], taken["lo"], owners))
    owners = owners[order]
    taken = {name: column[order] for name, column in taken.items()}
    if not len(owners):
        return [
            owners,
            *(taken[n] for n in ("lo", "hi", "slot_low", "slot_high", "seen", "off_lo", "off_hi")),
        ]
    # Of equal statements the last bounds what was sent after them, the first what was sent before.
    starts = np.flatnonzero(np.diff(numbered(owners, taken["lo"], taken["hi"]), prepend=-1))
    return [
        owners[starts],
        taken["lo"][starts],
        taken["hi"][starts],
        np.maximum.reduceat(taken["slot_low"], starts),
        np.minimum.reduceat(taken["slot_high"], starts),
        np.minimum.reduceat(taken["seen"], starts),
        np.maximum.reduceat(taken["off_lo"], starts),
        np.maximum.reduceat(taken["off_hi"], starts),
    ]


class _Claims:
    """Declared losses of one stream (by seq) or of one source and epoch (by offset), found by bisection."""

    def __init__(self) -> None:
        self._declared: set[tuple[int, int, str]] = set()
        self._sorted: list[tuple[int, int, str]] = []
        self._reach: list[int] = []

    def add(self, first: int, last: int, reason: str) -> None:
        self._declared.add((first, last, reason))

    def overlapping(self, first: int, last: int) -> Iterator[tuple[int, int, str]]:
        """Those that overlap `first` to `last`, by number."""
        if len(self._sorted) != len(self._declared):
            self._sorted = sorted(self._declared)
            self._reach, reach = [], NULL
            for _, hi, _ in self._sorted:
                reach = max(reach, hi)
                self._reach.append(reach)
        for at in range(bisect_left(self._reach, first), len(self._sorted)):
            lo, hi, reason = self._sorted[at]
            if lo > last:
                return
            if hi >= first:
                yield lo, hi, reason


def _attributed(columns: Columns) -> Iterator[tuple[Gap, str, bool, int]]:
    """The parts of all gaps: `(gap, reason, whether it was declared, number of events)`."""
    import numpy as np

    by_stream: dict[int, _Claims] = {}
    by_group: dict[int, _Claims] = {}
    reasons = columns.table["reason"]
    for at in np.flatnonzero(columns.is_lost).tolist():
        first, last = int(columns.numbers["lo"][at]), int(columns.numbers["hi"][at])
        reason = reasons[at].as_py() or UNATTRIBUTED
        owner = by_group if columns.no_topic[at] else by_stream
        key = int(columns.group[at] if columns.no_topic[at] else columns.stream[at])
        owner.setdefault(key, _Claims()).add(first, last, reason)
    for gap in missing(columns):
        claims: list[tuple[int, int, str]] = []
        if (exact := by_stream.get(gap.stream)) is not None:
            claims += exact.overlapping(gap.lo, gap.hi)
        if (wide := by_group.get(gap.group)) is not None:
            claims += _claims_by_offset(gap, wide)
        yield from (
            (gap, reason, declared, amount) for reason, declared, amount in divide(gap.lo, gap.hi, claims)
        )


def _claims_by_offset(gap: Gap, claims: _Claims) -> Iterator[tuple[int, int, str]]:
    """Declared ranges of offsets as claims on the gap: no more events than offsets that both have."""
    first = gap.off_lo if gap.off_lo != NULL else 0
    last = gap.off_hi if gap.off_hi != NULL else 1 << 62
    at = gap.lo
    for lo, hi, reason in claims.overlapping(first, last):
        shared = min(hi, last) - max(lo, first) + 1
        if at > gap.hi:
            return
        yield at, min(gap.hi, at + shared - 1), reason
        at += shared


def divide(lo: int, hi: int, claims: list[tuple[int, int, str]]) -> list[tuple[str, bool, int]]:
    """Divide the gap `lo` to `hi` among the claims on it; where they overlap, the first by number has it."""
    parts = []
    at = lo
    for first, last, reason in sorted(claims):
        if first > at:
            parts.append((UNATTRIBUTED, False, min(first - 1, hi) - at + 1))
            at = first
        end = min(last, hi)
        if end >= at:
            parts.append((reason, True, end - at + 1))
            at = end + 1
    if at <= hi:
        parts.append((UNATTRIBUTED, False, hi - at + 1))
    return parts


def _floor(value: int, size: int) -> int:
    return value - value % size
