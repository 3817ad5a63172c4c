"""Reading witness files in portions, as columns: a run of an hour is judged in memory that does not grow with it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brokerless.losstest.evidence.witness import (
    COUNT,
    COUNT_AT,
    HEADER_SIZE,
    MAGIC,
    RECORD_SIZE,
    Kind,
    Record,
)

PORTION = 1 << 17  # records at a time: 5 MB, small enough for the processor's caches
RECORD_TYPE = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("attempt", "<u2"),
        ("count", "<u4"),
        ("n", "<u8"),
        ("t", "<u8"),
        ("position", "<u8"),
        ("epoch", "<u4"),
        ("crc", "<u4"),
    ]
)
Columns = NDArray[Any]


def _crc_tables() -> NDArray[np.uint32]:
    """CRC-32 (zlib's) for four bytes at a time: table k is for the byte k places before the last."""
    tables = np.zeros((4, 256), np.uint32)
    tables[0] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        tables[0] = np.where(tables[0] & 1, np.uint32(0xEDB88320) ^ (tables[0] >> 1), tables[0] >> 1)
    for k in range(1, 4):
        tables[k] = tables[0][tables[k - 1] & 0xFF] ^ (tables[k - 1] >> 8)
    return tables


_CRC = _crc_tables()
_KINDS = frozenset(map(int, Kind))


def checksums(records: Columns) -> NDArray[np.uint32]:
    """The CRC that each of the records should have."""
    words = records.view("<u4").reshape(-1, RECORD_SIZE // 4)
    crc = np.full(len(records), 0xFFFFFFFF, np.uint32)
    for i in range(words.shape[1] - 1):
        x = crc ^ words[:, i]
        crc = _CRC[3][x & 0xFF] ^ _CRC[2][x >> 8 & 0xFF] ^ _CRC[1][x >> 16 & 0xFF] ^ _CRC[0][x >> 24]
    return ~crc


def valid_prefix(records: Columns) -> int:
    """How many records from the first on are stored completely: of a known kind number, with the right CRC."""
    good = (checksums(records) == records["crc"]) & (records["kind"] != 0)
    return len(good) if good.all() else int(good.argmin())


class WitnessFile:
    """One witness file. `damaged` is how many records were written and cannot be read; known after reading it all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = 0
        self.damaged = 0
        self.unknown_kinds: set[int] = set()

    def portions(self) -> Iterator[Columns]:
        """The records in order, up to the first that is damaged.

        The record that a killed process was just storing is no damage: its `write` had not returned.
        """
        self.records = self.damaged = 0
        with open(self.path, "rb") as file:
            header = file.read(HEADER_SIZE)
            if not header.startswith(MAGIC) or len(header) < HEADER_SIZE:
                self.damaged = -(-self.path.stat().st_size // RECORD_SIZE)
                return
            written = int.from_bytes(header[len(MAGIC) :], "little")
            while data := file.read(PORTION * RECORD_SIZE):
                whole = len(data) // RECORD_SIZE
                portion = np.frombuffer(data, RECORD_TYPE, whole)
                good = valid_prefix(portion)
                if good:
                    self.records += good
                    kinds = np.bincount(portion["kind"][:good], minlength=256)
                    self.unknown_kinds |= set(np.flatnonzero(kinds).tolist()) - _KINDS
                    yield portion[:good]
                if good < whole or len(data) % RECORD_SIZE:
                    file.seek(HEADER_SIZE + self.records * RECORD_SIZE)
                    break
            used = self._used_bytes(file.tell())
        self.damaged = max(written - self.records, -(-used // RECORD_SIZE) - 1, 0)

    def _used_bytes(self, start: int) -> int:
        """Bytes from `start` up to the last that is not zero: the rest was reserved and never used."""
        used = 0
        with open(self.path, "rb") as file:
            file.seek(start)
            at = 0
            while data := file.read(1 << 20):
                if kept := data.rstrip(b"\0"):
                    used = at + len(kept)
                at += len(data)
        return used


class Tail:
    """Follows a witness file that another process is writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._seen = 0

    def poll(self) -> Columns:
        """Complete records that were added since the last call.

        The header counts only what is complete; checksums are for the verdict, which verifies it all again.
        """
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _NO_RECORDS
        header = os.pread(self._fd, HEADER_SIZE, 0)
        written = COUNT.unpack_from(header, COUNT_AT)[0] if len(header) == HEADER_SIZE else 0
        if written <= self._seen:
            return _NO_RECORDS
        size, at = (written - self._seen) * RECORD_SIZE, HEADER_SIZE + self._seen * RECORD_SIZE
        data = os.pread(self._fd, size, at)
        records = np.frombuffer(data, RECORD_TYPE, len(data) // RECORD_SIZE)
        self._seen += len(records)
        return records

    def close(self) -> None:
        """Stop following."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_NO_RECORDS: Columns = np.zeros(0, RECORD_TYPE)


def portions(records: "WitnessFile | list[Record]") -> Iterator[Columns]:
    """Records of a file, or of a list as the tests make them."""
    if isinstance(records, WitnessFile):
        yield from records.portions()
    elif records:
        yield np.array([(*record, 0) for record in records], RECORD_TYPE)


class Reading(NamedTuple):
    """A whole witness file at once. `damaged` is the number of records that were written and cannot be read."""

    records: list[Record]
    damaged: int


def read(path: Path) -> Reading:
    """Read a whole witness file; what follows the first damaged record is counted, not interpreted."""
    file = WitnessFile(path)
    found = [Record(*fields[:8]) for portion in file.portions() for fields in portion.tolist()]
    return Reading(found, file.damaged)
