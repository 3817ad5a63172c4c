"""MoldUDP64, exactly: header, heartbeat, end of session, request; and the one answer we add to it.

Big-endian. A downstream packet is the header (session, sequence of the first message, count) and then
`count` message blocks, each a u16 length and as many bytes. A request is the header alone. No I/O here.

Our sequence numbers are journal offsets plus one: MoldUDP64 counts from 1, a journal from 0.
"""

import struct
from typing import NamedTuple

from brokerless.core.errors import ConfigError

HEADER = struct.Struct(">10sQH")
HEADER_BYTES = HEADER.size  # 20
LENGTH = struct.Struct(">H")
HEARTBEAT = 0
END_OF_SESSION = 0xFFFF
MAX_COUNT = 0xFFFE  # the largest count that is a number of messages
# The largest UDP payload over IPv4: 65,535 − 20 (IP) − 8 (UDP).
MAX_DATAGRAM = 65_507
# A sequence beyond this is noise: at 10 million events/s it takes 29,000 years to get here.
MAX_SEQUENCE = 1 << 63
# Names end in four digits of the epoch, so that a restart without the old journal is a new session.
SESSION_BYTES = 10
NAME_CHARS = 6
EPOCH_DIGITS = 4
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# "Gone": what a request server of ours says about a range that its journal no longer has. To anybody else
# it is a heartbeat: count 0 and a sequence (the oldest that can be had), with bytes after it that the
# protocol does not define.
GONE_MARK = b"BLg1"
GONE = struct.Struct(">4sQQQQQB")  # mark, first, base, oldest, next, epoch, length of source


class Header(NamedTuple):
    """The 20 bytes that begin every packet."""

    session: bytes
    sequence: int
    messages: int


class Gone(NamedTuple):
    """The journal has nothing from sequence `first` up to `oldest` (exclusive); `next` is to be sent next.

    `base` is the first sequence that the session ever had: before it there is nothing to be missed.
    """

    session: bytes
    first: int
    base: int
    oldest: int
    next: int
    epoch: int
    source: str


def wire_session(name: str, epoch: int) -> bytes:
    """The session as sent: up to six characters and four base-36 digits of the epoch, padded to ten."""
    return (check_name(name) + epoch_digits(epoch)).encode().ljust(SESSION_BYTES)


def epoch_digits(epoch: int) -> str:
    """The four base-36 digits of an epoch."""
    digits = ""
    for _ in range(EPOCH_DIGITS):
        epoch, digit = divmod(epoch, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def check_name(name: str) -> str:
    """Return the session name, or raise ConfigError: 1 to 6 printable ASCII characters, no spaces."""
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and " " not in name and name):
        raise ConfigError("session", f"{name!r} must be printable ASCII without spaces")
    if len(name) > NAME_CHARS:
        raise ConfigError(
            "session",
            f"{name!r} has {len(name)} characters; a MoldUDP64 session has {SESSION_BYTES}, of which "
            f"{EPOCH_DIGITS} tell restarts apart, so a name has at most {NAME_CHARS}",
        )
    return name


def session_name(session: bytes) -> str:
    """The part of a wire session that its user chose (for a foreign session: all of it that could be)."""
    text = session.decode("ascii", "replace").rstrip()
    return text[:-EPOCH_DIGITS] if len(text) > EPOCH_DIGITS else text


def session_matches(session: bytes, wanted: str | None) -> bool:
    """Is this wire session the one that a subscriber named? `None` takes any, a name any epoch of it."""
    if wanted is None:
        return True
    text = session.decode("ascii", "replace").rstrip()
    return text == wanted or (len(text) > EPOCH_DIGITS and text[:-EPOCH_DIGITS] == wanted)


def valid_session(session: bytes) -> bool:
    """Ten printable ASCII characters: what a session is made of, and noise seldom is."""
    return len(session) == SESSION_BYTES and session.isascii() and session.decode("ascii").isprintable()


def parse_header(packet: bytes | memoryview) -> Header | None:
    """The header of a packet, or None if this cannot be one."""
    if len(packet) < HEADER_BYTES:
        return None
    header = Header(*HEADER.unpack_from(packet))
    if header.sequence >= MAX_SEQUENCE or not valid_session(header.session):
        return None
    return header


def heartbeat(session: bytes, next_sequence: int) -> bytes:
    """Nothing new: `next_sequence` is the next that will be sent."""
    return HEADER.pack(session, next_sequence, HEARTBEAT)


def end_of_session(session: bytes, next_sequence: int) -> bytes:
    """No more will come; `next_sequence` is one more than the last that was sent."""
    return HEADER.pack(session, next_sequence, END_OF_SESSION)


def request(session: bytes, sequence: int, count: int) -> bytes:
    """Ask for `count` messages from `sequence`; the answer is one packet with as many as fit."""
    return HEADER.pack(session, sequence, min(count, MAX_COUNT))


def gone(answer: Gone) -> bytes:
    """The packet that says so; see `GONE_MARK`."""
    source = answer.source.encode()
    extra = GONE.pack(
        GONE_MARK, answer.first, answer.base, answer.oldest, answer.next, answer.epoch, len(source)
    )
    return HEADER.pack(answer.session, answer.oldest, HEARTBEAT) + extra + source


def parse_gone(packet: bytes | memoryview) -> Gone | None:
    """The Gone in a packet, or None if it is something else."""
    if len(packet) < HEADER_BYTES + GONE.size:
        return None
    session, sequence, count = HEADER.unpack_from(packet)
    mark, first, base, oldest, following, epoch, size = GONE.unpack_from(packet, HEADER_BYTES)
    if mark != GONE_MARK or count != HEARTBEAT or sequence != oldest or not valid_session(session):
        return None
    if len(packet) != HEADER_BYTES + GONE.size + size:
        return None
    if not (first < oldest <= following < MAX_SEQUENCE and base <= oldest):
        return None
    try:
        source = bytes(packet[HEADER_BYTES + GONE.size :]).decode()
    except UnicodeDecodeError:
        return None
    return Gone(session, first, base, oldest, following, epoch, source)


def block_ends(packet: bytes | memoryview, count: int, start: int = HEADER_BYTES) -> list[int] | None:
    """Where each of `count` message blocks ends, or None if the packet is too short for them.

    Bytes after the last block are allowed: that is where extensions go, and plain receivers skip them.
    """
    size = len(packet)
    ends = []
    at = start
    unpack = LENGTH.unpack_from
    for _ in range(count):
        if at + 2 > size:
            return None
        at += 2 + unpack(packet, at)[0]
        ends.append(at)
    return ends if at <= size else None
