"""A worker's side of the conversation with one publisher, without I/O. Driven like protocol.Follower.

`ready` holds deliveries (parcels of one message each) and losses, in order. Whatever the application decides
about an event is collected by `settle_*` (safe to call from any thread) and sent by `flush`.
"""

from collections import deque
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from brokerless.core import Backoff, Counters, Event, Frame, Lost
from brokerless.core.counters import count, loss
from brokerless.core.errors import FrameError, PeerError
from brokerless.direct import wire
from brokerless.direct.state import MAX_TEXT, SETTLED_S, State, reason_of

T = TypeVar("T")
# The publisher pings twice a second; after this much silence it is greeted anew.
SILENCE_S = 3.0
GREETING = Backoff(first_s=0.05, limit_s=1.0)
# Settled events wait at most this long for company while more events are at hand.
SETTLE_S = 0.005
# Times the prefetch. More than once, because what was lost on its way or let its lease end is given out anew.
_MOST_WAITING = 2
# Events that an application may leave unsettled before the oldest are forgotten; their leases are over by then.
MAX_BEGUN = 131_072
_NOT_SAID = 1 << 62  # above every number of a Settle


class WorkerCounters(Counters):
    """What a Worker counts, over all its publishers."""

    component = "direct.worker"

    delivered: Annotated[int, count("events handed to the application, redeliveries included")] = 0
    redelivered: Annotated[int, count("events handed to the application with attempt > 1")] = 0
    acked: Annotated[int, count("events acknowledged")] = 0
    nacked: Annotated[int, count("events given back")] = 0
    expired: Annotated[
        int, count("deliveries dropped because their lease was over before their turn came")
    ] = 0
    joins: Annotated[int, count("WELCOMEs received: the first join and every reconnection")] = 0
    bad_messages: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    lost: Annotated[int, loss("offsets that the group lost, as told by the publisher")] = 0


class Parcel(msgspec.Struct, frozen=True):
    """Events of one delivery, with their attempt; void after `until`. Settled in terms of the publisher's epoch."""

    instance: int
    epoch: int
    until: float
    events: list[tuple[Event, int]]


class Labour:
    """One publisher as a worker sees it."""

    wants_live = True

    def __init__(
        self,
        hello: wire.Hello,
        *,
        prefetch: int,
        counters: WorkerCounters,
        random: Callable[[], float],
        now: float,
    ) -> None:
        self.state = State.JOINING
        self.outbox: list[bytes] = []
        self.ready: deque[Parcel | Lost] = deque()
        self.live: tuple[int, str] = (0, "")
        self.error: PeerError | None = None
        self.source = ""
        self.instance = 0
        self.epoch = -1
        self._leases = True
        self._hello = hello
        self._greeting = wire.encode(hello)
        self._prefetch = prefetch
        self._counters = counters
        self._random = random
        self.greetings = 0  # without an answer
        self._attempts = 0  # greetings that led to nothing that lasted
        self._joined_at = now
        self._greet_at = now
        self._silent_at = now
        # Filled by whatever thread settles, emptied by `flush`.
        self.acks: deque[tuple[int, int]] = deque()
        self.nacks: deque[tuple[int, int, float]] = deque()
        self.extends: deque[tuple[int, int]] = deque()
        # Given back without an attempt: no handler has had them.
        self.unbegun: deque[tuple[int, int]] = deque()
        # What is left of the parcel that the application is given.
        self.hand: deque[tuple[Event, int]] = deque()
        # What the application was given and has not settled; the value is nothing.
        self.begun: dict[int, None] = {}
        # Keys of which an event was given back: what has arrived of them must not come before it. Up to the Settle
        # of that number, which the publisher had read when it sent the next ones in order.
        self._withheld: dict[str, int] = {}
        self._settles = 0
        self._settles_before = 0  # the last WELCOME
        # The last acknowledgements, in case a publisher is gone before it has read them.
        self._said: deque[tuple[int, int]] = deque(maxlen=wire.MAX_RANGES)

    # ---- what the driver calls -------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When handle_deadline must be called at the latest."""
        if self.state is State.JOINING:
            return self._greet_at
        return self._silent_at if self.state is State.FOLLOWING else float("inf")

    def handle_deadline(self, now: float) -> None:
        """Greet, or greet anew after silence."""
        if self.state is State.FOLLOWING and now >= self._silent_at:
            self._rejoin(now)
        if self.state is State.JOINING and now >= self._greet_at:
            if self._greeting not in self.outbox:  # or the last one has not left yet
                self.outbox.append(self._greeting)
            self._greet_at = now + GREETING.delay_s(self._attempts, self._random)
            self.greetings += 1
            self._attempts += 1

    def _rejoin(self, now: float) -> None:
        self.state = State.JOINING
        # A publisher that welcomes us and sends us away again must not make us spin.
        if now - self._joined_at >= SETTLED_S:
            self._attempts = 0
            self._greet_at = now

    def fail(self, text: str) -> None:
        """Have no more to do with this publisher, and say why."""
        self.error = PeerError(text)
        self.state = State.REFUSED

    def receive_live(self, data: bytes, now: float) -> None:
        """Workers have no live socket."""

    def receive_control(self, data: bytes, now: float) -> None:
        """A word of the publisher."""
        if self.state in (State.REFUSED, State.CLOSED):
            return
        try:
            reply = wire.decode_reply(data)
        except PeerError:
            self._counters.bad_messages += 1
            return
        self._silent_at = now + SILENCE_S
        match reply:
            case wire.Deliver():
                self._receive_deliver(reply, now)
            case wire.Welcome():
                self._receive_welcome(reply, now)
            case wire.Gone():
                self._receive_gone(reply)
            case wire.Ping():
                self.outbox.append(wire.encode(wire.Pong(reply.number)))
            case wire.Refused() if reply.again:
                if self.state is State.FOLLOWING:
                    self._rejoin(now)
            case wire.Refused():
                self.fail(f"the publisher refused: {reply.text[:MAX_TEXT]}")

    def _receive_welcome(self, welcome: wire.Welcome, now: float) -> None:
        if welcome.version != wire.VERSION:
            self.fail(
                f"the publisher speaks version {welcome.version}, we speak {wire.VERSION}; upgrade the older side"
            )
            return
        self.greetings = 0
        if self.state is State.FOLLOWING and welcome.instance == self.instance:
            # We greeted again before the first answer came, which took our credit away; what we have said since counts.
            self.outbox.append(wire.encode(wire.Credit(self._prefetch)))
            return
        self._counters.joins += 1
        self.state = State.FOLLOWING
        self._joined_at = now
        if welcome.instance != self.instance:
            # Another process: it gives out anew what the old one had given us, and is told what we have not begun.
            self._counters.expired += self.drop_hand() + self.drop_ready()
        if welcome.epoch != self.epoch:
            self.acks.clear()
            self.nacks.clear()
            self.extends.clear()
            self.unbegun.clear()
            self.begun.clear()
            self._said.clear()
        if welcome.instance != self.instance:
            self._withheld.clear()
        self._settles_before = self._settles
        if welcome.instance != self.instance and self._said:
            self._settles += 1
            again = wire.Settle(welcome.epoch, list(self._said), number=self._settles)
            self.outbox.append(wire.encode(again))
        self.source, self.instance, self.epoch = welcome.source, welcome.instance, welcome.epoch
        self._leases = welcome.replay  # without a journal nothing comes again, so nothing ends
        self.flush()  # before it is asked for events: some of them may be settled
        self.outbox.append(wire.encode(wire.Credit(self._prefetch)))

    def _receive_deliver(self, deliver: wire.Deliver, now: float) -> None:
        if deliver.epoch != self.epoch or self.state is not State.FOLLOWING:
            return
        try:
            chosen = self._open(deliver)
        except FrameError:
            self._counters.bad_messages += 1
            return
        if self._withheld:
            self._let_go(deliver.after)
        if not self._leases:
            self.outbox.append(wire.encode(wire.Pong()))  # read: there is room for one more on the way
        if chosen:
            until = now + self._hello.policy.lease_s if self._leases else float("inf")
            self.ready.append(Parcel(self.instance, self.epoch, until, chosen))
            self._drop_void()

    def _open(self, deliver: wire.Deliver) -> list[tuple[Event, int]]:
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
        parcels = [item for item in self.ready if isinstance(item, Parcel)]
        waiting = sum([len(parcel.events) for parcel in parcels])
        for parcel in parcels:
            if waiting <= _MOST_WAITING * self._prefetch:
                break
            self.ready.remove(parcel)
            waiting -= len(parcel.events)
            self._counters.expired += len(parcel.events)

    def _receive_gone(self, gone: wire.Gone) -> None:
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
    def unsettled(self) -> bool:
        """Whether `flush` has something to send now; while the publisher is away it waits."""
        told = self.acks or self.nacks or self.extends or self.unbegun
        return self.state is State.FOLLOWING and bool(told)

    def begin(self) -> tuple[Event, int] | None:
        """The next event of the parcel in hand, which is the application's now."""
        while self.hand:
            event, attempt = self.hand.popleft()
            if self._withheld and event.key in self._withheld:
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
            self._withheld[key] = _NOT_SAID

    def _let_go(self, read: int) -> None:
        """The publisher had read our Settle of that number: from here on its keys are in order again."""
        free = {key for key, number in list(self._withheld.items()) if number <= read}
        if not free:
            return
        self.unbegun += [(self.epoch, event.offset) for event, _ in self.hand if event.key in free]
        self.hand = deque(item for item in self.hand if item[0].key not in free)
        ready: deque[Parcel | Lost] = deque()
        for parcel in self.ready:
            if isinstance(parcel, Lost):
                ready.append(parcel)
                continue
            self.unbegun += [(parcel.epoch, event.offset) for event, _ in parcel.events if event.key in free]
            left = [item for item in parcel.events if item[0].key not in free]
            if left:
                ready.append(Parcel(parcel.instance, parcel.epoch, parcel.until, left))
        self.ready = ready
        for key in free:
            self._withheld.pop(key, None)

    def drop_hand(self) -> int:
        """Give back the rest of the parcel in hand, whose lease is over; return how many events."""
        rest = _drain(self.hand)
        self.unbegun += [(self.epoch, event.offset) for event, _ in rest]
        return len(rest)

    def drop_ready(self) -> int:
        """Give back what has arrived and was not opened; return how many events."""
        unopened = self._unopened()
        self.ready = deque(item for item in self.ready if isinstance(item, Lost))
        self.unbegun += unopened
        return len(unopened)

    def _unopened(self) -> list[tuple[int, int]]:
        parcels = [item for item in list(self.ready) if isinstance(item, Parcel)]
        return [(parcel.epoch, event.offset) for parcel in parcels for event, _ in parcel.events]

    def flush(self) -> None:
        """Put everything settled so far into the outbox. Words about another epoch are void and dropped."""
        if self.state is not State.FOLLOWING:
            return  # they wait for the next WELCOME
        while self.unsettled:
            withheld = [key for key, number in list(self._withheld.items()) if number == _NOT_SAID]
            acks = _runs(_drain(self.acks))
            nacks = [(a, a, delay) for e, a, delay in _drain(self.nacks) if e == self.epoch]
            extends = _runs(_drain(self.extends))
            unbegun = [(a, b) for e, a, b in _runs(_drain(self.unbegun)) if e == self.epoch]
            ours = [(a, b) for e, a, b in acks if e == self.epoch]
            self._counters.acked += sum(b - a + 1 for a, b in ours)
            self._said += ours
            self._counters.nacked += len(nacks)
            held = [(a, b) for e, a, b in extends if e == self.epoch]
            size = wire.MAX_RANGES
            for at in range(0, max(len(ours), len(nacks), len(held), len(unbegun)), size):
                part = slice(at, at + size)
                self._settles += 1
                settle = wire.Settle(
                    self.epoch, ours[part], nacks[part], held[part], unbegun[part], self._settles
                )
                self.outbox.append(wire.encode(settle))
            for key in withheld:
                self._withheld[key] = self._settles

    def close(self) -> None:
        """Settle what was decided, give back the rest by saying goodbye."""
        if self.state is State.FOLLOWING:
            self.outbox.append(wire.encode(wire.Credit(0)))  # or else we would be given them again
        if self._leases:  # or else nothing comes again
            self.nacks += [(self.epoch, offset, 0.0) for offset in list(self.begun)]
        self.flush()
        if self.state is State.FOLLOWING:
            self.outbox.append(wire.encode(wire.Bye(settles=self._settles - self._settles_before)))
        self.state = State.CLOSED


def _drain(queue: deque[T]) -> list[T]:
    drained = []
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
