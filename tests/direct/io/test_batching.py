"""When staged events are sent."""

import time

import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import JournalError
from brokerless.direct.counters import PublisherCounters
from brokerless.direct.io.batching import Batcher, Timer

from ..conftest import eventually


def flusher_of(journal: MemoryJournal, max_wait_s: float = 0.05) -> Batcher:
    return Batcher(journal, max_wait_s, PublisherCounters(), journal.stage, name="test")


def test_a_timer_fires_when_it_was_last_set_to() -> None:
    """Moving the timer moves it; the waiter is not woken by that."""
    timer = Timer()
    began = time.monotonic()
    timer.set(10_000_000_000)
    timer.set(30_000_000)
    timer.wait()
    assert 0.02 < time.monotonic() - began < 5
    timer.close()


def test_what_nobody_sends_is_sent_by_the_thread() -> None:
    """An event that was staged while busy goes out within max_wait_s though nothing is published after it."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal)
    journal.stage("t", b"x")
    flusher.arm(time.time_ns())
    assert journal.next == 0
    flusher.start()
    try:
        eventually(lambda: journal.next == 1)
    finally:
        flusher.stop()


def test_an_alarm_for_nothing_is_over_when_it_has_rung() -> None:
    """If somebody else sent the event that set the timer, the next event can set it again."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 0.001)
    now = flusher.lane.due = time.time_ns()
    flusher.arm(now - 1)
    assert flusher.lane.armed
    flusher.start()
    try:
        eventually(lambda: not flusher.lane.armed)
    finally:
        flusher.stop()


def test_a_clock_that_is_set_back_delays_nothing() -> None:
    """If the wall clock jumps back, the next event does not wait for the old time to come again."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal)
    journal.stage("t", b"x")
    flusher.lane.due = time.time_ns() + 3_600_000_000_000
    flusher.arm(time.time_ns())
    assert journal.next == 1
    assert flusher.lane.due - time.time_ns() < 1_000_000_000
    flusher.stop()


def test_the_interval_follows_the_cost_of_sending() -> None:
    """Cheap sending makes short intervals; they never exceed half of max_wait_s."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 0.001)
    for _ in range(50):
        journal.stage("t", b"x")
    now = flusher.lane.due = time.time_ns()
    flusher.flush(now)
    assert now <= flusher.lane.due <= time.time_ns() + 500_000
    flusher.stop()


def test_a_pause_counts_for_what_comes_after_it() -> None:
    """After a pause the next event is not made to wait; a pause is worth a millisecond and not more."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 3600.0)
    journal.stage("t", b"x")
    before = time.time_ns()
    flusher.flush(before)
    assert before - 1_000_000 <= flusher.lane.due <= time.time_ns() - 1_000_000
    slow = 10_000_000_000
    for _ in range(2):
        flusher.lane.due = 0
        journal.stage("t", b"x")
        flusher.flush(time.time_ns() - slow)
    assert flusher.lane.due > time.time_ns() + 4 * slow
    flusher.stop()


def test_a_busy_publisher_has_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a well filled frame, time in which nothing was sent counts no more, until it has been idle for a while."""
    while_ns = 60_000_000_000  # longer than a pause of this test itself
    monkeypatch.setattr("brokerless.direct.io.batching._BUSY_NS", while_ns)
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 3600.0)
    for _ in range(50):
        journal.stage("t", b"x")
    flusher.flush(time.time_ns())
    assert flusher.lane.credit == 0, "for events that go out alone, too"
    flusher.lane.due = 0
    journal.stage("t", b"x")
    before = time.time_ns()
    flusher.flush(before)
    assert flusher.lane.due >= before, "it waited for Python's lock; the next one are batched"
    flusher._busy -= while_ns
    flusher.lane.due = 0
    journal.stage("t", b"x")
    flusher.flush(time.time_ns())
    assert flusher.lane.credit > 0
    assert flusher.lane.due < time.time_ns()
    flusher.stop()


def test_what_was_not_due_is_sent_soon_after_it_is() -> None:
    """An event that is batched with no other goes out a little after it was due, not after max_wait_s."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 3600.0)
    flusher._grace = 1_000_000
    flusher.start()
    try:
        journal.stage("t", b"x")
        now = time.time_ns()
        flusher.lane.due = now + 1_000_000
        flusher.arm(now)
        eventually(lambda: journal.next == 1, 5.0)
    finally:
        flusher.stop()


def test_one_slow_send_makes_no_event_wait() -> None:
    """A send that took long once changes nothing; when sending stays slow, events are batched."""
    journal = MemoryJournal(source="p")
    flusher = flusher_of(journal, 3600.0)
    slow = 10_000_000_000
    waits = []
    for cost in (0, slow, 0, slow, slow):
        journal.stage("t", b"x")
        flusher.flush(time.time_ns() - cost)
        waits.append(flusher.lane.due - time.time_ns())
    assert all(wait < slow for wait in waits[:4])
    assert waits[4] > 4 * slow
    flusher.stop()


def test_a_disk_that_refuses_is_counted_and_tried_again(tmp_path: object) -> None:
    """A batch that cannot be written stays staged and accepted, and goes out when the disk takes it again."""
    journal = DiskJournal(f"{tmp_path}/j", source="p", fsync="never")
    counters = PublisherCounters()
    flusher = Batcher(journal, 0.01, counters, journal.stage, name="test")
    write = journal._write
    journal.stage("t", b"x")

    def refuse(frames: object) -> None:
        raise JournalError("j", "no space", errno=28)

    journal._write = refuse  # type: ignore[assignment,method-assign]  # a full disk
    flusher.flush(time.time_ns())
    assert (counters.flush_errors, journal.next, journal.staged) == (1, 0, 1)
    journal._write = write  # type: ignore[method-assign]
    flusher.start()
    eventually(lambda: journal.next == 1, 5.0)
    flusher.stop()
    journal.close()
