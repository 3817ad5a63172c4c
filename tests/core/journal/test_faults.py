"""Journals when something goes wrong at an awkward instant: interrupts, failing calls, callbacks, power cuts."""

import contextlib
import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from brokerless.core import DiskJournal, Event, Journal, JournalReader, MemoryJournal, Retention
from brokerless.core.errors import Closed, InvalidEvent, JournalError, UsageError

Make = Callable[..., Journal]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A factory of journals of one kind."""

    def build(**options: object) -> Journal:
        if request.param == "memory":
            return MemoryJournal(source="src", **options)  # type: ignore[arg-type]
        return DiskJournal(tmp_path / "j", source="src", fsync="never", **options)  # type: ignore[arg-type]

    return build


def events_of(journal: Journal | JournalReader) -> list[Event]:
    """Everything that can be read; nothing may be gone."""
    at, events = journal.oldest, []
    while at < journal.next:
        chunk = journal.read(at)
        assert not chunk.gone
        assert chunk.next > at
        events += [e for f in chunk.frames for e in f.events() if e.offset >= at]
        at = chunk.next
    return events


class Interrupted(Exception):
    """What the signal handler raises, as Ctrl-C raises KeyboardInterrupt."""


def test_an_interrupt_at_any_instant_leaves_a_journal_that_works(make: Make) -> None:
    """Ctrl-C in any call: no deadlock, every accepted event is where its receipt says, none is there twice."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    journal = make(retention=Retention(max_bytes=1 << 28))
    rng = random.Random(3)
    accepted: dict[int, tuple[bytes, str, int]] = {}
    i = 0
    gc.disable()  # what a callback of the collector raises is swallowed
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(800):
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))
                for _ in range(100_000):
                    i += 1
                    data, topic, key = b"%d" % i, f"t{i % 3}", "k" if i % 11 == 0 else ""
                    if i % 9 == 1:
                        journal.flush()
                        continue
                    receipt = (journal.append if i % 9 == 0 else journal.stage)(topic, data, key=key)
                    accepted[receipt.offset] = (data, topic, receipt.seq)
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    journal.flush()
    events = events_of(journal)
    assert [e.offset for e in events] == list(range(journal.next))
    found = {e.offset: (e.data, e.topic, e.seq) for e in events}
    assert accepted
    assert {offset: found[offset] for offset in accepted} == accepted
    journal.close()


@pytest.mark.parametrize("time", [1.5, "now", 1 << 63, b""])
def test_a_time_that_cannot_be_stored_is_refused_at_once(make: Make, time: object) -> None:
    """It does not get into the batch, where it would make every later flush fail."""
    journal = make()
    journal.stage("t", b"before")
    for call in (
        lambda: journal.stage("t", b"x", time=time),  # type: ignore[arg-type]
        lambda: journal.append("t", b"x", time=time),  # type: ignore[arg-type]
        lambda: journal.append_many("t", [b"x"], times=[time]),  # type: ignore[list-item]
    ):
        with pytest.raises(InvalidEvent, match="time"):
            call()
    journal.flush()
    assert [e.data for e in events_of(journal)] == [b"before"]
    journal.close()


def test_labels_that_fill_a_batch_cannot_make_it_too_large_for_a_frame(make: Make) -> None:
    """Topics, content types and keys count: events without data but with long labels are still flushed."""
    journal = make(retention=Retention(max_bytes=1 << 28))
    for i in range(45_000):
        label = f"{i:0250d}"
        journal.stage(label, b"", content_type=label, key=label)
    journal.flush()
    assert journal.next == 45_000
    journal.close()


def test_an_on_frame_that_raises_does_not_disturb_the_numbers(make: Make) -> None:
    """The events are stored, and the ones after them get the next offsets."""
    journal = make()

    def fail(_: object) -> None:
        raise OSError("no socket")

    journal.on_frame = fail
    with pytest.raises(OSError, match="no socket"):
        journal.append_many("t", [b"x" * 600_000] * 4)  # several frames
    journal.on_frame = None
    assert journal.next == 4
    journal.stage("t", b"y")
    journal.flush()
    assert [(e.offset, e.seq) for e in events_of(journal)] == [(i, i) for i in range(5)]
    journal.close()


def test_closing_ends_the_wait_of_a_producer_that_is_held_back(
    make: Make, until: Callable[..., None]
) -> None:
    """It gets Closed, even if room came at the same time, and nothing is accepted by a closed journal."""
    journal = make(retention=Retention(max_events=10), on_full="block", block_timeout_s=60)
    journal.register("slow")
    got: list[BaseException] = []

    def produce() -> None:
        try:
            while True:
                journal.append("t", b"x")
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    until(lambda: journal.counters.blocked)
    journal._lock.acquire()  # so that it sees the room and the end together
    try:
        journal._set_cursor("slow", 10)
        journal._advances += 1
        journal._closed = True
    finally:
        journal._give(None)
    journal._notify()
    thread.join(30)
    assert isinstance(got[0], Closed)
    journal._closed = False
    journal.close()


def test_staging_keeps_within_max_events(make: Make) -> None:
    """A batch is bounded by events too, not only by bytes."""
    journal = make(retention=Retention(max_events=200))
    for _ in range(5000):
        journal.stage("t", b"")
        assert journal.next + journal.staged - journal.oldest <= 200 + 200 // 16  # and one batch
    journal.flush()
    assert 150 <= journal.next - journal.oldest <= 200
    with pytest.raises(InvalidEvent, match="holds at most 200"):
        journal.append_many("t", [b"x"] * 201)
    assert journal.next - journal.oldest >= 150
    journal.close()


@pytest.mark.parametrize("offset", [-1, "5", 1.0, None, 1 << 64])
def test_a_cursor_position_that_is_none_is_refused(make: Make, offset: object) -> None:
    """Positions are numbers from 0 on; a wrong one changes nothing."""
    journal = make()
    journal.register("g", 0)
    with pytest.raises(UsageError, match="offset"):
        journal.advance("g", offset)  # type: ignore[arg-type]
    assert journal.registered() == {"g": 0}
    journal.close()
    for call in (lambda: journal.advance("g", 1), lambda: journal.unregister("g")):
        with pytest.raises(Closed):
            call()


# -- disk only --------------------------------------------------------------------------------------


def power_cut(path: Path) -> None:
    """Make the next opening believe that the machine was restarted."""
    meta = json.loads((path / "meta.json").read_text())
    meta["boot_id"], meta["clean"] = "another boot", False
    (path / "meta.json").write_text(json.dumps(meta))


def killed(code: str, *arguments: str) -> None:
    """Run a script that ends itself with SIGKILL."""
    script = "import os, signal, sys\nfrom brokerless.core import *\n" + code
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_a_kill_between_a_new_segment_and_its_first_frame_keeps_the_seqs(tmp_path: Path) -> None:
    """Staged events keep the seqs that their receipts told, though the header of the segment was written after."""
    killed(
        "j = DiskJournal(sys.argv[1], source='src', fsync='never', segment_bytes=4096)\n"
        "j.append('t', b'x' * 5000)\n"
        "assert [j.stage('t', b'%d' % i).seq for i in (1, 2, 3)] == [1, 2, 3]\n"
        "os.writev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "j.flush()\n",
        str(tmp_path),
    )
    assert len(list(tmp_path.glob("*.seg"))) == 2
    with DiskJournal(tmp_path, fsync="never") as journal:
        assert [(e.offset, e.seq) for e in events_of(journal)] == [(i, i) for i in range(4)]
        assert journal.sent() == {"t": 4}


def test_staged_events_are_recovered_whatever_the_new_limits_are(tmp_path: Path) -> None:
    """A smaller event limit, fewer topics or a full ring do not keep a journal with accepted events from opening."""
    killed(
        "j = DiskJournal(sys.argv[1], source='src', fsync='never')\n"
        "j.register('slow')\n"
        "j.append('t', b'x' * 50_000)\n"
        "for i in range(100): j.stage(f't{i % 3}', b'%d' % i * 100)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        str(tmp_path),
    )
    with DiskJournal(
        tmp_path,
        fsync="never",
        max_event_bytes=10,
        max_topics=1,
        on_full="reject",
        retention=Retention(max_bytes=50_000),
    ) as journal:
        assert journal.recovered.staged == 100
        assert [e.data for e in events_of(journal)][1:] == [b"%d" % i * 100 for i in range(100)]


def test_a_power_cut_that_leaves_the_newest_segment_empty_does_not_reuse_offsets(tmp_path: Path) -> None:
    """The end is then in an older segment, even if the head file is stale too."""
    with DiskJournal(tmp_path, source="src", fsync="never", segment_bytes=16_384) as journal:
        stale = (tmp_path / "head").read_bytes()
        while len(list(tmp_path.glob("*.seg"))) < 4:
            journal.append_many("t", [b"x" * 100] * 20)
        end = journal._begun_offset
    (tmp_path / "head").write_bytes(stale)
    max(tmp_path.glob("*.seg")).write_bytes(b"")
    power_cut(tmp_path)
    with DiskJournal(tmp_path, fsync="never") as journal:
        assert journal.recovered.epoch_raised
        assert journal.append("t", b"new").offset == end
        assert [e.offset for e in events_of(journal)] == list(range(end + 1))


def test_cursors_beyond_the_end_go_back_to_it_after_a_power_cut(tmp_path: Path) -> None:
    """Their offsets are given to other events, which the cursor's owner has not had."""
    with DiskJournal(tmp_path, source="src", fsync="never") as journal:
        journal.append("t", b"0")
        stale = (tmp_path / "head").read_bytes()
        size = (tmp_path / "00000001.seg").stat().st_size
        journal.append_many("t", [b"x"] * 9)
        journal.register("g", 10)
        journal.register("h", 1)
    (tmp_path / "head").write_bytes(stale)
    os.truncate(tmp_path / "00000001.seg", size)
    power_cut(tmp_path)
    with DiskJournal(tmp_path, fsync="never") as journal:
        assert journal.next == 1
        assert journal.registered() == {"g": 1, "h": 1}


def test_a_segment_in_which_nothing_is_intact_does_not_make_retention_drop_the_rest(tmp_path: Path) -> None:
    """Retention still drops segment by segment."""
    options = {"fsync": "never", "segment_bytes": 16_384, "retention": Retention(max_bytes=200_000)}
    with DiskJournal(tmp_path, source="src", **options) as journal:  # type: ignore[arg-type]
        while len(list(tmp_path.glob("*.seg"))) < 8:
            journal.append_many("t", [b"x" * 100] * 20)
    second = sorted(tmp_path.glob("*.seg"))[1]
    second.write_bytes(bytes(second.stat().st_size))
    with DiskJournal(tmp_path, **options) as journal:  # type: ignore[arg-type]
        while journal.oldest == 0:
            journal.append_many("t", [b"x" * 100] * 20)
        assert len(list(tmp_path.glob("*.seg"))) >= 8


class Failing:
    """Replaces a function of `os`; raises while `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.error = 0
        self.calls = 0
        self._real = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self._real(*arguments)


def test_a_write_and_its_undoing_that_both_fail_cost_nothing_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failed write left is overwritten, and a later failure does not cut into accepted events."""
    with DiskJournal(tmp_path, source="src", fsync="never") as journal:
        journal.append("t", b"0")
        truncate, real = Failing(monkeypatch, "ftruncate"), os.writev

        def half_written(fd: int, parts: tuple[bytes, bytes]) -> int:
            os.write(fd, b"".join(parts)[:30])
            raise OSError(errno.EIO, "interrupted")

        for i in (1, 2, 3):
            truncate.error = errno.EIO
            monkeypatch.setattr(os, "writev", half_written)
            with pytest.raises(JournalError):
                journal.append("t", b"refused")
            monkeypatch.setattr(os, "writev", real)
            truncate.error = 0
            journal.append("t", b"%d" % i)
        assert [e.data for e in events_of(journal)] == [b"0", b"1", b"2", b"3"]
    with DiskJournal(tmp_path, fsync="never") as journal:
        assert [e.data for e in events_of(journal)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("call", ["open", "rename", "fsync", "writev"])
def test_an_error_of_any_call_while_a_segment_is_begun_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each is our error, accepts nothing, and the same call succeeds afterwards; a reader sees all of it once."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with (
        DiskJournal(
            tmp_path, source="src", fsync="batch", segment_bytes=4096, retention=Retention(max_bytes=40_000)
        ) as journal,
        JournalReader(tmp_path) as reader,
    ):
        at, accepted, read, errors = 0, 0, [], set()
        for i in range(40):
            failing = Failing(monkeypatch, call)
            failing.error = errno.EIO if i % 2 else 0
            try:
                journal.append("t", b"%d" % accepted + b" " * 1500)
                accepted += 1
            except JournalError as error:
                errors.add(error.errno)
            monkeypatch.undo()
            assert journal.next == accepted
            chunk = reader.read(at)
            assert not chunk.gone
            read += [int(e.data) for f in chunk.frames for e in f.events()]
            at = chunk.next
        assert accepted >= 20
        assert errors == {errno.EIO}
        assert read == list(range(accepted))
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # what other tests left may be closed meanwhile


def test_a_second_sync_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """Both return only when the data is on the disk."""
    with DiskJournal(tmp_path, source="src", fsync="never") as journal:
        journal.append("t", b"x")
        begun, go, done = threading.Event(), threading.Event(), []
        real = os.fdatasync

        def slow(fd: int) -> None:
            begun.set()
            assert go.wait(30)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", slow)
        threads = [threading.Thread(target=lambda: (journal.sync(), done.append(1))) for _ in range(2)]
        threads[0].start()
        assert begun.wait(30)
        threads[1].start()
        until(journal._sync_lock.locked)
        threads[1].join(0.2)
        assert not done
        go.set()
        for thread in threads:
            thread.join(30)
        assert len(done) == 2


def test_sync_covers_the_segments_that_were_left_unsynced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fsync=never an explicit sync is the only one: it must not stop at the newest segment."""
    with DiskJournal(tmp_path, source="src", fsync="never", segment_bytes=4096) as journal:
        for _ in range(5):
            journal.append("t", b"x" * 5000)
        synced: set[str] = set()
        real = os.fdatasync

        def record(fd: int) -> None:
            synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        monkeypatch.setattr(os, "fdatasync", record)
        journal.sync()
        assert synced == {p.name for p in tmp_path.glob("*.seg")}


def test_the_regular_sync_survives_errors(tmp_path: Path, until: Callable[..., None]) -> None:
    """An on_frame that raises in the syncing thread does not end it: later events are still flushed."""
    with DiskJournal(tmp_path, source="src", fsync="interval", sync_interval_s=0.01) as journal:

        def fail(_: object) -> None:
            raise ValueError

        journal.on_frame = fail
        journal.stage("t", b"x")
        until(lambda: journal.counters.failed)
        journal.on_frame = None
        journal.stage("t", b"y")
        assert journal.wait(1, 20)


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
def test_after_a_restart_of_the_machine_no_journal_is_proven(tmp_path: Path, fsync: str) -> None:
    """Whatever was synced: the disk may have been put back meanwhile, so the epoch rises."""
    with DiskJournal(tmp_path, source="src", fsync=fsync) as journal:  # type: ignore[arg-type]
        journal.append("t", b"x")
    power_cut(tmp_path)
    with DiskJournal(tmp_path) as journal:
        assert journal.recovered.epoch_raised


def test_a_reader_does_not_see_what_the_writer_may_still_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record whose sync fails was never accepted; its offset goes to another event, which readers must get."""
    with DiskJournal(tmp_path, source="src", fsync="batch") as journal, JournalReader(tmp_path) as reader:
        journal.append("t", b"0")
        assert reader.read(0).next == 1
        seen = []

        def fail(_: int) -> None:
            seen.append(reader.read(1))
            raise OSError(errno.EIO, "no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(JournalError):
                journal.append("t", b"refused")
        assert [c.frames for c in seen] == [[]]
    with DiskJournal(tmp_path, fsync="batch") as journal, JournalReader(tmp_path) as reader:
        assert journal.append("t", b"accepted").offset == 1
        assert [e.data for f in reader.read(1).frames for e in f.events()] == [b"accepted"]


@pytest.mark.parametrize("fsync", ["batch", "interval"])
def test_a_disk_that_fails_to_sync_is_not_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: Literal["batch", "interval"]
) -> None:
    """After EIO a second sync would succeed and mean nothing: everything is refused until the journal is reopened."""
    journal = DiskJournal(tmp_path, source="src", fsync=fsync, sync_interval_s=3600)
    journal.append("t", b"0")
    journal.stage("t", b"1")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(JournalError):
            journal.append("t", b"refused") if fsync == "batch" else journal.sync()
    for accept in (journal.append, journal.stage):
        with pytest.raises(JournalError, match="failed to sync") as caught:
            accept("t", b"refused")
        assert caught.value.errno == errno.EIO
    accepted = [e.data for e in events_of(journal)]
    assert accepted == [b"0", b"1"]
    journal.close()
    with DiskJournal(tmp_path, fsync=fsync) as journal:
        journal.append("t", b"2")
        assert [e.data for e in events_of(journal)] == [b"0", b"1", b"2"]


def test_a_forked_child_cannot_touch_the_journal(tmp_path: Path) -> None:
    """A child gets a clear error, the parent goes on, and the lock goes with the parent."""
    journal = DiskJournal(tmp_path, source="src", fsync="interval")
    journal.stage("t", b"0")
    lane = journal.lane(lambda now, topic, data: journal.stage(topic, data), lambda _: None, lambda _: None)
    ours, theirs = os.pipe()
    stays, leaves = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for attempt in (
            lambda: lane("t", b"x"),
            lambda: journal.append("t", b"x"),
            journal.sync,
        ):
            try:
                attempt()
                told.append("accepted")
            except Closed as error:
                told.append("refused" if f"belongs to process {os.getppid()}" in str(error) else str(error))
            except BaseException as error:
                told.append(repr(error))
        journal.close()
        os.write(theirs, "\n".join(told).encode())
        os.read(stays, 1)  # stay, until the parent has opened it again
        os._exit(0)
    try:
        told = os.read(ours, 4096).decode().splitlines()
        assert told == ["refused"] * 3
        journal.append("t", b"1")
        journal.close()
        with DiskJournal(tmp_path, fsync="never") as again:
            assert [e.data for e in events_of(again)] == [b"0", b"1"]
    finally:
        os.write(leaves, b"x")
        os.waitpid(child, 0)
        for descriptor in (ours, theirs, stays, leaves):
            os.close(descriptor)


def test_a_clock_that_is_set_forward_expires_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages are counted by what has really passed since the journal was opened."""
    with DiskJournal(
        tmp_path, source="src", fsync="never", segment_bytes=16_384, retention=Retention(max_age_s=600)
    ) as journal:
        for _ in range(20):
            journal.append("t", b"x" * 4000)
        monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
        journal.append("t", b"x")
        assert journal.oldest == 0


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """Half-written temporary files of dead processes go; those of living ones and all others stay."""
    DiskJournal(tmp_path, source="src", fsync="never").close()
    dead = subprocess.Popen(["true"])
    dead.wait()
    kept = {f"meta.json.{os.getpid()}.1.tmp", "meta.json.note.tmp", "other.1.2.tmp"}
    for name in {f"meta.json.{dead.pid}.7.tmp", *kept}:
        (tmp_path / name).write_bytes(b"half")
    DiskJournal(tmp_path, fsync="never").close()
    assert {name for name in os.listdir(tmp_path) if name.endswith(".tmp")} == kept


def test_hostile_files_are_our_errors_or_cost_nothing(tmp_path: Path) -> None:
    """A wild index, odd file names, a salt that is none, limits beyond all memory, and a closed reader."""
    with DiskJournal(tmp_path, source="src", fsync="never") as journal:
        journal.append_many("t", [b"x"] * 10)
    (tmp_path / "00000001.idx").write_bytes(b"\x00" * 8 + b"\xff" * 8)
    (tmp_path / "²²².seg").write_bytes(b"")
    reader = JournalReader(tmp_path)
    assert reader.read(5, max_bytes=1 << 60).next == reader.read(5, max_bytes=0).next == 10
    reader.close()
    with pytest.raises(Closed):
        _ = reader.next
    DiskJournal(tmp_path, fsync="never").close()
    meta = json.loads((tmp_path / "meta.json").read_text())
    for salt in ("zz", "", "0011"):
        (tmp_path / "meta.json").write_text(json.dumps({**meta, "salt": salt}))
        for opening in (DiskJournal, JournalReader):
            with pytest.raises(JournalError, match=r"meta\.json is damaged"):
                opening(tmp_path)


def test_a_meta_file_replaced_within_a_tick_is_noticed(tmp_path: Path) -> None:
    """A reader that came before the source was bound learns its name, though the file's time is the same."""
    with DiskJournal(tmp_path, fsync="never") as journal, JournalReader(tmp_path) as reader:
        assert reader.source == ""
        stamp = (tmp_path / "meta.json").stat().st_mtime_ns
        journal.bind("src")
        os.utime(tmp_path / "meta.json", ns=(stamp, stamp))
        assert reader.source == "src"


def test_a_full_disk_on_flush_says_what_stays_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged events were accepted: the error of a flush must not say that they were not, and they are written later."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DiskJournal(tmp_path, source="src", fsync="never") as journal:
        for i in range(3):
            journal.stage("t", b"%d" % i)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.raises(JournalError, match="the 3 events staged before stay accepted"):
                journal.flush()
            with pytest.raises(JournalError, match="the 3 events staged before stay accepted"):
                journal.append("t", b"refused")
        journal.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.raises(JournalError, match="nothing of this call was accepted"):
                journal.append("t", b"refused")
        assert [e.data for f in journal.read(0).frames for e in f.events()] == [b"0", b"1", b"2"]
