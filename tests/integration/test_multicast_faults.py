"""Real processes that go offline, are killed, and come back."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokerless.core import Cursor, IntervalSet, Reason
from brokerless.multicast import Subscriber
from tests.multicast.groups import new_group

# What the publishers of these tests are paced to, and for how long a subscriber is away.
RATE = 50_000
AWAY_S = 5.0

# Publishes at a rate until told to stop; says after every batch what was accepted, on one line each.
PUBLISH = """
import json, sys, threading, time
from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.multicast import Publisher

group, kind, path, keep, rate = sys.argv[1:6]
retention = Retention(max_events=int(keep))
journal = DiskJournal(path, retention=retention) if kind == "disk" else MemoryJournal(retention=retention)
words = iter(sys.stdin)
pause = threading.Event()

def listen():
    for word in sys.stdin:
        if word.strip() == "pause":
            pause.set()
        else:
            break
    done.set()

done = threading.Event()
threading.Thread(target=listen, daemon=True).start()
with Publisher(group, "FAULT", journal=journal) as pub:
    print(json.dumps({"epoch": pub.epoch, "next": journal.next}), flush=True)
    batch, begun, sent = 200, time.monotonic(), 0
    while not done.is_set():
        if pause.is_set():
            print(json.dumps({"paused": journal.next, "oldest": journal.oldest}), flush=True)
            done.wait(60)
            break
        first = journal.next
        receipt = pub.publish_many("t", [b"%09d" % i for i in range(first, first + batch)])
        sent += batch
        print(json.dumps({"accepted": receipt.offset + receipt.count}), flush=True)
        ahead = sent / float(rate) - (time.monotonic() - begun)
        if ahead > 0:
            time.sleep(ahead)
"""

# Follows with a cursor; writes every range that it has processed, and every loss, to a file of its own.
FOLLOW = """
import json, os, sys
from brokerless.core import Lost
from brokerless.multicast import Subscriber

group, cursor, witness = sys.argv[1:4]
fd = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with Subscriber(group, "FAULT", cursor=cursor, commit_every_s=0.1) as sub:
    for item in sub.items():
        if isinstance(item, Lost):
            word = {"lost": [item.first, item.last, str(item.reason)]}
        else:
            events = item.events
            assert [int(e.data) for e in events] == list(range(item.first_offset, item.next_offset))
            word = {"got": [item.first_offset, item.next_offset - 1]}
        os.write(fd, json.dumps(word).encode() + b"\\n")
"""


class Process:
    """A child with its standard output read line by line."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> Iterator[dict[str, int]]:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            yield json.loads(line)

    def tell(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(20)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start child processes that are surely gone when the test is over."""
    children: list[Process] = []

    def make(program: str, *arguments: object) -> Process:
        process = Process(program, *map(str, arguments))
        children.append(process)
        return process

    yield make
    for process in children:
        process.end()


def witnessed(path: Path) -> tuple[IntervalSet, int, list[tuple[int, int, str]]]:
    """What a subscriber wrote: the offsets it got, how many of them more than once, and its losses."""
    got, repeated, lost = IntervalSet(), 0, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            word = json.loads(line)
        except ValueError:
            continue  # the last line of a killed process
        if "got" in word:
            first, last = word["got"]
            repeated += last - first + 1 - got.add(first, last)
        else:
            lost.append(tuple(word["lost"]))
    return got, repeated, lost


def stay_away(lines: Iterator[dict[str, int]], had: int) -> None:
    """Let 5 s pass in which 50,000 events are accepted each second; longer where the machine cannot do that.

    Counted from what the subscriber `had`: the next lines may have been written long before it was killed.
    """
    accepted, begun = had, time.monotonic()
    while accepted - had <= RATE * AWAY_S or time.monotonic() - begun < AWAY_S:
        accepted = next(lines)["accepted"]
        assert time.monotonic() - begun < 60, f"{accepted - had} events are far from {RATE}/s"


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_five_seconds_offline_with_a_journal_that_holds_it(
    start: Callable[..., Process], tmp_path: Path, until: Callable[..., None], kind: str
) -> None:
    """A subscriber killed for 5 s at 50,000 events/s gets everything when it is back: zero lost."""
    group, cursor, witness = new_group(), tmp_path / "cursor", tmp_path / "witness"
    subscriber = start(FOLLOW, group, cursor, witness)
    publisher = start(PUBLISH, group, kind, tmp_path / "journal", 20_000_000, RATE)
    lines = publisher.lines()
    next(lines)
    until(
        lambda: witnessed(witness)[0].total > 10_000 if next(lines) else False, 60, "the subscriber receives"
    )
    subscriber.kill()
    had = witnessed(witness)[0].last
    stay_away(lines, had)
    start(FOLLOW, group, cursor, witness)
    publisher.tell("pause")
    total = next(word["paused"] for word in lines if "paused" in word)
    assert total - had > RATE * AWAY_S, "so much was published that the subscriber was not there for"
    begun = witnessed(witness)[0].first
    until(lambda: witnessed(witness)[0].total + begun >= total, 60, "everything has arrived")
    got, repeated, lost = witnessed(witness)
    assert list(got) == [(begun, total - 1)]
    assert lost == []
    # What was processed after the last save of the cursor comes again: 0.1 s at 50,000/s, on a busy machine.
    assert repeated < 100_000


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_five_seconds_offline_with_a_journal_that_is_too_small(
    start: Callable[..., Process], tmp_path: Path, until: Callable[..., None], kind: str
) -> None:
    """The same with a journal of 100,000 events: exactly the evicted range is lost, and reported as that."""
    group, cursor, witness = new_group(), tmp_path / "cursor", tmp_path / "witness"
    subscriber = start(FOLLOW, group, cursor, witness)
    publisher = start(PUBLISH, group, kind, tmp_path / "journal", 100_000, RATE)
    lines = publisher.lines()
    next(lines)
    saved = Cursor(cursor)
    until(lambda: saved.load().positions if next(lines) else False, 60, "the subscriber receives, and saves")
    subscriber.kill()
    before = witnessed(witness)[0]
    position = saved.load().positions["FAULT"]
    stay_away(lines, before.last)
    publisher.tell("pause")
    paused = next(word for word in lines if "paused" in word)
    total, oldest = paused["paused"], paused["oldest"]
    assert 0 < total - oldest <= 100_000, "the journal keeps its bound"
    start(FOLLOW, group, cursor, witness)
    until(lambda: total - 1 in witnessed(witness)[0], 60, "everything that is left has arrived")
    got, repeated, lost = witnessed(witness)
    evicted = (position.offset, oldest - 1, str(Reason.EVICTED))
    assert lost == [evicted], "from where the cursor was to what the journal still has, told once"
    assert list(got) == [(before.first, before.last), (oldest, total - 1)], "and everything else arrived"
    assert repeated == 0


def test_a_killed_publisher_goes_on_with_its_session(start: Callable[..., Process], tmp_path: Path) -> None:
    """kill -9 in mid-stream, restart on the disk journal, three times: nothing accepted is lost, no repeats."""
    group = new_group()
    accepted = 0
    offsets = IntervalSet()
    sessions = set()
    with Subscriber(group, "FAULT", start="oldest") as sub:
        for round_ in range(4):
            publisher = start(PUBLISH, group, "disk", tmp_path / "journal", 2_000_000, 30_000)
            lines = publisher.lines()
            hello = next(lines)
            assert hello["next"] >= accepted, "what was accepted is in the journal"
            goal = accepted + 5_000
            for word in lines:
                accepted = word["accepted"]
                if accepted >= goal:
                    break
            if round_ < 3:
                publisher.kill()
            deadline = time.monotonic() + (60 if round_ == 3 else 0.2)
            while time.monotonic() < deadline and not (offsets and offsets.last >= accepted - 1):
                for batch in sub.batches(0.2):
                    assert [int(d) for d in batch.datas] == list(range(batch.first_offset, batch.next_offset))
                    assert offsets.add(batch.first_offset, batch.next_offset - 1) == len(batch)
                    sessions.add(sub.session)
                    if offsets.last >= accepted - 1:
                        break
        assert list(offsets) == [(0, offsets.last)]
        assert offsets.last >= accepted - 1
        assert len(sessions) == 1
        assert not sub.losses
        assert sub.counters.lost == 0


def test_a_stopped_subscriber_comes_back(
    start: Callable[..., Process], tmp_path: Path, until: Callable[..., None]
) -> None:
    """SIGSTOP for longer than every buffer lasts, then SIGCONT: the kernel dropped, repair brings it all."""
    group, witness = new_group(), tmp_path / "witness"
    subscriber = start(FOLLOW, group, tmp_path / "cursor", witness)
    publisher = start(PUBLISH, group, "memory", "-", 2_000_000, RATE)
    lines = publisher.lines()
    next(lines)
    until(
        lambda: witnessed(witness)[0].total > 10_000 if next(lines) else False, 60, "the subscriber receives"
    )
    subscriber.child.send_signal(signal.SIGSTOP)
    go_on = time.monotonic() + 2.5
    while time.monotonic() < go_on:
        next(lines)
    subscriber.child.send_signal(signal.SIGCONT)
    publisher.tell("pause")
    total = next(word["paused"] for word in lines if "paused" in word)
    begun = witnessed(witness)[0].first
    until(lambda: witnessed(witness)[0].total + begun >= total, 60, "everything has arrived")
    got, repeated, lost = witnessed(witness)
    assert list(got) == [(begun, total - 1)]
    assert repeated == 0
    assert lost == []
