"""Power cuts and slow disks for one directory of a run: only what was synced is certain to survive.

`_disk.c`, loaded into the process, remembers what each sync made durable. `lose_power` then replaces the directory
by one of the states that a power cut could leave: for each name that is not durable yet it or what was there before,
for each block of a file that is not durable yet the new contents or the old ones.
"""

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

BLOCK = 512
_DELAY = struct.Struct("=I")


def shim() -> str:
    """Where the compiled part lies, or an empty text if it was not built."""
    found = find_spec("brokerless.losstest.faults._disk")
    return found.origin or "" if found is not None else ""


class WatchedDisk:
    """A directory whose syncs are watched; `shadow` holds what is durable of it."""

    def __init__(self, root: Path, shadow: Path) -> None:
        self.root, self.shadow = root.resolve(), shadow.resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.shadow.mkdir()
        (self.shadow / "control").write_bytes(_DELAY.pack(0))
        self._cuts = 0

    @property
    def environment(self) -> dict[str, str]:
        """For the process that uses the disk."""
        return {"LOSSTEST_DISK_ROOT": str(self.root), "LOSSTEST_DISK_SHADOW": str(self.shadow)}

    def slow(self, seconds: float) -> None:
        """From now on every write and every sync takes so much longer."""
        fd = os.open(self.shadow / "control", os.O_WRONLY)
        os.pwrite(fd, _DELAY.pack(int(seconds * 1e6)), 0)
        os.close(fd)

    def lose_power(self, rolls: random.Random) -> None:
        """Replace the directory by what a power cut could leave. Its processes must have been killed before."""
        self._cuts += 1
        left = self.root.with_name(f"{self.root.name}.after-cut")
        self.build(rolls, left)
        self.root.rename(self.root.with_name(f"{self.root.name}.before-cut-{self._cuts}"))
        left.rename(self.root)
        for path in self.shadow.iterdir():
            if path.name != "control":
                path.unlink()
        self.all_is_durable()

    def build(self, rolls: random.Random, into: Path) -> None:
        """Build what a power cut now could leave."""
        names = {
            int(path.name.removeprefix("names-")): _names(path.read_bytes())
            for path in self.shadow.glob("names-*")
        }
        build(rolls, self.root, names, self._contents, into)

    def _contents(self, inode: int) -> bytes:
        path = self.shadow / f"content-{inode}"
        return path.read_bytes() if path.exists() else b""

    def all_is_durable(self) -> None:
        """What is there now has been written back, as it is after half a minute on any system, or was just mounted."""
        for directory, _, files in os.walk(self.root):
            with contextlib.suppress(FileNotFoundError):  # its processes go on meanwhile
                listed = b"".join(f"{e.inode()} {e.name}\0".encode() for e in os.scandir(directory))
                self._put(f"names-{Path(directory).stat().st_ino}", listed)
            for name in files:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        self._put(f"content-{path.stat().st_ino}", path.read_bytes())
                        self._hold(path)

    def _hold(self, path: Path) -> None:
        """Keep the inode from being used again."""
        with contextlib.suppress(FileExistsError):
            os.link(path, self.shadow / f"held-{path.stat().st_ino}")

    def _put(self, name: str, data: bytes) -> None:
        new = self.shadow / f"new-{name}"
        new.write_bytes(data)
        new.rename(self.shadow / name)


def _names(listed: bytes) -> dict[str, int]:
    entries = (one.decode("utf-8", "surrogateescape").partition(" ") for one in listed.split(b"\0") if one)
    return {name: int(inode) for inode, _, name in entries}


def build(
    rolls: random.Random,
    root: Path,
    names: Mapping[int, dict[str, int]],
    contents: Callable[[int], bytes],
    into: Path,
) -> None:
    """Build in `into` one of the states that a power cut now could leave of `root`.

    `names` is what each directory (by its inode) is certain to have, `contents` what a file held at its last sync.
    """

    def directory(now: Path | None, inode: int, into: Path) -> None:
        into.mkdir(parents=True)
        durable = names.get(inode, {})
        current = {entry.name: entry.inode() for entry in os.scandir(now)} if now is not None else {}
        for name in sorted({*durable, *current}):
            chosen = durable.get(name)
            if current.get(name) != chosen and rolls.random() < 0.5:
                chosen = current.get(name)
            if chosen is None:
                continue
            here = now / name if now is not None and current.get(name) == chosen else None
            if here is not None and not here.is_dir() and not here.is_file():
                continue  # a socket or a pipe: nothing of it is on a disk
            if chosen in names or (here is not None and here.is_dir()):
                directory(here, chosen, into / name)
            else:
                old = contents(chosen)
                new = here.read_bytes() if here is not None else old
                (into / name).write_bytes(mixed(rolls, old, new))
                if here is not None:
                    shutil.copymode(here, into / name)

    directory(root, root.stat().st_ino, into)


def mixed(rolls: random.Random, old: bytes, new: bytes) -> bytes:
    """Blocks of either; a file that grew has any length in between, and zeros where nothing was written yet."""
    if old == new:
        return new
    kind = rolls.random()
    if kind < 0.25:
        return old
    if kind < 0.5:
        return new
    length = rolls.choice([len(old), len(new), rolls.randint(*sorted((len(old), len(new))))])
    out = bytearray(length)
    for at in range(0, length, BLOCK):
        part = (new if rolls.random() < 0.5 else old)[at : min(at + BLOCK, length)]
        out[at : at + len(part)] = part
    return bytes(out)
