"""A sender without I/O: frames in, trains of packets out, heartbeats when nothing else is sent."""

from collections.abc import Iterator, Sequence

from brokerless.core.frame import Frame
from brokerless.multicast.packing import Seal, Train, pack_frame
from brokerless.multicast.policy import HeartbeatPolicy
from brokerless.multicast.protocol import end_of_session, heartbeat


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
        seal: Seal | None = None,
    ) -> None:
        self.session = session
        self.name = name
        self.next_sequence = next_sequence
        self._limit = datagram_bytes
        self._policy = policy
        self._seal = seal
        self._wait_s = policy.first_s
        self._due = now  # the first one tells receivers that join before any event where the stream begins

    def next_deadline(self) -> float:
        """When a heartbeat is due."""
        return self._due

    def frame(
        self, frame: Frame, now: float, known: tuple[int | Sequence[int], Sequence[bytes]] | None = None
    ) -> Iterator[Train]:
        """The packets of a frame, which must follow on what was sent before.

        `known` are its times (or the one of all) and datas, if the caller has them: then it need not be taken apart.
        """
        trains = pack_frame(self.session, self.name, frame, self._limit, self._seal, known=known)
        self.next_sequence = frame.next_offset + 1
        self._wait_s = self._policy.first_s
        self._due = now + self._wait_s
        return trains

    def heartbeat(self, now: float) -> bytes | None:
        """A heartbeat if one is due."""
        if now < self._due:
            return None
        self._due = now + self._wait_s
        self._wait_s = min(self._wait_s * self._policy.factor, self._policy.limit_s)
        return self._sealed(heartbeat(self.session, self.next_sequence))

    def end(self) -> bytes:
        """The packet that ends the session."""
        return self._sealed(end_of_session(self.session, self.next_sequence))

    def _sealed(self, packet: bytes) -> bytes:
        return packet + self._seal(packet) if self._seal else packet
