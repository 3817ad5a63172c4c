"""A small file mapped into memory, so that what is stored in it outlives the process without a system call.

A killed process leaves its mapped pages to the kernel, which is what makes accepting one event cheap and safe.
After a power cut the contents may be stale or torn, so every word and record can be checked.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator

from brokerless.core.crc import crc32
from brokerless.core.errors import JournalError

HEADER_BYTES = 4096
STAGE_BYTES = 1024 * 1024
_MAGIC = b"BLHEAD\x00\x01"

# Words of the header (8 bytes each, after the magic).
NEXT = 1  # offset after the newest that can be read
FIRST_SEGMENT = 2
LAST_SEGMENT = 3
STAGED_END = 4  # end of the staged records, from the start of the file
STAGED_BASE = 5  # offset of the first staged record

_RECORD = struct.Struct("<IIq")  # length and CRC of what follows, time (which seeds the CRC)
_pack_record = _RECORD.pack_into
RECORD_BYTES = _RECORD.size
_LENGTHS = struct.Struct("<BBB")  # of topic, content type and key


class Staged(tuple[int, str, str, str, bytes]):
    """One staged event as found after a crash: `(time, topic, content_type, key, data)`."""

    __slots__ = ()


class HeadFile:
    """Checked 48-bit words for readers, and the staging area of the writer."""

    def __init__(self, path: str, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        size = HEADER_BYTES + STAGE_BYTES
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            if create:
                # Real blocks, not a hole: storing into a hole on a full disk would be a SIGBUS.
                os.posix_fallocate(fd, 0, size)
            elif os.fstat(fd).st_size < size:
                raise JournalError(path, "is too short")
            access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, size, access=access)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        self._end = HEADER_BYTES
        if create and self._map[:8] != _MAGIC:
            self._map[:HEADER_BYTES] = _MAGIC.ljust(HEADER_BYTES, b"\x00")
            for word in (NEXT, FIRST_SEGMENT, LAST_SEGMENT):
                self.set(word, 0)

    def get(self, word: int) -> int | None:
        """The value of a word, or None if it is damaged."""
        raw = self._words[word]
        value = raw & 0xFFFF_FFFF_FFFF
        return value if raw == _checked(value) else None

    def set(self, word: int, value: int) -> None:
        """Store a value; one aligned store, so a reader or a crash sees the old one or the new one."""
        self._words[word] = _checked(value)

    def keep(self, base: int, time: int, prefix: bytes, data: bytes) -> bool:
        """Add a staged record; False if it does not fit. `base` is the offset of the first of the batch."""
        body = prefix + data
        start = self._end
        end = start + RECORD_BYTES + len(body)
        if end > HEADER_BYTES + STAGE_BYTES:
            return False
        self._map[start + RECORD_BYTES : end] = body
        _pack_record(self._map, start, len(body), crc32(body, time & 0xFFFF_FFFF), time)
        if start == HEADER_BYTES:
            self._words[STAGED_BASE] = base
        self._words[STAGED_END] = end  # the event counts from here on
        self._end = end
        return True

    def clear_staged(self) -> None:
        """Forget the staged records: they are in a segment now."""
        self._words[STAGED_END] = HEADER_BYTES
        self._end = HEADER_BYTES

    def rewind(self, stop: int) -> None:
        """Forget the records from offset `stop` on: they were kept, but never accepted."""
        at, end = HEADER_BYTES, self._words[STAGED_END]
        for _ in range(self._words[STAGED_BASE], stop):
            if at >= end:
                return
            at += RECORD_BYTES + _RECORD.unpack_from(self._map, at)[0]
        self._words[STAGED_END] = self._end = at

    def staged(self) -> tuple[int, list[Staged]]:
        """The offset of the first staged record, and all of them that are intact."""
        end = min(self._words[STAGED_END], HEADER_BYTES + STAGE_BYTES)
        return self._words[STAGED_BASE], list(self._records(end))

    def _records(self, end: int) -> Iterator[Staged]:
        at = HEADER_BYTES
        while at + RECORD_BYTES + _LENGTHS.size <= end:
            length, crc, time = _RECORD.unpack_from(self._map, at)
            at += RECORD_BYTES
            body = self._map[at : at + length]
            if length < _LENGTHS.size or at + length > end or crc32(body, time & 0xFFFF_FFFF) != crc:
                return
            topic, content_type, key = _LENGTHS.unpack_from(body)
            p = _LENGTHS.size
            q, r, s = p + topic, p + topic + content_type, p + topic + content_type + key
            try:
                yield Staged((time, body[p:q].decode(), body[q:r].decode(), body[r:s].decode(), body[s:]))
            except UnicodeDecodeError:
                return
            at += length

    def sync(self) -> None:
        """Write the pages to the disk."""
        self._map.flush()

    def close(self) -> None:
        """Unmap; closing twice is fine."""
        self._words.release()
        with contextlib.suppress(ValueError):
            self._map.close()


def stage_prefix(topic: str, content_type: str, key: str) -> bytes:
    """What a staged record has before the data; the same for all events of a topic without extras."""
    parts = topic.encode(), content_type.encode(), key.encode()
    return _LENGTHS.pack(*map(len, parts)) + b"".join(parts)


def _checked(value: int) -> int:
    check = ((value ^ 0x5BD1E995_A5A5) * 0x9E3779B97F4A7C15 >> 40) & 0xFFFF
    return value | check << 48
