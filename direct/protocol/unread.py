"""How many bytes each client has not read from the control socket, as far as its answers show.

The libraries do not tell how long their queue for one client is. So the publisher sends Pings, each with a number that
cannot be guessed: a client that answers one has read everything that was sent to it before.
"""

import secrets
from collections import deque

from brokerless.direct.protocol import messages

# How much one client may leave unread before its requests wait. A client sends one request at a time, for about 1 MiB.
# A single message larger than this is not counted; otherwise the next answer would wait until it was processed.
CLIENT_BYTES = 4 * 1024 * 1024
# How much all clients together may leave unread. Above it each client may leave only SCARCE_BYTES.
TOTAL_BYTES = 256 * 1024 * 1024
SCARCE_BYTES = 64 * 1024
# After so many bytes a Ping follows at once; for less, one is sent from time to time.
PING_BYTES = 2 * 1024 * 1024
# Pings of one client that are remembered; an answer to a later one says more.
_REMEMBERED = 64


def new_ping() -> tuple[int, bytes]:
    """A Ping with a number that cannot be guessed, and the number."""
    number = secrets.randbits(62) + 1
    return number, messages.encode(messages.Ping(number))


class Pings:
    """Those that were sent to one client, each with how much had been sent by then."""

    __slots__ = ("_sent",)

    def __init__(self) -> None:
        self._sent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, number: int, until: int) -> None:
        """A client that answers with this number has read everything before `until`."""
        self._sent.append((number, until))

    def answered(self, number: int) -> int | None:
        """How much that shows to have been read; None if there was no such Ping. Earlier ones need no answer then."""
        if all(sent != number for sent, _ in self._sent):
            return None
        while True:
            sent, until = self._sent.popleft()
            if sent == number:
                return until


class _Peer:
    __slots__ = ("large", "large_until", "pinged", "pings", "read", "sent")

    def __init__(self) -> None:
        self.sent = self.read = self.pinged = 0  # bytes since we began to count
        self.large = self.large_until = 0  # the last large message: its size, and `sent` after it
        self.pings = Pings()


class UnreadBytes:
    """The account of all peers; those that have read everything are not in it."""

    def __init__(self) -> None:
        self.total = 0
        self._peers: dict[bytes, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def of(self, peer: bytes) -> int:
        """How many bytes a peer may not have read."""
        known = self._peers.get(peer)
        return known.sent - known.read if known is not None else 0

    @property
    def scarce(self) -> bool:
        """Whether all of them together have left too much unread."""
        return self.total >= TOTAL_BYTES

    def full(self, peer: bytes) -> bool:
        """Whether a peer must read before it is answered."""
        known = self._peers.get(peer)
        if known is None:
            return False
        left = known.sent - known.read
        if self.scarce:
            return left >= SCARCE_BYTES
        return left - (known.large if known.read < known.large_until else 0) >= CLIENT_BYTES

    def unasked(self, peer: bytes) -> bool:
        """Whether something was sent to a peer after its last Ping."""
        known = self._peers.get(peer)
        return known is not None and known.sent > known.pinged

    def bytes_sent(self, peer: bytes) -> int:
        """How many bytes have been sent to a peer so far."""
        known = self._peers.get(peer)
        return known.sent if known is not None else 0

    def is_unread(self, peer: bytes, until: int) -> bool:
        """Whether a peer has not shown that it has read the first `until` bytes."""
        known = self._peers.get(peer)
        return known is not None and known.read < until <= known.sent

    def sent(self, peer: bytes, size: int) -> bool:
        """So many bytes have left for a peer; whether it should be pinged now."""
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer()
        known.sent += size
        self.total += size
        if size >= CLIENT_BYTES:
            known.large, known.large_until = size, known.sent
        return known.sent - known.pinged >= (SCARCE_BYTES if self.scarce else PING_BYTES)

    def ping(self, peer: bytes) -> bytes:
        """A Ping for a peer, to be sent after all that was told to `sent`."""
        number, ping = new_ping()
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer()
        # A client that answers has read the Ping, too.
        known.pinged = known.sent + len(ping)
        known.pings.add(number, known.pinged)
        return ping

    def shown(self, peer: bytes, number: int) -> None:
        """A peer has answered a Ping; numbers that were not sent to it are ignored."""
        known = self._peers.get(peer)
        until = known.pings.answered(number) if known is not None else None
        if known is None or until is None:
            return
        read = min(until, known.sent)
        self.total -= read - known.read
        known.read = read
        if known.read == known.sent and not known.pings:
            del self._peers[peer]

    def forget(self, peer: bytes) -> None:
        """The peer's connection is gone, and its queue with it."""
        self.total -= self.of(peer)
        self._peers.pop(peer, None)

    def peers(self, *, again: bool) -> list[bytes]:
        """Those that may have something unread since they were last asked, or (`again`) at all."""
        return [peer for peer, known in self._peers.items() if again or known.sent > known.pinged]
