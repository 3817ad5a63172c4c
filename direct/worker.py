"""The worker: one of a group, gets its share of the events and says what became of each."""

import asyncio
import itertools
import random
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from brokerless.core import Event, Lost
from brokerless.core.errors import Closed, ConfigError, PeerError, UsageError
from brokerless.direct import address as addresses
from brokerless.direct import wire
from brokerless.direct.batch import check_topics
from brokerless.direct.driver import Driver
from brokerless.direct.groups import MAX_CREDIT
from brokerless.direct.keys import ClientKeys
from brokerless.direct.work import SETTLE_S, Labour, Parcel, WorkerCounters

# Enough to hide a round trip at 100,000 events a second, few enough to share a backlog fairly. A handler that
# takes seconds wants fewer: what one worker holds, no other can do. RabbitMQ's guides say 100 to 300.
PREFETCH = 512
# As SQS; a handler that needs longer calls `extend`.
LEASE_S = 30.0
# SQS' examples and NATS' guides use 5.
MAX_DELIVER = 5
# How often one who wants to send looks whether the thread that waits for deliveries lets it.
_TURN_S = 0.001


class Delivery:
    """An event, held by this worker until its lease is over.

    Call `ack()` when its effect is recorded, `nack(delay)` to have it again later, here or elsewhere. Without
    either it comes again when the lease is over. Both may be called from any thread.
    """

    __slots__ = ("_epoch", "_labour", "_worker", "attempt", "event", "settled")

    def __init__(self, event: Event, attempt: int, epoch: int, labour: Labour, worker: "Worker") -> None:
        self.event = event
        # The publisher's present one; the event may be of an older one.
        self._epoch = epoch
        self.attempt = attempt
        self.settled = False
        self._labour = labour
        self._worker = worker

    def __repr__(self) -> str:
        return f"Delivery({self.event.id}, attempt={self.attempt})"

    def ack(self) -> None:
        """The event is dealt with. Sent with others, at the latest when the next delivery is asked for."""
        if self.settled:
            raise UsageError(f"{self!r} was settled before")
        self.settled = True
        self._labour.begun.pop(self.event.offset, None)
        self._labour.acks.append((self._epoch, self.event.offset))
        if self._worker.waiting:
            self._worker.wake()

    def nack(self, delay: float = 0.0) -> None:
        """Not dealt with: it comes again, not before `delay` seconds."""
        if self.settled:
            raise UsageError(f"{self!r} was settled before")
        if not 0 <= delay <= 86400 * 30:
            raise UsageError(f"delay is {delay} s; it must be between 0 and 30 days")
        self.settled = True
        self._labour.begun.pop(self.event.offset, None)
        self._labour.nacks.append((self._epoch, self.event.offset, delay))
        self._labour.withhold(self.event.key)
        if self._worker.waiting:
            self._worker.wake()

    def extend(self) -> None:
        """Begin the lease anew: the handler needs more time. Sent at once, whatever thread or task calls it."""
        self._labour.extends.append((self._epoch, self.event.offset))
        self._worker.hurry()


class Worker:
    """One worker of a group: `for delivery in worker: …; delivery.ack()`.

    Every group gets every event, one worker of it gets each. An event that was delivered before has
    `attempt > 1`. After `max_deliver` attempts it goes to the publisher's dead-letter journal. With
    `key_affinity` events of one key go to one worker, in order. A group that is new begins at the oldest event
    (`start="live"`: at the next one); a known one goes on where it was.

    A publisher without a journal sends each event at most once: to a worker that has room in time, or to nobody;
    what a worker gives back or leaves behind is lost, and `on_loss` tells.

    One thread (or task) at a time may iterate; deliveries may be settled from any. `stop()` and `close()` may be
    called from any, and by handlers of signals.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        group: str,
        topics: Sequence[str] = (),
        start: Literal["oldest", "live"] = "oldest",
        prefetch: int = PREFETCH,
        lease_s: float = LEASE_S,
        max_deliver: int = MAX_DELIVER,
        key_affinity: bool = False,
        on_loss: Callable[[Lost], None] | None = None,
        curve: ClientKeys | None = None,
    ) -> None:
        """Connect in the background. The lease, `max_deliver`, topics and affinity are the group's: the newest
        worker's values count."""
        texts = [address] if isinstance(address, str) else list(address)
        if not texts:
            raise ConfigError("address", "give at least one")
        wire.check_name("group", group)
        if start not in ("oldest", "live"):
            raise ConfigError("start", f"{start!r} is not oldest or live; a known group goes on where it was")
        if not 0 < prefetch <= MAX_CREDIT:
            raise ConfigError("prefetch", f"must be 1 to {MAX_CREDIT}")
        if not 0 < lease_s <= 86400:
            raise ConfigError("lease_s", "must be more than 0 and at most a day")
        if not 1 <= max_deliver <= 10_000:
            raise ConfigError("max_deliver", "must be 1 to 10,000")
        self.group = group
        self.on_loss = on_loss
        self.losses: deque[Lost] = deque(maxlen=1000)
        self.counters = WorkerCounters()
        self.waiting = False
        self._stopped = False
        self._driver = Driver()
        self._labours: list[Labour] = []
        self._parcel: tuple[Labour, Parcel] | None = None
        self._affinity = key_affinity
        self._flushed_at = time.monotonic()
        policy = wire.Policy(lease_s, max_deliver, key_affinity, check_topics(topics, wire.MAX_TOPICS))
        try:
            for text in texts:
                hello = wire.Hello(
                    wire.VERSION, secrets.token_hex(16), group=group, start=start, policy=policy
                )
                labour = Labour(
                    hello,
                    prefetch=prefetch,
                    counters=self.counters,
                    random=random.random,
                    now=time.monotonic(),
                )
                self._driver.add(addresses.parse(text), labour, curve)
                self._labours.append(labour)
        except BaseException:
            self._driver.close()
            raise
        self._turns = itertools.cycle(self._labours)

    # ---- receiving -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Delivery]:
        return self.deliveries()

    def deliveries(self, timeout: float | None = None) -> Iterator[Delivery]:
        """Deliveries one by one; ends when none has come for `timeout` seconds, or when closed."""
        while not self._stopped:
            delivery = self._next()
            if delivery is not None:
                yield delivery
            elif not self._fetch(timeout):
                return

    def receive(self, timeout: float | None = None) -> Delivery | None:
        """One delivery, or None when `timeout` seconds are over or the worker was closed."""
        return next(self.deliveries(timeout), None)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        async for delivery in self.adeliveries():
            yield delivery

    async def adeliveries(self, timeout: float | None = None) -> AsyncIterator[Delivery]:  # noqa: ASYNC109 - as in the synchronous ones
        """`deliveries` for asyncio. A cancelled wait loses nothing."""
        while not self._stopped:
            delivery = self._next()
            if delivery is not None:
                yield delivery
            elif not await self._afetch(timeout):
                return

    async def areceive(self, timeout: float | None = None) -> Delivery | None:  # noqa: ASYNC109 - as in the synchronous ones
        """`receive` for asyncio."""
        while not self._stopped:
            delivery = self._next()
            if delivery is not None:
                return delivery
            if not await self._afetch(timeout):
                break
        return None

    def _next(self) -> Delivery | None:
        """The next delivery of the parcel in hand."""
        if self._parcel is None:
            return None
        labour, parcel = self._parcel
        now = time.monotonic()
        if now > parcel.until or parcel.instance != labour.instance:
            # The publisher gives these out anew; handling them now would be handling them twice.
            self.counters.expired += labour.drop_hand()
            if self._affinity:
                # Others have these keys now, and what came before in them.
                self.counters.expired += labour.drop_ready()
        if now - self._flushed_at > SETTLE_S:
            self._settle(now)
        begun = labour.begin()
        if begun is not None:
            event, attempt = begun
            self.counters.delivered += 1
            if attempt > 1:
                self.counters.redelivered += 1
            return Delivery(event, attempt, parcel.epoch, labour, self)
        self._parcel = None
        return None

    def _fetch(self, timeout: float | None) -> bool:
        if self._take():
            return True
        try:
            for seconds in self._steps(timeout):
                if self._take():
                    return True
                if self._stopped:
                    return False
                self.waiting = True
                self._driver.run(self._driver.wait, 0 if self._unsettled() else seconds)
        except Closed:
            return False
        finally:
            self.waiting = False
        return self._take()

    async def _afetch(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - as in the synchronous ones
        if self._take():
            await asyncio.sleep(0)
            return True
        try:
            for seconds in self._steps(timeout):
                if self._take():
                    return True
                if self._stopped:
                    return False
                self.waiting = True
                await self._driver.wait_async(0 if self._unsettled() else seconds)
        except Closed:
            return False
        finally:
            self.waiting = False
        return self._take()

    def _steps(self, timeout: float | None) -> Iterator[float]:
        self._settle(time.monotonic())
        for seconds in self._driver.steps(timeout):
            yield seconds
            self._settle(time.monotonic())

    def _take(self) -> bool:
        for _ in self._labours:
            labour = next(self._turns)
            while labour.ready:
                item = labour.ready[0]
                if isinstance(item, Parcel):
                    labour.hand = deque(item.events)
                    self._parcel = (labour, item)
                    labour.ready.popleft()
                    return True
                labour.ready.popleft()
                self.losses.append(item)
                if self.on_loss is not None:
                    self.on_loss(item)
        return False

    # ---- settling --------------------------------------------------------------------------------------

    def _unsettled(self) -> bool:
        return any(labour.unsettled for labour in self._labours)

    def _settle(self, now: float) -> None:
        """Send what was settled, and take what has arrived: credit comes back with acknowledgements."""
        self._flushed_at = now
        self._driver.run(self._exchange, now)

    def _exchange(self, now: float) -> None:
        for labour in self._labours:
            labour.flush()
        self._driver.pump(now)

    @property
    def failed(self) -> dict[str, PeerError]:
        """Publishers given up, with the reason, by address; receiving raises when no other is left."""
        return dict(self._driver.failed)

    def wake(self) -> None:
        """Make a waiting iteration send what was settled by another thread."""
        self._driver.wake()

    def hurry(self) -> None:
        """Send what was settled now: who calls may not ask for the next delivery for long."""
        self._flushed_at = 0.0
        if self.waiting:
            self.wake()  # another thread or task waits for deliveries: it sends, or lets us
        while not self._driver.attempt(self._send):
            time.sleep(_TURN_S)
            if not any(labour.extends for labour in self._labours):
                return
            self.wake()
        if self.waiting:
            self.wake()  # sending can take the socket's word that something has arrived

    def _send(self) -> None:
        if self._driver.closing:
            return
        for labour in self._labours:
            labour.flush()
        for channel in self._driver.channels:
            channel.quiet = False
            channel.send()

    # ---- closing ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the iteration after the delivery in hand. For handlers of signals and for other threads.

        What has arrived and was not begun is given back by `close()`.
        """
        self._stopped = True
        self._driver.wake()

    def close(self) -> None:
        """Send what was settled, give back the rest, close. Ends iterations that wait in other threads."""
        self._driver.close(self._end)

    def _end(self) -> None:
        self._stopped = True
        for labour in self._labours:
            labour.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "Worker":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
