"""Proof that a disk journal is the newest of its name: how far it was written, kept outside of its directory.

A journal that was restored from a copy, or whose disk was rolled back, cannot know from its own files what happened
after the copy was made: it would give the same offsets to other events, and consumers would take them for events that
they have had. So every open journal has a witness: a small file in memory (`/dev/shm`), which neither a copy nor a
rolled-back disk brings back, with the boot of the machine, the instance (a random name, new with every opening) and
the offset up to which events became readable. Opening compares. A journal is proven if all three fit: same boot, same
instance, and nothing of what the witness has seen is missing. Otherwise its epoch rises, which costs consumers
nothing but a new numbering of topics.

Not proven are: the first opening after a restart of the machine or of its container, a copy on another machine, a copy
beside the original, and a journal whose witness was deleted. What no witness can see is a virtual machine that goes
back together with its memory: there a consumer notices that it has had more than the publisher knows of.
"""

import contextlib
import mmap
import os
import stat
import tempfile

import msgspec

from brokerless.core.runtime.files import atomic_write
from brokerless.core.runtime.process import boot_id

# More than this many files are looked through for those whose journal is gone.
_MANY = 256
_MAX_BYTES = 64 * 1024
_SUFFIX = ".journal"


class Testimony(msgspec.Struct):
    """What a witness says of the last opening: `next` is the offset after the newest readable event."""

    boot_id: str
    instance: str
    journal: str
    next: int = 0


class Witness:
    """The witness of one journal, by the journal's salt."""

    def __init__(self, journal: str, salt: str) -> None:
        self._journal = os.path.abspath(journal)
        self._directory = _directory()
        # By salt, not by path: a copy elsewhere on this machine has the same witness.
        self._path = os.path.join(self._directory, f"{salt}{_SUFFIX}") if self._directory else ""
        self._map: mmap.mmap | None = None
        self._words: memoryview | None = None

    def testimony(self) -> Testimony | None:
        """What is known of the last opening; None if nothing is."""
        found = _read(self._path) if self._path else None
        if found is None or not found.boot_id or found.boot_id != boot_id() or self._is_beside(found.journal):
            return None
        return found

    def _is_beside(self, journal: str) -> bool:
        """Whether that is another directory, and there: we are a copy of what may be open and written to now."""
        try:
            return not os.path.samefile(journal, self._journal)
        except OSError:  # it was moved here
            return False

    def begin(self, instance: str, next_offset: int) -> None:
        """Witness this instance from here on. If that is impossible, the next opening is not proven."""
        if not self._path:
            return
        body = msgspec.msgpack.encode(Testimony(boot_id(), instance, self._journal))
        with contextlib.suppress(OSError, ValueError):
            _prune(self._directory)
            atomic_write(self._path, next_offset.to_bytes(8, "little") + body)
            with open(self._path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 8)
            self._words = memoryview(self._map).cast("Q")

    def advance(self, next_offset: int) -> None:
        """Events before this offset are readable: consumers may have them."""
        if self._words is not None:
            self._words[0] = next_offset

    def close(self) -> None:
        """Unmap it; what it says stays. Closing twice is fine."""
        if self._words is not None:
            words, self._words = self._words, None
            words.release()
            assert self._map is not None
            self._map.close()


def _directory() -> str:
    """A directory of this user, in memory if possible; empty if there is none that only this user can write."""
    for parent in ("/dev/shm", tempfile.gettempdir()):  # noqa: S108 - checked below
        path = os.path.join(parent, f"brokerless-{os.getuid()}")
        with contextlib.suppress(OSError):
            os.makedirs(path, mode=0o700, exist_ok=True)
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
                return path
    return ""


def _read(path: str) -> Testimony | None:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES)
        found = msgspec.msgpack.decode(raw[8:], type=Testimony)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    found.next = int.from_bytes(raw[:8], "little")
    return found


def _prune(directory: str) -> None:
    """Remove the witnesses of journals that are gone, if there are many."""
    names = [name for name in os.listdir(directory) if name.endswith(_SUFFIX)]  # not what others are writing
    if len(names) <= _MANY or os.urandom(1)[0] % 32:
        return
    for name in names:
        found = _read(os.path.join(directory, name))
        if found is None or not os.path.isdir(found.journal):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))
