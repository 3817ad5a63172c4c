"""Where a journal was at a time: the first event at or after it."""

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Journal, JournalReader, MemoryJournal, Retention
from brokerless.core.errors import UsageError

kinds = pytest.mark.parametrize("kind", ["memory", "disk"])


def make(kind: str, path: Path) -> Journal:
    """A journal of that kind, with small segments."""
    if kind == "memory":
        return MemoryJournal(source="s", retention=Retention(max_bytes=1 << 24))
    return DiskJournal(path, source="s", fsync="never", segment_bytes=4096)


@kinds
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=25),
    asked=st.lists(st.integers(-2, 80), max_size=8),
)
def test_the_first_event_at_or_after_a_time(
    kind: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], asked: list[int]
) -> None:
    """For rising times it is what a search over all events finds, whatever frames and segments there are."""
    with make(kind, tmp_path_factory.mktemp("j")) as journal:
        times: list[int] = []
        for step, count in steps:
            now = (times[-1] if times else 0) + step
            journal.append_many("t", [b"x" * 100] * count, times=[now + i // 20 for i in range(count)])
            times += [now + i // 20 for i in range(count)]
        for wanted in asked:
            assert journal.offset_at(wanted) == bisect_left(times, wanted)


@kinds
def test_a_large_journal(kind: str, tmp_path: Path) -> None:
    """Many segments with an index; also after the oldest are gone, with a datetime, and with staged events."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with make(kind, tmp_path) as journal:
        first = round(start.timestamp() * 1_000_000)
        for i in range(3000):
            journal.append("t", b"x" * 200, time=first + i * 1_000_000)
        for i in (0, 1, 1499, 2998, 2999):
            assert journal.offset_at(start + timedelta(seconds=i)) == i
            assert journal.offset_at(first + i * 1_000_000 - 1) == i
        journal.stage("t", b"y", time=first + 5_000 * 1_000_000)
        assert journal.offset_at(first + 4_000 * 1_000_000) == 3000
        assert journal.offset_at(first + 6_000 * 1_000_000) == journal.next == 3001


def test_what_retention_dropped(tmp_path: Path) -> None:
    """A time before everything is the oldest event that is left."""
    with DiskJournal(tmp_path, source="s", fsync="never", retention=Retention(max_events=100)) as journal:
        for i in range(1000):
            journal.append("t", b"x", time=i)
        assert journal.offset_at(0) == journal.oldest > 0
        assert journal.offset_at(950) == 950
        with JournalReader(tmp_path) as reader:
            assert reader.offset_at(0) == reader.oldest
            assert reader.offset_at(999) == 999
            assert reader.offset_at(1000) == reader.next


@kinds
def test_an_empty_journal_and_wrong_times(kind: str, tmp_path: Path) -> None:
    """Nothing is there: `next`. A time without a zone is refused, as it means another instant on each machine."""
    with make(kind, tmp_path) as journal:
        assert journal.offset_at(5) == 0
        for wrong in (datetime(2026, 1, 1), 1.5, "now", True):  # noqa: DTZ001 - that is what is refused
            with pytest.raises(UsageError):
                journal.offset_at(wrong)  # type: ignore[arg-type]


def test_a_damaged_index_is_not_believed(tmp_path: Path) -> None:
    """Then the segment is read from its beginning."""
    with DiskJournal(tmp_path, source="s", fsync="never") as journal:
        for i in range(2000):
            journal.append("t", b"x" * 200, time=i)
        for index in tmp_path.glob("*.idx"):
            raw = bytearray(index.read_bytes())
            assert raw
            raw[8::16] = b"\xff" * len(raw[8::16])
            index.write_bytes(raw)
        assert [journal.offset_at(i) for i in (0, 700, 1999)] == [0, 700, 1999]
