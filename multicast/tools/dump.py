"""What `brokerless mcast dump` says about packets: session, sequence, gaps. Pure: packets in, lines out."""

from typing import NamedTuple

from brokerless.multicast.wire.message import decode
from brokerless.multicast.wire.moldudp64 import (
    END_OF_SESSION,
    HEARTBEAT,
    block_ends,
    parse_gone,
    parse_header,
)
from brokerless.multicast.wire.pure import TRAILER_BYTES, TRAILER_MARK

# Streams looked at side by side; more than this on one capture are noise, and the oldest is forgotten.
MAX_STREAMS = 1024


class DumpedPacket(NamedTuple):
    """One packet, explained. `kind` is data, heartbeat, end, gone, request or malformed."""

    kind: str
    session: str
    sequence: int
    messages: int
    notes: tuple[str, ...]


class Dumper:
    """Follows streams (per destination and session), and says where they have gaps and repeats."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, bytes], int] = {}
        self.packets = self.malformed = self.messages = self.missing = self.repeated = self.gaps = 0

    def look(self, destination: str, data: bytes, *, multicast: bool = True) -> DumpedPacket:
        """Explain one datagram that was sent to `destination` (any name for the stream)."""
        self.packets += 1
        gone = parse_gone(data)
        if gone is not None:
            note = f"gone up to {gone.oldest - 1}, epoch {gone.epoch}, source {gone.source}"
            return DumpedPacket("gone", _text(gone.session), gone.oldest, 0, (note,))
        header = parse_header(data)
        if header is None:
            self.malformed += 1
            return DumpedPacket("malformed", "", 0, 0, (f"{len(data)} bytes",))
        session, sequence, count = header
        if not multicast and len(data) == 20 and count not in (HEARTBEAT, END_OF_SESSION):
            return DumpedPacket("request", _text(session), sequence, count, ())
        if count in (HEARTBEAT, END_OF_SESSION):
            notes = self._follow((destination, session), sequence, 0) if multicast else []
            kind = "heartbeat" if count == HEARTBEAT else "end"
            return DumpedPacket(kind, _text(session), sequence, 0, tuple(notes))
        ends = block_ends(data, count)
        if ends is None:
            self.malformed += 1
            return DumpedPacket("malformed", _text(session), sequence, count, ("shorter than its messages",))
        self.messages += count
        notes = self._follow((destination, session), sequence, count) if multicast else []
        extra = len(data) - (ends[-1] if ends else 20)
        if extra == TRAILER_BYTES and data[-TRAILER_BYTES + 2 : -TRAILER_BYTES + 6] == TRAILER_MARK:
            notes.append("authenticated")
        elif extra:
            notes.append(f"{extra} bytes after the last message")
        return DumpedPacket("data", _text(session), sequence, count, tuple(notes))

    def _follow(self, stream: tuple[str, bytes], sequence: int, count: int) -> list[str]:
        expected = self._next.get(stream)
        if expected is None:
            if len(self._next) >= MAX_STREAMS:
                del self._next[next(iter(self._next))]
            self._next[stream] = sequence + count
            return ["first of this session"]
        self._next[stream] = max(expected, sequence + count)
        if sequence > expected:
            self.gaps += 1
            self.missing += sequence - expected
            return [f"GAP: {sequence - expected} missing, {expected} to {sequence - 1}"]
        if count and sequence < expected:
            again = min(expected, sequence + count) - sequence
            self.repeated += again
            return [f"repeats {again}"]
        return []


def messages_of(data: bytes) -> list[tuple[int, str, bytes]]:
    """The messages of a data packet: sequence, what is known about it, data."""
    header = parse_header(data)
    if header is None or header.messages in (HEARTBEAT, END_OF_SESSION):
        return []
    columns = decode(data, header.sequence, header.messages)
    if columns is None:
        return []
    described = columns.described if len(columns.described) > 1 else list(columns.described) * header.messages
    shown = []
    for i, one in enumerate(described):
        what = "" if one is None else f"{one.topic} seq={columns.seqs[i]} time={columns.times[i]}"
        shown.append((header.sequence + i, what, columns.datas[i]))
    return shown


def _text(session: bytes) -> str:
    return session.decode("ascii", "replace").rstrip()
