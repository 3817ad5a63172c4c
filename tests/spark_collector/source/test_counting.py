"""Counting by headers gives what reading everything gives."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, JournalReader
from brokerless.spark_collector.collector.spool import as_items
from brokerless.spark_collector.source.counting import event_counts, frame_counts
from brokerless.spark_collector.source.locations import JournalLocation
from tests.spark_collector.spools import fill, fill_journal, open_spool


def counted(path: Path, first: int, stop: int) -> list[tuple[int, int, int]]:
    """By reading all of it."""
    found = []
    for part in JournalLocation(str(path)).frames(first, stop):
        assert isinstance(part, Frame)
        items = as_items(part, max(first, part.first_offset), min(stop, part.next_offset))
        found += [(item.offset + 1, item.frame.count, len(item.frame.raw)) for item in items]
    return found


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), min_size=1, max_size=12), st.data())
def test_same_as_reading(
    tmp_path_factory: pytest.TempPathFactory, fills: list[tuple[int, int]], data: st.DataObject
) -> None:
    """For frames of any number and size, over several segments, from anywhere to anywhere."""
    path = tmp_path_factory.mktemp("s") / "s"
    with open_spool(path, segment_bytes=8 * 1024) as spool:
        at = 0
        for count, size in fills:
            fill(spool, "p", at, count, per_frame=7, size=size)
            at += count
        end = spool.next
    first = data.draw(st.integers(0, end - 1))
    stop = data.draw(st.integers(first + 1, end))
    with JournalReader(path) as reader:
        counts = event_counts(reader, first, stop)
    assert counts is not None
    assert list(counts) == counted(path, first, stop)
    for part in JournalLocation(str(path)).frames(first, stop):
        assert isinstance(part, Frame)
        assert set(frame_counts(part, first, stop)) <= set(counted(path, first, stop))


def test_a_journal_without_frames(tmp_path: Path) -> None:
    """Each offset is one event: there is nothing to count."""
    fill_journal(tmp_path / "j", "p", 10)
    with JournalReader(tmp_path / "j") as reader:
        assert event_counts(reader, 0, 10) is None
        ((after, events, size),) = event_counts(reader, 2, 7, in_bytes=True) or ()
    assert (after, events) == (7, 5)
    assert size > 10, "of the frame that holds them"


def test_damage_ends_the_count(tmp_path: Path) -> None:
    """A file that is cut off is counted up to there; bytes changed anywhere raise nothing."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    file = next((tmp_path / "s").glob("*.seg"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    with JournalReader(tmp_path / "s") as reader:
        found = list(event_counts(reader, 0, 10) or ())
    assert 3 <= len(found) < 10
    assert [f[:2] for f in found] == [(n + 1, 10) for n in range(len(found))]
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with JournalReader(tmp_path / "s") as reader:
            assert len(list(event_counts(reader, 0, 10) or ())) <= 10
