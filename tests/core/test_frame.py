"""Frames: what goes in comes out, and nothing else gets through."""

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.core import Event, Frame, encode_frame
from brokerless.core.errors import FrameError
from brokerless.core.event import Headers
from brokerless.core.frame import MAX_FRAME_BYTES, PREFIX_BYTES

texts = st.text(st.characters(codec="utf-8"), max_size=12)
rows = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(-(2**62), 2**62),
        st.binary(max_size=40),
        st.sampled_from(["", "text/plain", "application/json"]),
        texts,
        st.dictionaries(texts, texts, max_size=2),
    ),
    min_size=1,
    max_size=40,
)

Row = tuple[int, int, bytes, str, str, dict[str, str]]


def build(rows: list[Row], first_offset: int = 1000) -> tuple[Frame, list[Event]]:
    """A frame of the rows, and the events that it should hold."""
    used = list(dict.fromkeys(r[0] for r in rows))
    firsts = {t: 10 * t for t in used}
    seqs = dict(firsts)
    events = []
    for i, (t, time, data, content_type, key, headers) in enumerate(rows):
        row = first_offset + i, f"topic-{t}", seqs[t], time, data, content_type, key, Headers(headers)
        events.append(Event("src", 5, *row))
        seqs[t] += 1
    frame = encode_frame(
        "src",
        5,
        first_offset,
        topics=[(f"topic-{t}", firsts[t]) for t in used],
        topic_index=[used.index(r[0]) for r in rows],
        times=[r[1] for r in rows],
        datas=[r[2] for r in rows],
        content_types=[r[3] for r in rows],
        keys=[r[4] for r in rows],
        headers=[r[5] for r in rows],
    )
    return frame, events


@given(rows)
def test_events_survive_the_round_trip(rows: list[Row]) -> None:
    """Any events, with mixed topics, types and keys, come back equal, and the header fits them."""
    frame, events = build(rows)
    parsed = Frame.parse(frame.raw)
    assert parsed.events() == frame.events() == events
    assert (parsed.first_offset, parsed.next_offset, parsed.count) == (1000, 1000 + len(rows), len(rows))
    assert parsed.seqs() == [e.seq for e in events]
    assert parsed.topic_column() == [e.topic for e in events]
    assert parsed.content_type_column() == [e.content_type for e in events]
    assert parsed.header_column() == [e.headers for e in events]
    assert parsed.datas() == [e.data for e in events]
    for topic, first, count in parsed.topics:
        assert [e.seq for e in events if e.topic == topic] == list(range(first, first + count))


@given(rows, st.data())
def test_a_slice_is_the_frame_of_its_events(rows: list[Row], data: st.DataObject) -> None:
    """Slicing by offset gives a valid frame that holds exactly those events with their numbers."""
    frame, events = build(rows)
    lo = data.draw(st.integers(0, len(rows) - 1))
    hi = data.draw(st.integers(lo + 1, len(rows)))
    part = Frame.parse(frame.slice(1000 + lo, 1000 + hi).raw)
    assert part.events() == events[lo:hi]


def test_a_slice_outside_is_an_error() -> None:
    """Asking for offsets that are not there is not an empty frame."""
    frame, _ = build([(0, 0, b"x", "", "", {})])
    with pytest.raises(FrameError, match="not in"):
        frame.slice(2000, 2001)


@given(rows, st.data())
def test_any_changed_byte_is_noticed(rows: list[Row], data: st.DataObject) -> None:
    """Flipping any bits of any byte makes parse raise FrameError, whatever byte it is."""
    raw = bytearray(build(rows)[0].raw)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        Frame.parse(raw)


@given(st.binary(max_size=300))
def test_random_bytes_are_only_ever_a_frame_error(raw: bytes) -> None:
    """Garbage never raises anything but FrameError."""
    with pytest.raises(FrameError):
        Frame.parse(raw)


@given(rows, st.data())
@settings(max_examples=200)
def test_without_the_crc_hostile_bytes_still_cannot_crash(rows: list[Row], data: st.DataObject) -> None:
    """With verify=False a mutated frame gives events or FrameError, nothing else."""
    raw = bytearray(build(rows)[0].raw)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(PREFIX_BYTES, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = Frame.parse(raw, verify=False)
        events = frame.events()
    except FrameError:
        return
    assert len(events) == frame.count


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, -1])
def test_cut_and_padded_frames_are_refused(cut: int) -> None:
    """A frame must fill its buffer exactly."""
    raw = build([(0, 0, b"hello", "", "", {})])[0].raw
    with pytest.raises(FrameError):
        Frame.parse(raw[:cut])
    with pytest.raises(FrameError):
        Frame.parse(raw + b"\x00")


def test_a_giant_length_field_allocates_nothing() -> None:
    """A prefix that announces gigabytes is refused from the prefix alone."""
    raw = bytearray(build([(0, 0, b"hello", "", "", {})])[0].raw)
    struct.pack_into("<I", raw, 8, 0xFFFF_FFF0)
    with pytest.raises(FrameError, match=f"limit is {MAX_FRAME_BYTES}"):
        Frame.parse(raw)


def test_a_newer_version_is_named() -> None:
    """A frame of a later version says so instead of looking like garbage."""
    raw = bytearray(build([(0, 0, b"hello", "", "", {})])[0].raw)
    raw[2] = 9
    with pytest.raises(FrameError, match="version 9"):
        Frame.parse(raw)


def test_too_many_or_no_events_are_refused() -> None:
    """The index is 16 bits wide, and an empty frame means nothing."""
    for n in (0, 65_536):
        with pytest.raises(FrameError, match="events"):
            encode_frame("s", 1, 0, topics=[("t", 0)], topic_index=None, times=[0] * n, datas=[b""] * n)


@pytest.mark.parametrize(("offset", "seq"), [(0, 2**64 - 1), (2**64 - 1, 0), (2**62, 0)])
def test_numbers_that_could_not_be_stored_again_are_refused(offset: int, seq: int) -> None:
    """A hostile frame cannot push a ledger beyond what its snapshot can hold."""
    raw = encode_frame("s", 1, offset, topics=[("t", seq)], topic_index=None, times=[0], datas=[b""]).raw
    with pytest.raises(FrameError, match="out of range"):
        Frame.parse(raw)


def test_a_topic_longer_than_any_we_accept_is_refused() -> None:
    """A ledger keeps names for long: their size must not be the sender's choice."""
    raw = encode_frame("s", 1, 0, topics=[("t" * 256, 0)], topic_index=None, times=[0], datas=[b""]).raw
    with pytest.raises(FrameError, match="too long"):
        Frame.parse(raw)


def test_a_frame_without_headers_has_no_column_for_them() -> None:
    """Empty headers leave no trace: the bytes are those of a frame that was never told of headers."""
    args = {"topics": [("t", 0)], "topic_index": None, "times": [1, 2], "datas": [b"a", b"b"]}
    plain = encode_frame("s", 1, 0, **args)  # type: ignore[arg-type]
    assert encode_frame("s", 1, 0, **args, headers=[{}, {}]).raw == plain.raw  # type: ignore[arg-type]
    with_headers = encode_frame("s", 1, 0, **args, headers=[{}, {"h": "v"}])  # type: ignore[arg-type]
    assert with_headers.slice(0, 1).raw == plain.slice(0, 1).raw
    assert with_headers.slice(1, 2).events()[0].headers == {"h": "v"}


def test_a_reader_of_five_columns_skips_headers() -> None:
    """What an older reader does with a sixth column: nothing. Events come without their headers."""

    class OldColumns(msgspec.Struct, array_like=True):
        topic_index: bytes
        times: bytes
        datas: list[bytes]
        content_index: bytes = b""
        keys: list[str] = []

    frame = encode_frame(
        "s", 1, 0, topics=[("t", 0)], topic_index=None, times=[1], datas=[b"a"], headers=[{"h": "v"}]
    )
    body = PREFIX_BYTES + int.from_bytes(frame.raw[4:8], "little")
    assert msgspec.msgpack.decode(frame.raw[body:], type=OldColumns).datas == [b"a"]
