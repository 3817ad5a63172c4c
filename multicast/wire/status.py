"""The status exchange between subscriber and request server, which we add to MoldUDP64.

A subscriber tells its position and asks for the newest sequence; the server answers with that and with a cookie. A
request that carries the cookie comes from an address that really receives our answers. Big-endian; a packet begins
with a MoldUDP64 header, and what we add follows it, where plain receivers and servers never look:

    question   header (session or ten spaces, expected sequence, count 0), then `BLq1`, cookie, requester,
               expected sequence, tag
    request    header (session, sequence, count), with or without the same extension
    answer     header (session, next sequence, count 0), then `BLs1`, cookie, requester, base, oldest, epoch,
               receivers, length of source, source
    heartbeat  header, then `BLw1`: the sender wants a question from every subscriber
    heartbeat  header, then `BLn1`, receivers: so many subscribers should wait for each other before they ask
    repair     a packet of messages that was asked for and goes to the whole group: behind the last message `BLm1`,
               messages that were asked for (more than are in it: no more fit)

No I/O here.
"""

import struct
from typing import NamedTuple

from brokerless.multicast.wire.moldudp64 import (
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    MAX_COUNT,
    MAX_SEQUENCE,
    SESSION_BYTES,
    block_ends,
    valid_session,
)

# A question about whatever session the server has.
ANY_SESSION = b" " * SESSION_BYTES
# The position of a subscriber that leaves: it is behind nothing.
LEAVING = (1 << 64) - 1
STATUS_WANTED = b"BLw1"
_RECEIVERS_MARK = b"BLn1"
SHARED_MARK = b"BLm1"
_MARKED = struct.Struct(">4sH")
SHARED_BYTES = _MARKED.size
_EXTENSION_MARK = b"BLq1"
_EXTENSION = struct.Struct(">4sQQQB")
_STATUS_MARK = b"BLs1"
_STATUS = struct.Struct(">4sQQQQQIB")
EXTENDED_REQUEST_BYTES = HEADER_BYTES + _EXTENSION.size


class Requester(NamedTuple):
    """The subscriber that asks: the server's cookie, its own number, and its position."""

    cookie: int
    requester: int  # random, one per subscriber
    expected: int
    tag: int


class Status(NamedTuple):
    """What a server has: sequences from `oldest` up to `next` (exclusive) of `session`, which began at `base`."""

    session: bytes
    next: int
    cookie: int
    requester: int
    base: int
    oldest: int
    epoch: int
    receivers: int
    source: str


def extended_request(session: bytes, sequence: int, count: int, requester: Requester) -> bytes:
    """A request with the extension; count 0 is a question for the status."""
    header = HEADER.pack(session, sequence, min(count, MAX_COUNT))
    return header + _EXTENSION.pack(_EXTENSION_MARK, *requester)


def parse_requester(packet: bytes | memoryview) -> Requester | None:
    """The extension of a request; None if there is none."""
    if len(packet) != EXTENDED_REQUEST_BYTES:
        return None
    mark, cookie, requester, expected, tag = _EXTENSION.unpack_from(packet, HEADER_BYTES)
    return Requester(cookie, requester, expected, tag) if mark == _EXTENSION_MARK else None


def status_packet(status: Status) -> bytes:
    """The answer to a question."""
    source = status.source.encode()
    return (
        HEADER.pack(status.session, status.next, HEARTBEAT)
        + _STATUS.pack(
            _STATUS_MARK,
            status.cookie,
            status.requester,
            status.base,
            status.oldest,
            status.epoch,
            status.receivers,
            len(source),
        )
        + source
    )


def parse_status(packet: bytes | memoryview) -> Status | None:
    """The Status in a packet, or None if it is something else."""
    if len(packet) < HEADER_BYTES + _STATUS.size:
        return None
    session, following, count = HEADER.unpack_from(packet)
    mark, cookie, requester, base, oldest, epoch, receivers, size = _STATUS.unpack_from(packet, HEADER_BYTES)
    if mark != _STATUS_MARK or count != HEARTBEAT or not valid_session(session):
        return None
    if len(packet) != HEADER_BYTES + _STATUS.size + size:
        return None
    if not 0 < base <= oldest <= following < MAX_SEQUENCE:
        return None
    try:
        source = bytes(packet[HEADER_BYTES + _STATUS.size :]).decode()
    except UnicodeDecodeError:
        return None
    return Status(session, following, cookie, requester, base, oldest, epoch, receivers, source)


def is_status(packet: bytes | memoryview) -> bool:
    """Does this begin like an answer to a question?"""
    return packet[HEADER_BYTES : HEADER_BYTES + 4] == _STATUS_MARK


def wants_status(packet: bytes | memoryview) -> bool:
    """Does this heartbeat ask every subscriber for its position?"""
    return packet[HEADER_BYTES : HEADER_BYTES + 4] == STATUS_WANTED


def receivers_known(receivers: int) -> bytes:
    """What follows a heartbeat of a sender that knows so many subscribers."""
    return _MARKED.pack(_RECEIVERS_MARK, min(receivers, 0xFFFF))


def parse_receivers(packet: bytes | memoryview) -> int | None:
    """How many subscribers a heartbeat says there are; None: nothing."""
    if len(packet) != HEADER_BYTES + _MARKED.size:
        return None
    mark, receivers = _MARKED.unpack_from(packet, HEADER_BYTES)
    return receivers if mark == _RECEIVERS_MARK else None


def shared_repair(asked: int) -> bytes:
    """What follows the last message of a repair that goes to the whole group."""
    return _MARKED.pack(SHARED_MARK, min(asked, MAX_COUNT))


def parse_shared(packet: bytes | memoryview) -> int | None:
    """How many messages were asked for, if this packet is a repair for the whole group; otherwise None."""
    end = len(packet) - _MARKED.size
    if end < HEADER_BYTES or packet[end : end + 4] != SHARED_MARK:
        return None
    ends = block_ends(packet, HEADER.unpack_from(packet)[2])
    if not ends or ends[-1] != end:
        return None  # the data of a message ends like that
    return int(_MARKED.unpack_from(packet, end)[1])
