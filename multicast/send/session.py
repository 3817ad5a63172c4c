"""A sender without I/O: frames in, GSO batches of packets out, heartbeats when nothing else is sent."""

from collections.abc import Iterator, Sequence

from brokerless.core.frame import Frame
from brokerless.multicast.policy import HeartbeatPolicy
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.moldudp64 import end_of_session, heartbeat
from brokerless.multicast.wire.packing import GsoBatch, pack_frame
from brokerless.multicast.wire.status import STATUS_WANTED, receivers_known


class Sender:
    """One session. Send what `frame` returns, and what `heartbeat` returns when `next_deadline` has come."""

    def __init__(
        self,
        session: bytes,
        name: str,
        next_sequence: int,
        *,
        datagram_bytes: int,
        policy: HeartbeatPolicy,
        now: float,
        sign: Signer | None = None,
    ) -> None:
        self.session = session
        self.name = name
        self.next_sequence = next_sequence
        self._limit = datagram_bytes
        self._policy = policy
        self._sign = sign
        self._wait_s = policy.first_s
        self._receivers = 0
        self._several = False  # there were, so that subscribers must be told if there is one
        self._due = now  # the first one tells receivers that join before any event where the stream begins

    def next_deadline(self) -> float:
        """When a heartbeat is due."""
        return self._due

    def frame(
        self, frame: Frame, now: float, known: tuple[int | Sequence[int], Sequence[bytes]] | None = None
    ) -> Iterator[GsoBatch]:
        """The packets of a frame, which must follow on what was sent before.

        `known` are its times (or the one of all) and datas, if the caller has them: then it need not be taken apart.
        """
        batches = pack_frame(self.session, self.name, frame, self._limit, self._sign, known=known)
        self.next_sequence = frame.next_offset + 1
        self._wait_s = self._policy.first_s
        self._due = now + self._wait_s
        return batches

    def single(self, head: bytes, seq: int, time: int, data: bytes) -> bytes:
        """The packet of one event without labels, which must follow on what was sent before.

        It has the same bytes as by way of a frame. `head` is what `describe` says of it. Call `sent_single` then.
        """
        packet = kernels.pack_gso_batch(self.session, self.next_sequence, head, seq, time, (data,), 0, 1, 1)
        return packet + self._sign(packet) if self._sign else packet

    def sent_single(self, now: float) -> None:
        """One event was sent."""
        self.next_sequence += 1
        self._wait_s = self._policy.first_s
        self._due = now + self._wait_s

    def heartbeat(self, now: float) -> bytes | None:
        """A heartbeat if one is due."""
        if now < self._due:
            return None
        self._due = now + self._wait_s
        self._wait_s = min(self._wait_s * self._policy.factor, self._policy.limit_s)
        return self._signed(self._beat())

    def tell_receivers(self, receivers: int) -> bytes | None:
        """So many subscribers are known: from now on heartbeats say so, and the one returned at once."""
        if receivers == self._receivers:
            return None
        self._receivers = receivers
        self._several |= receivers > 1
        return self._signed(self._beat()) if self._several else None

    def _beat(self) -> bytes:
        beat = heartbeat(self.session, self.next_sequence)
        return beat + receivers_known(self._receivers) if self._several else beat

    def solicit(self) -> bytes:
        """A heartbeat that asks every subscriber of ours for its position."""
        return self._signed(heartbeat(self.session, self.next_sequence) + STATUS_WANTED)

    def end(self) -> bytes:
        """The packet that ends the session."""
        return self._signed(end_of_session(self.session, self.next_sequence))

    def _signed(self, packet: bytes) -> bytes:
        return packet + self._sign(packet) if self._sign else packet
