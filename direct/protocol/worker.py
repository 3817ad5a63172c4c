"""A worker's connection to one publisher, without I/O. See protocol/client.py for what the driver must do.

`ready` holds deliveries (one DeliveryBatch per message) and losses, in order. What the application decides about an
event is appended to `acks`, `nacks`, `extends` (safe from any thread) and sent by `flush`.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from brokerless.core import Event, Frame, Lost
from brokerless.core.errors import FrameError
from brokerless.direct.counters import WorkerCounters
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import ClientProtocol, State, reason_of
from brokerless.direct.protocol.promotion import first_after

T = TypeVar("T")
# The publisher pings twice a second; after this much silence the worker joins again.
SILENCE_S = 3.0
# Settled events wait at most this long for company while more events are at hand.
SETTLE_S = 0.005
# Times the prefetch. More than once, because what was lost on its way, or whose lease ended, is leased again.
_MOST_WAITING = 2
# Events that an application may leave unsettled before the oldest are forgotten; their leases are over by then.
MAX_BEGUN = 131_072
_NOT_SAID = 1 << 62  # above every number of a Settle


class DeliveryBatch(msgspec.Struct, frozen=True):
    """Events of one delivery, with their attempt; void after `until`. Settled in terms of the publisher's epoch."""

    instance: int
    epoch: int
    until: float
    events: list[tuple[Event, int]]


class WorkerProtocol(ClientProtocol):
    """One publisher as a worker sees it."""

    def __init__(
        self,
        hello: messages.Hello,
        *,
        prefetch: int,
        counters: WorkerCounters,
        random: Callable[[], float],
        now: float,
    ) -> None:
        super().__init__(hello, counters=counters, random=random, now=now)
        self.ready: deque[DeliveryBatch | Lost] = deque()
        self._leases = True
        self._prefetch = prefetch
        self._counters = counters
        self._silent_at = now
        # Filled by whatever thread settles, emptied by `flush`.
        self.acks: deque[tuple[int, int]] = deque()
        self.nacks: deque[tuple[int, int, float]] = deque()
        self.answers: deque[tuple[str, bytes]] = deque()  # replies to requests, by the request's name
        self.extends: deque[tuple[int, int]] = deque()
        # Given back without an attempt: no handler has had them.
        self.unbegun: deque[tuple[int, int]] = deque()
        # What is left of the batch that the application is given.
        self.current: deque[tuple[Event, int]] = deque()
        # What the application was given and has not settled; the value is nothing.
        self.begun: dict[int, None] = {}
        # Keys of which an event was given back: what has arrived of them must not come before it. Up to the Settle
        # of that number, which the publisher had read when it sent the next ones in order.
        self._withheld_keys: dict[str, int] = {}
        self._settles = 0
        self._settles_before = 0  # the last WELCOME
        # The last acknowledgements, in case a publisher is gone before it has read them.
        self._said: deque[tuple[int, int]] = deque(maxlen=messages.MAX_RANGES)
        # Older epochs, each with the offset below which the present one has the same events.
        self._same: dict[int, int] = {}

    # ---- what the driver calls -------------------------------------------------------------------------

    def _following_deadline(self) -> float:
        return self._silent_at

    def _handle_following(self, now: float) -> None:
        if now >= self._silent_at:
            self._rejoin(now)

    def _heard_control(self, now: float) -> None:
        self._silent_at = now + SILENCE_S

    def _receive_reply(self, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Deliver):
            self._receive_deliver(reply, now)
        elif isinstance(reply, messages.Gone):
            self._receive_gone(reply)

    def _receive_welcome(self, welcome: messages.Welcome, now: float) -> None:
        self.unanswered_hellos = 0
        if self.state is State.FOLLOWING and welcome.instance == self.instance:
            # We sent HELLO again before the first answer came, which took our credit away; what we sent since counts.
            self.outbox.append(messages.encode(messages.Credit(self._prefetch)))
            return
        self._joined(now)
        if welcome.instance != self.instance:
            # Another process: it leases again what the old one had leased to us, and is told what we have not begun.
            self._counters.expired += self.drop_current() + self.drop_ready()
        if welcome.epoch != self.epoch:
            self._keep_acks(welcome)
            self.nacks.clear()
            self.extends.clear()
            self.unbegun.clear()
            self.begun.clear()
        if welcome.instance != self.instance:
            self._withheld_keys.clear()
        self._settles_before = self._settles
        if welcome.instance != self.instance and self._said:
            self._settles += 1
            again = messages.Settle(welcome.epoch, list(self._said), number=self._settles)
            self.outbox.append(messages.encode(again))
        self.source, self.instance, self.epoch = welcome.source, welcome.instance, welcome.epoch
        self._leases = welcome.replay  # without a journal nothing comes again, so nothing ends
        self.flush()  # before it is asked for events: some of them may be settled
        self.outbox.append(messages.encode(messages.Credit(self._prefetch)))

    def _keep_acks(self, welcome: messages.Welcome) -> None:
        """Below the offset where another epoch began the journal has the same events: their settlements hold."""
        known = any(epoch == self.epoch for epoch, _ in welcome.epochs)
        same = first_after(welcome.epochs, self.epoch, welcome.begin) if known else 0
        self._same = {epoch: min(end, same) for epoch, end in self._same.items()} if known else {}
        if known:
            self._same[self.epoch] = same
        self._said = deque([r for r in self._said if r[1] < same], maxlen=messages.MAX_RANGES)

    def _translated(self, settled: list[tuple[int, int]], epoch: int) -> list[tuple[int, int]]:
        """In terms of the present epoch, if it has the same events."""
        return [(epoch if at < self._same.get(of, 0) else of, at) for of, at in settled]

    def _receive_deliver(self, deliver: messages.Deliver, now: float) -> None:
        if deliver.epoch != self.epoch or self.state is not State.FOLLOWING:
            return
        try:
            chosen = self._open(deliver)
        except FrameError:
            self._counters.bad_messages += 1
            return
        if self._withheld_keys:
            self._let_go(deliver.after)
        if not self._leases:
            self.outbox.append(
                messages.encode(messages.Pong())
            )  # read: there is room for one more on the way
        if chosen:
            until = now + self._hello.policy.lease_s if self._leases else float("inf")
            self.ready.append(DeliveryBatch(self.instance, self.epoch, until, chosen))
            self._drop_void()

    def _open(self, deliver: messages.Deliver) -> list[tuple[Event, int]]:
        """The events that are meant, each once and no more than we have room for, or else FrameError."""
        total, end = 0, -1
        for first, last, _ in sorted(deliver.ranges):
            if not end < first <= last:
                raise FrameError("ranges that overlap")
            total, end = total + last - first + 1, last
        if total > self._prefetch or len(deliver.frames) > len(deliver.ranges):
            raise FrameError(f"{total} events, there is room for {self._prefetch}")
        chosen: list[tuple[Event, int]] = []
        ranges = deque(deliver.ranges)
        for raw in deliver.frames:
            frame = Frame.parse(raw)
            if frame.source != self.source:
                raise FrameError(f"a frame of {frame.source!r}")
            events, first, after = frame.events(), frame.first_offset, frame.next_offset
            while ranges and ranges[0][0] < after:
                a, b, attempt = ranges.popleft()
                chosen += [(event, attempt) for event in events[max(0, a - first) : max(0, b + 1 - first)]]
                if b >= after:
                    ranges.appendleft((after, b, attempt))
                    break
        if len(chosen) != total:
            raise FrameError("ranges beyond the frames")
        return chosen

    def _drop_void(self) -> None:
        """A publisher never has more under way than we have room for: of much more, the oldest are void by now."""
        batches = [item for item in self.ready if isinstance(item, DeliveryBatch)]
        waiting = sum([len(batch.events) for batch in batches])
        for batch in batches:
            if waiting <= _MOST_WAITING * self._prefetch:
                break
            self.ready.remove(batch)
            waiting -= len(batch.events)
            self._counters.expired += len(batch.events)

    def _receive_gone(self, gone: messages.Gone) -> None:
        if gone.epoch != self.epoch:
            return
        for first, last in gone.ranges:
            if last < first:
                self._counters.bad_messages += 1
                continue
            self._counters.lost += last - first + 1
            self.ready.append(Lost(self.source, self.epoch, None, first, last, reason_of(gone.reason)))

    # ---- settling --------------------------------------------------------------------------------------

    @property
    def has_settles_to_send(self) -> bool:
        """Whether `flush` has something to send now; while the publisher is away it waits."""
        told = self.acks or self.nacks or self.extends or self.unbegun or self.answers
        return self.state is State.FOLLOWING and bool(told)

    def begin(self) -> tuple[Event, int] | None:
        """The next event of the current batch, which is the application's now."""
        while self.current:
            try:
                event, attempt = self.current.popleft()
            except IndexError:
                break  # another thread gave it back: the lease is over
            if self._withheld_keys and event.key in self._withheld_keys:
                self.unbegun.append((self.epoch, event.offset))
                continue
            if len(self.begun) >= MAX_BEGUN:
                self.begun.pop(next(iter(self.begun)), None)
            self.begun[event.offset] = None
            return event, attempt
        return None

    def withhold(self, key: str) -> None:
        """An event of this key was given back: later ones that are here go back too, and come after it."""
        if key and self._leases and self._hello.policy.affinity:
            self._withheld_keys[key] = _NOT_SAID

    def _let_go(self, read: int) -> None:
        """The publisher had read our Settle of that number: from here on its keys are in order again."""
        free = {key for key, number in list(self._withheld_keys.items()) if number <= read}
        if not free:
            return
        self.unbegun += [(self.epoch, event.offset) for event, _ in self.current if event.key in free]
        self.current = deque(item for item in self.current if item[0].key not in free)
        ready: deque[DeliveryBatch | Lost] = deque()
        for batch in self.ready:
            if isinstance(batch, Lost):
                ready.append(batch)
                continue
            self.unbegun += [(batch.epoch, event.offset) for event, _ in batch.events if event.key in free]
            left = [item for item in batch.events if item[0].key not in free]
            if left:
                ready.append(DeliveryBatch(batch.instance, batch.epoch, batch.until, left))
        self.ready = ready
        for key in free:
            self._withheld_keys.pop(key, None)

    def drop_current(self) -> int:
        """Give back the rest of the current batch, whose lease is over; return how many events."""
        rest = _drain(self.current)
        self.unbegun += [(self.epoch, event.offset) for event, _ in rest]
        return len(rest)

    def drop_ready(self) -> int:
        """Give back what has arrived and was not opened; return how many events."""
        unopened = self._unopened()
        self.ready = deque(item for item in self.ready if isinstance(item, Lost))
        self.unbegun += unopened
        return len(unopened)

    def _unopened(self) -> list[tuple[int, int]]:
        batches = [item for item in list(self.ready) if isinstance(item, DeliveryBatch)]
        return [(batch.epoch, event.offset) for batch in batches for event, _ in batch.events]

    def flush(self) -> None:
        """Put everything settled so far into the outbox. Words about another epoch are void and dropped."""
        if self.state is not State.FOLLOWING:
            return  # they wait for the next WELCOME
        while self.has_settles_to_send:
            self.outbox += [messages.encode(messages.Answer(*answer)) for answer in _drain(self.answers)]
            withheld = [key for key, number in list(self._withheld_keys.items()) if number == _NOT_SAID]
            acks = _runs(self._translated(_drain(self.acks), self.epoch))
            nacks = [(a, a, delay) for e, a, delay in _drain(self.nacks) if e == self.epoch]
            extends = _runs(_drain(self.extends))
            unbegun = [(a, b) for e, a, b in _runs(_drain(self.unbegun)) if e == self.epoch]
            ours = [(a, b) for e, a, b in acks if e == self.epoch]
            self._counters.acked += sum(b - a + 1 for a, b in ours)
            self._said += ours
            self._counters.nacked += len(nacks)
            held = [(a, b) for e, a, b in extends if e == self.epoch]
            size = messages.MAX_RANGES
            for at in range(0, max(len(ours), len(nacks), len(held), len(unbegun)), size):
                part = slice(at, at + size)
                self._settles += 1
                settle = messages.Settle(
                    self.epoch, ours[part], nacks[part], held[part], unbegun[part], self._settles
                )
                self.outbox.append(messages.encode(settle))
            for key in withheld:
                self._withheld_keys[key] = self._settles

    def close(self) -> None:
        """Settle what was decided, give back the rest by sending BYE."""
        if self.state is State.FOLLOWING:
            self.outbox.append(messages.encode(messages.Credit(0)))  # or else we would be given them again
        if self._leases:  # or else nothing comes again
            self.nacks += [(self.epoch, offset, 0.0) for offset in list(self.begun)]
        self.flush()
        if self.state is State.FOLLOWING:
            self.outbox.append(messages.encode(messages.Bye(settles=self._settles - self._settles_before)))
        self._become(State.CLOSED)


def _drain(queue: deque[T]) -> list[T]:
    drained = []
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while queue:
            drained.append(queue.popleft())
    return drained


def _runs(settled: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(epoch, offset) pairs as (epoch, first, last) runs."""
    runs: list[tuple[int, int, int]] = []
    for epoch, offset in sorted(settled):
        if runs and runs[-1][0] == epoch and offset <= runs[-1][2] + 1:
            runs[-1] = (epoch, runs[-1][1], max(offset, runs[-1][2]))
        else:
            runs.append((epoch, offset, offset))
    return runs
