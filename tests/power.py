"""Power cuts in memory: what a disk may hold afterwards.

Only what was synced is certain to survive; of the rest, any subset does. `Disk` watches `fsync`, `fdatasync` and the
flushes of mapped files below one directory, and remembers what each made durable: the contents of a file, or the names
in a directory. `cut` builds what a cut now could leave: for each name that is not durable yet it or what was there
before, for each block of a file that is not durable yet the new contents or the old ones.
"""

import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol
from unittest import mock

import pytest

from brokerless.core.journal import witness
from brokerless.core.journal.cursor_table import CursorTable
from brokerless.core.journal.head_file import HeadFile
from brokerless.losstest.faults.power_cut import build


class Run(Protocol):
    """Something that writes below a watched directory, and knows what it was promised."""

    rolls: random.Random
    disk: "Disk"

    def begin(self) -> None:
        """Open the files."""

    def step(self) -> None:
        """Do one thing."""

    def check(self, into: Path) -> None:
        """Cut the power now: build what is left in that directory, and compare."""

    def close(self) -> None:
        """Close the files."""


def cut_often(root: Path, seeds: range, make: Callable[[int, Path], Run], *, cuts: int, steps: int) -> None:
    """A run for each seed, each with so many cuts and up to so many steps before each of them."""
    # No witness outside of the directory: the machine is another one after a cut.
    with mock.patch.object(witness, "_directory", return_value=""):
        for seed in seeds:
            place = root / str(seed)
            place.mkdir()
            run = make(seed, place)
            with run.disk.watching():
                run.begin()
                for n in range(cuts):
                    for _ in range(run.rolls.randint(0, steps)):
                        run.step()
                    run.check(place / f"cut{n}")
                run.close()
            shutil.rmtree(place)


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
class PowerCuts:
    """The tests of a writer that is told `fsync`: `writer(seed, directory, fsync)` makes it."""

    writer: ClassVar[Callable[[int, Path, str], Run]]
    steps = 8  # at most so many before each cut
    runs = 8

    def cut(self, root: Path, seeds: range, fsync: str) -> None:
        """Runs of a writer, each with five cuts."""
        cut_often(root, seeds, lambda seed, place: self.writer(seed, place, fsync), cuts=5, steps=self.steps)

    def test_power_cuts(self, tmp_path: Path, fsync: str) -> None:
        """A few dozen cuts of each kind."""
        self.cut(tmp_path, range(self.runs), fsync)

    @pytest.mark.slow
    def test_many_power_cuts(self, tmp_path: Path, fsync: str) -> None:
        """The same for longer: more than a thousand cuts over all three."""
        self.cut(tmp_path, range(1000, 1080), fsync)


class Disk:
    """Everything below `root`, which must be empty."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}  # by inode: as of its last sync
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}  # by inode of the directory
        self._directories: set[int] = {root.stat().st_ino}
        self._held: list[int] = []  # descriptors that keep inodes from being used again
        self._seen: set[int] = set()
        self._lock = threading.Lock()  # what a sync saw must not be replaced by what an earlier one saw

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember what is synced in this block."""
        flush_table, flush_head = CursorTable.sync, HeadFile.sync

        def synced_table(table: CursorTable) -> None:
            flush_table(table)
            self._sync(table._fd)

        def synced_head(head: HeadFile) -> None:
            flush_head(head)
            fd = os.open(head.path, os.O_RDONLY)
            self._sync(fd)
            os.close(fd)

        with (
            mock.patch.object(os, "fsync", self._sync),
            mock.patch.object(os, "fdatasync", self._sync),
            mock.patch.object(CursorTable, "sync", synced_table),
            mock.patch.object(HeadFile, "sync", synced_head),
        ):
            yield
        for fd in self._held:
            os.close(fd)
        self._held.clear()

    def _sync(self, fd: int) -> None:
        with self._lock:
            self._note(fd)

    def _note(self, fd: int) -> None:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            names = {}
            for entry in os.scandir(f"/proc/self/fd/{fd}"):
                names[entry.name] = entry.inode()
                self._hold(Path(f"/proc/self/fd/{fd}") / entry.name, entry.inode())
            self._names[found.st_ino] = names
        else:
            self._hold(Path(f"/proc/self/fd/{fd}"), found.st_ino)
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def _hold(self, path: Path, inode: int) -> None:
        if inode not in self._seen:
            self._seen.add(inode)
            self._held.append(os.open(path, os.O_RDONLY))

    def cut(self, rolls: random.Random, into: Path) -> None:
        """Build one of the states that a power cut now could leave."""
        build(rolls, self.root, self._names, lambda inode: self._contents.get(inode, b""), into)
