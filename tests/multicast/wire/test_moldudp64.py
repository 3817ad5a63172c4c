"""MoldUDP64 headers, requests, and the answer that says gone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.multicast.wire.moldudp64 import (
    END_OF_SESSION,
    MAX_COUNT,
    MAX_SEQUENCE,
    Gone,
    block_ends,
    end_of_session,
    gone,
    heartbeat,
    parse_gone,
    parse_header,
    request,
    session_matches,
    session_name,
    wire_session,
)

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=6)
EPOCHS = st.integers(0, 2**63 - 1)


def test_the_layout_is_the_specification_s() -> None:
    """The bytes of a heartbeat, an end of session and a request, written out."""
    session = b"ORDERS0001"
    assert heartbeat(session, 7) == b"ORDERS0001" + b"\0\0\0\0\0\0\0\7" + b"\0\0"
    assert end_of_session(session, 7) == b"ORDERS0001" + b"\0\0\0\0\0\0\0\7" + b"\xff\xff"
    assert request(session, 258, 3) == b"ORDERS0001" + b"\0\0\0\0\0\0\1\2" + b"\0\3"
    assert request(session, 1, 100_000)[18:] == MAX_COUNT.to_bytes(2, "big"), "never an end of session"


@given(name=NAMES, epoch=EPOCHS)
def test_a_session_is_ten_bytes_and_its_name_can_be_read(name: str, epoch: int) -> None:
    """A publisher's session matches its own name, and no other epoch near it gives the same session."""
    session = wire_session(name, epoch)
    assert len(session) == 10
    assert session_name(session) == name
    assert session_matches(session, name)
    assert session_matches(session, None)
    assert session_matches(session, session.decode().rstrip())
    assert not session_matches(session, name + "x" if len(name) < 6 else name[:-1])
    assert wire_session(name, epoch + 1) != session
    header = parse_header(heartbeat(session, 1))
    assert header is not None
    assert header.session == session


@pytest.mark.parametrize("name", ["", "sevenxx", "a b", "ä", "a\n"])
def test_a_wrong_name_is_refused(name: str) -> None:
    """Empty, too long, with spaces, not ASCII, or with control characters."""
    with pytest.raises(ConfigError):
        wire_session(name, 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    """Parsing never raises, and what it accepts is within bounds."""
    header = parse_header(data)
    if header is not None:
        assert header.sequence < MAX_SEQUENCE
        assert 0 <= header.messages <= END_OF_SESSION
    parse_gone(data)


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    EPOCHS,
    st.text(min_size=1, max_size=20),
)
def test_gone_is_read_back_and_is_a_heartbeat_to_others(
    first: int, width: int, more: int, epoch: int, source: str
) -> None:
    """What a request server says is what the receiver reads; anybody else reads a heartbeat."""
    source = source.encode("utf-8", "ignore").decode()
    said = Gone(
        wire_session("T", epoch), first, min(first, 5), first + width, first + width + more, epoch, source
    )
    raw = gone(said)
    assert parse_gone(raw) == said
    header = parse_header(raw)
    assert header is not None
    assert (header.messages, header.sequence) == (0, said.oldest)
    assert parse_gone(raw[:-1]) is None
    assert parse_gone(raw + b"x") is None


@given(st.lists(st.binary(max_size=50), max_size=20), st.binary(max_size=10), st.integers(0, 5))
def test_blocks_are_found_and_short_packets_noticed(
    messages: list[bytes], extra: bytes, missing: int
) -> None:
    """Every block's end is found; bytes after the last are allowed; a packet that is too short is None."""
    packet = heartbeat(b"x" * 10, 1) + b"".join(len(m).to_bytes(2, "big") + m for m in messages)
    ends = block_ends(packet + extra, len(messages))
    assert ends is not None
    assert len(ends) == len(messages)
    assert (ends[-1] if ends else 20) == len(packet)
    if messages:
        assert block_ends(packet[:-1], len(messages)) is None
    if missing and not extra:
        assert block_ends(packet, len(messages) + missing) is None
