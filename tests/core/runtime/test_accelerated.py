"""The C module against the Python code that it mirrors: the same bytes, the same events, the same errors."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import (
    DiskJournal,
    Event,
    Frame,
    Journal,
    MemoryJournal,
    Receipt,
    Retention,
    encode_frame,
)
from brokerless.core.errors import FrameError, InvalidEvent
from tests.core.twins import either, implementation, raws

try:
    from brokerless.core import _speed
except ImportError:
    pytest.skip("built without the C module", allow_module_level=True)

__all__ = ["either"]  # a fixture
text = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=40)
labels = st.sampled_from(["", "a", "text/plain", "é" * 20])
maps = st.sampled_from([{}, {}, {"traceparent": "00-1-2-01"}, {"é": "x" * 300, "b": ""}])


@given(st.binary(max_size=400), st.integers(0, 0xFFFF_FFFF))
def test_crc(data: bytes, seed: int) -> None:
    """The CRC is zlib's, of any length, from any start, at any alignment."""
    assert _speed.crc32(data, seed) == zlib.crc32(data, seed)
    assert _speed.crc32(memoryview(data)[3:], seed) == zlib.crc32(data[3:], seed)
    for times in (7, 1000):  # from a kilobyte on, and from 64 on, it goes other ways
        large = memoryview(data * times)[1:]
        assert _speed.crc32(large, seed) == zlib.crc32(large, seed)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of encode_frame."""
    n = draw(st.sampled_from([1, 2, 15, 16, 17, 300]))
    topics = draw(st.lists(st.tuples(text, st.integers(0, 1 << 40)), min_size=1, max_size=min(n, 20)))
    index = [*range(len(topics)), *(draw(st.integers(0, len(topics) - 1)) for _ in range(n - len(topics)))]
    sizes = st.sampled_from([0, 1, 31, 255, 256, 300, 65_535, 65_536] if n < 10 else [0, 1, 100, 255, 256])
    return {
        "source": draw(text),
        "epoch": draw(st.integers(0, 1 << 61)),
        "first_offset": draw(st.sampled_from([0, 127, 128, 255, 256, 65_536, 1 << 32, 1 << 61])),
        "topics": topics,
        "topic_index": index,
        "times": [draw(st.integers(-(1 << 63), (1 << 63) - 1)) for _ in range(min(n, 3))]
        + [7] * (n - min(n, 3)),
        "datas": [bytes([i % 256]) * draw(sizes) for i in range(n)],
        "content_types": draw(st.none() | st.lists(labels, min_size=n, max_size=n)),
        "keys": draw(st.none() | st.lists(labels, min_size=n, max_size=n)),
        "headers": draw(st.none() | st.lists(maps, min_size=n, max_size=n)),
    }


def encoded(name: str, args: dict[str, Any]) -> Frame:
    with implementation(name):
        return encode_frame(**args)


@given(columns())
def test_frames_are_the_same_bytes(args: dict[str, Any]) -> None:
    """Whatever is encoded, both give the same bytes, and decode them to the same events."""
    ours, plain = encoded("c", args), encoded("python", args)
    assert ours.raw == plain.raw
    assert ours.header == plain.header
    assert outcome("c", ours.raw) == outcome("python", ours.raw)
    assert isinstance(outcome("c", ours.raw)[0], list)


def outcome(name: str, raw: bytes) -> tuple[list[Event] | str, str]:
    """What decoding gives: the events or the error, and the error of checking alone."""
    with implementation(name):
        result: list[Event] | str
        checked = ""
        try:
            found = Frame.parse(raw, verify=False)
        except FrameError as error:
            return str(error), ""
        try:
            result = Frame(found.raw, found.header).events()
        except FrameError as error:
            result = str(error)
        try:
            found.check()
        except FrameError as error:
            checked = str(error)
        return result, checked


def single(raw: bytes, source: str, epoch: int, offset: int) -> Event | None:
    """What read_single must give: the event, if the Python code finds a frame of just this one without labels."""
    with implementation("python"):
        try:
            found = Frame.parse(raw)
            events = found.events()
        except FrameError:
            return None
        columns = found.columns()
        if len(events) != 1 or found.header.content_types or columns.keys or columns.headers:
            return None
        wanted = (events[0].source, events[0].epoch, events[0].offset) == (source, epoch, offset)
        return events[0] if wanted else None


@given(columns())
def test_single_events_are_the_same(args: dict[str, Any]) -> None:
    """The short way of a frame with one event gives that event; of any other frame, nothing."""
    raw = encoded("python", args).raw
    source, epoch, offset = args["source"], args["epoch"], args["first_offset"]
    wanted = single(raw, source, epoch, offset)
    assert _speed.read_single(raw, source, epoch, offset, Event) == wanted
    plain = not args["keys"] and not any(args["content_types"] or [])
    assert (wanted is not None) == (len(args["datas"]) == 1 and plain)
    for other in ((source + "x", epoch, offset), (source, epoch + 1, offset), (source, epoch, offset + 1)):
        assert _speed.read_single(raw, *other, Event) is None


@given(st.data())
def test_damaged_single_events_are_declined(data: st.DataObject) -> None:
    """Whatever is changed, with or without a CRC that fits: the event that the Python code sees, or nothing."""
    sizes = st.sampled_from([0, 1, 20, 255, 256, 70_000])
    raw = bytearray(
        encode_frame(
            data.draw(st.sampled_from(["s", "é" * 20])),
            7,
            data.draw(st.sampled_from([0, 127, 128, 70_000, 1 << 33])),
            topics=[(data.draw(st.sampled_from(["t", "ü" * 40, "n" * 255])), 5)],
            topic_index=None,
            times=[-1],
            datas=[b"x" * data.draw(sizes)],
        ).raw
    )
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, min(len(raw) - 1, 200)))
        if data.draw(st.integers(0, 9)) < 7:
            raw[at] = data.draw(st.integers(0, 255))
        else:
            raw[at : at + 2] = data.draw(st.binary(max_size=3))
    if len(raw) > 16 and data.draw(st.booleans()):
        header = min(int.from_bytes(raw[4:8], "little"), len(raw) - 16)
        raw[4:8] = header.to_bytes(4, "little")
        raw[8:12] = (len(raw) - 16 - header).to_bytes(4, "little")
    if len(raw) > 16:
        raw[12:16] = zlib.crc32(raw[16:], zlib.crc32(raw[:12])).to_bytes(4, "little")
    for offset in (0, 127, 128, 70_000, 1 << 33):
        for source in ("s", "é" * 20):
            found = _speed.read_single(bytes(raw), source, 7, offset, Event)
            # It may decline what is valid and unusual; the Python code then reads it.
            assert found is None or found == single(bytes(raw), source, 7, offset)
    raw[len(raw) // 2] ^= 1
    assert _speed.read_single(bytes(raw), "s", 7, 0, Event) is None


@pytest.mark.parametrize(
    "args",
    [
        (bytearray(20), "s", 1, 1),
        (b"", "s", 1, 1),
        (b"\xb5\x1e\x01\x00" + bytes(12), "s", 1, 1),
        (b"\xb5\x1e\x01\x00" + b"\xff" * 12, "s", 1, 1),
        (b"\xb5\x1e\x01\x00\x01\x00\x00\x00" + bytes(9), "s", 1, 1),
        (b"x" * 40, b"s", 1, 1),
        (b"x" * 40, "s", -1, 1),
        (b"x" * 40, "s", 1, 1 << 70),
        (b"x" * 40, "\ud800", 1, 1),
    ],
)
def test_what_is_no_single_event_is_declined(args: Any) -> None:
    """Wrong types, nothing at all, lengths that do not fit."""
    assert _speed.read_single(*args, Event) is None


SAMPLES = [
    {"topics": [("t", 5)], "topic_index": None, "datas": [b"x" * 10, b"", b"y" * 300]},
    {"topics": [("a", 0), ("b", 9)], "topic_index": [0, 1, 1, 0], "datas": [b"1", b"2", b"3", b"4"]},
    {"topics": [("t", 5)], "topic_index": None, "datas": [b"x"] * 20, "content_types": ["u", "v"] * 10},
    {
        "topics": [("t", 5)],
        "topic_index": None,
        "datas": [b"x"] * 3,
        "content_types": ["u"] * 3,
        "keys": ["k", "", "é"],
    },
]


@given(st.data())
def test_damaged_frames_give_the_same_error(data: st.DataObject) -> None:
    """Change, cut or add bytes anywhere: both say the same, and neither reads beyond the end."""
    sample: dict[str, Any] = data.draw(st.sampled_from(SAMPLES))
    raw = bytearray(encode_frame("s", 1, 100, times=list(range(len(sample["datas"]))), **sample).raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.integers(0, 9)) < 7:
            raw[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x90, 0xC4, 0xC5, 0xC6, 0xDC, 0xDD, 0xFF]))
        else:
            patch = data.draw(st.binary(max_size=3))
            raw[at : at + 2] = patch
    # The lengths in the prefix are made to fit, so that the damage gets to the decoders.
    header = min(int.from_bytes(raw[4:8], "little"), max(0, len(raw) - 16))
    if len(raw) >= 16 and data.draw(st.booleans()):
        raw[4:8] = header.to_bytes(4, "little")
        raw[8:12] = (len(raw) - 16 - header).to_bytes(4, "little")
    assert outcome("c", bytes(raw)) == outcome("python", bytes(raw))


def test_every_single_byte_of_a_frame() -> None:
    """Each byte replaced by each interesting value, exhaustively: the same outcome."""
    for sample in SAMPLES:
        raw = encode_frame("s", 1, 100, times=list(range(len(sample["datas"]))), **sample).raw
        for at in range(16, min(len(raw), 120)):
            for value in (0, 1, 2, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xC0, 0xC4, 0xC5, 0xC6, 0xDC, 0xDD, 0xFF):
                changed = raw[:at] + bytes([value]) + raw[at + 1 :]
                assert outcome("c", changed) == outcome("python", changed), (at, value)


@pytest.mark.parametrize(
    "args",
    [
        ("s", 1, 1, [("t", 0, 1)], [], b"", b"", ["text"], b"", [], 1 << 20),
        ("s", -1, 1, [("t", 0, 1)], [], b"", b"", [b""], b"", [], 1 << 20),
        ("s", 1, 1 << 70, [("t", 0, 1)], [], b"", b"", [b""], b"", [], 1 << 20),
        ("\ud800", 1, 1, [("t", 0, 1)], [], b"", b"", [b""], b"", [], 1 << 20),
        ("s", 1, 1, [("t", 0)], [], b"", b"", [b""], b"", [], 1 << 20),
        ("s", 1, 1, ["t"], [], b"", b"", [b""], b"", [], 1 << 20),
        ("s", 1, 1, [("t", 0, 1)], [7], b"", b"", [b""], b"", [], 1 << 20),
        ("s", 1, 1, [("t", 0, 1)], [], b"", b"", (b"",), b"", [], 1 << 20),
        ("s", 1, 1, [("t", 0, 1)], [], b"", b"", [b"x" * 100], b"", [], 50),
    ],
)
def test_what_is_not_ordinary_is_declined(args: Any) -> None:
    """Wrong types, numbers and sizes are left to the Python code, which knows what to say."""
    assert _speed.pack_frame(*args, b"") is None


operation = st.one_of(
    st.tuples(
        st.just("stage"), st.sampled_from("aab"), st.sampled_from([0, 1, 100, 5000]), labels, labels, maps
    ),
    st.tuples(st.just("plain"), st.sampled_from("aaab"), st.sampled_from([0, 1, 100, 1000])),
    st.tuples(st.just("many"), st.sampled_from("ab"), st.integers(1, 5)),
    st.tuples(st.just("wrong"), st.sampled_from(["", "x\n", "a"]), st.sampled_from([b"", "text", None])),
    st.tuples(st.just("flush")),
)


def perform(journal: Journal, operations: list[Any]) -> list[Any]:
    """Do them with fixed times; what every call gave."""
    results: list[Any] = []
    clock = itertools.count(1_000_000)
    for number, (what, *args) in enumerate(operations):
        data = b"%d" % number
        try:
            if what == "stage":
                topic, size, content_type, key, headers = args
                results.append(
                    journal.stage(topic, data + b"." * size, content_type, key, next(clock), headers)
                )
            elif what == "plain":
                for _ in range(5):
                    results.append(journal.stage(args[0], data + b"." * args[1], time=next(clock)))
            elif what == "many":
                times = [next(clock) for _ in range(args[1])]
                results.append(journal.append_many(args[0], [data] * args[1], times=times))
            elif what == "wrong":
                results.append(journal.stage(args[0], args[1], time=next(clock)))
            else:
                journal.flush()
        except InvalidEvent as error:
            results.append(str(error))
        results.append((journal.next, journal.staged, journal.staged_bytes, journal.sent()))
    return results


@given(st.lists(operation, max_size=20), st.sampled_from([2_000, 100_000, 10_000_000]))
def test_journals_in_memory_are_the_same(operations: list[Any], room: int) -> None:
    """The same calls give the same receipts, errors, accounting and frames."""
    found = []
    with mock.patch("brokerless.core.journal.memory.new_epoch", return_value=7):
        for name in ("c", "python"):
            with implementation(name):
                journal = MemoryJournal(
                    retention=Retention(max_bytes=room), source="p", max_event_bytes=2_000
                )
                results = perform(journal, operations)
                journal.flush()
                found.append((results, raws(journal), journal.counters))
    assert found[0] == found[1]


@given(st.lists(operation, max_size=10))
def test_journals_on_disk_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any]
) -> None:
    """The same calls leave the same staged records in the mapped head, and either recovers the other's."""
    found = []
    directory = tmp_path_factory.mktemp("journals")
    with mock.patch("brokerless.core.journal.epoch.new_epoch", return_value=7):
        for name, other in (("c", "python"), ("python", "c")):
            with implementation(name):
                journal = DiskJournal(directory / name, source="p", fsync="never")
                results = perform(journal, operations)
                base, staged = journal._head.staged()
                journal._release()  # as the kernel does for a killed process: files closed, nothing written
            with implementation(other), DiskJournal(directory / name, fsync="never") as again:
                found.append((results, base if staged else None, staged, raws(again)))
    assert found[0] == found[1]


class Interrupted(Exception):
    """Raised by the signal handler, anywhere."""


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_interrupt_at_any_instant(either: str, kind: str, tmp_path: Path) -> None:
    """Ctrl-C anywhere in staging, appending and flushing: nothing accepted is lost, no number is given twice."""
    journal: Journal
    if kind == "disk":
        journal = DiskJournal(tmp_path / "j", source="p", fsync="never")
    else:
        journal = MemoryJournal(source="p", retention=Retention(max_bytes=1 << 28))

    def otherwise(now: int, topic: str, data: bytes) -> Receipt:
        return journal.stage(topic, data, time=now // 1000)

    lane = journal.lane(otherwise, lambda _: None, lambda _: None)
    lane.due = 1 << 62
    telling = journal.lane(otherwise, lambda _: None, lambda _: None, lambda _: None)
    telling.credit = 1 << 40
    accepted: dict[int, tuple[str, int, bytes]] = {}
    chance = random.Random(5)
    interrupts = 0

    def interrupt(*_: object) -> None:
        raise Interrupted

    def accept(number: int) -> None:
        topic, data = "ab"[number % 7 == 0], b"%d" % number
        how = number % 5
        if how < 3:
            receipt = (lane if how else telling)(topic, data)
        elif how == 3:
            receipt = journal.append_many(topic, [data, data])
            accepted[receipt.offset + 1] = (topic, receipt.seq + 1, data)
        else:
            receipt = journal.stage(topic, data)
            journal.flush()
        accepted[receipt.offset] = (topic, receipt.seq, data)

    gc.disable()  # its callbacks swallow what a handler raises in them, and pytest tells
    before = signal.signal(signal.SIGALRM, interrupt)
    deadline = time.monotonic() + 1.5
    try:
        for number in itertools.count():
            if time.monotonic() > deadline:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 6e-5))
                accept(number)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupts > 50
    staged = journal.staged
    if kind == "disk" and staged:
        journal._release()  # type: ignore[attr-defined]  # killed with events staged
        journal = DiskJournal(tmp_path / "j", fsync="never")
    else:
        journal.flush()
    events = [event for raw in raws(journal) for event in Frame.parse(raw).events()]
    assert [event.offset for event in events] == list(range(len(events)))
    for topic in "ab":
        assert [e.seq for e in events if e.topic == topic] == list(
            range(sum(e.topic == topic for e in events))
        )
    for offset, (topic, seq, data) in accepted.items():
        assert (events[offset].topic, events[offset].seq, events[offset].data) == (topic, seq, data)
    # Whatever else is there was being accepted when it was interrupted.
    assert len(events) - len(accepted) <= 2 * interrupts
    journal.close()


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_chooses() -> None:
    """BROKERLESS_PURE=1 means Python; the package says which one it is."""
    code = "from brokerless.core import ACCELERATED; print(ACCELERATED)"
    assert run(code, BROKERLESS_PURE="1") == "False"
    assert run(code, BROKERLESS_PURE="0") == "True"


def test_nothing_leaks() -> None:
    """A hundred thousand events staged, encoded and decoded leave no memory behind."""
    code = """
import resource
from brokerless.core import Frame, MemoryJournal, Retention
def work():
    journal = MemoryJournal(source="p", retention=Retention(max_bytes=100_000))
    frames = []
    journal.on_frame = lambda frame: frames.append(len(Frame.parse(frame.raw).events()))
    for i in range(20_000):
        journal.stage("a" if i % 3 else f"b{i % 50}", b"x" * 100, key="k" if i % 1000 == 0 else "")
        if i % 500 < 5:
            journal.flush()
    lane = journal.lane(journal.stage, lambda _: journal.flush(), lambda _: None, lambda raw: frames.append(len(raw)))
    for i in range(2_000):
        lane("a", b"x" * 100)
    journal.close()
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run(code, BROKERLESS_PURE="0")) < 4_000  # kilobytes; 200,000 events of 100 bytes are 20,000
