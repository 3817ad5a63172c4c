"""Power cuts at random moments: nothing that `fsync` promised is missing, and nothing wrong is read."""

import random
from pathlib import Path
from unittest import mock

import pytest

from brokerless.core import Cursor, DiskJournal, Position, Retention
from brokerless.core.errors import JournalError
from brokerless.core.journal import witness
from brokerless.core.runtime.files import make_directories
from tests.power import Disk, PowerCuts


class Run:
    """A writer on a watched disk, and what it was promised."""

    def __init__(self, seed: int, root: Path, fsync: str) -> None:
        self.rolls = random.Random(seed)
        self.fsync = fsync
        # With the small one, segments are deleted: any of them may be back after the cut.
        self.retention = Retention(max_events=self.rolls.choice([100_000, 120]))
        self.path = root / "disk" / "deep" / "journal"
        (root / "disk").mkdir()
        self.disk = Disk(root / "disk")
        self.accepted: list[bytes] = []
        self.promised = 0  # events that must survive
        self.cursor = -1  # registered: its name must survive

    def begin(self) -> None:
        """Open the journal; the disk must be watched."""
        self.journal = self.open(self.path)

    def open(self, path: Path) -> DiskJournal:
        return DiskJournal(
            path,
            source="src",
            fsync=self.fsync,  # type: ignore[arg-type]
            retention=self.retention,
            sync_interval_s=3600,
            segment_bytes=4096,
        )

    def step(self) -> None:
        """One call of a writer."""
        journal, roll = self.journal, self.rolls.random()
        data = b"%d " % len(self.accepted) + b"x" * self.rolls.choice([1, 50, 700])
        if roll < 0.45:
            journal.append(self.rolls.choice("ab"), data)
            self.accepted.append(data)
        elif roll < 0.6:
            datas = [b"%d y" % (len(self.accepted) + i) for i in range(self.rolls.randint(1, 30))]
            journal.append_many("a", datas)
            self.accepted += datas
        elif roll < 0.75:
            journal.stage("b", data)
            self.accepted.append(data)
            if roll < 0.7:
                journal.flush()
        elif roll < 0.85 and self.fsync != "never":
            journal.sync()
            self.promised = len(self.accepted)
        elif roll < 0.95:
            journal.register("g", 0)
            journal.advance("g", self.rolls.randint(0, len(self.accepted)))
            self.cursor = journal.registered()["g"]
        else:
            journal.close()
            self.journal = self.open(self.path)
            if self.fsync != "never":
                self.promised = len(self.accepted)
        if self.fsync == "batch":
            self.promised = len(self.accepted)

    def check(self, into: Path) -> None:
        """Cut the power now, and open what is left."""
        self.disk.cut(self.rolls, into)
        path = into / "deep" / "journal"
        if self.fsync == "never" and not path.is_dir():
            return
        with mock.patch.object(witness, "_directory", return_value=""):
            try:
                journal = self.open(path)
            except JournalError:
                if self.fsync != "never":
                    raise
                return  # told, and never promised
            with journal:
                self.compare(journal)

    def compare(self, journal: DiskJournal) -> None:
        assert journal.next >= self.promised
        oldest = self.journal.oldest  # before the cut: what lies below was evicted
        assert journal.oldest <= oldest or not self.promised
        found: dict[int, bytes] = {}
        at = journal.oldest
        gone: set[int] = set()
        while at < journal.next:
            chunk = journal.read(at)
            found.update({e.offset: e.data for f in chunk.frames for e in f.events()})
            for first, last in chunk.gone:
                gone |= set(range(first, last + 1))
            assert chunk.next > at
            at = chunk.next
        for offset, data in found.items():
            assert data == self.accepted[offset]
        assert set(range(oldest, self.promised)) <= set(found), "promised, and missing"
        assert set(range(journal.oldest, journal.next)) == set(found) | gone, "skipped in silence"
        if journal.recovered.epoch_raised or not self.promised:
            assert journal.append("a", b"new").offset == max(journal.next - 1, 0)
        elif found:
            pytest.fail("the epoch did not rise after a restart of the machine")
        if self.cursor >= 0 and self.fsync != "never":
            assert "g" in journal.registered(), "the name of a registered cursor is forgotten"
        for position in journal.registered().values():
            assert position <= journal.next, "a cursor beyond the end would skip new events"

    def close(self) -> None:
        self.journal.close()


class TestPowerCuts(PowerCuts):
    """What `fsync` promised survives."""

    writer, runs = Run, 6


def test_what_is_not_synced_may_be_lost(tmp_path: Path) -> None:
    """The simulator itself: unsynced contents and names survive in some cuts and not in others, synced ones always."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    kinds = set()
    with disk.watching():
        make_directories(str(root / "kept" / "deep"), sync=True)
        (root / "lost").mkdir()
        Cursor(root / "kept" / "deep" / "synced", sync=True).save({"s": Position(1, 5)})
        Cursor(root / "kept" / "deep" / "loose").save({"s": Position(1, 7)})
        for seed in range(40):
            into = tmp_path / str(seed)
            disk.cut(random.Random(seed), into)
            assert Cursor(into / "kept" / "deep" / "synced").load().positions["s"].offset == 5
            loose = into / "kept" / "deep" / "loose"
            kinds.add(((into / "lost").exists(), loose.exists() and loose.stat().st_size > 0))
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}


def test_a_cursor_with_sync_survives(tmp_path: Path) -> None:
    """Every save is the old contents or the new ones, and after it returned the new ones; so are new directories."""
    for seed in range(20):
        rolls = random.Random(seed)
        root = tmp_path / f"disk{seed}"
        root.mkdir()
        disk = Disk(root)
        with disk.watching():
            cursor = Cursor(root / "a" / "b" / "cursor", sync=True)
            for n in range(1, rolls.randint(2, 6)):
                cursor.save({"s": Position(1, n)})
            disk.cut(rolls, tmp_path / f"cut{seed}")
        assert Cursor(tmp_path / f"cut{seed}" / "a" / "b" / "cursor").load().positions["s"].offset == n
