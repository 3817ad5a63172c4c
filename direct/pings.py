"""Pings that cannot be answered by whoever has not read them."""

import secrets
from collections import deque

from brokerless.direct import wire

# Pings of one client that may be answered; an answer to a later one tells as much.
_REMEMBERED = 64


def new_ping() -> tuple[int, bytes]:
    """A Ping with a number that cannot be guessed, and the number."""
    number = secrets.randbits(62) + 1
    return number, wire.encode(wire.Ping(number))


class Pings:
    """Those that were sent to one client, each with how much had been sent by then."""

    __slots__ = ("_sent",)

    def __init__(self) -> None:
        self._sent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, number: int, until: int) -> None:
        """Whoever answers with this number has read everything before `until`."""
        self._sent.append((number, until))

    def answered(self, number: int) -> int | None:
        """How much that shows to have been read; None if there was no such Ping. Earlier ones need no answer then."""
        if all(sent != number for sent, _ in self._sent):
            return None
        while True:
            sent, until = self._sent.popleft()
            if sent == number:
                return until
