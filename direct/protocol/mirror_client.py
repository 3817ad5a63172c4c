"""A mirror's connection to the publisher (or to another mirror), without I/O: a subscriber that keeps whole frames."""

from collections.abc import Callable
from typing import Any

import msgspec

from brokerless.core import Position
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import State
from brokerless.direct.protocol.subscriber import SubscriberProtocol


class MirrorProtocol(SubscriberProtocol):
    """`align` is called with each WELCOME of a new session before anything is asked for: it makes the copy a prefix of
    what is offered there, and gives the position to go on from, or None if that is not for us. `time_before` tells when
    the copy's event before an offset was published, `differs` is called when the publisher has another event there.
    `promised` is the epoch below which nobody is followed."""

    def __init__(
        self,
        hello: messages.Hello,
        *,
        align: Callable[[messages.Welcome], Position | None],
        promised: Callable[[], int],
        time_before: Callable[[int], int],
        differs: Callable[[], None],
        **arguments: Any,
    ) -> None:
        super().__init__(hello, start="cursor", **arguments)
        self.epochs: list[tuple[int, int]] = []
        self.states: list[messages.State] = []
        self.mirrored = 0
        self.lease_s = 0.0
        self.proof = 0  # the number of the publisher's last challenge
        self._renamed = False  # the publisher may know us by another address
        self._align = align
        self._promised = promised
        self._time_before = time_before
        self._differs = differs

    def _seen_of(self, source: str) -> int:
        return max(super()._seen_of(source), self._promised())

    def _receive_welcome(self, welcome: messages.Welcome, now: float) -> None:
        if self.state is not State.FOLLOWING or welcome.instance != self.instance:
            position = self._align(welcome)
            if position is None:
                self._rejoin(now)
                return
            self._positions[welcome.source] = position
            self._start = "cursor" if welcome.state < 0 else "snapshot"
            self._state_end = -1
            self.ready.clear()
            self.epoch = -1  # begin at that position, as after a restart
            self._forget_held()
        self.epochs = list(welcome.epochs)
        if not welcome.copy:
            self.mirrored, self.lease_s = welcome.mirrored, welcome.lease_s
        super()._receive_welcome(welcome, now)
        if self._renamed and self.state is State.FOLLOWING:
            # This may be the answer to a greeting with the old address: we would never count there.
            self._renamed = False
            self.outbox.append(self._hello_message)

    def _needs_snapshot(self, welcome: messages.Welcome) -> bool:
        # Frames of older epochs belong to the copy like all others.
        return self._state_end < 0 and self.position < welcome.oldest

    def _last_time(self) -> int:
        return self._time_before(self.position)

    def _go_back(self, chunk: messages.Chunk, now: float) -> None:
        """What the copy has is not thrown away: the publisher finds out and stops, or begins a new epoch."""
        if not chunk.tail:
            self._differs()
        self._rejoin(now)

    def _receive_reply(self, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.State):
            self.states = [reply]
        else:
            super()._receive_reply(reply, now)

    def rename(self, mirror: str) -> None:
        """Send this address in HELLO from here on."""
        self._hello = msgspec.structs.replace(self._hello, mirror=mirror)
        self._hello_message = messages.encode(self._hello)
        self._renamed = True
        self.outbox = []

    def acknowledge(self, epoch: int, offset: int) -> None:
        """Tell that the copy has everything of the epoch before the offset."""
        self.outbox.append(messages.encode(messages.Advance(epoch, offset, self.proof)))

    def ask_state(self, echo: int, dead_letters: int) -> None:
        """Ask for groups, positions and dead letters, and show that we follow."""
        self.outbox.append(messages.encode(messages.StateRequest(echo, dead_letters, self.proof)))

    def go_back_to(self, position: Position, now: float) -> None:
        """What was received after that position could not be kept: join again, and get it again."""
        self.ready.clear()
        self._state_end = -1
        self.epoch, self.position = position.epoch, position.offset
        self._forget_held()
        self.instance = 0
        self._rejoin(now)

    def leave(self, now: float) -> None:
        """Do not follow this one any more: look for another."""
        self.instance = 0
        self.outbox = []
        self._rejoin(now)
