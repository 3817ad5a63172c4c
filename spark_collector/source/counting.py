"""How many events a range of a spool has: by headers alone, without reading the data between them.

Read limits are counted in events, and an event of a spool is a whole frame. Looking only where the headers are
keeps planning a batch at some microseconds per frame, whatever the frames weigh. Nothing is verified: that is
the business of whoever reads the data, and until then a damaged header makes at most a batch of another size.
"""

import contextlib
from collections.abc import Iterator
from itertools import chain

import msgspec

from brokerless.core import Frame, JournalReader
from brokerless.core.errors import FrameError
from brokerless.core.frame import DECODE_ERRORS, PREFIX_BYTES, Header, frame_length
from brokerless.core.journal.segment import SALT_BYTES, Segment
from brokerless.spark_collector.collector.spool import NESTED

# Widths of msgpack's lengths of bytes values, and of arrays.
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_DECODED = (FrameError, IndexError, *DECODE_ERRORS)


class _Count(msgspec.Struct, array_like=True):
    """The first fields of a frame's header."""

    source: str
    epoch: int
    first_offset: int
    count: int


_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_count = msgspec.msgpack.Decoder(_Count).decode


# The offset after something, the events in it, and its bytes.
Size = tuple[int, int, int]


def event_counts(
    reader: JournalReader, first: int, stop: int, *, in_bytes: bool = False
) -> Iterator[Size] | None:
    """`(offset after it, events in it, bytes)` for what a journal holds in `[first, stop)`, in order.

    Of a spool for each frame that a producer sent. Ends early where something is not as it should be. None if the
    journal holds no frames: each offset is one event then, and nobody needs to look, except for their bytes.
    """
    located = reader.locate(first)
    if located is None:
        return iter(())
    records = _records(reader, *located)
    begin = next(records, None)
    if begin is None:
        return iter(())
    if NESTED in begin[1].content_types:
        return _counts(chain([begin], records), first, stop)
    return _plain_sizes(chain([begin], records), first, stop) if in_bytes else None


_Record = tuple[memoryview, Header, int]


def _records(reader: JournalReader, number: int, position: int) -> Iterator[_Record]:
    """The view of each record's frame, its header, and where its columns begin; ends at the first odd one."""
    salt = bytes.fromhex(reader.meta.salt)
    while True:
        try:
            with contextlib.closing(Segment(reader.path, number, salt)) as segment:
                view, position = segment.view(), position or segment.data_start
        except (OSError, ValueError):  # not there, or empty
            return
        try:
            while position < len(view):
                at = position + SALT_BYTES
                if view[position:at] != salt:
                    return
                position = at + frame_length(view[at : at + PREFIX_BYTES])
                body = PREFIX_BYTES + int.from_bytes(view[at + 4 : at + 8], "little")
                yield view[at:position], _decode_header(view[at + PREFIX_BYTES : at + body]), body
        except _DECODED:
            return
        number, position = number + 1, 0


def _plain_sizes(records: Iterator[_Record], first: int, stop: int) -> Iterator[Size]:
    for frame, header, _ in records:
        low, high = max(first, header.first_offset), min(stop, header.first_offset + header.count)
        if high > low:
            yield high, high - low, len(frame)
        if high >= stop:
            return


def _counts(records: Iterator[_Record], first: int, stop: int) -> Iterator[Size]:
    for frame, header, body in records:
        offset = header.first_offset
        if offset >= stop:
            return
        try:
            counts = list(_inner_counts(frame, header.count, body))
        except _DECODED:
            return
        for n, (count, size) in enumerate(counts):
            if first <= offset + n < stop:
                yield offset + n + 1, count, size
        if offset + len(counts) >= stop:
            return  # what comes next may be undone by the writer, and a mapped file must not be cut under our eyes


def frame_counts(outer: Frame, first: int, stop: int) -> Iterator[Size]:
    """The same for one frame that was read."""
    header_bytes = int.from_bytes(outer.raw[4:8], "little")
    return _counts(iter([(memoryview(outer.raw), outer.header, PREFIX_BYTES + header_bytes)]), first, stop)


def _inner_counts(frame: memoryview, events: int, at: int) -> Iterator[tuple[int, int]]:
    """The events and the bytes of each frame that this one holds as data."""
    at += 1  # the array of columns
    for _ in ("topic index", "times"):
        at = _bytes_at(frame, at)[1]
    at += 1 + _ARRAY.get(frame[at], 0)
    for _ in range(events):
        begin, at = _bytes_at(frame, at)
        header = begin + PREFIX_BYTES
        count = _decode_count(
            frame[header : header + int.from_bytes(frame[begin + 4 : begin + 8], "little")]
        ).count
        yield count, at - begin


def _bytes_at(frame: memoryview, at: int) -> tuple[int, int]:
    """Where the bytes value at `at` begins and ends. Raises IndexError, FrameError."""
    width = _BYTES.get(frame[at])
    if width is None:
        raise FrameError("not bytes")
    begin = at + 1 + width
    return begin, begin + int.from_bytes(frame[at + 1 : begin], "big")
