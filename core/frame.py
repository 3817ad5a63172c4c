"""Frames: batches of consecutive events of one source, encoded once for storing, sending and sending again.

    prefix  16 bytes: magic, version, flags, header length, body length, CRC-32 of everything else
    header  msgpack: source, epoch, first offset, count, topics with first seq and count, content types
    body    msgpack columns: topic index, times, data, content type index, keys; headers if any event has some

The header alone is enough for a ledger and for filtering by topic. Topics are mixed in one frame, because
batches of one topic each are batches of one event when there are thousands of topics.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count, repeat
from typing import Any

import msgspec

from brokerless.core.errors import FrameError
from brokerless.core.event import MAX_HEADERS, NO_HEADERS, Event, Headers
from brokerless.core.runtime.accelerated import speed
from brokerless.core.runtime.crc import crc32

MAGIC = b"\xb5\x1e"
VERSION = 1
_PREFIX = struct.Struct("<2sBBIII")
PREFIX_BYTES = _PREFIX.size
_CRC = struct.Struct("<I")
# The 16 MiB an event may have, plus everything around it. A length field above this is never believed.
MAX_FRAME_BYTES = 32 * 1024 * 1024
# The topic index is 16 bits wide.
MAX_FRAME_EVENTS = 65_535
_NUMBERS = 1 << 62
# Frames of more events are not worth merging. A merged frame is a tenth of a millisecond of work for its receiver.
SMALL_FRAME_EVENTS = 64
_MERGED_EVENTS = 4096
_MERGED_BYTES = 256 * 1024


class Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a frame says of itself before its columns are looked at."""

    source: str
    epoch: int
    first_offset: int
    count: int
    topics: list[tuple[str, int, int]]
    content_types: list[str] = []


class Columns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The events of a frame, column by column.

    `topic_index` and `content_index` are little-endian u16 arrays into the header's tables, empty when all
    events have the first entry. `times` is a little-endian i64 array of microseconds, as Arrow has it.
    `keys` is empty when no event has one, and so is `headers`.
    """

    topic_index: bytes
    times: bytes
    datas: list[bytes]
    content_index: bytes = b""
    keys: list[str] = []
    headers: list[dict[str, str]] = []


# What decoding hostile msgpack can raise: msgspec lets UnicodeDecodeError (a ValueError) through.
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, MemoryError, RecursionError)

_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_columns = msgspec.msgpack.Decoder(Columns).decode


class Frame:
    """One encoded frame with its header decoded; the columns are decoded when asked for."""

    __slots__ = ("_columns", "header", "raw")

    def __init__(self, raw: bytes, header: Header) -> None:
        self.raw = raw
        self.header = header
        self._columns: Columns | None = None

    def __repr__(self) -> str:
        h = self.header
        return f"Frame({h.source}:{h.epoch}:{h.first_offset}+{h.count}, {len(h.topics)} topics)"

    @property
    def source(self) -> str:
        """The producer's name."""
        return self.header.source

    @property
    def epoch(self) -> int:
        """The producer's epoch."""
        return self.header.epoch

    @property
    def first_offset(self) -> int:
        """Offset of the first event."""
        return self.header.first_offset

    @property
    def next_offset(self) -> int:
        """Offset after the last event."""
        return self.header.first_offset + self.header.count

    @property
    def count(self) -> int:
        """Number of events."""
        return self.header.count

    @property
    def topics(self) -> list[tuple[str, int, int]]:
        """`(topic, first seq, count)` for each topic in the frame."""
        return self.header.topics

    @classmethod
    def parse(cls, buffer: bytes | bytearray | memoryview, *, verify: bool = True) -> "Frame":
        """Read one frame that fills `buffer` exactly. Raises FrameError for anything else.

        `verify=False` skips the CRC, for bytes that came through a channel which checks them itself.
        """
        length = frame_length(buffer)
        if length != len(buffer):
            raise FrameError(f"{len(buffer)} bytes where {length} are announced")
        return cls.of_length(bytes(buffer), verify=verify)

    @classmethod
    def of_length(cls, raw: bytes, *, verify: bool = True) -> "Frame":
        """`parse` for bytes whose length is what `frame_length` says."""
        _, _, _, header_bytes, _, crc = _PREFIX.unpack_from(raw)
        if verify and crc32(memoryview(raw)[PREFIX_BYTES:], crc32(raw[:12])) != crc:
            raise FrameError("CRC does not match")
        try:
            header = _decode_header(memoryview(raw)[PREFIX_BYTES : PREFIX_BYTES + header_bytes])
        except DECODE_ERRORS as error:
            raise FrameError(f"header: {error}") from None
        _check_header(header)
        return cls(raw, header)

    def columns(self) -> Columns:
        """Decode (once) and check the columns. Raises FrameError if they do not fit the header."""
        columns = self._columns
        if columns is None:
            try:
                columns = _decode_columns(memoryview(self.raw)[self._body_at() :])
            except DECODE_ERRORS as error:
                raise FrameError(f"columns: {error}") from None
            _check_columns(self.header, columns)
            self._columns = columns
        return columns

    def check(self) -> None:
        """Raise FrameError if `columns` or `events` would."""
        if self._columns is None and speed is not None:
            h = self.header
            if speed.check_columns(self.raw, self._body_at(), h.count, h.topics, h.content_types):
                return
        self.columns()

    def _body_at(self) -> int:
        return PREFIX_BYTES + int.from_bytes(self.raw[4:8], "little")

    def datas(self) -> list[bytes]:
        """The data of all events."""
        return self.columns().datas

    def seqs(self) -> list[int]:
        """The seq of every event."""
        h, c = self.header, self.columns()
        if not c.topic_index:
            first = h.topics[0][1]
            return list(range(first, first + h.count))
        counters = [count(first) for _, first, _ in h.topics]
        return list(map(next, map(counters.__getitem__, _u16(c.topic_index))))

    def topic_column(self) -> list[str]:
        """The topic of every event."""
        h, c = self.header, self.columns()
        names = [name for name, _, _ in h.topics]
        if not c.topic_index:
            return names * h.count
        return list(map(names.__getitem__, _u16(c.topic_index)))

    def events(self) -> list[Event]:
        """All events, in order."""
        h = self.header
        if self._columns is None and speed is not None:
            made: list[Event] | None = speed.read_events(
                self.raw,
                self._body_at(),
                h.count,
                h.topics,
                h.content_types,
                h.source,
                h.epoch,
                h.first_offset,
                Event,
            )
            if made is not None:
                return made
        c = self.columns()
        times = memoryview(c.times).cast("q")
        offsets = count(h.first_offset)
        source, epoch = repeat(h.source, h.count), repeat(h.epoch)
        # One C loop per shape of frame: building events is the hot path of every consumer.
        if not c.topic_index:
            topic, first_seq, _ = h.topics[0]
            topics: Any = repeat(topic)
            seqs: Any = count(first_seq)
        else:
            index = _u16(c.topic_index)
            names = [name for name, _, _ in h.topics]
            counters = [count(first) for _, first, _ in h.topics]
            topics = map(names.__getitem__, index)
            seqs = map(next, map(counters.__getitem__, index))
        if not h.content_types and not c.keys and not c.headers:
            return list(map(Event, source, epoch, offsets, topics, seqs, times, c.datas))
        return list(
            map(
                Event,
                source,
                epoch,
                offsets,
                topics,
                seqs,
                times,
                c.datas,
                self._content_types(),
                c.keys or repeat(""),
                self._headers(),
            )
        )

    def header_column(self) -> list[Mapping[str, str]]:
        """The headers of every event."""
        return list(self._headers()) if self.columns().headers else [NO_HEADERS] * self.header.count

    def _headers(self) -> Iterable[Mapping[str, str]]:
        headers = self.columns().headers
        return (
            (Headers(entry) if entry else NO_HEADERS for entry in headers) if headers else repeat(NO_HEADERS)
        )

    def content_type_column(self) -> list[str]:
        """The content type of every event."""
        return list(self._content_types()) if self.header.content_types else [""] * self.header.count

    def _content_types(self) -> Any:
        h, c = self.header, self.columns()
        if not h.content_types:
            return repeat("")
        if not c.content_index:
            return repeat(h.content_types[0], h.count)
        return map(h.content_types.__getitem__, _u16(c.content_index))

    def slice(self, first: int, stop: int) -> "Frame":
        """The frame of the events with offsets in `[first, stop)`; itself if that is all of them."""
        h = self.header
        lo, hi = max(0, first - h.first_offset), min(h.count, stop - h.first_offset)
        if lo == 0 and hi == h.count:
            return self
        if lo >= hi:
            raise FrameError(f"offsets {first} to {stop - 1} are not in {self!r}")
        c = self.columns()
        if c.topic_index:
            index = _u16(c.topic_index)
            topic_index = list(index[lo:hi])
            skipped = [0] * len(h.topics)
            for i in index[:lo]:
                skipped[i] += 1
        else:
            topic_index = [0] * (hi - lo)
            skipped = [lo]
        topics, compact = _compact_topics(h.topics, topic_index, skipped)
        contents = list(self._content_types())[lo:hi] if h.content_types else None
        return encode_frame(
            h.source,
            h.epoch,
            h.first_offset + lo,
            topics=topics,
            topic_index=compact,
            times=memoryview(c.times).cast("q")[lo:hi].tolist(),
            datas=c.datas[lo:hi],
            content_types=contents,
            keys=c.keys[lo:hi] or None,
            headers=c.headers[lo:hi] or None,
        )


def encode_frame(
    source: str,
    epoch: int,
    first_offset: int,
    *,
    topics: Sequence[tuple[str, int]],
    topic_index: Sequence[int] | None,
    times: Sequence[int] | bytes,
    datas: list[bytes],
    content_types: Sequence[str] | None = None,
    keys: list[str] | None = None,
    headers: Sequence[Mapping[str, str]] | None = None,
) -> Frame:
    """Encode events with consecutive offsets into one frame.

    `topics` has `(topic, first seq)`; `topic_index` says for each event which of them, and may be None when
    there is one topic. `content_types`, `keys` and `headers` have one entry per event, or are None when all are
    empty; a single content type stands for all.
    `times` are microseconds, or the column of them as it is stored. The caller guarantees valid topics and data.
    Raises FrameError when the result would be too large.
    """
    n = len(datas)
    if len(topics) == 1:
        table = [(topics[0][0], topics[0][1], n)]
        index = b""
    else:
        assert topic_index is not None
        counts = [0] * len(topics)
        for i in topic_index:
            counts[i] += 1
        table = [(name, first, c) for (name, first), c in zip(topics, counts, strict=True)]
        index = array("H", topic_index).tobytes()
    stamps = times if isinstance(times, bytes) else array("q", times).tobytes()
    return build_frame(source, epoch, first_offset, table, index, stamps, datas, content_types, keys, headers)


def build_frame(
    source: str,
    epoch: int,
    first_offset: int,
    table: list[tuple[str, int, int]],
    index: bytes,
    stamps: bytes,
    datas: list[bytes],
    content_types: Sequence[str] | None = None,
    keys: list[str] | None = None,
    headers: Sequence[Mapping[str, str]] | None = None,
) -> Frame:
    """`encode_frame` for columns that are ready: the topic table with counts, the index, the times."""
    n = len(datas)
    if not 0 < n <= MAX_FRAME_EVENTS:
        raise FrameError(f"{n} events, a frame holds 1 to {MAX_FRAME_EVENTS}")
    content_table: list[str] = []
    content_index = b""
    if content_types is not None:
        content_table = list(dict.fromkeys(content_types))
        if content_table == [""]:
            content_table = []
        elif len(content_table) > 1:
            where = {text: i for i, text in enumerate(content_table)}
            content_index = array("H", map(where.__getitem__, content_types)).tobytes()
    # Without headers there is no such column: the bytes are those of frames before there were headers.
    header_column = _encode(headers) if headers and any(headers) else b""
    # Frames are made without their columns: a journal that keeps one must not keep the data twice.
    header = Header(source, epoch, first_offset, n, table, content_table)
    if speed is not None:
        raw = speed.pack_frame(
            source,
            epoch,
            first_offset,
            table,
            content_table,
            index,
            stamps,
            datas,
            content_index,
            keys or [],
            MAX_FRAME_BYTES,
            header_column,
        )
        if raw is not None:
            return Frame(raw, header)
    columns: list[Any] = [index, stamps, datas, content_index, keys or []]
    if header_column:
        columns.append(msgspec.Raw(header_column))
    return Frame(_pack(header, columns), header)


def _pack(header: Header, columns: list[Any]) -> bytes:
    head, body = _encode(header), _encode(columns)
    if PREFIX_BYTES + len(head) + len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(head) + len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(head), len(body), 0)[:12]
    crc = crc32(body, crc32(head, crc32(prefix)))
    return b"".join((prefix, _CRC.pack(crc), head, body))


def merge_small(frames: Sequence[Frame]) -> list[Frame]:
    """The same events in fewer frames: runs of small frames become one each, larger ones stay as they are.

    For frames of a journal, which are intact and consecutive. An event that was published alone has a frame of its own;
    sending and decoding thousands of those costs both sides fifty times as much as one frame with the same events.
    """
    merged: list[Frame] = []
    run: list[Frame] = []
    events = size = following = epoch = 0
    source = ""
    for frame in frames:
        h, more = frame.header, len(frame.raw)
        n = h.count
        if (
            n > SMALL_FRAME_EVENTS
            or events + n > _MERGED_EVENTS
            or size + more > _MERGED_BYTES
            or h.first_offset != following
            or h.epoch != epoch
            or h.source != source
        ):
            merged += _merged(run, events)
            run, events, size = [], 0, 0
            following, epoch, source = h.first_offset, h.epoch, h.source
        if n > SMALL_FRAME_EVENTS:
            merged.append(frame)
        else:
            run.append(frame)
            events += n
            size += more
        following += n
    return merged + _merged(run, events)


def _merged(run: list[Frame], events: int) -> list[Frame]:
    """One frame of all events; the frames themselves where a topic's seqs have a hole (which no journal has)."""
    if len(run) < 2:
        return run
    if len(run) == events and speed is not None:
        merged = _merged_singles(run, speed.read_single)
        if merged is not None:
            return [merged]
    return _merged_any(run)


def _merged_singles(run: list[Frame], single: Callable[..., Event | None]) -> Frame | None:
    """The case that merging is for, without decoding columns: all were published alone, without labels. Else None."""
    h = run[0].header
    source, epoch, offset = h.source, h.epoch, h.first_offset
    where: dict[str, list[int]] = {}  # of each topic its place, first seq and next seq
    # Arrays: thousands of numbers that are kept as objects cost more than everything else here.
    index, times = array("H"), array("q")
    datas: list[bytes] = []
    for frame in run:
        event = single(frame.raw, source, epoch, offset, Event)
        if event is None:
            return None
        offset += 1
        seq = event.seq
        place = where.get(event.topic)
        if place is None:
            place = where[event.topic] = [len(where), seq, seq]
        elif place[2] != seq:
            return None
        place[2] = seq + 1
        index.append(place[0])
        times.append(event.time)
        datas.append(event.data)
    table = [(topic, first, end - first) for topic, (_, first, end) in where.items()]
    column = index.tobytes() if len(table) > 1 else b""
    return build_frame(source, epoch, h.first_offset, table, column, times.tobytes(), datas)


def _merged_any(run: list[Frame]) -> list[Frame]:
    where: dict[str, int] = {}
    table: list[list[Any]] = []  # name, first seq, count
    index: list[int] = []
    times: list[bytes] = []
    datas: list[bytes] = []
    contents: list[str] = []
    keys: list[str] = []
    headers: list[Mapping[str, str]] = []
    labelled = False
    for frame in run:
        h = frame.header
        columns = frame._columns or _decode_columns(memoryview(frame.raw)[frame._body_at() :])
        places = []
        for name, first, n in h.topics:
            at = where.get(name)
            if at is None:
                at = where[name] = len(table)
                table.append([name, first, n])
            else:
                entry = table[at]
                if entry[1] + entry[2] != first:
                    return run
                entry[2] += n
            places.append(at)
        if columns.topic_index:
            index += map(places.__getitem__, _u16(columns.topic_index))
        else:
            index += places * h.count
        times.append(columns.times)
        datas += columns.datas
        if labelled or h.content_types or columns.keys or columns.headers:
            if not labelled:
                labelled = True
                before = len(datas) - h.count
                contents, keys, headers = [""] * before, [""] * before, [NO_HEADERS] * before
            contents += frame._content_types() if h.content_types else [""] * h.count
            keys += columns.keys or [""] * h.count
            headers += columns.headers or [NO_HEADERS] * h.count
    h = run[0].header
    rows = [(name, first, n) for name, first, n in table]
    column = array("H", index).tobytes() if len(rows) > 1 else b""
    labels = keys if any(keys) else None
    stamps = b"".join(times)
    source, epoch, first = h.source, h.epoch, h.first_offset
    return [
        build_frame(
            source, epoch, first, rows, column, stamps, datas, contents or None, labels, headers or None
        )
    ]


def frame_length(buffer: bytes | bytearray | memoryview) -> int:
    """Length of the frame that begins at `buffer`, from its prefix. Raises FrameError if it is not one."""
    if len(buffer) < PREFIX_BYTES:
        raise FrameError(f"{len(buffer)} bytes are less than a prefix")
    magic, version, _, header_bytes, body_bytes, _ = _PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise FrameError("does not begin with the magic number")
    if version != VERSION:
        raise FrameError(f"version {version}, this software knows version {VERSION}")
    length = PREFIX_BYTES + int(header_bytes) + int(body_bytes)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"announces {length} bytes, the limit is {MAX_FRAME_BYTES}")
    return length


def _u16(column: bytes) -> memoryview:
    return memoryview(column).cast("H")


def _check_header(header: Header) -> None:
    if header.count == 1 and len(header.topics) == 1:
        # An event that was published alone: the same checks without loops.
        name, first, n = header.topics[0]
        numbers = (
            0 <= first < _NUMBERS and 0 <= header.first_offset < _NUMBERS and 0 <= header.epoch < _NUMBERS
        )
        if n == 1 and numbers and len(name) <= 255:
            return
    if not 0 < header.count <= MAX_FRAME_EVENTS:
        raise FrameError(f"announces {header.count} events")
    # A number that 62 bits cannot hold could not be stored again, by a ledger or a cursor for example.
    if not 0 <= header.first_offset < _NUMBERS or not 0 <= header.epoch < _NUMBERS:
        raise FrameError("offset or epoch out of range")
    if not header.topics or sum(n for _, _, n in header.topics) != header.count:
        raise FrameError("topic counts do not add up to the event count")
    if any(not 0 <= first < _NUMBERS or n < 1 or len(name) > 255 for name, first, n in header.topics):
        raise FrameError("a topic with a seq out of range, without events or with too long a name")


def _check_columns(header: Header, columns: Columns) -> None:
    n = header.count
    if len(columns.datas) != n or len(columns.times) != 8 * n:
        raise FrameError("column lengths do not fit the event count")
    if columns.keys and len(columns.keys) != n:
        raise FrameError("key column does not fit the event count")
    if columns.headers and (len(columns.headers) != n or max(map(len, columns.headers)) > MAX_HEADERS):
        raise FrameError("header column does not fit the event count, or has too many for one event")
    _check_index("topic", columns.topic_index, n, len(header.topics))
    _check_index("content type", columns.content_index, n, len(header.content_types))
    if columns.topic_index:
        found = [0] * len(header.topics)
        for i in _u16(columns.topic_index):
            found[i] += 1
        if found != [c for _, _, c in header.topics]:
            raise FrameError("topic index does not fit the topic counts")


def _check_index(what: str, index: bytes, n: int, entries: int) -> None:
    if not index:
        if entries > 1:
            raise FrameError(f"{what} index is missing")
        return
    if len(index) != 2 * n or max(_u16(index)) >= entries:
        raise FrameError(f"{what} index does not fit")


def _compact_topics(
    topics: list[tuple[str, int, int]], index: list[int], skipped: list[int]
) -> tuple[list[tuple[str, int]], list[int]]:
    """The topics that are still used after slicing, with their first seq moved on, and the new index."""
    used = list(dict.fromkeys(chain(index)))
    where = {old: new for new, old in enumerate(used)}
    table = [(topics[old][0], topics[old][1] + skipped[old]) for old in used]
    return table, [where[i] for i in index]
