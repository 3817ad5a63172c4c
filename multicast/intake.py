"""From datagrams to the receiver: checks, takes apart, and sorts into messages, heartbeats and answers. Pure.

Whole trains (what the kernel's receive offload gives) are checked and taken apart by a few calls if they
are what a busy sender of ours sends; anything else goes packet by packet.
"""

from collections.abc import Callable

from brokerless.multicast import speed
from brokerless.multicast.message import Columns, decode, decode_train
from brokerless.multicast.protocol import (
    END_OF_SESSION,
    GONE_MARK,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    Gone,
    parse_gone,
    parse_header,
)
from brokerless.multicast.receiver import Receiver

Unseal = Callable[[memoryview], memoryview | None]


class Intake:
    """Feeds one receiver. `on_gone` hears of answers that also tell who the source is."""

    def __init__(
        self,
        receiver: Receiver[Columns],
        *,
        unseal: Unseal | None = None,
        opaque: bool = False,
        on_gone: Callable[[Gone], None] | None = None,
    ) -> None:
        self.receiver = receiver
        self._counters = receiver.counters
        self._unseal = unseal
        self._opaque = opaque
        self._on_gone = on_gone

    def train(self, buffer: bytes | memoryview, packet_bytes: int, now: float) -> None:
        """Datagrams of `packet_bytes` each, one after another; only the last may be shorter."""
        packets = len(buffer) // packet_bytes
        whole = packets * packet_bytes
        view = memoryview(buffer)
        if packets < 2 or packet_bytes < HEADER_BYTES or not self._uniform(view[:whole], packet_bytes, now):
            whole = 0
        for start in range(whole, len(buffer), packet_bytes):
            self.packet(view[start : start + packet_bytes], now)

    def _uniform(self, train: memoryview, packet_bytes: int, now: float) -> bool:
        """Take a train as one, if it is of equal packets in sequence; otherwise do nothing and say False."""
        header = None if self._opaque else speed.train_header(train, packet_bytes)
        receiver = self.receiver
        if header is None or header[0] != receiver.session:
            return False  # the first packet of a session is looked at more closely
        session, first, count = header
        messages = len(train) // packet_bytes * count
        if self._unseal is not None and not self._all_sealed(train, packet_bytes):
            return False
        columns = None
        if receiver.wants(session, first, messages, now):
            columns = decode_train(train, packet_bytes, first, count)
            if columns is None:
                return False
        self._counters.packets += len(train) // packet_bytes
        self._counters.received_bytes += len(train)
        if columns is not None and not receiver.in_order(session, first, messages, columns):
            receiver.accept(first, messages, columns, len(train), now)
        return True

    def _all_sealed(self, train: memoryview, packet_bytes: int) -> bool:
        unseal = self._unseal
        assert unseal is not None
        starts = range(0, len(train), packet_bytes)
        return all(unseal(train[start : start + packet_bytes]) is not None for start in starts)

    def packet(self, packet: bytes | memoryview, now: float, *, server: int | None = None) -> None:
        """One datagram; `server` is the number of the request server that sent it, None: it is live."""
        counters, receiver = self._counters, self.receiver
        counters.packets += 1
        counters.received_bytes += len(packet)
        if self._unseal is not None:
            opened = self._unseal(memoryview(packet))
            if opened is None:
                counters.unauthentic += 1
                return
            packet = opened
        header = parse_header(packet)
        if header is None:
            counters.malformed += 1
            return
        session, first, count = header
        if count == HEARTBEAT:
            self._heartbeat(packet, session, first, now, server)
        elif count == END_OF_SESSION:
            if server is None:
                receiver.end(session, first, now)
        elif not first:
            counters.malformed += 1
        elif receiver.wants(session, first, count, now):
            columns = decode(packet, first, count, opaque=self._opaque)
            if columns is None:
                counters.malformed += 1
            elif not receiver.in_order(session, first, count, columns):
                receiver.accept(first, count, columns, len(packet), now, repair=server is not None)

    def _heartbeat(
        self, packet: bytes | memoryview, session: bytes, following: int, now: float, server: int | None
    ) -> None:
        if server is None:
            self.receiver.heartbeat(session, max(1, following), now)
            return
        if packet[HEADER_BYTES : HEADER_BYTES + len(GONE_MARK)] != GONE_MARK:
            return  # a foreign server's heartbeat: tells nothing new
        answer = parse_gone(packet)
        if answer is None:
            self._counters.malformed += 1
            return
        if self._on_gone is not None:
            self._on_gone(answer)
        self.receiver.gone(server, answer, now)


def header_of(packet: bytes | memoryview) -> tuple[bytes, int, int]:
    """The three fields, unchecked: for tools that show anything."""
    session, sequence, count = HEADER.unpack_from(packet)
    return session, sequence, count
