"""A journal proves that it is the newest of its name, or its epoch rises: copies, rollbacks, restarts."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core import DiskJournal
from brokerless.core.journal import witness


def epoch_of(path: Path, *, events: int = 0) -> tuple[int, bool]:
    """Open, append, close: the epoch, and whether it was raised."""
    with DiskJournal(path, source="s", fsync="never") as journal:
        for _ in range(events):
            journal.append("t", b"x")
        return journal.epoch, journal.recovered.epoch_raised


def test_a_journal_that_stays_where_it_is_keeps_its_epoch(tmp_path: Path) -> None:
    """Closed and opened again, killed and opened again: the same epoch."""
    first, _ = epoch_of(tmp_path, events=3)
    assert epoch_of(tmp_path, events=3) == (first, False)
    code = (
        "import os, signal, sys\nfrom brokerless.core import DiskJournal\n"
        "j = DiskJournal(sys.argv[1], fsync='never'); j.append('t', b'x'); j.stage('t', b'y')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with DiskJournal(tmp_path) as journal:
        assert (journal.epoch, journal.recovered.proven, journal.next) == (first, True, 8)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_restored_copy_raises_the_epoch(tmp_path: Path, in_place: bool, while_open: bool) -> None:
    """A copy made at any time and put back, with new files or into the old ones, cannot reuse offsets."""
    path, copy = tmp_path / "j", tmp_path / "copy"
    journal = DiskJournal(path, source="s", fsync="never")
    journal.append_many("t", [b"a"] * 100)
    if while_open:
        shutil.copytree(path, copy)
    else:
        journal.close()
        shutil.copytree(path, copy)
        journal = DiskJournal(path, source="s", fsync="never")
    journal.append_many("t", [b"b"] * 150)
    journal.close()
    if in_place:
        for file in copy.iterdir():
            with open(path / file.name, "r+b") as target:
                target.truncate(0)
                target.write(file.read_bytes())
    else:
        shutil.rmtree(path)
        shutil.copytree(copy, path)
    with DiskJournal(path, source="s") as again:
        assert again.recovered.epoch_raised
        assert not again.recovered.proven
        assert again.epochs()[-1] == (again.epoch, 100)
        assert again.append("t", b"c").seq == 0


def test_a_copy_beside_the_original(tmp_path: Path) -> None:
    """It has a new epoch, also while the original is open and has not gone on since; so has every change of side."""
    first, _ = epoch_of(tmp_path / "a", events=5)
    with DiskJournal(tmp_path / "a", source="s") as original:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        other, raised = epoch_of(tmp_path / "b", events=1)
        assert raised
        assert other > first == original.append("t", b"more").epoch
    for side in ("a", "b", "a"):
        last, (other, raised) = other, epoch_of(tmp_path / side, events=1)
        assert raised
        assert other > last


def test_a_journal_that_is_moved_keeps_its_epoch(tmp_path: Path) -> None:
    """Where it was, nobody can write to it."""
    first, _ = epoch_of(tmp_path / "a", events=5)
    (tmp_path / "a").rename(tmp_path / "b")
    assert epoch_of(tmp_path / "b", events=1) == (first, False)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert epoch_of(tmp_path / "link") == (first, False)


def test_without_a_witness_the_epoch_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted, unreadable, or a directory that others can write: never believed, and nothing fails."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(witness, "_directory", lambda: str(place))
    epoch_of(tmp_path / "j", events=1)
    assert not epoch_of(tmp_path / "j")[1]
    for file in place.iterdir():
        file.write_bytes(b"nonsense")
    assert epoch_of(tmp_path / "j")[1]
    shutil.rmtree(place)
    assert epoch_of(tmp_path / "j")[1]
    monkeypatch.setattr(witness, "_directory", lambda: "")
    assert epoch_of(tmp_path / "j")[1]
    assert epoch_of(tmp_path / "j", events=2)[1]


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that others can write could be prepared by them."""
    monkeypatch.setattr(witness.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(witness.os, "getuid", lambda: 4_000_000)
    assert witness._directory() == ""
    shutil.rmtree("/dev/shm/brokerless-4000000", ignore_errors=True)


def test_witnesses_of_journals_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is bounded by the journals that exist. What another process is just writing stays."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(witness, "_directory", lambda: str(place))
    monkeypatch.setattr(witness, "_MANY", 3)
    monkeypatch.setattr(witness.os, "urandom", lambda n: b"\x00" * n)
    for i in range(6):
        found = witness.Witness(str(tmp_path / f"gone{i}"), f"{i:08x}")
        found.begin("i", 0)
        found.close()
    (place / "eeeeeeee.journal.1.2.tmp").write_bytes(b"")
    kept = witness.Witness(str(tmp_path), "ffffffff")
    kept.begin("i", 7)
    testimony = kept.testimony()
    kept.close()
    assert testimony is not None
    assert testimony.next == 7
    assert len(os.listdir(place)) <= 5
    assert (place / "eeeeeeee.journal.1.2.tmp").exists()
