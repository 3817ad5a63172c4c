"""The status exchange on the wire."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.multicast.wire.moldudp64 import HEADER_BYTES, heartbeat, parse_header
from brokerless.multicast.wire.status import (
    STATUS_WANTED,
    Requester,
    Status,
    extended_request,
    is_status,
    parse_requester,
    parse_status,
    status_packet,
    wants_status,
)

U64 = st.integers(0, (1 << 64) - 1)
SESSION = b"ORDERS000A"


@given(U64, U64, U64, st.integers(0, 255), st.integers(0, 0xFFFE))
def test_a_request_carries_who_asks(cookie: int, who: int, expected: int, tag: int, count: int) -> None:
    """The header is that of an ordinary request, and the extension comes back as it was."""
    requester = Requester(cookie, who, expected, tag)
    packet = extended_request(SESSION, 7, count, requester)
    assert parse_header(packet) == (SESSION, 7, count)
    assert parse_requester(packet) == requester
    assert parse_requester(packet[:HEADER_BYTES]) is None


@given(st.integers(1, 1 << 40), st.integers(0, 1000), st.integers(0, 1000), U64, U64, st.text(max_size=60))
def test_a_status_comes_back(base: int, more: int, kept: int, cookie: int, epoch: int, source: str) -> None:
    """What a server has, who asked, and its cookie."""
    status = Status(SESSION, base + more + kept, cookie, 9, base, base + more, epoch, 3, source)
    packet = status_packet(status)
    assert is_status(packet)
    assert parse_status(packet) == status
    assert parse_status(packet[:-1]) is None or not source


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    """No exception, whatever comes."""
    parse_status(noise)
    parse_requester(noise)
    is_status(noise)
    wants_status(noise)


def test_a_heartbeat_can_ask_for_the_position() -> None:
    """A plain receiver sees a heartbeat."""
    assert wants_status(heartbeat(SESSION, 5) + STATUS_WANTED)
    assert not wants_status(heartbeat(SESSION, 5))
