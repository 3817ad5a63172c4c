"""What was seen against a model: whatever comes again is recognised, whatever is new is not."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, Position, encode_frame
from brokerless.spark_collector.collector.seen import SeenOffsets


def frame(first: int, count: int, epoch: int = 1) -> Frame:
    return encode_frame(
        "s", epoch, first, topics=[("t", first)], topic_index=None, times=[0] * count, datas=[b""] * count
    )


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 2)), max_size=30)


@given(ranges, st.integers(0, 29))
def test_each_event_is_fresh_once(parts: list[tuple[int, int, int]], crash: int) -> None:
    """Frames in any order and overlap, and a restart in the middle: each offset is fresh exactly once."""
    seen, model = SeenOffsets(), set[tuple[int, int]]()
    for n, (first, count, epoch) in enumerate(parts):
        fresh = seen.fresh(frame(first, count, epoch))
        offsets = [(epoch, o) for f in fresh for o in range(f.first_offset, f.next_offset)]
        expected = [(epoch, o) for o in range(first, first + count) if (epoch, o) not in model]
        assert offsets == expected
        for f in fresh:
            seen.add(f)
        model.update(offsets)
        if n == crash:
            restored = SeenOffsets.restore(seen.snapshot("spool", 1, 5), "spool", [(1, 0)])
            assert restored is not None
            seen = restored[0]


def test_resume_is_the_first_hole() -> None:
    """A journal of two epochs goes on at the first offset that is not there, or at its end."""
    seen = SeenOffsets()
    epochs = [(1, 0), (2, 10)]
    assert seen.resume("s", epochs, 20) == 0
    seen.add(frame(0, 10, 1))
    assert seen.resume("s", epochs, 20) == 10
    seen.add(frame(12, 8, 2))
    assert seen.resume("s", epochs, 20) == 10
    seen.skip("s", 2, 10, 11)
    assert seen.resume("s", epochs, 20) == 20
    assert seen.positions() == {"s": Position(2, 20)}


def test_a_state_of_another_or_cut_spool_or_a_damaged_one_is_not_used() -> None:
    """Another spool, a cut below what they speak of, or damage."""
    raw = SeenOffsets().snapshot("spool", 1, 50)
    assert SeenOffsets.restore(raw, "spool", [(1, 0)]) is not None
    assert SeenOffsets.restore(raw, "another", [(1, 0)]) is None
    assert SeenOffsets.restore(raw, "spool", [(1, 0), (2, 40)]) is None
    assert SeenOffsets.restore(raw, "spool", [(1, 0), (2, 50)]) is not None
    for cut in range(len(raw)):
        assert SeenOffsets.restore(raw[:cut], "spool", [(1, 0)]) is None


def test_memory_is_bounded() -> None:
    """With holes everywhere the lowest intervals are forgotten, and counted."""
    seen = SeenOffsets(max_intervals=100)
    for n in range(0, 2000, 2):
        seen.add(frame(n, 1))
    assert seen.forgotten > 0
    assert seen.has("s", 1, 1998)
    assert not seen.has("s", 1, 0)
