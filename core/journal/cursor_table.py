"""Named positions in a mapped file: advancing one is a store into memory, and it outlives a killed process."""

import contextlib
import mmap
import os
import struct

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.crc import crc32
from brokerless.core.runtime.files import lock_file

SLOT_BYTES = 512
_NAME = struct.Struct("<IH")  # CRC of the name, its length; 0 length: free
_NAME_AT = 16
_GROW = 64


def read_positions(path: str) -> dict[str, int]:
    """The positions in a table's file, without opening it for writing; empty if there is none. Raises OSError."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        return {}
    found = {}
    for at in range(0, len(raw) - SLOT_BYTES + 1, SLOT_BYTES):
        crc, length = _NAME.unpack_from(raw, at + _NAME_AT)
        name = raw[at + _NAME_AT + 6 : at + _NAME_AT + 6 + length]
        if length and length <= SLOT_BYTES - _NAME_AT - 6 and crc32(name) == crc:
            found[name.decode("utf-8", "replace")] = int.from_bytes(raw[at : at + 8], "little")
    return found


class CursorTable:
    """A table of `name → position`. Each slot: the position, then the name with its CRC."""

    def __init__(self, path: str, *, exclusive: bool = False) -> None:
        """`exclusive`: BlockingIOError if another one has the file open like that, in whatever process."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = lock_file(path) if exclusive else os.open(path, flags, 0o644)
        self._map: mmap.mmap | None = None
        self._words: memoryview
        self._grow(max(_GROW * SLOT_BYTES, os.fstat(self._fd).st_size // SLOT_BYTES * SLOT_BYTES))
        self.positions: dict[str, int] = {}
        self._where: dict[str, int] = {}
        self._free: list[int] = []
        self._load()

    def _grow(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)
        # The old map is left to the garbage collector: another thread may be syncing it.
        self._map = mmap.mmap(self._fd, size)
        self._words = memoryview(self._map).cast("Q")

    def _load(self) -> None:
        assert self._map is not None
        for at in range(0, len(self._map), SLOT_BYTES):
            crc, length = _NAME.unpack_from(self._map, at + _NAME_AT)
            raw = self._map[at + _NAME_AT + 6 : at + _NAME_AT + 6 + length]
            if not length or length > SLOT_BYTES - _NAME_AT - 6 or crc32(raw) != crc:
                self._free.append(at)
                continue
            name = raw.decode("utf-8", "replace")
            self._where[name] = at
            self.positions[name] = self._words[at // 8]
        self._free.reverse()

    def set(self, name: str, position: int) -> None:
        """Store a position; a new name takes a free slot."""
        at = self._where.get(name)
        if at is None:
            raw = name.encode()
            if len(raw) > SLOT_BYTES - _NAME_AT - 6:
                raise ConfigError("name", f"{name!r} is too long")
            if not self._free:
                assert self._map is not None
                size = len(self._map)
                self._grow(size * 2)
                self._free = list(range(size * 2 - SLOT_BYTES, size - 1, -SLOT_BYTES))
            at = self._free.pop()
            self._words[at // 8] = position
            assert self._map is not None
            self._map[at + _NAME_AT + 6 : at + _NAME_AT + 6 + len(raw)] = raw
            _NAME.pack_into(self._map, at + _NAME_AT, crc32(raw), len(raw))
            self._where[name] = at
        self._words[at // 8] = position
        self.positions[name] = position

    def drop(self, name: str) -> None:
        """Forget a name; unknown ones are ignored."""
        at = self._where.pop(name, None)
        if at is not None:
            assert self._map is not None
            _NAME.pack_into(self._map, at + _NAME_AT, 0, 0)
            self._free.append(at)
            del self.positions[name]

    def sync(self) -> None:
        """Write the pages to the disk."""
        assert self._map is not None
        self._map.flush()

    def close(self) -> None:
        """Unmap and close; closing twice is fine."""
        with contextlib.suppress(ValueError, OSError):
            self._words.release()
            assert self._map is not None
            self._map.close()
            os.close(self._fd)
            self._fd = -1
