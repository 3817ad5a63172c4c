"""Lanes: staging for whoever publishes very often, and lone events that are told at once."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import (
    DiskJournal,
    Frame,
    Journal,
    MemoryJournal,
    Retention,
)
from tests.core.twins import either, implementation, raws

__all__ = ["either"]  # a fixture


def test_the_lane_passes_on_what_it_does_not_know(either: str) -> None:
    """Keywords, labels and events that are not ordinary get to `otherwise`, with the time in front."""
    journal = MemoryJournal(source="p")
    seen: list[tuple[Any, ...]] = []

    def otherwise(now: int, *args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        assert abs(now - time.time_ns()) < 60_000_000_000
        return "elsewhere"

    lane = journal.lane(otherwise, lambda _: None, lambda _: None)
    assert lane("t", b"new topic") == "elsewhere"
    assert lane("t", b"x", "key", wait="acked") == "elsewhere"
    assert lane(topic="t", data=b"x") == "elsewhere"
    assert seen[1] == (("t", b"x", "key"), {"wait": "acked"})
    with pytest.raises(ZeroDivisionError):
        journal.lane(lambda *_: 1 // 0, lambda _: None, lambda _: None)("t", b"x")


def test_the_lane_flushes_when_it_is_time() -> None:
    """`flush` is called when `due` has come, otherwise `arm` unless somebody is armed; errors of either come out."""
    with implementation("c"):
        journal = MemoryJournal(source="p")
        called: list[str] = []
        journal.stage("t", b"x")
        lane = journal.lane(pytest.fail, lambda _: called.append("flush"), lambda _: called.append("arm"))
        lane("t", b"x")
        lane.due = 1 << 62
        lane("t", b"x")
        lane.armed = True
        lane("t", b"x")
        assert called == ["flush", "arm"]
        assert journal.staged == 4
        broken = journal.lane(pytest.fail, lambda _: 1 // 0, lambda _: None)
        with pytest.raises(ZeroDivisionError):
            broken("t", b"accepted all the same")
        assert journal.staged == 5


def test_the_lane_keeps_and_sends_a_lone_event() -> None:
    """It is in the journal when it is told. Not when others are staged, nor when it is not due."""
    with implementation("c"):
        journal = MemoryJournal(source="p")
        told: list[Any] = []

        def send_single(raw: bytes) -> None:
            told.append(raw)
            assert (journal.staged, journal.next, journal.staged_bytes) == (0, len(told), 0)

        def flush(_: int) -> None:
            frame = journal.flush()
            assert frame is not None
            told.append(frame.raw)

        lane = journal.lane(lambda now, *args: journal.stage(*args), flush, lambda _: None, send_single)
        lane("t", b"a new topic is not ordinary")
        flush(0)
        lane("t", b"x")
        assert journal.counters.appended == 1
        journal.settle()
        assert journal.counters.appended == 2
        lane("t", b"y")
        lane.due = 1 << 62
        lane("t", b"not due")
        lane.due = 0
        lane("t", b"so these two are together")
        assert [len(Frame.parse(raw).events()) for raw in told] == [1, 1, 1, 2]
        assert raws(journal) == told
        assert journal.counters.appended == 5
        assert journal.held_bytes == sum(map(len, told))


@pytest.mark.parametrize("look", ["read", "flush", "append", "close", "wait"])
def test_whoever_looks_sees_what_was_kept(look: str) -> None:
    """Kept events are the journal's: every way of looking finds them, in order, before what comes later."""
    with implementation("c"):
        journal = MemoryJournal(source="p", retention=Retention(max_bytes=100_000))
        journal.append("t", b"0")
        lane = journal.lane(pytest.fail, pytest.fail, pytest.fail, lambda _: None)
        lane.credit = 1 << 40
        for i in range(1, 5):
            lane("t", b"%d" % i)
        assert journal.next == 5
        if look == "append":
            journal.append("t", b"5")
        elif look == "wait":
            assert journal.wait(4, 0.0)
            assert not journal.wait(5, 0.01)
            lane("t", b"5")
        elif look != "read":
            getattr(journal, look)()
        found = [e.data for raw in raws(journal) for e in Frame.parse(raw).events()]
        assert found == [b"%d" % i for i in range(journal.next)]


def test_what_was_staged_alone_can_be_kept() -> None:
    """The second of `single_steps`: one event at a time, where the journal may, and while nobody asked not to."""
    with implementation("c"):
        journal = MemoryJournal(source="p")
        _, keep = journal.single_steps()
        journal.append("t", b"0")
        journal.stage("t", b"1")
        assert not keep()  # nobody has promised to call `settle`
        journal.flush()
        journal.keep_singles()
        assert not keep()  # nothing is staged
        journal.stage("t", b"2")
        assert keep()
        assert (journal.next, journal.counters.appended) == (3, 2)
        journal.settle()
        assert journal.counters.appended == 3
        journal.stage("t", b"3")
        journal.stage("t", b"4")
        assert not keep()
        journal.flush()
        found = [e.data for raw in raws(journal) for e in Frame.parse(raw).events()]
        assert found == [b"%d" % i for i in range(5)]
        bounded = MemoryJournal(source="p", on_full="block")
        bounded.keep_singles()
        bounded.stage("t", b"x")
        assert not bounded.single_steps()[1]()


def test_what_is_kept_is_bounded() -> None:
    """By number and size; then events are flushed as ever, and the ring keeps to its bound."""
    with implementation("c"):
        for size, limit in ((10, 1024), (10_000, 26), (300_000, 0)):
            journal = MemoryJournal(source="p", retention=Retention(max_bytes=5_000_000))
            journal.append("t", b"0")
            flushed: list[int] = []
            told: list[int] = []

            def flush(_: int, journal: Journal = journal, flushed: list[int] = flushed) -> None:
                flushed.append(journal.next)
                journal.flush()

            lane = journal.lane(
                lambda now, *args, journal=journal: journal.append(*args),
                flush,
                lambda _: None,
                lambda raw, told=told: told.append(len(raw)),
            )
            lane.credit = 1 << 40
            for _ in range(2000):
                lane("t", b"x" * size)
                assert journal._stage.kept_bytes <= 256 * 1024
                assert len(journal._stage.kept) <= 1024
            assert (flushed[0] - 1 if flushed else 0) == limit
            assert journal.held_bytes <= 5_000_000 + 256 * 1024
            offsets = [e.offset for raw in raws(journal) for e in Frame.parse(raw).events()]
            assert offsets == list(range(journal.oldest, 2001))


@pytest.mark.parametrize(
    "make",
    [
        lambda _: MemoryJournal(source="p", on_full="block"),
        lambda _: MemoryJournal(source="p", on_full="reject"),
        lambda _: MemoryJournal(source="p", retention=Retention(max_events=1000)),
        lambda _: MemoryJournal(source="p", retention=Retention(max_bytes=100_000, max_age_s=1.0)),
        lambda path: DiskJournal(path / "j", source="p"),
    ],
)
def test_a_journal_that_must_look_first_keeps_nothing(make: Any, tmp_path: Path) -> None:
    """One that may have to refuse, that counts events or their age, or that is on disk."""
    with implementation("c"), make(tmp_path) as journal:
        journal.append("t", b"x")
        flushed: list[int] = []
        lane = journal.lane(
            lambda now, *args: journal.stage(*args), flushed.append, lambda _: None, pytest.fail
        )
        lane("t", b"y")
        assert (journal.next, journal.staged) == (1, 1)


def test_a_send_that_raises_leaves_the_event_accepted() -> None:
    """The error comes out; the event is in the journal, and its lock is free."""
    with implementation("c"):
        journal = MemoryJournal(source="p")
        journal.append("t", b"x")
        lane = journal.lane(pytest.fail, pytest.fail, pytest.fail, lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            lane("t", b"y")
        assert [e.data for raw in raws(journal) for e in Frame.parse(raw).events()] == [b"x", b"y"]


COLLECTED = """
import gc, sys
from brokerless.core import MemoryJournal
journal, told = MemoryJournal(source="p"), []
journal.append("t", b"first")
lane = journal.lane(lambda now, *args: journal.stage(*args), lambda _: journal.flush(), lambda _: None, told.append)
lane.credit = 1 << 40

def collected(phase, info):
    # Stands for a finalizer that gives way to a thread which flushes. Not while the journal itself is at work.
    if phase == "start" and sys._getframe(1).f_globals is globals():
        journal.flush()

gc.callbacks.append(collected)
gc.set_threshold(1)
keep = []
for i in range(2000):
    keep.append([i])
    assert lane("t", b"%d" % i).offset == i + 1
gc.set_threshold(0)
journal.flush()
events = [event for frame in journal.read(0, max_bytes=1 << 30).frames for event in frame.events()]
assert [event.offset for event in events] == list(range(2001)), [event.offset for event in events][:20]
assert [event.data for event in events[1:]] == [b"%d" % i for i in range(2000)]
print(len(told))
"""


def test_the_garbage_collector_may_run_while_an_event_is_kept() -> None:
    """Making what is kept can run finalizers, and other threads with them: each event is there once all the same."""
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class Text(str):
    """A str that msgpack cannot encode, and which compares and hashes in its own way."""

    def __eq__(self, other: object) -> bool:
        return other is self

    def __hash__(self) -> int:
        return 7


class Data(bytes):
    """Bytes that msgpack cannot encode."""


def test_subclasses_of_str_and_bytes_are_taken_as_what_they_are(either: str) -> None:
    """As topic, label or data, by every way in; nobody else's events suffer."""
    journal = MemoryJournal(source=Text("p"))
    journal.append("t", b"0")
    journal.stage(Text("t"), Data(b"1"))
    journal.stage("t", b"2", Text(""), Text("key"))
    journal.stage("t", b"3", content_type=Text("a/b"))
    journal.append_many(Text("t"), [Data(b"4"), b"5"], Text(""), keys=[Text("k"), ""])
    journal.append_many(Text("u"), [Data(b"6")], Text("c/d"))
    journal.flush()
    events = [event for raw in raws(journal) for event in Frame.parse(raw).events()]
    assert [(e.source, e.topic, e.seq, e.data, e.content_type, e.key) for e in events] == [
        ("p", "t", 0, b"0", "", ""),
        ("p", "t", 1, b"1", "", ""),
        ("p", "t", 2, b"2", "", "key"),
        ("p", "t", 3, b"3", "a/b", ""),
        ("p", "t", 4, b"4", "", "k"),
        ("p", "t", 5, b"5", "", ""),
        ("p", "u", 0, b"6", "c/d", ""),
    ]
