"""Merging small frames: the same events, in fewer frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Event, Frame, MemoryJournal
from brokerless.core import frame as frames
from brokerless.core.frame import SMALL_FRAME_EVENTS, encode_frame, merge_small

appends = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.binary(max_size=20), min_size=1, max_size=SMALL_FRAME_EVENTS + 5),
        st.sampled_from(["", "", "text/plain"]),
        st.sampled_from([None, None, "k"]),
        st.sampled_from([None, None, {"h": "v"}]),
    ),
    max_size=12,
)


def events_of(found: list[Frame]) -> list[Event]:
    """The events, from frames that were parsed again, as a receiver does."""
    return [event for frame in found for event in Frame.parse(frame.raw).events()]


@pytest.mark.parametrize("accelerated", [True, False])
@given(calls=appends)
def test_the_events_are_the_same(
    calls: list[tuple[str, list[bytes], str, str | None, dict[str, str] | None]], accelerated: bool
) -> None:
    """Whatever was appended, with labels or without: nothing changes but the number of frames."""
    speed, frames.speed = frames.speed, frames.speed if accelerated else None
    try:
        with MemoryJournal(source="s") as journal:
            for topic, datas, content_type, key, headers in calls:
                keys = [key] * len(datas) if key else None
                journal.append_many(topic, datas, content_type, keys=keys, headers=headers)
            found = journal.read(0).frames
            merged = merge_small(found)
            assert events_of(merged) == events_of(found)
            assert len(merged) <= len(found)
    finally:
        frames.speed = speed


def test_lone_events_become_one_frame() -> None:
    """A thousand events of three topics; a large frame between them stays as it is."""
    with MemoryJournal(source="s") as journal:
        for i in range(500):
            journal.append(f"t{i % 3}", b"x")
        journal.append_many("t0", [b"y"] * 1000)
        for i in range(500):
            journal.append(f"t{i % 3}", b"z")
        found = journal.read(0).frames
        merged = merge_small(found)
    assert (len(found), [frame.count for frame in merged]) == (1001, [500, 1000, 500])
    assert merged[1] is found[500]


def test_what_does_not_belong_together_is_not_merged() -> None:
    """Another epoch, a hole in the offsets, a hole in a topic's seqs."""

    def one(epoch: int, offset: int, seq: int) -> Frame:
        return encode_frame(
            "s", epoch, offset, topics=[("t", seq)], topic_index=None, times=[1], datas=[b"x"]
        )

    assert len(merge_small([one(1, 0, 0), one(2, 1, 0)])) == 2
    assert len(merge_small([one(1, 0, 0), one(1, 2, 1)])) == 2
    assert len(merge_small([one(1, 0, 0), one(1, 1, 5)])) == 2
    assert len(merge_small([one(1, 0, 0), one(1, 1, 1)])) == 1
    assert merge_small([]) == []
