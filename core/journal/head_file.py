"""A small file mapped into memory, so that what is stored in it outlives the process without a system call.

A killed process leaves its mapped pages to the kernel, which is what makes accepting one event cheap and safe.
After a power cut the contents may be stale or incomplete, so every word and record can be checked.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping

import msgspec

from brokerless.core.errors import JournalError
from brokerless.core.event import NO_HEADERS, Headers
from brokerless.core.runtime.crc import crc32

HEADER_BYTES = 4096
STAGE_BYTES = 1024 * 1024
_MAGIC = b"BLHEAD\x00\x01"

# Words of the header (8 bytes each, after the magic).
NEXT = 1  # offset after the newest that can be read
FIRST_SEGMENT = 2
LAST_SEGMENT = 3
STAGED_END = 4  # end of the staged records, from the start of the file
STAGED_BASE = 5  # offset of the first staged record

# Length of the body, CRC of time and body, time. The batch seeds the CRC: a record is valid only where it belongs.
_RECORD = struct.Struct("<IIq")
_TIME = struct.Struct("<q")
_HEAD = struct.Struct("<II")
_pack_head, _pack_time = _HEAD.pack_into, _TIME.pack
RECORD_BYTES = _RECORD.size
_LENGTHS = struct.Struct("<BBB")  # of topic, content type and key
# A topic has at least one byte. 0: the length of headers follows, then the lengths above; headers are after the key.
_HEADERS = struct.Struct("<BH")
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class StagedRecord(tuple[int, str, str, str, bytes, Headers]):
    """One staged event as found after a crash: `(time, topic, content_type, key, data, headers)`."""

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
            self.map = mmap.mmap(fd, size, access=access)
        finally:
            os.close(fd)
        self._words = memoryview(self.map).cast("Q")
        if create and self.map[:8] != _MAGIC:
            self.map[:HEADER_BYTES] = _MAGIC.ljust(HEADER_BYTES, b"\x00")
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
        body = _pack_time(time) + prefix + data
        words = self._words
        # Records of a batch that has been written since are of no use any more.
        start = words[STAGED_END] if words[STAGED_BASE] == base else HEADER_BYTES
        end = start + _HEAD.size + len(body)
        if end > HEADER_BYTES + STAGE_BYTES:
            return False
        if start == HEADER_BYTES:
            words[STAGED_END] = HEADER_BYTES
            words[STAGED_BASE] = base
        self.map[start + _HEAD.size : end] = body
        _pack_head(self.map, start, len(body) - _TIME.size, crc32(body, _seed(base)))
        words[STAGED_END] = end  # the event counts from here on
        return True

    def clear_staged(self) -> None:
        """Forget the staged records: they are in a segment now."""
        self._words[STAGED_END] = HEADER_BYTES

    def rewind(self, stop: int) -> None:
        """Forget the records from offset `stop` on: they were kept, but never accepted."""
        at, end = HEADER_BYTES, self._words[STAGED_END]
        for _ in range(self._words[STAGED_BASE], stop):
            if at >= end:
                return
            at += RECORD_BYTES + _RECORD.unpack_from(self.map, at)[0]
        self._words[STAGED_END] = at

    def staged(self) -> tuple[int, list[StagedRecord]]:
        """The offset of the first staged record, and all of them that are intact."""
        end = min(self._words[STAGED_END], HEADER_BYTES + STAGE_BYTES)
        base = self._words[STAGED_BASE]
        return base, list(self._records(base, end))

    def _records(self, base: int, end: int) -> Iterator[StagedRecord]:
        at = HEADER_BYTES
        while at + RECORD_BYTES + _LENGTHS.size <= end:
            length, crc, time = _RECORD.unpack_from(self.map, at)
            checked = self.map[at + _HEAD.size : at + RECORD_BYTES + length]
            at += RECORD_BYTES
            body = checked[_TIME.size :]
            if length < _LENGTHS.size or at + length > end or crc32(checked, _seed(base)) != crc:
                return
            try:
                yield _parse(time, body)
            except (UnicodeDecodeError, msgspec.MsgspecError, struct.error):
                return
            at += length

    def sync(self) -> None:
        """Write the pages to the disk."""
        self.map.flush()

    def close(self) -> None:
        """Unmap; closing twice is fine."""
        self._words.release()
        with contextlib.suppress(ValueError):
            self.map.close()


def stage_prefix(topic: str, content_type: str, key: str, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
    """What a staged record has before the data; the same for all events of a topic without extras."""
    parts = topic.encode(), content_type.encode(), key.encode()
    lengths = _LENGTHS.pack(*map(len, parts))
    if not headers:
        return lengths + b"".join(parts)
    extra = msgspec.msgpack.encode(headers)
    return _HEADERS.pack(0, len(extra)) + lengths + b"".join(parts) + extra


def _parse(time: int, body: bytes) -> StagedRecord:
    extra = at = 0
    if not body[0]:
        extra, at = _HEADERS.unpack_from(body)[1], _HEADERS.size
    topic, content_type, key = _LENGTHS.unpack_from(body, at)
    p = at + _LENGTHS.size
    q, r, s = p + topic, p + topic + content_type, p + topic + content_type + key
    headers = Headers(_decode_headers(body[s : s + extra])) if extra else NO_HEADERS
    texts = body[p:q].decode(), body[q:r].decode(), body[r:s].decode()
    return StagedRecord((time, *texts, body[s + extra :], headers))


def _seed(base: int) -> int:
    return (base ^ base >> 32) & 0xFFFF_FFFF


def _checked(value: int) -> int:
    check = ((value ^ 0x5BD1E995_A5A5) * 0x9E3779B97F4A7C15 >> 40) & 0xFFFF
    return value | check << 48
