"""Reading a disk journal, from any process, while it is being written."""

import contextlib
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Protocol

from brokerless.core.errors import Closed, Evicted, JournalError
from brokerless.core.event import MAX_TIME, MIN_TIME, microseconds
from brokerless.core.frame import Frame
from brokerless.core.journal.head_file import FIRST_SEGMENT, LAST_SEGMENT, NEXT, HeadFile
from brokerless.core.journal.meta import META, Meta, load_meta
from brokerless.core.journal.segment import (
    SALT_BYTES,
    Segment,
    first_time,
    parse_record,
    record_length,
    segment_name,
)
from brokerless.core.journal.types import Chunk

HEAD = "head"
# Numbers that fit into the head's words; anything else in the directory is not ours.
_SEGMENT_NAME = re.compile(r"[0-9]{8,12}\.seg")
# Polling, because a journal may lie on a shared file system, where nothing notifies.
_POLL_FIRST_S = 0.0005
_POLL_LIMIT_S = 0.02
# What one call to the system reads at most, however much the caller would take.
_BLOCK_BYTES = 4 * 1024 * 1024


class _Location:
    """Where a reader is: the record at `position` of `segment` should begin with `offset`."""

    __slots__ = ("offset", "position", "segment")

    def __init__(self, segment: Segment, position: int, offset: int) -> None:
        self.segment = segment
        self.position = position
        self.offset = offset


class JournalReader:
    """Follows a DiskJournal read-only: never blocks its writer and is never blocked by it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises JournalError if there is no journal at `path` or it cannot be read."""
        self.path = os.fspath(path)
        meta = load_meta(self.path)
        if meta is None:
            raise JournalError(self.path, "there is no journal here")
        self._meta = meta
        self._meta_stamp = (0, 0, 0)  # it may have been replaced since: look again
        self._salt = bytes.fromhex(meta.salt)
        try:
            self._head = HeadFile(os.path.join(self.path, HEAD))
        except OSError as error:
            raise JournalError(
                self.path, f"head cannot be read: {error.strerror}", errno=error.errno
            ) from None
        self._lock = threading.Lock()
        self._location: _Location | None = None
        self._firsts: dict[int, int | None] = {}
        self._closed = False

    # -- what is in it ------------------------------------------------------------------------------

    def _stamp(self) -> tuple[int, int, int]:
        """Changes with the file; its time alone does not, when it is replaced twice within a tick."""
        try:
            found = os.stat(os.path.join(self.path, META))
        except OSError:
            return 0, 0, 0
        return found.st_mtime_ns, found.st_ino, found.st_size

    @property
    def meta(self) -> Meta:
        """What `meta.json` says now."""
        stamp = self._stamp()
        if stamp != self._meta_stamp:
            self._meta = load_meta(self.path) or self._meta
            self._meta_stamp = stamp
        return self._meta

    @property
    def source(self) -> str:
        """The producer's name; empty until its writer was bound."""
        return self.meta.source

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return self.meta.epoch

    @property
    def next(self) -> int:
        """The offset after the newest that can be read."""
        value = self._word(NEXT)
        return value if value is not None else self._scan_next()

    def _word(self, word: int) -> int | None:
        try:
            return self._head.get(word)
        except ValueError:  # unmapped
            raise Closed(f"reader of {self.path}") from None

    @property
    def oldest(self) -> int:
        """The oldest offset that can be read."""
        offset = self._first_of(self._segments()[0])
        if offset is None:
            # Deleted by retention while we looked, or damaged: the first one in which anything is intact.
            known = (self._first_of(number) for number in list_segments(self.path))
            offset = next((first for first in known if first is not None), None)
        return self.next if offset is None else offset

    def sent(self) -> dict[str, int]:
        """For each topic of the newest epoch the seq that the next event will have."""
        last = self._segments()[1]
        segment = self._open_segment(last)
        if segment is None:
            return {}
        try:
            topics = dict(segment.header.snapshot.topics) if segment.header else {}
            offset = segment.first_offset() or 0
        finally:
            segment.close()
        epoch, end = self.epoch, self.next
        while offset < end:
            chunk = self.read(offset)
            for frame in chunk.frames:
                for topic, first, count in frame.topics:
                    if frame.epoch == epoch:
                        topics[topic] = max(topics.get(topic, 0), first + count)
            if chunk.next == offset:
                break
            offset = chunk.next
        return topics

    def _segments(self) -> tuple[int, int]:
        """Numbers of the oldest and the newest segment."""
        first, last = self._word(FIRST_SEGMENT), self._word(LAST_SEGMENT)
        if first is None or last is None or not os.path.exists(os.path.join(self.path, segment_name(last))):
            numbers = list_segments(self.path)
            return (numbers[0], numbers[-1]) if numbers else (1, 0)
        return first, last

    def _first_of(self, number: int) -> int | None:
        """First offset of a segment; None if it is not there or nothing in it is intact."""
        try:
            return self._firsts[number]
        except KeyError:
            pass
        segment = self._open_segment(number)
        if segment is None:
            return None
        try:
            first = segment.first_offset()
        except OSError as error:
            raise self._unreadable(error) from None
        finally:
            segment.close()
        if len(self._firsts) > 65_536:
            self._firsts.clear()
        self._firsts[number] = first
        return first

    def _open_segment(self, number: int) -> Segment | None:
        """None if it is not there (any more). Raises JournalError."""
        try:
            return Segment(self.path, number, self._salt)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> JournalError:
        return JournalError(self.path, f"cannot be read: {error.strerror}", errno=error.errno)

    def _scan_next(self) -> int:
        """`next` without the head file: walk the newest segment."""
        _, last = self._segments()
        offset = self._first_of(last) or 0
        while True:
            chunk = self.read(offset)
            if chunk.next == offset:
                return offset
            offset = chunk.next

    # -- reading ------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int = 1024 * 1024) -> Chunk:
        """Frames from `offset` on, at least one if there is any; the first may begin before `offset`.

        Raises Evicted when `offset` is older than `oldest`, JournalError when the files cannot be read.
        """
        with self._lock:
            if self._closed:
                raise Closed(f"reader of {self.path}")
            # What lies beyond this may still be undone by the writer, if its disk is full.
            limit = self._word(NEXT)
            location = self._location
            if location is None or location.offset != offset:
                location = self._find(offset)
                if location is None:
                    return Chunk([], [], offset)
                self._move(location)
            walk = _Walk(self, location, offset, limit, max(1, max_bytes))
            try:
                walk.run()
            except OSError as error:
                self._forget_location()
                raise self._unreadable(error) from None
            return Chunk(walk.frames, walk.gone, max(offset, location.offset))

    def _move(self, location: _Location) -> None:
        if self._location is not None and self._location.segment is not location.segment:
            self._location.segment.close()
        self._location = location

    def _forget_location(self) -> None:
        if self._location is not None:
            self._location.segment.close()
            self._location = None

    def _find(self, offset: int) -> _Location | None:
        """Where to start reading for `offset`. Raises Evicted."""
        first, last = self._segments()
        if last < first:
            return None
        oldest = self.oldest
        if offset < oldest:
            raise Evicted(offset, oldest)
        segment = self._open_segment(self._segment_of(offset, first, last))
        if segment is None:
            raise Evicted(offset, self.oldest)
        try:
            found = segment.seek(offset)
        except OSError as error:
            segment.close()
            raise self._unreadable(error) from None
        if found is None:
            found = segment.data_start, segment.first_offset() or 0
        return _Location(segment, *found)

    def locate(self, offset: int) -> tuple[int, int] | None:
        """A segment's number and the position in it of an intact record at or before `offset`; None if unknown.

        For readers of the files in another language. Raises Evicted.
        """
        with self._lock:
            location = self._find(offset)
        if location is None:
            return None
        with contextlib.closing(location.segment) as segment:
            if segment.header is None:  # damaged: whoever reads it has to search
                return None
            return segment.number, location.position

    def _segment_of(self, offset: int, first: int, last: int) -> int:
        """The number of the segment that should hold `offset`."""
        lo, hi = first, last
        while lo < hi:
            middle = (lo + hi + 1) // 2
            begins = self._first_of(middle)
            if begins is None:
                break
            lo, hi = (lo, middle - 1) if begins > offset else (middle, hi)
        if lo == hi and self._first_of(lo) is not None:
            return lo
        # A segment is missing or has nothing intact: look at all of them.
        known = ((number, self._first_of(number)) for number in list_segments(self.path))
        return max(
            (number for number, begins in known if begins is not None and begins <= offset), default=first
        )

    def offset_at(self, time: int | datetime) -> int:
        """The offset of the first event at or after a time (µs since 1970, or a datetime); `next` if there is none.

        A binary search, first over segments, then over a segment's index, then over events: it assumes that times rise,
        as they do unless the producer set them itself or its clock was set back. Then the answer is one of the offsets
        at which the time is passed.
        """
        wanted = microseconds(time)
        first, last = self._segments()
        numbers = [n for n in range(first, last + 1) if self._first_of(n) is not None]
        # The last segment that begins before that time; events of that time can only be in it or behind it.
        at = bisect_left(numbers, wanted, key=self._begins_at_time) - 1
        offset = self._first_of(numbers[max(0, at)]) if numbers else None
        if offset is None:
            return self.next
        if at >= 0:
            segment = self._open_segment(numbers[at])
            if segment is not None:
                with contextlib.closing(segment):
                    offset = segment.seek_time(wanted, offset)
        return first_at(self, max(offset, self.oldest), wanted)

    def _begins_at_time(self, number: int) -> int:
        """The time of a segment's first event; of one that is empty or damaged, a time after everything."""
        segment = self._open_segment(number)
        if segment is None:
            return MIN_TIME
        with contextlib.closing(segment):
            frame = segment.intact(segment.data_start, segment.size)
            return first_time(frame) if frame is not None else MAX_TIME

    def wait(self, offset: int, timeout: float) -> bool:
        """Wait until an event at `offset` can be read, or `timeout` seconds; return whether it can."""
        deadline = time.monotonic() + timeout
        pause = _POLL_FIRST_S
        while self.next <= offset:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, _POLL_LIMIT_S)
        return True

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._forget_location()
                self._head.close()

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _Walk:
    """One call of `read`: goes from record to record and segment to segment, and over damage."""

    def __init__(
        self, reader: JournalReader, location: _Location, wanted: int, limit: int | None, max_bytes: int
    ) -> None:
        self._reader = reader
        self._location = location
        self._wanted = wanted
        self._limit = limit
        self._left = max_bytes
        self.frames: list[Frame] = []
        self.gone: list[tuple[int, int]] = []

    def run(self) -> None:
        while self._left > 0 and not self._at_limit() and self._block():
            pass

    def _at_limit(self) -> bool:
        return self._limit is not None and self._location.offset >= self._limit

    def _block(self) -> bool:
        """Read one block of records; False when there is nothing more to read now."""
        location = self._location
        salt = self._reader._salt
        # At least a page, so that skipping to `wanted` within an index step takes few calls.
        block = location.segment.read(location.position, min(max(self._left, 65536), _BLOCK_BYTES))
        at = 0
        while self._left > 0 and not self._at_limit():
            frame = parse_record(block, at, salt)
            if frame is None or frame.first_offset < location.offset:
                break
            at += SALT_BYTES + len(frame.raw)
            location.position += SALT_BYTES + len(frame.raw)
            self._take(frame)
        if self._left <= 0 or self._at_limit():
            return False
        length = record_length(block[at : at + 64], salt)
        if (
            length is not None
            and length > len(block) - at
            and location.position + length <= location.segment.size
        ):
            frame = location.segment.intact(location.position, location.segment.size)
            if frame is not None and frame.first_offset >= location.offset:
                location.position += length
                self._take(frame)
                return True
        elif at and at == len(block):
            return True
        return self._beyond()

    def _take(self, frame: Frame) -> None:
        self._missing_until(frame.first_offset)
        self._location.offset = frame.next_offset
        if frame.next_offset > self._wanted:
            self.frames.append(frame)
            self._left -= len(frame.raw)

    def _missing_until(self, offset: int) -> None:
        first = max(self._location.offset, self._wanted)
        if offset > first:
            self.gone.append((first, offset - 1))
        self._location.offset = max(self._location.offset, offset)

    def _beyond(self) -> bool:
        """No intact record here: the end, a write in progress, or damage."""
        location, reader = self._location, self._reader
        following = self._open_next()
        size = location.segment.size
        if location.position < size:
            being_written = following is None and (self._limit is None or location.offset >= self._limit)
            if being_written:
                return False
            found = location.segment.search(location.position, location.offset)
            if found is not None:
                if following is not None:
                    following.close()
                location.position = found[0]
                self._missing_until(found[1].first_offset)
                return True
        if following is not None:
            begins = following.first_offset()
            if begins is not None:
                self._missing_until(begins)
            location.segment.close()
            location.segment, location.position = following, following.data_start
            return True
        first, newest = reader._segments()
        if location.segment.number < first:
            # Retention deleted what comes next: the next call finds that out, and raises Evicted.
            reader._forget_location()
        elif location.segment.number >= newest and self._limit is not None and self._limit > location.offset:
            location.position = size
            self._missing_until(self._limit)
        return False

    def _open_next(self) -> Segment | None:
        """The next segment that is there: usually the next number, a later one if files are missing."""
        reader, number = self._reader, self._location.segment.number
        following = reader._open_segment(number + 1)
        if following is not None:
            return following
        first, newest = reader._segments()
        if number + 1 >= newest or number < first:
            return None
        for later in (n for n in list_segments(reader.path) if n > number):
            following = reader._open_segment(later)
            if following is not None:
                return following
        return None


class Readable(Protocol):
    """What a journal and a reader of one have in common."""

    @property
    def oldest(self) -> int: ...
    @property
    def next(self) -> int: ...
    def read(self, offset: int, *, max_bytes: int = ...) -> Chunk: ...


def chunks_from(journal: Readable, offset: int) -> Iterator[tuple[int, Chunk]]:
    """All that a journal has from an offset on: chunks, each with the offset that it was read at.

    What is evicted meanwhile is passed over. A chunk's first frame may begin before its offset.
    """
    while offset < journal.next:
        try:
            chunk = journal.read(offset)
        except Evicted as evicted:
            offset = evicted.oldest
            continue
        yield offset, chunk
        if chunk.next <= offset:
            return
        offset = chunk.next


def first_at(journal: Readable, offset: int, wanted: int) -> int:
    """The offset of the first event from `offset` on at or after a time in µs; `next` if there is none."""
    for start, chunk in chunks_from(journal, offset):
        for frame in chunk.frames:
            times = memoryview(frame.columns().times).cast("q")
            if times[-1] < wanted:  # as rising times are compared: by the last one
                continue
            at = bisect_left(times, wanted)
            if at < len(times):
                return max(start, frame.first_offset + at)
    return journal.next


def list_segments(directory: str) -> list[int]:
    """Numbers of all segment files, sorted. Raises JournalError."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise JournalError(directory, f"cannot be listed: {error.strerror}", errno=error.errno) from None
    return sorted(int(name[:-4]) for name in names if _SEGMENT_NAME.fullmatch(name))
