"""Journals against a model: random calls, and for disk a crash at a random moment of a live writer.

A crash is simulated by stopping the writer, a process of its own, wherever it is, copying its directory, and
letting it go on: the copy is what `kill -9` would have left.
"""

import fcntl
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from brokerless.core import DiskJournal, Journal, JournalReader, MemoryJournal, Retention
from brokerless.core.errors import Evicted, JournalFull
from tests.core.journal.copies import crashed

TOPICS = ["a", "b", "topic/c"]
topics = st.sampled_from(TOPICS)
datas = st.binary(max_size=300) | st.integers(1, 9000).map(bytes)
keys = st.sampled_from(["", "", "k"])


class JournalMachine(RuleBasedStateMachine):
    """Any calls in any order: the journal holds the newest accepted events, numbered as the receipts said."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="journal-model-")
        self.accepted: list[tuple[str, int, bytes, str]] = []
        self.seqs: dict[str, int] = {}
        self.cursors: dict[str, int] = {}

    def open(self) -> Journal:
        raise NotImplementedError

    @initialize(on_full=st.sampled_from(["evict", "reject"]), bound=st.sampled_from([0, 60_000, 400_000]))
    def begin(self, on_full: str, bound: int) -> None:
        self.options: dict[str, Any] = {
            "on_full": on_full,
            "retention": Retention(max_bytes=bound) if bound else Retention(max_events=60),
        }
        self.journal = self.open()
        self.epoch = self.journal.epoch

    def take(self, receipt: Any, topic: str, data: list[bytes], key: str) -> None:
        assert (receipt.offset, receipt.seq) == (len(self.accepted), self.seqs.get(topic, 0))
        assert (receipt.epoch, receipt.count) == (self.epoch, len(data))
        for one in data:
            self.accepted.append((topic, self.seqs.get(topic, 0), one, key))
            self.seqs[topic] = self.seqs.get(topic, 0) + 1

    @rule(topic=topics, data=datas, key=keys, how=st.sampled_from(["stage", "append"]))
    def one(self, topic: str, data: bytes, key: str, how: str) -> None:
        try:
            receipt = getattr(self.journal, how)(topic, data, key=key)
        except JournalFull:
            assert self.options["on_full"] == "reject"
            assert self.cursors
        else:
            self.take(receipt, topic, [data], key)

    @rule(topic=topics, data=st.lists(datas, min_size=1, max_size=8))
    def many(self, topic: str, data: list[bytes]) -> None:
        try:
            receipt = self.journal.append_many(topic, data)
        except JournalFull:
            assert self.options["on_full"] == "reject"
            assert self.cursors
        else:
            self.take(receipt, topic, data, "")

    @rule()
    def flush(self) -> None:
        self.journal.flush()
        assert self.journal.next == len(self.accepted)

    @rule(name=st.sampled_from(["g", "h"]))
    def register(self, name: str) -> None:
        position = self.journal.register(name)
        assert position == self.cursors.setdefault(name, self.journal.oldest)

    @precondition(lambda self: self.cursors)
    @rule(share=st.floats(0, 1), data=st.data())
    def advance(self, share: float, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        position = int(share * self.journal.next)
        self.journal.advance(name, position)
        self.cursors[name] = position

    @rule(max_bytes=st.integers(1, 30_000), share=st.floats(0, 1))
    def read(self, max_bytes: int, share: float) -> None:
        at = int(share * self.journal.next)
        if at < self.journal.oldest:
            with pytest.raises(Evicted):
                self.journal.read(at)
            at = self.journal.oldest
        self.compare(self.journal, at, max_bytes)

    def compare(self, journal: Journal | JournalReader, at: int, max_bytes: int = 1 << 20) -> None:
        while at < journal.next:
            chunk = journal.read(at, max_bytes=max_bytes)
            assert not chunk.gone
            for event in (e for f in chunk.frames for e in f.events() if e.offset >= at):
                assert event.offset == at
                assert (event.topic, event.seq, event.data, event.key) == self.accepted[at]
                at += 1
            assert at == chunk.next

    @invariant()
    def numbers(self) -> None:
        if hasattr(self, "journal"):
            assert self.journal.next + self.journal.staged == len(self.accepted)
            assert self.journal.sent() == self.seqs
            assert self.journal.registered() == self.cursors

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.flush()
            self.compare(self.journal, self.journal.oldest)
            self.journal.close()
        shutil.rmtree(self.directory)


class MemoryMachine(JournalMachine):
    def open(self) -> Journal:
        return MemoryJournal(source="src", **self.options)


class DiskMachine(JournalMachine):
    def open(self) -> Journal:
        return DiskJournal(
            self.directory + "/j", source="src", fsync="never", segment_bytes=16_384, **self.options
        )

    @rule()
    def reopen(self) -> None:
        """Closing and opening changes nothing but that everything can be read."""
        self.journal.close()
        self.journal = self.open()
        assert self.journal.epoch == self.epoch
        assert self.journal.next == len(self.accepted)

    @rule()
    def copy(self) -> None:
        """What a crash right now would leave has everything accepted, staged or not; a reader sees the rest."""
        copy = self.directory + "/copy"
        with crashed(Path(self.directory, "j"), Path(copy)):
            with JournalReader(copy) as reader:
                assert reader.next == self.journal.next
                self.compare(reader, reader.oldest)
            with DiskJournal(copy, fsync="never", segment_bytes=16_384, **self.options) as journal:
                assert not journal.recovered.gone
                assert (journal.epoch, journal.next) == (self.epoch, len(self.accepted))
                assert journal.sent() == self.seqs
                assert journal.registered() == self.cursors
                self.compare(journal, journal.oldest)
        shutil.rmtree(copy)


TestMemory = MemoryMachine.TestCase
TestDisk = DiskMachine.TestCase
for _case in (TestMemory, TestDisk):
    _case.settings = settings(settings.default, max_examples=25, stateful_step_count=40, deadline=None)


WRITER = """
import random, sys
from brokerless.core import DiskJournal, Retention
path, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
journal = DiskJournal(path, source="src", fsync="never", segment_bytes=16_384, retention=Retention(max_bytes=1 << 30))
journal.register("g")
out = sys.stdout.buffer
offset = journal.next
while True:
    n, topic, key = 1, f"t{rng.randrange(4)}", rng.choice(["", "", "key"])
    datas = [b"%d " % (offset + i) * rng.choice([1, 1, 30, 300]) for i in range(rng.choice([1, 1, 5]))]
    kind = rng.randrange(5)
    if len(datas) > 1:
        journal.append_many(topic, datas)
    elif kind == 0:
        journal.append(topic, datas[0], key=key)
    else:
        journal.stage(topic, datas[0], key=key)
    if kind == 1:
        journal.flush()
        journal.advance("g", journal.next)
    offset += len(datas)
    out.write(b"%d\\n" % offset)
    out.flush()
"""


def crashes(directory: Path, count: int, seed: int) -> None:
    """Stop, copy, let go on, `count` times; each copy must hold everything reported before it, and go on."""
    rng = random.Random(seed)
    live = directory / "live"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, live, str(seed)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    # A small pipe holds the writer back while a copy is checked.
    fcntl.fcntl(writer.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    reported, rest = 0, b""

    def drain() -> None:
        nonlocal reported, rest
        while piece := os.read(writer.stdout.fileno(), 1 << 16) if readable() else b"":  # type: ignore[union-attr]
            *lines, rest = (rest + piece).split(b"\n")
            reported = int(lines[-1]) if lines else reported

    def readable() -> bool:
        return bool(select.select([writer.stdout], [], [], 0)[0])

    try:
        deadline = time.monotonic() + 60
        while not reported:
            assert time.monotonic() < deadline
            drain()
            time.sleep(0.001)
        for crash in range(count):
            until = time.perf_counter() + rng.uniform(0.0002, 0.003)
            while time.perf_counter() < until:
                drain()
            os.kill(writer.pid, signal.SIGSTOP)
            wait_until_stopped(writer.pid)
            drain()
            accepted = reported
            copy = directory / f"copy{crash}"
            with crashed(live, copy):
                os.kill(writer.pid, signal.SIGCONT)
                check_copy(copy, accepted)
            shutil.rmtree(copy)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline


def check_copy(path: Path, accepted: int) -> None:
    with DiskJournal(path, fsync="never") as journal:
        assert not journal.recovered.gone
        assert not journal.recovered.epoch_raised
        assert journal.next >= accepted
        assert journal.registered()["g"] <= journal.next
        journal.append("t0", b"%d " % journal.next)
        seqs: dict[str, int] = {}
        at = 0
        while at < journal.next:
            chunk = journal.read(at)
            assert not chunk.gone
            for event in (e for f in chunk.frames for e in f.events()):
                assert event.offset == at
                assert event.data.startswith(b"%d " % at)
                assert event.seq == seqs.get(event.topic, 0)
                seqs[event.topic] = event.seq + 1
                at += 1
        assert seqs == journal.sent()


def test_a_copy_at_any_moment_of_a_live_writer_is_a_whole_journal(tmp_path: Path) -> None:
    """Twelve simulated crashes of one writer: everything reported is there once, with its numbers."""
    crashes(tmp_path, 12, 11)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # every copy is read from its beginning
def test_a_thousand_copies_of_live_writers(tmp_path: Path) -> None:
    """The same for longer, with a fresh writer every hundred crashes."""
    for seed in range(10):
        crashes(tmp_path / str(seed), 100, seed)
