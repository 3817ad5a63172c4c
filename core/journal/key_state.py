"""What a compacting journal keeps of the events that retention dropped: the newest of every key, per topic.

A state is "as of" its `end`: it has, of all events before that offset, the newest of each topic and key, unless that
one has no data (a tombstone). A reader that takes a whole state and then follows the journal from `end` knows the
last value of every key. On disk a state is one file that never changes; the next one replaces it.

    header   magic, version, 0, salt, end, number of events, CRC
    records  length, CRC, offset of the first event, offset after the last; then the block, msgpack:
             a frame, its events' offsets, their seqs

Events that are left have offsets with holes between them, which a frame cannot say: so the frame in a block is numbered
without holes, and the true numbers are beside it.
"""

import os
import re
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import msgspec

from brokerless.core.errors import FrameError, JournalError
from brokerless.core.event import Event
from brokerless.core.frame import DECODE_ERRORS, Frame, encode_frame
from brokerless.core.journal.reader import JournalReader, chunks_from
from brokerless.core.runtime.crc import crc32
from brokerless.core.runtime.files import sync_directory, write_all

STATE_VERSION = 1
_MAGIC = b"BLSTATE\x00"
_HEADER = struct.Struct("<8sHH4sQQ")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIQQ")
_SPAN = struct.Struct("<QQ")
_NAME = re.compile(r"([0-9]{8,20})\.state")
# A block is what is checked, sent and handed out at once: a millisecond or so of work. One event may be larger.
_BLOCK_BYTES = 256 * 1024
_BLOCK_EVENTS = 4096
_TEMPORARY = ".state.new"
_MAX_RECORD_BYTES = 40 * 1024 * 1024


class _Encoded(msgspec.Struct, array_like=True):
    frame: bytes
    offsets: bytes
    seqs: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Encoded).decode


class StateBlock:
    """Events of one epoch with rising offsets, decoded as far as needed."""

    __slots__ = ("frame", "offsets", "raw", "seqs")

    def __init__(self, raw: bytes) -> None:
        """Raises FrameError unless that is a block."""
        self.raw = raw
        try:
            encoded = _decode(raw)
        except DECODE_ERRORS as error:
            raise FrameError(f"block of a state: {error}") from None
        self.frame = frame = Frame.parse(encoded.frame)
        frame.check()
        if not len(encoded.offsets) == len(encoded.seqs) == 8 * frame.count:
            raise FrameError("block of a state: offsets and seqs do not fit the events")
        self.offsets: list[int] = memoryview(encoded.offsets).cast("q").tolist()
        self.seqs: list[int] = memoryview(encoded.seqs).cast("q").tolist()
        rising = all(map(int.__lt__, self.offsets, self.offsets[1:]))
        if not rising or self.offsets[0] < 0 or min(self.seqs) < 0 or max(self.offsets[-1], *self.seqs) >> 62:
            raise FrameError("block of a state: offsets do not rise, or are out of range")

    def seqs_by_topic(self, first: int, stop: int) -> dict[str, list[int]]:
        """The seqs of the events with offsets in `[first, stop)`, by topic. Raises FrameError if they do not rise."""
        lo, hi = bisect_left(self.offsets, first), bisect_left(self.offsets, stop)
        found: dict[str, list[int]] = {}
        for topic, seq in zip(self.frame.topic_column()[lo:hi], self.seqs[lo:hi], strict=True):
            found.setdefault(topic, []).append(seq)
        return found

    def events(self) -> list[Event]:
        """All events, with their own offsets and seqs."""
        frame = self.frame
        c = frame.columns()
        times = memoryview(c.times).cast("q")
        contents, keys = frame.content_type_column(), c.keys or repeat("")
        rows = self.offsets, frame.topic_column(), self.seqs, times, c.datas, contents, keys
        return list(map(Event, repeat(frame.source), repeat(frame.epoch), *rows, frame.header_column()))


class StateChunk(msgspec.Struct, frozen=True):
    """What reading a state gives: encoded blocks, ranges `(first, after)` that are damaged, where to go on."""

    blocks: list[bytes]
    gone: list[tuple[int, int]]
    next: int


class State(Protocol):
    """The state as of `end`. It stays what it is, whatever the journal does meanwhile."""

    @property
    def end(self) -> int: ...
    def read(self, offset: int, until: int, *, max_bytes: int) -> StateChunk:
        """Blocks with the events in `[offset, until)`, at least one if there is any; they may have others, too."""

    def close(self) -> None: ...


class Builder:
    """Collects rows into blocks. `emit` gets each: its first offset, the one after its last, the block, how many."""

    def __init__(self, emit: Callable[[int, int, bytes, int], None]) -> None:
        self._emit = emit
        self._source = ""
        self._epoch = -1
        self._clear()

    def _clear(self) -> None:
        self._size = 0
        self._offsets: list[int] = []
        self._seqs: list[int] = []
        self._columns: list[list[Any]] = [[], [], [], [], [], []]

    def add(self, frame: Frame, offsets: Sequence[int], seqs: Sequence[int], picked: Sequence[int]) -> None:
        """Take the events at these places of a frame."""
        c = frame.columns()
        size = sum([len(c.datas[i]) for i in picked]) + 64 * len(picked)
        other = (frame.source, frame.epoch) != (self._source, self._epoch)
        if other or self._size + size > _BLOCK_BYTES or len(self._offsets) + len(picked) > _BLOCK_EVENTS:
            self.flush()
            self._source, self._epoch = frame.source, frame.epoch
        self._size += size
        times = memoryview(c.times).cast("q")
        rows: tuple[Any, ...] = (
            offsets,
            seqs,
            frame.topic_column(),
            times,
            c.datas,
            frame.content_type_column(),
            c.keys,
            frame.header_column(),
        )
        whole = len(picked) == frame.count
        for column, values in zip((self._offsets, self._seqs, *self._columns), rows, strict=True):
            column.extend(values if whole else [values[i] for i in picked])

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be emitted."""
        return not self._offsets

    def flush(self) -> None:
        """Emit what was collected."""
        if self._offsets:
            raw = _block(self._source, self._epoch, self._offsets, self._seqs, self._columns)
            self._emit(self._offsets[0], self._offsets[-1] + 1, raw, len(self._offsets))
            self._clear()


def _block(source: str, epoch: int, offsets: list[int], seqs: list[int], columns: Any) -> bytes:
    topics, times, datas, contents, keys, headers = columns
    table: dict[str, int] = {}
    for topic, seq in zip(topics, seqs, strict=True):
        table.setdefault(topic, seq)
    where = {topic: i for i, topic in enumerate(table)}
    frame = encode_frame(
        source,
        epoch,
        offsets[0],
        topics=list(table.items()),
        topic_index=list(map(where.__getitem__, topics)),
        times=times,
        datas=datas,
        content_types=contents if any(contents) else None,
        keys=keys,
        headers=headers if any(headers) else None,
    )
    return _encode(_Encoded(frame.raw, array("q", offsets).tobytes(), array("q", seqs).tobytes()))


class MemoryState:
    """The state of a journal in memory: a list of its events, by offset."""

    def __init__(self, end: int, events: list[Event]) -> None:
        self.end = end
        self._events = events

    def read(self, offset: int, until: int, *, max_bytes: int) -> StateChunk:
        """See State."""
        events, blocks = self._events, list[bytes]()
        at = bisect_left(events, offset, key=lambda event: event.offset)
        last = bisect_left(events, until, key=lambda event: event.offset)
        size = 0
        while at < last and size < max_bytes:
            stop, part = at, 0
            while stop < last and stop - at < _BLOCK_EVENTS and (part < _BLOCK_BYTES or stop == at):
                if events[stop].epoch != events[at].epoch:
                    break
                part += len(events[stop].data) + 64
                stop += 1
            rows = events[at:stop]
            columns = (
                [e.topic for e in rows],
                [e.time for e in rows],
                [e.data for e in rows],
                [e.content_type for e in rows],
                [e.key for e in rows],
                [e.headers for e in rows],
            )
            offsets, seqs = [e.offset for e in rows], [e.seq for e in rows]
            blocks.append(_block(rows[0].source, rows[0].epoch, offsets, seqs, columns))
            at, size = stop, size + part
        return StateChunk(blocks, [], events[at].offset if at < last else until)

    def close(self) -> None:
        """Nothing is open."""


class StateFile:
    """One state on disk, open for reading; it can be read on when its name is gone."""

    def __init__(self, path: str) -> None:
        """Raises OSError, or JournalError if it is not a complete state."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        raw = os.pread(self._fd, _HEADER.size + _CRC.size, 0)
        self.size = os.fstat(self._fd).st_size
        if (
            len(raw) < _HEADER.size + _CRC.size
            or crc32(raw[: _HEADER.size]) != _CRC.unpack_from(raw, _HEADER.size)[0]
        ):
            raise JournalError(self.path, "is not a state, or damaged")
        magic, version, _, salt, self.end, self.count = _HEADER.unpack_from(raw)
        if magic != _MAGIC or version != STATE_VERSION:
            raise JournalError(self.path, f"has version {version}, this software knows {STATE_VERSION}")
        self.salt = bytes(salt)
        # Where the records are, by the offset after their last event.
        self._firsts: list[int] = []
        self._afters: list[int] = []
        self._positions: list[int] = []
        position = len(raw)
        while position < self.size:
            head = os.pread(self._fd, _RECORD.size, position)
            if len(head) < _RECORD.size:
                break
            length, _, first, after = _RECORD.unpack(head)
            if position + _RECORD.size + length > self.size or (self._afters and after <= self._afters[-1]):
                break
            self._firsts.append(first)
            self._afters.append(after)
            self._positions.append(position)
            position += _RECORD.size + length
        self.complete = position == self.size

    def read(self, offset: int, until: int, *, max_bytes: int) -> StateChunk:
        """See State. Raises JournalError if the file cannot be read."""
        at, last = bisect_right(self._afters, offset), bisect_left(self._firsts, until)
        blocks: list[bytes] = []
        size = 0
        while at < last and size < max_bytes:
            raw = self._record(at)
            if raw is None:  # whatever comes behind it may be intact, but the keys of this one are unknown
                begin, after = max(offset, self._afters[at - 1] if at else 0), min(until, self._afters[at])
                return StateChunk(blocks, [(begin, after)], after)
            blocks.append(raw)
            size += len(raw)
            at += 1
        if at < last:
            return StateChunk(blocks, [], self._afters[at - 1])
        known = self._afters[-1] if self._afters else 0
        gone = [] if self.complete else [(max(offset, known), until)]
        return StateChunk(blocks, [gap for gap in gone if gap[0] < gap[1]], until)

    def _record(self, which: int) -> bytes | None:
        position = self._positions[which]
        try:
            head = os.pread(self._fd, _RECORD.size, position)
            length, crc, first, after = _RECORD.unpack(head)
            if length > _MAX_RECORD_BYTES:
                return None
            body = os.pread(self._fd, length, position + _RECORD.size)
        except OSError as error:
            raise JournalError(self.path, f"cannot be read: {error.strerror}", errno=error.errno) from None
        return body if crc32(body, crc32(_SPAN.pack(first, after))) == crc else None

    def blocks(self) -> Iterator[StateBlock | None]:
        """All blocks; None for one that is damaged."""
        for which in range(len(self._afters)):
            raw = self._record(which)
            yield None if raw is None else StateBlock(raw)
        if not self.complete:
            yield None

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StateWriter:
    """Writes the file of a state; it appears under its name when it is whole."""

    def __init__(self, directory: str, salt: bytes, *, sync: bool) -> None:
        """Raises OSError."""
        self._directory, self._salt, self._sync = directory, salt, sync
        self._temporary = os.path.join(directory, f"{threading.get_ident()}{_TEMPORARY}")
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._events = 0
        try:
            write_all(self._fd, bytes(_HEADER.size + _CRC.size))
        except BaseException:
            self.abandon()
            raise

    def add(self, block: StateBlock, first: int = 0, after: int = 1 << 62) -> None:
        """Append a block, or what it has in a range of offsets. Raises OSError."""
        lo, hi = bisect_left(block.offsets, first), bisect_left(block.offsets, after)
        if hi - lo == len(block.offsets):
            self.add_raw(block.offsets[0], block.offsets[-1] + 1, block.raw, hi)
        elif lo < hi:
            build = Builder(self.add_raw)
            build.add(block.frame, block.offsets, block.seqs, range(lo, hi))
            build.flush()

    def add_raw(self, first: int, after: int, block: bytes, events: int) -> None:
        """The same for a block that is not decoded."""
        crc = crc32(block, crc32(_SPAN.pack(first, after)))
        write_all(self._fd, _RECORD.pack(len(block), crc, first, after) + block)
        self._events += events

    def finish(self, end: int) -> StateFile:
        """Put it in its place: whole, and as durable as wanted. Raises OSError."""
        header = _HEADER.pack(_MAGIC, STATE_VERSION, 0, self._salt, end, self._events)
        os.pwrite(self._fd, header + _CRC.pack(crc32(header)), 0)
        if self._sync:
            os.fdatasync(self._fd)
        path = os.path.join(self._directory, state_name(end))
        os.rename(self._temporary, path)
        os.close(self._fd)
        self._fd = -1
        if self._sync:
            sync_directory(self._directory)
        return StateFile(path)

    def abandon(self) -> None:
        """Give up; harmless after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            os.unlink(self._temporary)


def state_name(end: int) -> str:
    """File name of the state as of that offset."""
    return f"{end:08d}.state"


def remove_unfinished(directory: str) -> None:
    """Remove what a writer left that was killed in the middle. Raises OSError."""
    for name in os.listdir(directory):
        if name.endswith(_TEMPORARY):
            os.unlink(os.path.join(directory, name))


def list_states(directory: str) -> list[str]:
    """Paths of the states in a journal's directory, the newest first. Raises OSError."""
    found = [(int(match[1]), name) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    return [os.path.join(directory, name) for _, name in sorted(found, reverse=True)]


def newest_state(directory: str, salt: bytes) -> StateFile | None:
    """The newest complete state of the journal with that salt; if none is complete, the newest at all."""
    fallback = None
    for path in list_states(directory):
        try:
            found = StateFile(path)
        except (OSError, JournalError):
            continue
        if found.salt == salt and found.complete:
            if fallback is not None:
                fallback.close()
            return found
        if found.salt == salt and fallback is None:
            fallback = found
        else:
            found.close()
    return fallback


class Compacted(msgspec.Struct, frozen=True):
    """The new state, and how many frames or blocks could not be read."""

    state: StateFile
    damaged: int


def compact(
    directory: str,
    salt: bytes,
    old: StateFile | None,
    begin: int,
    end: int,
    *,
    sync: bool,
    stopped: Callable[[], bool],
) -> Compacted | None:
    """Write the state as of `end` from the one as of `begin` and the events between; None if `stopped` says so.

    Memory: an entry for each key that occurs between. Raises OSError, JournalError.
    """
    with JournalReader(directory) as reader:
        found = _newest(reader, begin, end, stopped)
        if found is None:
            return None
        newest, damaged = found
        writer = StateWriter(directory, salt, sync=sync)
        try:
            build = Builder(writer.add_raw)
            for block in old.blocks() if old is not None else ():
                if stopped():
                    return None
                if block is None:
                    damaged += 1
                else:
                    _take_left(block, newest, writer, build)
            alive = sorted(at for keys in newest.values() for at in keys.values() if at >= 0)
            newest.clear()
            for frame in _frames(reader, begin, end) if alive else ():
                if stopped():
                    return None
                if frame is not None:
                    first, stop = frame.first_offset, frame.next_offset
                    places = [
                        at - first for at in alive[bisect_left(alive, first) : bisect_left(alive, stop)]
                    ]
                    if places:
                        build.add(frame, range(first, stop), frame.seqs(), places)
            build.flush()
            return Compacted(writer.finish(end), damaged)
        finally:
            writer.abandon()


# By topic and key: the newest offset, or `~offset` if that is a tombstone. Nested, because a tuple for each event costs
# more than all the rest.
_Newest = dict[str, dict[str, int]]


def _newest(
    reader: JournalReader, begin: int, end: int, stopped: Callable[[], bool]
) -> tuple[_Newest, int] | None:
    """The newest of each topic and key; how many frames are damaged."""
    newest: _Newest = {}
    damaged = 0
    for frame in _frames(reader, begin, end):
        if stopped():
            return None
        if frame is None:
            damaged += 1
        elif (columns := frame.columns()).keys:
            marks: Sequence[int] = range(frame.first_offset, frame.next_offset)
            if not all(columns.datas):
                marks = [at if data else ~at for at, data in zip(marks, columns.datas, strict=True)]
            of = {topic: newest.setdefault(topic, {}) for topic, _, _ in frame.topics}
            if len(of) == 1:
                of.popitem()[1].update(zip(columns.keys, marks, strict=True))
                continue
            for topic, key, mark in zip(frame.topic_column(), columns.keys, marks, strict=True):
                of[topic][key] = mark
    for keys in newest.values():
        keys.pop("", None)
    return newest, damaged


def _take_left(block: StateBlock, newest: _Newest, writer: StateWriter, build: Builder) -> None:
    """What is left of a block of the old state when these keys have newer events."""
    names = zip(block.frame.topic_column(), block.frame.columns().keys, strict=True)
    left = [i for i, (topic, key) in enumerate(names) if key not in newest.get(topic, ())]
    untouched = len(left) == block.frame.count
    if untouched and (len(block.raw) >= _BLOCK_BYTES // 2 or len(left) >= _BLOCK_EVENTS // 2):
        build.flush()
        writer.add(block)
    elif left:
        build.add(block.frame, block.offsets, block.seqs, left)


def _frames(reader: JournalReader, begin: int, end: int) -> Iterator[Frame | None]:
    """Frames with the events of `[begin, end)`; None for a range that cannot be read."""
    for start, chunk in chunks_from(reader, begin):
        if start >= end:
            return
        yield from (None for first, _ in chunk.gone if first < end)
        for frame in chunk.frames:
            if frame.first_offset >= end:
                return
            lo, hi = max(begin, frame.first_offset), min(end, frame.next_offset)
            if lo < hi:
                yield frame.slice(lo, hi)
