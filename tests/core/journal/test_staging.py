"""Staging against a model, in Python and in C: whatever is mixed, numbers and contents come out as they went in."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Event, Journal, JournalReader, MemoryJournal, Receipt, Retention
from brokerless.core.errors import InvalidEvent

step = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from("aab"), st.sampled_from([0, 1, 100, 1024, 1025, 5000])),
    st.tuples(st.just("keyed"), st.sampled_from("ab"), st.just(3)),
    st.tuples(st.just("headed"), st.sampled_from("ab"), st.sampled_from([0, 1, 2000])),
    st.tuples(st.just("many"), st.sampled_from("ab"), st.just(10)),
    st.tuples(st.just("wrong"), st.sampled_from("ab"), st.just(0)),
    st.tuples(st.just("flush"), st.just(""), st.just(0)),
    st.tuples(st.just("look"), st.just(""), st.just(0)),
)


def everything(journal: Journal | JournalReader) -> list[Event]:
    events: list[Event] = []
    at = journal.oldest
    while at < journal.next:
        chunk = journal.read(at)
        events += [event for frame in chunk.frames for event in frame.events()]
        at = chunk.next
    return events


def publish_of(journal: Journal) -> Any:
    """The journal's lane, with nobody who flushes."""

    def otherwise(now: int, topic: str, data: bytes, key: str = "", headers: Any = None) -> Receipt:
        return journal.stage(topic, data, "", key, now // 1000, headers)

    lane = journal.lane(otherwise, pytest.fail, pytest.fail)
    lane.due, lane.armed = 1 << 62, True
    return lane


Row = tuple[int, str, int, bytes, str, dict[str, str]]


def play(journal: Journal, steps: list[tuple[str, str, int]]) -> list[Row]:
    """Do the steps; what must be in the journal afterwards, as (offset, topic, seq, data, key, headers)."""
    publish = publish_of(journal)
    model: list[Row] = []
    seqs = {"a": 0, "b": 0}

    def note(
        topic: str, data: bytes, key: str, receipt: Receipt, headers: dict[str, str] | None = None
    ) -> None:
        assert (receipt.offset, receipt.seq) == (len(model), seqs[topic])
        model.append((len(model), topic, seqs[topic], data, key, headers or {}))
        seqs[topic] += 1

    for number, (what, topic, size) in enumerate(steps * 3):
        data = b"%d" % number + b"." * size
        if what == "publish":
            for _ in range(4):
                note(topic, data[:size], "", publish(topic, data[:size]))
        elif what == "keyed":
            note(topic, data, "k", publish(topic, data, key="k"))
        elif what == "headed":
            headers = {"number": str(number), "x": "é" * size}
            note(topic, data, "", publish(topic, data, headers=headers), headers)
        elif what == "many":
            receipt = journal.append_many(topic, [data] * size)
            for i in range(size):
                note(topic, data, "", Receipt(receipt.epoch, receipt.offset + i, receipt.seq + i))
        elif what == "wrong":
            with pytest.raises(InvalidEvent):
                publish(topic, "text")
            with pytest.raises(InvalidEvent):
                publish(topic, "text", headers={"a": "b"})
        elif what == "flush":
            journal.flush()
            assert journal.staged == 0
        else:
            assert journal.sent() == {t: n for t, n in seqs.items() if n}
            assert journal.next + journal.staged == len(model)
            assert journal.staged_bytes >= sum(len(m[3]) for m in model[journal.next :])
    return model


def shown(events: list[Event]) -> list[Row]:
    return [(e.offset, e.topic, e.seq, e.data, e.key, dict(e.headers)) for e in events]


@given(st.lists(step, max_size=25))
def test_runs_in_memory(steps: list[tuple[str, str, int]]) -> None:
    """Offsets, seqs, data, keys and headers come out as they went in, whatever interrupts a run."""
    journal = MemoryJournal(retention=Retention(max_bytes=10_000_000), source="p")
    model = play(journal, steps)
    journal.flush()
    assert shown(everything(journal)) == model


@given(st.lists(step, max_size=12))
def test_runs_on_disk_survive_without_a_flush(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    """What was staged in a run and never flushed is there after the process is gone without a word."""
    path = tmp_path_factory.mktemp("journal")
    journal = DiskJournal(path, source="p", fsync="never")
    model = play(journal, steps)
    journal._release()  # as the kernel does for a killed process: files closed, nothing written
    with DiskJournal(path, fsync="never") as again:
        assert shown(everything(again)) == model


def test_a_run_keeps_the_bound_of_a_small_journal() -> None:
    """A run ends before more is staged than a batch of this journal may hold."""
    journal = MemoryJournal(retention=Retention(max_bytes=160_000), source="p")
    publish = publish_of(journal)
    for _ in range(2000):
        publish("t", b"." * 1000)
        assert journal.held_bytes + journal.staged_bytes <= 180_000


def test_threads_in_the_inner_loop(tmp_path: Path) -> None:
    """Four threads, one of them flushing: every event is there once, numbered without a hole."""
    journal = DiskJournal(tmp_path / "j", source="p", fsync="never")
    publish = publish_of(journal)
    receipts: list[list[Receipt]] = [[], [], []]

    def produce(i: int) -> None:
        for n in range(3000):
            receipts[i].append(publish("t" if n % 50 else f"t{i}", b"%d" % i))

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        journal.flush()
    journal.flush()
    assert sorted(r.offset for part in receipts for r in part) == list(range(9000))
    assert [e.offset for e in everything(journal)] == list(range(9000))
    by_offset = {e.offset: e for e in everything(journal)}
    for i, part in enumerate(receipts):
        assert all(by_offset[r.offset].data == b"%d" % i for r in part)
        assert all(by_offset[r.offset].seq == r.seq for r in part)
    journal.close()
