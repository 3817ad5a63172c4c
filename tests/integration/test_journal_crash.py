"""Journals with real processes: killed writers, readers that follow."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, JournalReader

# Forks a writer for every line "path seed", and says when it has ended: starting Python for each would take longer than
# all that the writers do.
WRITERS = """
import os, sys
from brokerless.core import DiskJournal

def write(path, seed):
    journal = DiskJournal(path, source="src", fsync="never", segment_bytes=200_000)
    offset = journal.next
    print(os.getpid(), journal.next, journal.epoch, flush=True)
    out = sys.stdout.buffer
    i = 0
    while True:
        i += 1
        kind = (seed + i) % 4
        if kind == 0:
            n = journal.append(f"t{i % 5}", b"%d" % offset).count
        elif kind == 1:
            n = journal.append_many("many", [b"%d" % (offset + k) for k in range(7)]).count
        else:
            n = journal.stage(f"t{i % 3}", b"%d" % offset, key="k" if i % 11 == 0 else "").count
            if i % 50 == 2:
                journal.flush()
        offset += n
        out.write(b"%d\\n" % offset)  # everything before this offset is accepted
        out.flush()

for line in sys.stdin:
    path, seed = line.split()
    child = os.fork()
    if child == 0:
        write(path, int(seed))
    os.waitpid(child, 0)
    print(" ended", flush=True)
"""


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks writers."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as forking:
        yield forking
        forking.kill()


def run_and_kill(writers: subprocess.Popen[bytes], path: Path, seed: int, lines: int) -> tuple[int, int, int]:
    """Start a writer, kill it after it reported `lines` times; return first, epoch and the last reported offset."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    writers.stdin.write(b"%s %d\n" % (os.fsencode(path), seed))
    writers.stdin.flush()
    pid, first, epoch = map(int, writers.stdout.readline().split())
    for _ in range(lines):
        writers.stdout.readline()
    os.kill(pid, signal.SIGKILL)
    accepted = -1
    # What follows an incomplete number makes it none.
    while not (line := writers.stdout.readline()).endswith(b" ended\n"):
        accepted = int(line)
    return first, epoch, accepted


def check(path: Path, accepted: int) -> int:
    """Every accepted event is there exactly once, in order; return how many there are in all."""
    seqs: dict[str, int] = {}
    count = 0
    with JournalReader(path) as reader:
        at = 0
        while at < reader.next:
            chunk = reader.read(at)
            assert not chunk.gone
            for event in (e for f in chunk.frames for e in f.events()):
                assert (event.offset, event.data) == (count, b"%d" % count)
                assert event.seq == seqs.get(event.topic, 0)
                seqs[event.topic] = event.seq + 1
                count += 1
            at = chunk.next
    assert count >= accepted
    return count


def campaign(writers: subprocess.Popen[bytes], path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    total, epochs = 0, set()
    for kill in range(kills):
        first, epoch, accepted = run_and_kill(writers, path, seed + kill, rng.randrange(0, 60))
        epochs.add(epoch)
        assert first >= total
        with DiskJournal(path, fsync="never") as journal:
            assert not journal.recovered.gone
            assert not journal.recovered.epoch_raised
        total = max(total, accepted)
        total = check(path, total)
    assert len(epochs) == 1


@pytest.mark.parametrize("part", range(4))
def test_a_writer_killed_at_random_loses_nothing_accepted(
    writers: subprocess.Popen[bytes], tmp_path: Path, part: int
) -> None:
    """200 kills in four campaigns: after each the journal holds every accepted event once, and goes on."""
    campaign(writers, tmp_path / "journal", 50, 1000 * part)


@pytest.mark.slow
def test_a_writer_killed_two_thousand_times(writers: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The same for much longer."""
    campaign(writers, tmp_path / "journal", 2000, 77)


READER = """
import sys
from brokerless.core import JournalReader
reader = JournalReader(sys.argv[1])
total = int(sys.argv[2])
at = seen = 0
print("ready", flush=True)
while at < total:
    if not reader.wait(at, 60):
        sys.exit(f"nothing after {at}")
    chunk = reader.read(at)
    assert not chunk.gone, chunk.gone
    for frame in chunk.frames:
        assert frame.first_offset == at, (frame.first_offset, at)
        for event in frame.events():
            assert event.data == b"%d" % event.offset
        seen += frame.count
        at = frame.next_offset
print(seen, flush=True)
"""


def test_two_readers_in_other_processes_follow_a_writer_at_full_speed(tmp_path: Path) -> None:
    """Both see every event once, in order, over many segments, while the writer appends without pause."""
    total = 300_000
    with DiskJournal(tmp_path, source="src", fsync="never", segment_bytes=300_000) as journal:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, tmp_path, str(total)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        for first in range(0, total, 1000):
            journal.append_many("t", [b"%d" % i for i in range(first, first + 500)])
            for i in range(first + 500, first + 1000):
                journal.stage("u", b"%d" % i)
            journal.flush()
        for reader in readers:
            out, _ = reader.communicate(timeout=120)
            assert (reader.returncode, out.strip()) == (0, str(total))
    assert len(list(tmp_path.glob("*.seg"))) > 5
