"""From datagrams to the receiver: checks, takes apart, and sorts into messages, heartbeats and answers. Pure.

Whole GSO batches (what the kernel's receive offload gives) are checked and taken apart by a few calls if they
are what a busy sender of ours sends; anything else goes packet by packet.
"""

from collections.abc import Callable, Sequence

from brokerless.multicast.receive.reorder import Receiver
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.auth import CLOCK_WINDOW_S, Freshness, Verifier, signed_at, wall_us
from brokerless.multicast.wire.message import Columns, Described, decode, decode_gso_batch
from brokerless.multicast.wire.moldudp64 import (
    END_OF_SESSION,
    GONE_MARK,
    HEADER_BYTES,
    HEARTBEAT,
    LENGTH,
    Gone,
    parse_gone,
    parse_header,
)
from brokerless.multicast.wire.pure import TRAILER_BYTES
from brokerless.multicast.wire.status import (
    SHARED_BYTES,
    SHARED_MARK,
    Status,
    is_status,
    parse_receivers,
    parse_shared,
    parse_status,
    wants_status,
)

# Servers whose answers are told from recorded ones; a subscriber knows a handful.
_MAX_SERVERS = 64


class PacketDecoder:
    """Feeds one receiver."""

    def __init__(
        self,
        receiver: Receiver[Columns],
        *,
        auth_key: bytes | None = None,
        opaque: bool = False,
        on_source: Callable[[Gone | Status], None] | None = None,
        requester: int = 0,
        clock_window_s: float = CLOCK_WINDOW_S,
        clock_us: Callable[[], int] = wall_us,
    ) -> None:
        """`on_source` hears of answers that tell who the source is. Answers to our questions carry `requester`.

        With `auth_key` only packets that are new (see `Freshness`) begin a session or prove that a sender is alive.
        """
        self.receiver = receiver
        self.on_status: Callable[[int, Status], None] | None = None
        self._requester = requester
        self._live = Freshness(window_s=clock_window_s, one_stream=True, clock_us=clock_us)
        self._answers = Freshness(window_s=clock_window_s, max_signers=_MAX_SERVERS, clock_us=clock_us)
        self._counters = receiver.counters
        self._verify = Verifier(auth_key, "group") if auth_key is not None else None
        self._verify_answer = Verifier(auth_key, "answer") if auth_key is not None else None
        self._opaque = opaque
        self._on_source = on_source
        # What the messages of the last packet in sequence began with, and what that says: those of the next one mostly
        # do, too. Empty if they have keys.
        self.last: tuple[bytes, Sequence[Described | None]] = (b"", ())

    def batch(self, buffer: bytes | memoryview, packet_bytes: int, now: float) -> None:
        """Datagrams of `packet_bytes` each, one after another; only the last may be shorter."""
        packets = len(buffer) // packet_bytes
        whole = packets * packet_bytes
        view = memoryview(buffer)
        if packets < 2 or packet_bytes < HEADER_BYTES or not self._uniform(view[:whole], packet_bytes, now):
            whole = 0
        for start in range(whole, len(buffer), packet_bytes):
            self.packet(view[start : start + packet_bytes], now)

    def _uniform(self, batch: memoryview, packet_bytes: int, now: float) -> bool:
        """Take a GSO batch as one, if it is of equal packets in sequence; otherwise do nothing and say False."""
        header = None if self._opaque else kernels.gso_batch_header(batch, packet_bytes)
        receiver = self.receiver
        if header is None or header[0] != receiver.session:
            return False  # the first packet of a session is looked at more closely
        session, first, count = header
        signed = TRAILER_BYTES if self._verify is not None else 0
        # One byte of the mark is looked at first, because asking costs a microsecond.
        if batch[packet_bytes - signed - SHARED_BYTES] == SHARED_MARK[0] and (
            parse_shared(batch[: packet_bytes - signed]) is not None
        ):
            return False
        if self._verify is not None and not self._verify.batch(batch, packet_bytes):
            return False
        size = len(batch)
        packets = size // packet_bytes
        messages = packets * count
        columns = None
        live = self._verify is None or self._live.is_new(*signed_at(batch))
        is_next = live and first == receiver.expected and first == receiver.highest
        if is_next or receiver.wants(session, first, messages, now, live=live):
            columns = self._decode_like_last(batch, packet_bytes, first, count)
            if columns is None:
                return False
        self._counters.packets += packets
        self._counters.received_bytes += size
        if columns is None:
            pass
        elif is_next:
            receiver.next_in_order(messages, now, receiver.ready, (session, columns))
        elif not receiver.in_order(session, first, messages, columns):
            receiver.accept(first, messages, columns, size, now)
        return True

    def _decode_like_last(
        self, batch: bytes | memoryview, packet_bytes: int, first: int, count: int
    ) -> Columns | None:
        """`decode_gso_batch`, and quicker if the messages are of the same kind as the last ones."""
        head, described = self.last
        parts = kernels.unpack(batch, packet_bytes, count, head, 0) if head else None
        if parts is not None:
            return Columns(first, described, *parts, len(batch))
        columns = decode_gso_batch(batch, packet_bytes, first, count)
        if columns is not None:
            (one,) = columns.described
            assert one is not None
            at = HEADER_BYTES + LENGTH.size
            head = b"" if one.key_bytes else bytes(batch[at : at + one.size])
            self.last = head, columns.described  # in one step: a signal handler may raise before it
        return columns

    def packet(self, packet: bytes | memoryview, now: float, *, server: int | None = None) -> None:
        """One datagram; `server` is the number of the request server that sent it, None: it is live."""
        counters, receiver = self._counters, self.receiver
        counters.packets += 1
        counters.received_bytes += len(packet)
        signed, proven = packet, True
        verify = self._verify if server is None else self._verify_answer
        if verify is not None:
            opened = verify(memoryview(packet))
            if opened is None:
                counters.unauthentic += 1
                return
            packet = opened
        if server is None and (asked := parse_shared(packet)) is not None:
            self._shared(packet, asked, now)
            return
        if verify is not None:
            stamps = self._live if server is None else self._answers
            proven = stamps.is_new(*signed_at(signed))
        if server is None and proven and not self._opaque and self._next(packet, now):
            return
        header = parse_header(packet)
        if header is None:
            counters.malformed += 1
            return
        session, first, count = header
        if count == HEARTBEAT:
            if server is None:
                self._heartbeat(packet, session, max(1, first), now, proven)
            else:
                self._answer(packet, now, server, proven)
        elif count == END_OF_SESSION:
            if server is None and proven:
                receiver.end(session, first, now)
        elif not first:
            counters.malformed += 1
        elif receiver.wants(session, first, count, now, live=proven and server is None, proven=proven):
            columns = decode(packet, first, count, opaque=self._opaque)
            if columns is None:
                counters.malformed += 1
            elif not receiver.in_order(session, first, count, columns):
                receiver.accept(first, count, columns, len(packet), now, repair=server is not None)

    @property
    def expects(self) -> tuple[bytes, int, bytes]:
        """Session, sequence, and beginning of the message, of a packet that needs no further look; 0 if none."""
        receiver = self.receiver
        sequence, session = receiver.expected, receiver.session
        if session is None or sequence != receiver.highest or self._verify is not None or self._opaque:
            return b"", 0, b""
        return session, sequence, self.last[0]

    def _heartbeat(
        self, packet: bytes | memoryview, session: bytes, following: int, now: float, proven: bool
    ) -> None:
        receiver = self.receiver
        receiver.heartbeat(session, following, now, live=proven)
        if wants_status(packet):
            receiver.want_status(now)
        elif proven and session == receiver.session and (receivers := parse_receivers(packet)):
            receiver.share_among(receivers)

    def _shared(self, packet: bytes | memoryview, asked: int, now: float) -> None:
        """A repair that somebody asked for and everybody gets."""
        header = parse_header(packet)
        if header is None or not header.sequence:
            self._counters.malformed += 1
            return
        session, first, count = header
        if self.receiver.wants_shared(session, first, count, asked, now):
            columns = decode(packet, first, count, opaque=self._opaque)
            if columns is None:
                self._counters.malformed += 1
            else:
                self.receiver.accept(first, count, columns, len(packet), now, repair=True, shared=True)

    def _next(self, packet: bytes | memoryview, now: float) -> bool:
        """Take a packet that is what is expected next, of the same kind as the one before; otherwise do nothing."""
        size, receiver = len(packet), self.receiver
        header = kernels.gso_batch_header(packet, size)
        if header is None:
            return False
        session, first, count = header
        if first != receiver.expected or first != receiver.highest or session != receiver.session:
            return False
        columns = self._decode_like_last(packet, size, first, count)
        if columns is None:
            return False
        receiver.next_in_order(count, now, receiver.ready, (session, columns))
        return True

    def _answer(self, packet: bytes | memoryview, now: float, server: int, proven: bool) -> None:
        """A heartbeat from a request server: its status, that a range is gone, or a foreign one that tells nothing."""
        if is_status(packet):
            status = parse_status(packet)
            if status is None or status.requester != self._requester:
                self._counters.malformed += 1
                return
            if self.on_status is not None:
                self.on_status(server, status)
            if self._on_source is not None:
                self._on_source(status)
            self.receiver.status(status, now, proven=proven)
        elif packet[HEADER_BYTES : HEADER_BYTES + len(GONE_MARK)] == GONE_MARK:
            answer = parse_gone(packet)
            if answer is None:
                self._counters.malformed += 1
                return
            if self._on_source is not None:
                self._on_source(answer)
            self.receiver.gone(server, answer, now)
