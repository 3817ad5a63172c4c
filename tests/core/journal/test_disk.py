"""What a disk journal promises beyond the common interface."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, JournalReader, Retention
from brokerless.core.errors import ConfigError, Evicted, JournalError, JournalLocked


def fill(path: Path, n: int = 10, **options: object) -> list[bytes]:
    """A closed journal with `n` events."""
    datas = [b"%d" % i for i in range(n)]
    with DiskJournal(path, source="src", fsync="never", **options) as journal:  # type: ignore[arg-type]
        for data in datas:
            journal.append("t", data)
    return datas


def read_all(path: Path) -> list[bytes]:
    """The data of all events, read by a reader of its own."""
    with JournalReader(path) as reader:
        at, datas = reader.oldest, []
        while at < reader.next:
            chunk = reader.read(at)
            datas += [e.data for f in chunk.frames for e in f.events() if e.offset >= at]
            at = chunk.next
        return datas


def in_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def test_reopening_goes_on_with_numbers_epoch_and_cursors(tmp_path: Path) -> None:
    """After a clean close nothing is different: same epoch, next offset, next seqs, cursor positions."""
    with DiskJournal(tmp_path, source="src") as journal:
        epoch = journal.epoch
        journal.append("a", b"1")
        journal.append("b", b"2")
        journal.register("group", 1)
    with DiskJournal(tmp_path) as journal:
        assert (journal.source, journal.epoch, journal.next) == ("src", epoch, 2)
        assert journal.recovered.clean
        assert journal.registered() == {"group": 1}
        receipt = journal.append("a", b"3")
        assert (receipt.epoch, receipt.offset, receipt.seq) == (epoch, 2, 1)
    assert read_all(tmp_path) == [b"1", b"2", b"3"]


def test_numbers_of_topics_survive_the_segments_they_were_in(tmp_path: Path) -> None:
    """A topic whose events are long evicted goes on with its seq: segments carry the numbering."""
    options = {"retention": Retention(max_bytes=150_000), "segment_bytes": 16_384, "fsync": "never"}
    with DiskJournal(tmp_path, source="src", **options) as journal:
        journal.append("rare", b"x")
        for _ in range(2000):
            journal.append("busy", b"y" * 200)
        assert journal.oldest > 0
    with DiskJournal(tmp_path, **options) as journal:
        assert journal.append("rare", b"x").seq == 1
        assert journal.append("busy", b"x").seq == 2000
        assert JournalReader(tmp_path).sent() == {"rare": 2, "busy": 2001}


def test_a_second_writer_is_refused_and_readers_are_welcome(tmp_path: Path) -> None:
    """The lock names its holder; it is free again after close."""
    with DiskJournal(tmp_path, source="src") as journal:
        journal.append("t", b"x")
        with pytest.raises(JournalLocked, match=str(os.getpid())):
            DiskJournal(tmp_path)
        assert read_all(tmp_path) == [b"x"]
    DiskJournal(tmp_path).close()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    """A journal on a file is refused for writing and for reading, by name."""
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(JournalError, match="is a file"):
        DiskJournal(path)
    with pytest.raises(JournalError, match="is a file"):
        JournalReader(path)
    assert path.read_text() == "mine"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """A reader says that there is no journal; a writer makes one, with parents."""
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(tmp_path)
    DiskJournal(tmp_path / "a" / "b", source="src").close()


def test_a_read_only_directory(tmp_path: Path) -> None:
    """Without permission to write the error says so, and readers still work."""
    fill(tmp_path)
    os.chmod(tmp_path, 0o555)
    for parent in [tmp_path, *tmp_path.parents]:
        if os.stat(parent).st_uid == os.getuid() and parent != tmp_path and "pytest" in str(parent):
            os.chmod(parent, 0o755)
    done = in_child(
        "import os, sys\n"
        "from brokerless.core import DiskJournal, JournalReader\n"
        "from brokerless.core.errors import JournalError\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: DiskJournal(sys.argv[1])\n"
        "except JournalError as error: print('refused', error)\n"
        "print(JournalReader(sys.argv[1]).next)\n",
        str(tmp_path),
    )
    os.chmod(tmp_path, 0o755)
    assert "refused" in done.stdout, done.stderr
    assert "not writable" in done.stdout
    assert done.stdout.split()[-1] == "10"


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    """A journal of a later version is refused with both versions, and not touched."""
    fill(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["format"] = 99
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    for opening in (DiskJournal, JournalReader):
        with pytest.raises(JournalError, match="format 99"):
            opening(tmp_path)
    assert json.loads((tmp_path / "meta.json").read_text())["format"] == 99


def test_damaged_or_missing_meta_is_named(tmp_path: Path) -> None:
    """Without a usable meta.json nothing is guessed."""
    fill(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(JournalError, match=r"meta\.json is damaged"):
        DiskJournal(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(JournalError, match=r"no meta\.json"):
        DiskJournal(tmp_path)


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path) -> None:
    """When the file may not grow, the call raises with errno, earlier events stay, and later ones go on."""
    code = (
        "import resource, sys\n"
        "from brokerless.core import DiskJournal\n"
        "from brokerless.core.errors import JournalError\n"
        "j = DiskJournal(sys.argv[1], source='src', fsync='never')\n"
        "j.append_many('t', [b'x' * 100] * 100)\n"
        "limit = 3_000_000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "accepted = 100\n"
        "try:\n"
        "    while True:\n"
        "        j.append_many('t', [b'x' * 1000] * 100); accepted += 100\n"
        "except JournalError as error: print('error', error.errno, flush=True)\n"
        "assert j.next == accepted, (j.next, accepted)\n"
        "j.stage('t', b'kept in the staging area')\n"
        "try: j.append_many('t', [b'x' * 1_000_000])\n"
        "except JournalError as error: print('again', error.errno, flush=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "j.append('t', b'after')\n"
        "j.close(); print('accepted', accepted)\n"
    )
    done = in_child(code, str(tmp_path))
    assert f"error {errno.EFBIG}" in done.stdout, done.stderr
    assert f"again {errno.EFBIG}" in done.stdout
    accepted = int(done.stdout.split()[-1])
    datas = read_all(tmp_path)
    assert len(datas) == accepted + 2
    assert datas[-2:] == [b"kept in the staging area", b"after"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_without_space(tmp_path: Path) -> None:
    """ENOSPC on a real, full file system: refused, nothing accepted is lost, goes on when there is room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=True)
    try:
        journal = DiskJournal(tmp_path / "j", source="src", fsync="never")
        accepted = 0
        with pytest.raises(JournalError) as caught:
            for _ in range(1000):
                journal.append_many("t", [b"x" * 1000] * 20)
                accepted += 20
        assert caught.value.errno == errno.ENOSPC
        assert journal.counters.failed == 1
        journal.close()
        assert len(read_all(tmp_path / "j")) == accepted
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_staged_events_survive_a_kill(tmp_path: Path) -> None:
    """Events accepted by stage and never flushed are there after SIGKILL, with topic, key, type and time."""
    code = (
        "import os, signal, sys\n"
        "from brokerless.core import DiskJournal\n"
        "j = DiskJournal(sys.argv[1], source='src')\n"
        "j.append('t', b'0')\n"
        "j.stage('t', b'1', 'text/plain', 'key', 123456); j.stage('u', b'2')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert in_child(code, str(tmp_path)).returncode == -9
    with DiskJournal(tmp_path) as journal:
        assert not journal.recovered.clean
        assert journal.recovered.staged == 2
        assert not journal.recovered.epoch_raised
        events = [e for f in journal.read(0).frames for e in f.events()]
        assert [(e.topic, e.data, e.seq) for e in events] == [("t", b"0", 0), ("t", b"1", 1), ("u", b"2", 0)]
        assert (events[1].content_type, events[1].key, events[1].time) == ("text/plain", "key", 123456)


def test_after_a_restart_of_the_machine_the_epoch_rises(tmp_path: Path) -> None:
    """Unsynced events may be missing without a trace, so numbers must not be used twice: new epoch, seqs from 0."""
    code = (
        "import os, signal, sys\n"
        "from brokerless.core import DiskJournal\n"
        "j = DiskJournal(sys.argv[1], source='src'); j.append_many('t', [b'x'] * 5)\n"
        "print(j.epoch, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    old = int(in_child(code, str(tmp_path)).stdout)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["boot_id"] = "another boot"
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with DiskJournal(tmp_path) as journal:
        assert journal.recovered.epoch_raised
        assert journal.epoch > old
        receipt = journal.append("t", b"y")
        assert (receipt.epoch, receipt.offset, receipt.seq) == (journal.epoch, 5, 0)
        assert journal.epochs() == [(old, 0), (journal.epoch, 5)]
    assert read_all(tmp_path) == [b"x"] * 5 + [b"y"]


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
def test_every_sync_policy_accepts_and_reads_back(tmp_path: Path, fsync: str) -> None:
    """The three policies differ in what a power cut costs, not in what readers see."""
    with DiskJournal(tmp_path, source="src", fsync=fsync, sync_interval_s=0.01) as journal:  # type: ignore[arg-type]
        for i in range(50):
            journal.stage("t", b"%d" % i)
        journal.sync()
        assert len(read_all(tmp_path)) == 50


def test_interval_sync_makes_staged_events_readable(tmp_path: Path) -> None:
    """With fsync=interval nothing stays staged for longer than the interval."""
    with DiskJournal(tmp_path, source="src", fsync="interval", sync_interval_s=0.02) as journal:
        journal.stage("t", b"x")
        assert journal.wait(0, 20)


def test_a_reader_that_falls_behind_retention_is_told(tmp_path: Path) -> None:
    """A reader in the middle of what gets deleted gets Evicted with the oldest offset, and can go on there."""
    with DiskJournal(
        tmp_path, source="src", fsync="never", retention=Retention(max_bytes=200_000), segment_bytes=16_384
    ) as journal:
        journal.append_many("t", [b"x" * 100] * 50)
        reader = JournalReader(tmp_path)
        assert reader.read(0, max_bytes=1).next > 0
        for _ in range(200):
            journal.append_many("t", [b"x" * 100] * 50)
        at = 50
        with pytest.raises(Evicted) as caught:
            while True:
                following = reader.read(at).next
                assert following > at
                at = following
        assert caught.value.oldest == journal.oldest == reader.oldest
        assert reader.read(caught.value.oldest).frames[0].first_offset == caught.value.oldest
        reader.close()


def test_reading_anywhere_uses_the_index_and_does_not_need_it(tmp_path: Path) -> None:
    """Any offset is found, with the index, with a damaged one and without one."""
    with DiskJournal(tmp_path, source="src", fsync="never", segment_bytes=1 << 20) as journal:
        for _ in range(300):
            journal.append_many("t", [b"x" * 100] * 100)
    wanted = [0, 1, 12_345, 29_999]
    for damage in (lambda p: None, lambda p: p.write_bytes(b"\xff" * 160), lambda p: p.unlink()):
        for index in tmp_path.glob("*.idx"):
            damage(index)
        with JournalReader(tmp_path) as reader:
            for offset in wanted:
                frame = reader.read(offset, max_bytes=1).frames[0]
                assert frame.first_offset <= offset < frame.next_offset


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """Unknown sync policies and intervals are ConfigErrors."""
    with pytest.raises(ConfigError, match="fsync"):
        DiskJournal(tmp_path, fsync="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sync_interval_s"):
        DiskJournal(tmp_path, sync_interval_s=0)


def test_thousands_of_cursors_survive(tmp_path: Path) -> None:
    """The table of positions grows, reuses free slots, and is there after reopening."""
    with DiskJournal(tmp_path, source="src") as journal:
        for i in range(500):
            journal.register(f"group-{i}", i)
        for i in range(0, 500, 2):
            journal.unregister(f"group-{i}")
        journal.register("new", 7)
        expected = journal.registered()
    with DiskJournal(tmp_path) as journal:
        assert journal.registered() == expected
        assert len(expected) == 251


def test_open_files_are_given_back(tmp_path: Path) -> None:
    """Opening and closing journals and readers leaves no file descriptor behind."""
    fill(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with DiskJournal(tmp_path / "a") as journal, JournalReader(tmp_path / "a") as reader:
            journal.append("t", b"x")
            reader.read(0)
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests left may be closed meanwhile
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
