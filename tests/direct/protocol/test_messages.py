"""Messages: what is encoded comes back, and nothing else is believed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import PeerError
from brokerless.direct.protocol import messages

offsets = st.integers(0, (1 << 62) - 1)
ranges = st.lists(st.tuples(offsets, offsets), max_size=20)


@given(
    st.one_of(
        st.builds(messages.Hello, st.integers(0, 9), st.text(max_size=20), st.text(max_size=20)),
        st.builds(messages.Ready, offsets, offsets),
        st.builds(messages.Replay, offsets, offsets, offsets, st.integers(1, 1 << 30)),
        st.builds(messages.Credit, st.integers(0, 1 << 31)),
        st.builds(messages.Settle, offsets, ranges),
        st.builds(messages.Advance, offsets, offsets),
        st.builds(messages.Bye, st.booleans()),
        st.just(messages.Pong()),
    )
)
def test_requests_come_back_as_they_were(message: messages.Request) -> None:
    """Encoding and decoding a request changes nothing."""
    assert messages.decode_request(messages.encode(message)) == message


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_with_one_error(data: bytes) -> None:
    """Random bytes raise PeerError or decode to a valid message, and nothing else ever happens."""
    for decode in (messages.decode_request, messages.decode_reply, messages.decode_beat):
        try:
            decode(data)
        except PeerError:
            continue


@pytest.mark.parametrize(
    "message",
    [
        [3, 1, 1, -1, 100],
        [3, 1, 1, 1, 1 << 40],
        [6, 1 << 60],
        [6, -1],
        [7, 1, [[0, 1]] * (messages.MAX_RANGES + 1)],
        [1, 1, "x" * 1000],
        [1, 1, "c", "g", "", "", [30.0, 5, False, ["t"] * (messages.MAX_TOPICS + 1)]],
        [1, 1, "c", "g", "", "", [-1.0, 5, False, []]],
        [99],
        {"a": 1},
    ],
)
def test_numbers_out_of_bounds_are_refused(message: object) -> None:
    """Lengths, counts and numbers beyond their bounds are not accepted."""
    with pytest.raises(PeerError):
        messages.decode_request(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        [65, 1, "p", 1, -1, 0, 0, 0, "1", 0.25],
        [65, 1, "p", 1, 1, 0, 0, 1 << 62, "1", 0.25],
        [65, 1, "p", 1, 1, 0, 0, 0, "x" * 1000, 0.25],
        [65, 1, "p", 1, 1, 0, 0, 0, "1", 0.25, True, 1 << 63],
        [67, 1, 1, 1 << 62, 1, [], []],
        [67, 1, 1, 1, -1, [], []],
        [67, 1, 1, 1, 1, [[0, 1, ""]] * (messages.MAX_PARTS + 1), []],
        [67, 1, 1, 1, 1, [], [b""] * (messages.MAX_PARTS + 1)],
        [68, 1, 1, {str(i): 1 for i in range(messages.MAX_SENT_TOPICS + 1)}],
        [68, 1, 1, {"x" * 256: 1}],
        [69, 1, [b""] * (messages.MAX_PARTS + 1), []],
        [69, 1, [], [[0, 1, 1]] * (messages.MAX_PARTS + 1)],
    ],
)
def test_what_a_publisher_says_is_bounded_alike(message: object) -> None:
    """Numbers are offsets, and lists have a length that an honest publisher cannot exceed."""
    with pytest.raises(PeerError):
        messages.decode_reply(msgspec.msgpack.encode(message))


def test_a_giant_request_is_refused_before_it_is_decoded() -> None:
    """The limit on size comes first."""
    with pytest.raises(PeerError, match="limit"):
        messages.decode_request(b"\x97" + b"\0" * messages.MAX_REQUEST_BYTES)


def test_deep_nesting_does_not_overflow_the_stack() -> None:
    """Ten thousand nested arrays are an ordinary error."""
    with pytest.raises(PeerError):
        messages.decode_request(b"\x91" * 10_000)
