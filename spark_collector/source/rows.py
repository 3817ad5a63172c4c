"""Frames to Arrow batches: whole columns at a time, never event by event."""

from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core import Frame
from brokerless.spark_collector.collector.spool import JOURNAL_TRANSPORT, Item, LedgerNote
from brokerless.spark_collector.source.schema import KIND_LOST, KIND_RANGE, KIND_SENT, arrow_schema
from brokerless.spark_collector.source.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

# Spark hands over batch by batch: large enough that the hand-over does not count, small enough that the other
# side works at the same time.
BATCH_ROWS = 32_768
# Columns of one value that are kept for the next batch; a spool has a handful.
MAX_CONSTANTS = 64
# A batch of large events must not hold hundreds of megabytes.
BATCH_BYTES = 16 * 1024 * 1024
# From year 1 to 9999. The clamp depends on the event alone, so that all its copies have the same time.
MIN_TIME_US = -62_135_596_800_000_000
MAX_TIME_US = 253_402_300_799_999_999


class RowBuilder:
    """Collects frames and turns them into Arrow batches of the row schema, of wanted topics only."""

    def __init__(self, selection: Selection | None = None) -> None:
        import numpy

        self._selection = selection or Selection()
        self._np: Any = numpy
        self._constants: dict[str, pa.Array] = {}
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.bytes = 0
        self._counts: list[int] = []
        self._items: list[tuple[str, int, str, str, int]] = []
        self._topics: dict[str, int] = {}
        self._contents: dict[str, int] = {}
        self._topic_index: list[Any] = []
        self._content_index: list[Any] = []
        self._seqs: list[Any] = []
        self._offsets: list[Any] = []
        self._times: list[bytes] = []
        self._datas: list[bytes] = []
        self._keys: list[str] = []
        self._has_keys = False
        self._headers: list[dict[str, str]] = []
        self._has_headers = False

    @property
    def full(self) -> bool:
        """Whether it is time to `take`."""
        return self.rows >= BATCH_ROWS or self.bytes >= BATCH_BYTES

    def add(self, item: Item) -> None:
        """Add all events of a frame. Raises FrameError if its columns are damaged."""
        np, frame = self._np, item.frame
        header, columns = frame.header, frame.columns()
        n = header.count
        self.rows += n
        self.bytes += len(frame.raw)
        self._counts.append(n)
        self._items.append((header.source, header.epoch, item.transport, item.kind, item.received))
        self._times.append(columns.times)
        self._datas += columns.datas
        self._keys += columns.keys or [""] * n
        self._has_keys |= bool(columns.keys)
        self._headers += columns.headers or [{}] * n
        self._has_headers |= bool(columns.headers)
        names = self._topics
        if not columns.topic_index:
            topic, first, _ = header.topics[0]
            self._topic_index.append(np.full(n, names.setdefault(topic, len(names)), np.int32))
            self._seqs.append(np.arange(first, first + n, dtype=np.int64))
        else:
            local = np.frombuffer(columns.topic_index, np.uint16)
            table = [names.setdefault(topic, len(names)) for topic, _, _ in header.topics]
            self._topic_index.append(np.array(table, np.int32)[local])
            self._seqs.append(self._mixed_seqs(header.topics, local))
        if item.kind == KIND_SENT:  # the producer's next offset, the same for all topics
            self._offsets.append(np.full(n, header.first_offset, np.int64))
        else:
            self._offsets.append(np.arange(header.first_offset, header.first_offset + n, dtype=np.int64))
        self._add_contents(frame)

    def _mixed_seqs(self, topics: list[tuple[str, int, int]], local: Any) -> Any:
        """The seq of each event of a frame with several topics: its rank among those of its topic."""
        np = self._np
        order = np.argsort(local, kind="stable")
        ranked = np.concatenate([np.arange(first, first + n, dtype=np.int64) for _, first, n in topics])
        seqs = np.empty(len(local), np.int64)
        seqs[order] = ranked
        return seqs

    def _add_contents(self, frame: Frame) -> None:
        np, known = self._np, self._contents
        types, index = frame.header.content_types, frame.columns().content_index
        if not types:
            self._content_index.append(np.full(frame.count, known.setdefault("", len(known)), np.int32))
        elif not index:
            self._content_index.append(np.full(frame.count, known.setdefault(types[0], len(known)), np.int32))
        else:
            table = np.array([known.setdefault(t, len(known)) for t in types], np.int32)
            self._content_index.append(table[np.frombuffer(index, np.uint16)])

    def take(self) -> "pa.RecordBatch":
        """What was added since the last call, as one batch.

        Event times beyond the years that Spark and Python know are clamped to them.
        """
        import pyarrow as pa

        np = self._np
        counts = self._counts
        times = np.frombuffer(b"".join(self._times), np.int64)
        stamps = np.repeat(np.array([i[4] for i in self._items], np.int64), counts)
        # A journal read without a collector has no time of receipt: the event was received when it was accepted.
        received = np.where(stamps < 0, np.clip(times, MIN_TIME_US, MAX_TIME_US), stamps)
        times = np.clip(times, MIN_TIME_US, MAX_TIME_US)
        stamp = pa.timestamp("us", tz="UTC")
        batch = pa.RecordBatch.from_arrays(
            [
                self._repeated([i[0] for i in self._items]),
                pa.array(np.repeat(np.array([i[1] for i in self._items], np.int64), counts)),
                self._named(self._topics, self._topic_index),
                pa.array(np.concatenate(self._seqs)),
                pa.array(np.concatenate(self._offsets)),
                pa.array(times).cast(stamp),
                pa.array(received).cast(stamp),
                self._repeated([i[2] for i in self._items]),
                self._repeated([i[3] for i in self._items]),
                self._named(self._contents, self._content_index),
                pa.array(self._datas, pa.binary()),
                pa.array(self._keys, pa.string()) if self._has_keys else self._constant(""),
                self._header_maps(),
            ],
            schema=arrow_schema(),
        )
        if self._selection.has_topics:
            wanted = [self._selection.wants_topic(topic) for topic in self._topics]
            if not all(wanted):
                mask = np.array(wanted)[np.concatenate(self._topic_index)]
                batch = batch.filter(pa.array(mask))
        self._clear()
        return batch

    def _header_maps(self) -> "pa.Array":
        """The headers of each event as a map."""
        import pyarrow as pa

        kind = arrow_schema().field("headers").type
        if not self._has_headers:
            none = pa.array([], pa.string())
            zeros = pa.array(self._np.zeros(self.rows + 1, self._np.int32))
            return pa.MapArray.from_arrays(zeros, none, none)
        return pa.array([list(headers.items()) for headers in self._headers], kind)

    def _repeated(self, values: list[str]) -> "pa.Array":
        """One value per frame, repeated for each of its events."""
        known: dict[str, int] = {}
        index = [known.setdefault(v, len(known)) for v in values]
        if len(known) == 1:
            return self._constant(values[0])
        np = self._np
        return self._named(known, [np.repeat(np.array(index, np.int32), self._counts)])

    def _named(self, names: dict[str, int], index: list[Any]) -> "pa.Array":
        """The names that `index`, in parts, stands for."""
        import pyarrow as pa

        if len(names) == 1:
            return self._constant(next(iter(names)))
        return pa.array(list(names), pa.string()).take(pa.array(self._np.concatenate(index)))

    def _constant(self, value: str) -> "pa.Array":
        """The same value in every row: usually the same as in the last batch, and then nothing is built."""
        import pyarrow as pa

        held = self._constants.get(value)
        if held is None or len(held) < self.rows:
            if len(self._constants) >= MAX_CONSTANTS:
                self._constants.clear()
            # Some more than needed: batches end with a whole frame, so that their lengths differ a little.
            count = self.rows + self.rows // 4
            held = self._constants[value] = pa.repeat(pa.scalar(value, pa.string()), count)
        return held.slice(0, self.rows)


def lost_row(source: str, epoch: int, first: int, last: int, reason: str, now_us: int) -> dict[str, Any]:
    """The row that stands for a range of offsets which cannot be read any more."""
    note = LedgerNote("lost", first, last, reason)
    return {
        "source": source,
        "epoch": epoch,
        "topic": "",
        "seq": first,
        "offset": first,
        "time": now_us,
        "received": now_us,
        "transport": JOURNAL_TRANSPORT,
        "kind": KIND_LOST,
        "content_type": "application/json",
        "data": msgspec.json.encode(note),
        "key": "",
        "headers": [],
    }


def range_row(source: str, epoch: int, first: int, data: bytes) -> dict[str, Any]:
    """The row that stands for a range which whoever gets it reads by himself; `data` says which."""
    return lost_row(source, epoch, first, first, "", 0) | {"kind": KIND_RANGE, "data": data}


def range_batch(source: str, epoch: int, first: int, data: bytes) -> "pa.RecordBatch":
    """`range_row` as Arrow."""
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([range_row(source, epoch, first, data)], arrow_schema())


def lost_batch(source: str, epoch: int, first: int, last: int, reason: str, now_us: int) -> "pa.RecordBatch":
    """`lost_row` as Arrow."""
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([lost_row(source, epoch, first, last, reason, now_us)], arrow_schema())
