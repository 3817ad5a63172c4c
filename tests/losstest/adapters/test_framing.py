"""Frames on a byte stream: any cutting gives the same bodies."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.adapters.framing import Deframer, frame


@given(bodies=st.lists(st.binary(max_size=50), max_size=8), noise=st.binary(max_size=20), cuts=st.data())
def test_frames_survive_any_cutting(bodies: list[bytes], noise: bytes, cuts: st.DataObject) -> None:
    """However the stream is cut into pieces, the same bodies come out, after noise without a marker too."""
    stream = noise.replace(b"\xf5", b"") + b"".join(frame(body) for body in bodies)
    deframer = Deframer()
    found = []
    while stream:
        size = cuts.draw(st.integers(1, len(stream)))
        found += deframer.feed(stream[:size])
        stream = stream[size:]
    assert found == bodies


def test_an_interrupted_frame_costs_only_itself() -> None:
    """The rest of a frame whose reader died is skipped, and the next one is found."""
    deframer = Deframer()
    assert deframer.feed(frame(b"first")[7:] + frame(b"second")) == [b"second"]
