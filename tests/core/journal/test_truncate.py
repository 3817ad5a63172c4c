"""Copies of a journal: same frames, epochs and offsets; becoming the journal itself; cutting what went another way."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Frame, Journal, MemoryJournal, Retention
from brokerless.core.errors import JournalError, UsageError
from brokerless.core.journal.epoch import TERM, is_superseded, next_epoch, next_term


def frames_of(journal: Journal, offset: int = 0) -> list[Frame]:
    """Everything that can be read from an offset on."""
    found: list[Frame] = []
    while offset < journal.next:
        chunk = journal.read(offset)
        found += chunk.frames
        offset = chunk.next
    return found


def raws(journal: Journal, offset: int = 0) -> list[bytes]:
    return [frame.raw for frame in frames_of(journal, offset)]


def copy(journal: DiskJournal, into: DiskJournal) -> None:
    into.begin_copy(journal.source)
    into.append_frames(frames_of(journal, max(into.next, journal.oldest)), journal.epochs())


def test_a_copy_has_the_same_frames_epochs_offsets_and_seqs(tmp_path: Path) -> None:
    """What is appended as frames is what the writer's journal has, and stays so when it is opened again."""
    with DiskJournal(tmp_path / "a", source="s") as a, DiskJournal(tmp_path / "b") as b:
        a.append_many("t", [b"1", b"2"])
        a.append("u", b"3", key="k", headers={"h": "v"})
        copy(a, b)
        a.append("t", b"4")
        copy(a, b)
        assert raws(b) == raws(a)
        assert (b.epoch, b.next, b.epochs(), b.sent()) == (a.epoch, a.next, a.epochs(), a.sent())
        want, epochs = raws(a), a.epochs()
    with DiskJournal(tmp_path / "b") as b:
        assert (raws(b), b.epochs(), b.replica) == (want, epochs, True)


def test_a_copy_begins_no_epoch_of_its_own_when_nothing_proves_it(tmp_path: Path) -> None:
    """Opened on another machine (no witness), a copy goes on as what it is; a writer's journal begins an epoch."""
    with DiskJournal(tmp_path / "a", source="s") as a, DiskJournal(tmp_path / "b") as b:
        a.append("t", b"1")
        copy(a, b)
        b._witness.close()
        Path(b._witness._path).unlink()
        epochs = a.epochs()
    with DiskJournal(tmp_path / "b") as b:
        assert (b.epochs(), b.next) == (epochs, 1)


def test_what_the_writer_no_longer_had_stays_a_hole(tmp_path: Path) -> None:
    """A copy that begins late begins at the oldest; one that was away for too long says what is gone."""
    with DiskJournal(tmp_path / "a", source="s") as a, DiskJournal(tmp_path / "b") as b:
        for i in range(30):
            a.append("t", b"%d" % i)
        b.begin_copy("s")
        every = frames_of(a)
        b.append_frames(every[10:15], a.epochs())
        assert (b.oldest, b.next) == (10, 15)
        b.append_frames(every[20:], a.epochs())
        assert (b.oldest, b.next) == (10, 30)
        assert b.read(15).gone == [(15, 19)]
    with DiskJournal(tmp_path / "b") as b:
        assert (b.oldest, b.next, b.recovered.epoch_raised) == (10, 30, False)
        assert b.read(15).gone == [(15, 19)]


def test_only_what_follows_is_appended(tmp_path: Path) -> None:
    """Frames of another source, or of offsets that are there, are refused, and nothing of the call is kept."""
    with DiskJournal(tmp_path / "a", source="s") as a, DiskJournal(tmp_path / "b") as b:
        a.append("t", b"1")
        a.append("t", b"2")
        with pytest.raises(UsageError):
            b.append_frames(frames_of(a))
        copy(a, b)
        with pytest.raises(UsageError):
            b.append_frames(frames_of(a))
        assert b.next == 2


def test_a_promoted_copy_is_the_journal_in_an_epoch_above_all(tmp_path: Path) -> None:
    """Offsets go on, seqs start over, and no clock of the old writer can make a higher epoch."""
    with DiskJournal(tmp_path / "a", source="s") as a, DiskJournal(tmp_path / "b") as b:
        a.append_many("t", [b"1", b"2"])
        copy(a, b)
        b.register("sub.x", 9)
        epoch = b.promote()
        assert is_superseded(next_epoch(a.epoch), epoch)
        receipt = b.append("t", b"3")
        assert (receipt.epoch, receipt.offset, receipt.seq) == (epoch, 2, 0)
        assert b.registered() == {"sub.x": 2}
        assert b.epochs() == [*a.epochs(), (epoch, 2)]
    with DiskJournal(tmp_path / "b") as b:
        assert (b.replica, b.epoch, b.append("t", b"4").offset) == (False, epoch, 3)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    at=st.integers(0, 60),
    small=st.booleans(),
)
def test_a_cut_copy_is_what_was_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], at: int, small: bool
) -> None:
    """Whatever the frames and segments: below the cut everything is there, and another writer's frames follow."""
    path = tmp_path_factory.mktemp("cut")
    a = DiskJournal(path / "a", source="s", fsync="never")
    b = DiskJournal(path / "b", fsync="never", segment_bytes=300 if small else 0)
    with a, b:
        for size in sizes:
            a.append_many("t", [b"x" * 20] * size)
        b.begin_copy("s")
        for frame in frames_of(a):
            b.append_frames([frame], a.epochs())
        at = min(at, a.next)
        before = [event for frame in frames_of(b) for event in frame.events() if event.offset < at]
        b.truncate(at)
        assert [event for frame in frames_of(b) for event in frame.events()] == before
        other = DiskJournal(path / "c", source="s", fsync="never")
        with other:
            other.append_many("t", [b"y"] * (at + 3))
            later = [f.slice(at, f.next_offset) for f in frames_of(other) if f.next_offset > at]
            b.append_frames(later, [(other.epoch, at)])
            assert (b.next, b.epoch) == (other.next, other.epoch)
    with DiskJournal(path / "b", fsync="never") as b:
        events = [event for frame in frames_of(b, b.oldest) for event in frame.events()]
        assert [event.offset for event in events] == list(range(at + 3))
        assert [event.data for event in events] == [b"x" * 20] * at + [b"y"] * 3


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_journal_that_refuses_keeps_what_it_has(tmp_path: Path, kind: str) -> None:
    """Staged events are kept, new ones get the reason, and reading goes on."""
    journal: Journal = (
        MemoryJournal(retention=Retention(max_bytes=1 << 20)) if kind == "memory" else DiskJournal(tmp_path)
    )
    with journal:
        journal.bind("s")
        journal.stage("t", b"1")
        journal.refuse(lambda end: JournalError("x", f"replaced at {end}"))
        for accept in (journal.stage, journal.append):
            with pytest.raises(JournalError, match="replaced at 1"):
                accept("t", b"2")
        assert [e.data for f in frames_of(journal) for e in f.events()] == [b"1"]


@given(st.integers(0, 2000), st.integers(0, TERM - 1))
def test_a_later_term_is_above_every_clock(term: int, clock: int) -> None:
    """Whatever epoch a replaced writer makes, it is below that of the promotion."""
    old = term * TERM + clock
    assert next_term(old) > next_epoch(old) > old
    assert next_term(old) // TERM == term + 1
