"""Parts of a remote tier as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, encode_frame
from brokerless.spark_collector.tier.parts import PartDamaged, PartHeader, decode_part, encode_part


def frame(first: int, count: int) -> Frame:
    datas = [bytes([n % 256]) * (n % 7) for n in range(count)]
    return encode_frame(
        "s", 1, first, topics=[("t", first)], topic_index=None, times=[0] * count, datas=datas
    )


HEADER = PartHeader(3, "id", "writer", 0, 30, 30)


@given(st.lists(st.integers(1, 20), max_size=8))
def test_what_is_written_is_read(counts: list[int]) -> None:
    """The same header and frames."""
    frames = [frame(n, count) for n, count in enumerate(counts)]
    header, found = decode_part("k", encode_part(HEADER, frames))
    assert header == HEADER
    assert [f.raw for f in found] == [f.raw for f in frames]


@given(st.data())
def test_every_change_is_noticed(data: st.DataObject) -> None:
    """A byte that is changed, missing or added anywhere."""
    raw = encode_part(HEADER, [frame(0, 10), frame(10, 20)])
    at = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :], raw[:at], raw + b"x"):
        with pytest.raises(PartDamaged):
            decode_part("k", wrong)
