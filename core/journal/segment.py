"""Segment files of a disk journal: a header, then records of salt and frame.

    header  magic, version, salt, number, first offset, snapshot length, CRC
    snapshot  msgpack: epoch and `topic → next seq` when the segment was begun
    records   4 bytes of salt, one frame

The salt is drawn once per journal. After damage the reader looks for the next salt followed by a frame's magic
number; event data that happens to contain a frame (a collector stores frames as data) is never taken for one.
"""

import mmap
import os
import struct

import msgspec

from brokerless.core.errors import FrameError
from brokerless.core.frame import MAGIC, PREFIX_BYTES, Frame, frame_length
from brokerless.core.runtime.crc import crc32

SALT_BYTES = 4
SEGMENT_VERSION = 1
_HEADER = struct.Struct("<8sHH4sQQI")
_MAGIC = b"BLSEGMT\x00"
_CRC = struct.Struct("<I")
_INDEX = struct.Struct("<QQ")
# One entry per this many bytes: a reader that starts anywhere skips at most this much.
INDEX_EVERY_BYTES = 64 * 1024
_SEARCH_BYTES = 1024 * 1024


class Snapshot(msgspec.Struct, array_like=True):
    """The numbering when a segment was begun."""

    epoch: int
    topics: dict[str, int]


class SegmentHeader(msgspec.Struct, frozen=True):
    """What the beginning of a segment file says; `data_start` is where its records begin."""

    number: int
    first_offset: int
    snapshot: Snapshot
    data_start: int


def segment_name(number: int) -> str:
    """File name of a segment: dense numbers, so that the newest can be found without listing."""
    return f"{number:08d}.seg"


def index_name(number: int) -> str:
    """File name of a segment's sparse index."""
    return f"{number:08d}.idx"


def encode_header(salt: bytes, number: int, first_offset: int, snapshot: Snapshot) -> bytes:
    """The bytes that a new segment begins with."""
    body = msgspec.msgpack.encode(snapshot)
    head = _HEADER.pack(_MAGIC, SEGMENT_VERSION, 0, salt, number, first_offset, len(body))
    return head + _CRC.pack(crc32(body, crc32(head))) + body


class Segment:
    """One segment file, open for reading."""

    def __init__(self, directory: str, number: int, salt: bytes) -> None:
        """Raises FileNotFoundError when the segment is not there (any more)."""
        self.number = number
        self.path = os.path.join(directory, segment_name(number))
        self._index_path = os.path.join(directory, index_name(number))
        self._salt = salt
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise
        # With a damaged header the records are searched for from the start of the file.
        self.data_start = self.header.data_start if self.header else 0

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._fd).st_size

    def _read_header(self) -> SegmentHeader | None:
        head = os.pread(self._fd, _HEADER.size + 4, 0)
        if len(head) < _HEADER.size + 4:
            return None
        magic, version, _, _, number, first, length = _HEADER.unpack_from(head)
        if magic != _MAGIC or version != SEGMENT_VERSION or length > self.size:
            return None
        body = os.pread(self._fd, length, len(head))
        if crc32(body, crc32(head[:-4])) != _CRC.unpack_from(head, _HEADER.size)[0]:
            return None
        try:
            snapshot = msgspec.msgpack.decode(body, type=Snapshot)
        except msgspec.DecodeError:
            return None
        return SegmentHeader(number, first, snapshot, len(head) + length)

    def first_offset(self) -> int | None:
        """The first offset, from the header or else from the first intact frame; None if there is neither."""
        if self.header is not None:
            return self.header.first_offset
        found = self.search(0, 0)
        return found[1].first_offset if found else None

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the file."""
        return os.pread(self._fd, size, position)

    def view(self) -> memoryview:
        """The whole file as it is now, mapped. Raises OSError, ValueError if it is empty."""
        return memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))

    def search(self, position: int, expected: int) -> tuple[int, Frame] | None:
        """The first intact record at or after `position` whose frame is not older than `expected`."""
        mark = self._salt + MAGIC
        size = self.size
        while position < size:
            block = os.pread(self._fd, _SEARCH_BYTES, position)
            at = block.find(mark)
            while at >= 0:
                found = self.intact(position + at, size)
                if found is not None and found.first_offset >= expected:
                    return position + at, found
                at = block.find(mark, at + 1)
            if len(block) < _SEARCH_BYTES:
                return None
            position += len(block) - len(mark) + 1
        return None

    def intact(self, position: int, size: int) -> Frame | None:
        """The frame of the record at `position`, if it is complete within `size` and its CRC is right."""
        if position > size:  # from a damaged index; it may not even be a number that the system takes
            return None
        prefix = os.pread(self._fd, SALT_BYTES + PREFIX_BYTES, position)
        length = record_length(prefix, self._salt)
        if length is None or position + length > size:
            return None
        return parse_record(memoryview(os.pread(self._fd, length, position)), 0, self._salt)

    def seek_time(self, wanted: int, first: int) -> int:
        """The offset of an indexed record that begins before that time (µs), or `first`, the segment's first offset."""
        entries = self._index()
        lo, hi = 0, len(entries)
        size = self.size
        while lo < hi:
            middle = (lo + hi) // 2
            offset, position = entries[middle]
            frame = self.intact(position, size)
            if frame is None or frame.first_offset != offset:  # a damaged index is not believed
                return first
            if first_time(frame) < wanted:
                first, lo = offset, middle + 1
            else:
                hi = middle
        return first

    def _index(self) -> list[tuple[int, int]]:
        """Offsets and positions of the sparse index; empty if it cannot be read."""
        try:
            with open(self._index_path, "rb") as file:
                raw = file.read()
        except OSError:
            return []
        return list(_INDEX.iter_unpack(raw[: len(raw) // _INDEX.size * _INDEX.size]))

    def seek(self, offset: int) -> tuple[int, int] | None:
        """A position at or before the record that holds `offset`, with the offset it begins at.

        None means the beginning of the segment. The index is only believed where it leads to an intact record.
        """
        entries = [e for e in self._index() if e[0] <= offset]
        for first, position in reversed(entries):
            frame = self.intact(position, self.size)
            if frame is not None and frame.first_offset == first:
                return position, first
        return None


def first_time(frame: Frame) -> int:
    """The time of a frame's first event, in µs."""
    return memoryview(frame.columns().times).cast("q")[0]


def last_time(frame: Frame) -> int:
    """The time of a frame's last event, in µs."""
    return memoryview(frame.columns().times).cast("q")[-1]


def record_length(buffer: bytes | memoryview, salt: bytes) -> int | None:
    """Length of the record that begins at `buffer`, None if it does not begin like one (or is too short)."""
    if len(buffer) < SALT_BYTES + PREFIX_BYTES or buffer[:SALT_BYTES] != salt:
        return None
    try:
        return SALT_BYTES + frame_length(buffer[SALT_BYTES : SALT_BYTES + PREFIX_BYTES])
    except FrameError:
        return None


def parse_record(buffer: bytes | memoryview, at: int, salt: bytes) -> Frame | None:
    """The frame of the record at `at`; None if it is incomplete or damaged."""
    length = record_length(buffer[at : at + SALT_BYTES + PREFIX_BYTES], salt)
    if length is None or at + length > len(buffer):
        return None
    try:
        return Frame.of_length(bytes(buffer[at + SALT_BYTES : at + length]))
    except FrameError:
        return None


def index_entry(offset: int, position: int) -> bytes:
    """One entry of the sparse index."""
    return _INDEX.pack(offset, position)
