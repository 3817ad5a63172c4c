"""The books against a model: whatever comes again is recognised, whatever is new is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, encode_frame
from brokerless.core.errors import UsageError
from brokerless.spark_collector.books import Books


def frame(first: int, count: int, epoch: int = 1) -> Frame:
    return encode_frame(
        "s", epoch, first, topics=[("t", first)], topic_index=None, times=[0] * count, datas=[b""] * count
    )


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 2)), max_size=30)


@given(ranges, st.integers(0, 29))
def test_each_event_is_fresh_once(parts: list[tuple[int, int, int]], crash: int) -> None:
    """Frames in any order and overlap, and a restart in the middle: each offset is fresh exactly once."""
    books, model = Books(), set[tuple[int, int]]()
    for n, (first, count, epoch) in enumerate(parts):
        fresh = books.fresh(frame(first, count, epoch))
        offsets = [(epoch, o) for f in fresh for o in range(f.first_offset, f.next_offset)]
        expected = [(epoch, o) for o in range(first, first + count) if (epoch, o) not in model]
        assert offsets == expected
        for f in fresh:
            books.add(f)
        model.update(offsets)
        if n == crash:
            restored = Books.restore(books.snapshot("spool", 1, 5), "spool", [(1, 0)])
            assert restored is not None
            books = restored[0]


def test_resume_is_the_first_hole() -> None:
    """A journal of two epochs goes on at the first offset that is not there, or at its end."""
    books = Books()
    epochs = [(1, 0), (2, 10)]
    assert books.resume("s", epochs, 20) == 0
    books.add(frame(0, 10, 1))
    assert books.resume("s", epochs, 20) == 10
    books.add(frame(12, 8, 2))
    assert books.resume("s", epochs, 20) == 10
    books.settle("s", 2, 10, 11)
    assert books.resume("s", epochs, 20) == 20
    assert books.highest("s") == (2, 20)
    assert books.highest("other") is None


def test_books_of_another_or_cut_spool_are_not_believed() -> None:
    """Another spool, a cut below what they speak of, or damage."""
    raw = Books().snapshot("spool", 1, 50)
    assert Books.restore(raw, "spool", [(1, 0)]) is not None
    assert Books.restore(raw, "another", [(1, 0)]) is None
    assert Books.restore(raw, "spool", [(1, 0), (2, 40)]) is None
    assert Books.restore(raw, "spool", [(1, 0), (2, 50)]) is not None
    with pytest.raises(UsageError, match="damaged"):
        Books.restore(b"garbage", "spool", [])


def test_memory_is_bounded() -> None:
    """With holes everywhere the lowest intervals are forgotten, and counted."""
    books = Books(max_intervals=100)
    for n in range(0, 2000, 2):
        books.add(frame(n, 1))
    assert books.forgotten > 0
    assert books.has("s", 1, 1998)
    assert not books.has("s", 1, 0)
