"""Witness files: what one process saw, in fixed-size records that survive SIGKILL of the process.

Each record is one `write()` to a file opened with O_APPEND. The kernel has it when the call returns, so
killing the process loses nothing that was written. A torn or damaged record fails its CRC and ends the file.
"""

import os
import struct
import time
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

MAGIC = b"BLwit\x00\x01\n"
_BODY = struct.Struct("<BBHIQQQI")  # kind, flags, attempt, count, n, t_ns, position, epoch
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<BBHIQQQII")
RECORD_SIZE = _RECORD.size  # 40
NO_POSITION = (1 << 64) - 1
_EPOCH_MASK = 0xFFFF_FFFF  # epochs may be time stamps; 32 bits tell two of one run apart


class Kind(IntEnum):
    """What a record says."""

    START = (
        1  # producer: n = number of events planned, t = intended time of event 0, position = interval in ns
    )
    OFFERED = 2  # producer: send() is about to be called for n
    ACCEPTED = 3  # producer: send() returned
    REJECTED = 4  # producer: send() refused
    DONE = 5  # producer: has offered all it will
    PENDING = 6  # producer: still has n events to hand over
    READY = 10  # consumer: receives from now on
    PROBE = 11  # consumer: has seen a probe
    DELIVERED = 12  # consumer: handler invoked
    COMMITTED = 13  # consumer: effect recorded
    ACKED = 14  # consumer: acknowledged to the transport
    UNEXPECTED = 15  # consumer: something that is no event of this run
    COUNTED = 16  # consumer: of the events n … n+position-1, `count` more were counted (no identity)
    CLOSED = 17  # consumer: stopped in an orderly way
    IDLE = 18  # consumer: looked, and there was nothing
    SWALLOWED = 20  # relay or sieve: event n was dropped here


class Record(NamedTuple):
    """One record as read back."""

    kind: int
    flags: int
    attempt: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    n: int
    t: int
    position: int
    epoch: int


class Witness:
    """Appends records to one file. Not thread-safe: one process, one thread, one witness.

    Raises OSError if the file cannot be written: a witness that cannot write must not go on silently.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A FIFO stands in for the file when the process's disk is made full on purpose.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._write(MAGIC)

    def write(
        self,
        kind: Kind,
        n: int = 0,
        *,
        count: int = 1,
        t: int | None = None,
        attempt: int = 0,
        position: int = NO_POSITION,
        epoch: int = 0,
        flags: int = 0,
    ) -> None:
        """Append one record; it survives SIGKILL once this returns."""
        when = time.monotonic_ns() if t is None else t
        body = _BODY.pack(kind, flags, attempt, count, n, when, position, epoch & _EPOCH_MASK)
        self._write(body + _CRC.pack(zlib.crc32(body)))

    def _write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written != len(data):  # only a full disk does this; the torn record is detected when reading
            raise OSError(f"witness {self.path}: wrote {written} of {len(data)} bytes")

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse(data: bytes) -> tuple[list[Record], int]:
    """Records of consecutive bytes (without magic), and how many bytes they took.

    Stops before an incomplete or damaged record.
    """
    records: list[Record] = []
    used = 0
    whole = len(data) - len(data) % RECORD_SIZE
    view = memoryview(data)
    for fields in _RECORD.iter_unpack(view[:whole]):
        if zlib.crc32(view[used : used + RECORD_SIZE - 4]) != fields[8]:
            break
        records.append(Record(*fields[:8]))
        used += RECORD_SIZE
    return records, used


class Reading(NamedTuple):
    """A whole witness file. `damaged` is the number of bytes after the last good record."""

    records: list[Record]
    damaged: int


def read(path: Path) -> Reading:
    """Read a witness file; bytes after the first damaged record are counted, not interpreted."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        return Reading([], len(data))
    records, used = parse(data[len(MAGIC) :])
    return Reading(records, len(data) - len(MAGIC) - used)


class Tail:
    """Follows a witness file that another process is writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = len(MAGIC)

    def poll(self) -> Iterator[Record]:
        """Complete records that were added since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return iter(())
        records, used = parse(data)
        self._at += used
        return iter(records)
