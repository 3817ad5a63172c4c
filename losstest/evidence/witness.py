"""Witness files: what one process saw, in fixed-size records that survive SIGKILL of the process.

The file is mapped into the process's memory: a record is there for the kernel, and for readers in other processes,
as soon as it is stored, and killing the process loses nothing that was written. It costs 0.8 µs, a third of a
`write()`. The header says how many records are complete; each has a CRC, so a damaged one ends the file.
"""

import mmap
import os
import struct
import time
import zlib
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

MAGIC = b"BLwit\x00\x02\n"
COUNT = struct.Struct("<Q")  # complete records
COUNT_AT = len(MAGIC)
HEADER_SIZE = COUNT_AT + COUNT.size
_BODY = struct.Struct("<BBHIQQQI")  # kind, flags, attempt, count, n, t_ns, position, epoch
_CRC = struct.Struct("<I")
RECORD_SIZE = _BODY.size + _CRC.size  # 40
# Space is reserved before it is used, so that a full disk is an error and not a signal: little at first (most
# runs are short), twice as much each time, up to what a tenth of a second needs at the highest rate.
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 20
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
    INDETERMINATE = 7  # producer: send() said, or an error shows, that n may have been accepted or not
    PENDING = 6  # producer: still has n events to hand over; consumer: still expects n
    READY = 10  # consumer: receives from now on
    PROBE = 11  # consumer: has seen a probe
    DELIVERED = 12  # consumer: handler invoked
    COMMITTED = 13  # consumer: effect recorded
    ACKED = 14  # consumer: acknowledged to the transport
    UNEXPECTED = 15  # consumer: something that is no event of this run; flags say what (Unexpected)
    CLOSED = 17  # consumer: stopped in an orderly way
    IDLE = 18  # consumer: looked, and there was nothing
    DROPPED = 20  # relay or seeded drop: event n was dropped here
    DELAYED = 21  # relay: the datagram with event n was held back, and others may have passed it


class Unexpected(IntEnum):
    """What was wrong with an unexpected delivery."""

    DAMAGED = 1  # not a payload, or its bytes were changed or mixed with those of another event
    OTHER_RUN = 2  # a payload of another run


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
        self._map: mmap.mmap | None = None
        self._at = HEADER_SIZE
        self._size = 0
        if path.is_fifo():
            # Stands in for the file when the process's disk is made full on purpose; see `copy_records`.
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._grow()

    def _grow(self) -> None:
        more = min(max(self._size, FIRST_BYTES), MOST_BYTES)
        os.posix_fallocate(self._fd, self._size, more)
        self._size += more
        if self._map is None:
            self._map = mmap.mmap(self._fd, self._size)
            self._map[:HEADER_SIZE] = MAGIC + COUNT.pack(0)
        else:
            self._map.resize(self._size)

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
        self.append(body + _CRC.pack(zlib.crc32(body)))

    def append(self, record: bytes) -> None:
        """Append one encoded record."""
        if self._map is None:
            os.write(self._fd, record)  # to a FIFO, in one piece
            return
        end = self._at + RECORD_SIZE
        if end > self._size:
            self._grow()
        self._map[self._at : end] = record
        self._at = end
        COUNT.pack_into(self._map, COUNT_AT, (end - HEADER_SIZE) // RECORD_SIZE)

    def close(self) -> None:
        """Give back what was reserved and close the file; calling it again does nothing."""
        if self._map is not None:
            self._map.close()
            self._map = None
            os.ftruncate(self._fd, self._at)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def copy_records(fifo: Path, target: Path) -> None:
    """From a FIFO into a witness file, for a process whose own disk is made full; until the FIFO's end."""
    witness = Witness(target)
    held = b""
    with open(fifo, "rb", buffering=0) as source:
        while data := source.read(65536):
            held += data
            whole = len(held) - len(held) % RECORD_SIZE
            for at in range(0, whole, RECORD_SIZE):
                witness.append(held[at : at + RECORD_SIZE])
            held = held[whole:]
    witness.close()
