"""Where groups survive their publisher: one small file per group beside the journal.

Two slots are written in turn, each with a number and a CRC, so that one is always valid, whenever the process
is killed. Writing is one `pwrite` into the page cache, which outlives the process; the journal's `fsync` says when it
is synced. After a power cut the state may be older than the journal, which costs redeliveries, or newer, and then it is
clipped to what the journal has (see `members.clip`).
"""

import contextlib
import os
import struct
import time
from urllib.parse import quote, unquote

import msgspec

from brokerless.core.errors import JournalError
from brokerless.core.journal.disk import Fsync
from brokerless.core.runtime.crc import crc32
from brokerless.core.runtime.files import make_directories, sync_directory
from brokerless.direct.groups.members import GroupState

_HEAD = struct.Struct("<QII")  # number of the write, length, CRC-32 of number, length and body
_SUFFIX = ".group"
# As DiskJournal's.
SYNC_INTERVAL_S = 1.0


def _crc(number: int, body: bytes) -> int:
    return crc32(body, crc32(struct.pack("<QI", number, len(body))))


class GroupFile:
    """The state of one group on disk."""

    def __init__(self, path: str, fsync: Fsync = "never", interval_s: float = 0.0) -> None:
        self._fsync = fsync
        self._interval_s = interval_s
        self._synced_at = 0.0
        self._unsynced = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if fsync != "never":
                sync_directory(os.path.dirname(path))
        except OSError as error:
            raise JournalError(
                path, f"group state cannot be opened: {error.strerror}", errno=error.errno
            ) from None
        self.path = path
        self._number = 0
        # Slots move apart when the state outgrows them; the file says where they are by being scanned.
        self._slot = 4096
        self.state = self._load()

    def _load(self) -> GroupState | None:
        size = os.fstat(self._fd).st_size
        best: GroupState | None = None
        slot = 4096
        while slot <= max(size, 4096):
            for at in (0, slot):
                found = self._read(at, slot)
                if found is not None and found[0] > self._number:
                    self._number, best = found
                    self._slot = slot
            slot *= 2
        return best

    def _read(self, at: int, slot: int) -> tuple[int, GroupState] | None:
        head = os.pread(self._fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        number, length, crc = _HEAD.unpack(head)
        if not number or length > slot * 2:
            return None
        body = os.pread(self._fd, length, at + _HEAD.size)
        if len(body) != length or _crc(number, body) != crc:
            return None
        try:
            return number, msgspec.msgpack.decode(body, type=GroupState)
        except msgspec.MsgspecError:
            return None

    def save(self, state: GroupState) -> None:
        """Store the state; the one before stays until the next save. Raises JournalError."""
        body = msgspec.msgpack.encode(state)
        self._number += 1
        at = 0
        if self._number % 2 == 0 or _HEAD.size + len(body) > self._slot:
            # A state too large for the first slot goes behind it, where there is always room.
            while _HEAD.size + len(body) > self._slot:
                self._slot *= 2
            at = self._slot
            self._number += self._number % 2
        try:
            os.pwrite(self._fd, _HEAD.pack(self._number, len(body), _crc(self._number, body)) + body, at)
            self._unsynced = self._fsync != "never"
            self.sync_if_due()
        except OSError as error:
            raise JournalError(
                self.path, f"group state cannot be written: {error.strerror}", errno=error.errno
            ) from None

    def sync_if_due(self) -> None:
        """Make what was saved survive a power cut, at once or when the interval is over. Raises OSError."""
        if self._unsynced:
            now = time.monotonic()
            if self._fsync == "batch" or now - self._synced_at >= self._interval_s:
                os.fdatasync(self._fd)
                self._unsynced, self._synced_at = False, now

    def close(self) -> None:
        """Sync and close the file; closing twice is fine."""
        if self._fd >= 0:
            if self._unsynced:
                with contextlib.suppress(OSError):
                    os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1


class GroupStore:
    """All groups of one publisher; without a directory nothing is kept, as with a MemoryJournal."""

    def __init__(
        self, directory: str | None, *, fsync: Fsync = "never", sync_interval_s: float = SYNC_INTERVAL_S
    ) -> None:
        """`fsync` as in DiskJournal: when what is saved is synced, so that it survives a power cut."""
        self._directory = directory
        self._fsync = fsync
        self._sync_interval_s = sync_interval_s
        self._files: dict[str, GroupFile] = {}
        if directory is not None:
            try:
                make_directories(directory, sync=fsync != "never")
            except OSError as error:
                raise JournalError(
                    directory, f"cannot be made: {error.strerror}", errno=error.errno
                ) from None

    @property
    def durable(self) -> bool:
        """Whether groups outlive their publisher."""
        return self._directory is not None

    def load(self) -> dict[str, GroupState | None]:
        """Every stored group; None if its file has no readable state."""
        if self._directory is None:
            return {}
        found: dict[str, GroupState | None] = {}
        for name in sorted(os.listdir(self._directory)):
            if name.endswith(_SUFFIX):
                group = unquote(name.removesuffix(_SUFFIX))
                found[group] = self._file(group).state
        return found

    def _file(self, group: str) -> GroupFile:
        assert self._directory is not None
        if group not in self._files:
            path = os.path.join(self._directory, quote(group, safe="") + _SUFFIX)
            self._files[group] = GroupFile(path, self._fsync, self._sync_interval_s)
        return self._files[group]

    def save(self, group: str, state: GroupState) -> None:
        """Keep the state of a group."""
        if self._directory is not None:
            self._file(group).save(state)

    def sync_if_due(self) -> None:
        """Sync the files whose interval is over. Raises JournalError."""
        for file in self._files.values():
            try:
                file.sync_if_due()
            except OSError as error:
                raise JournalError(
                    file.path, f"group state cannot be synced: {error.strerror}", errno=error.errno
                ) from None

    def forget(self, group: str) -> None:
        """Remove a group's file."""
        if self._directory is not None:
            file = self._files.pop(group, None)
            if file is not None:
                file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory, quote(group, safe="") + _SUFFIX))

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
