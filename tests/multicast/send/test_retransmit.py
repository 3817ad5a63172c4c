"""Answers out of journals."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, JournalReader, MemoryJournal, Retention
from brokerless.multicast.send.retransmit import Readable, Retransmitter
from brokerless.multicast.wire.message import decode
from brokerless.multicast.wire.moldudp64 import Gone, parse_header


def fill(journal: MemoryJournal | DiskJournal) -> None:
    journal.bind("src")
    journal.append_many("run", [b"%05d" % i for i in range(500)])
    for i in range(100):
        journal.append(
            "a" if i % 2 else "bb", b"x" * i, "text/plain" if i % 5 == 0 else "", "k" if i % 7 == 0 else ""
        )


@pytest.fixture(params=["memory", "disk", "reader"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Readable]:
    """The three things that answers can be made of."""
    if request.param == "memory":
        memory = MemoryJournal()
        fill(memory)
        yield memory
        return
    with DiskJournal(tmp_path / "j") as disk:
        fill(disk)  # type: ignore[arg-type]
        if request.param == "disk":
            yield disk
        else:
            with JournalReader(tmp_path / "j") as reader:
                yield reader


@pytest.mark.parametrize("limit", [200, 1400, 60_000])
def test_asking_again_and_again_brings_every_event(journal: Readable, limit: int) -> None:
    """Each answer is one packet within the limit; together they are the journal."""
    retransmitter = Retransmitter(journal, "T")
    truth = [event for frame in journal.read(0, max_bytes=1 << 30).frames for event in frame.events()]
    events = []
    at = 1
    while at <= 600:
        answer = retransmitter.answer(at, 600, limit)
        assert isinstance(answer, tuple)
        packet, count = answer
        assert len(packet) <= limit
        header = parse_header(packet)
        assert header is not None
        assert header == (retransmitter.session, at, count)
        columns = decode(packet, at, count)
        assert columns is not None
        events += columns.events("T", "?", 0)
        at += count
    assert events == truth
    assert retransmitter.answer(601, 1, limit) is None, "not there yet"
    assert retransmitter.answer(590, 3, limit)[1] <= 3  # type: ignore[index]


def test_a_stream_is_the_whole_range(journal: Readable) -> None:
    """What goes over TCP: any range, in large packets."""
    retransmitter = Retransmitter(journal, "T")
    events = []
    for answer in retransmitter.stream(100, 450, 5000):
        assert isinstance(answer, tuple)
        columns = decode(answer[0], 100 + len(events), answer[1])
        assert columns is not None
        events += columns.events("T", "?", 0)
    assert [event.offset for event in events] == list(range(99, 549))


def test_what_is_evicted_is_gone() -> None:
    """The answer says what there still is; a stream goes on from there."""
    journal = MemoryJournal(source="src", retention=Retention(max_events=100))
    for _ in range(30):
        journal.append_many("a", [b"x"] * 10)
    retransmitter = Retransmitter(journal, "T")
    answer = retransmitter.answer(1, 10, 1400)
    assert answer == Gone(retransmitter.session, 1, 1, journal.oldest + 1, 301, journal.epoch, "src")
    answers = list(retransmitter.stream(1, 300, 60_000))
    assert isinstance(answers[0], Gone)
    assert sum(a[1] for a in answers[1:] if not isinstance(a, Gone)) == 300 - journal.oldest
