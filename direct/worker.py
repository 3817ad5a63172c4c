"""The worker: one of a group, gets its share of the events and says what became of each."""

import asyncio
import itertools
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal

from brokerless.core import Event, Lost
from brokerless.core.discovery import Found, pattern_of
from brokerless.core.errors import Closed, ConfigError, UsageError
from brokerless.core.event import check_data, microseconds
from brokerless.core.exporter import Announced
from brokerless.core.loss_log import LossLog
from brokerless.core.runtime.closing import Closing
from brokerless.core.topics import check_topics
from brokerless.direct.address import parse_address
from brokerless.direct.counters import WorkerCounters
from brokerless.direct.groups.group import MAX_CREDIT
from brokerless.direct.io.batching import Timer
from brokerless.direct.io.client import Discovered, Driver, FollowsPublishers
from brokerless.direct.io.failover import Failover
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.requests import ID, is_over
from brokerless.direct.protocol.worker import SETTLE_S, DeliveryBatch, WorkerProtocol

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

    __slots__ = ("_epoch", "_protocol", "_worker", "attempt", "event", "settled")

    def __init__(
        self, event: Event, attempt: int, epoch: int, protocol: WorkerProtocol, worker: "Worker"
    ) -> None:
        self.event = event
        # The publisher's present one; the event may be of an older one.
        self._epoch = epoch
        self.attempt = attempt
        self.settled = False
        self._protocol = protocol
        self._worker = worker

    def __repr__(self) -> str:
        return f"Delivery({self.event.id}, attempt={self.attempt})"

    def ack(self) -> None:
        """The event is processed. Sent now, or within 5 ms together with others that are acknowledged meanwhile."""
        if self.settled:
            raise UsageError(f"{self!r} was settled before")
        self.settled = True
        self._protocol.begun.pop(self.event.offset, None)
        self._protocol.acks.append((self._epoch, self.event.offset))
        self._worker.flush_soon()

    def reply(self, data: bytes) -> None:
        """Answer the request that this event is (see RequestClient), and acknowledge it.

        Raises UsageError if it is not a request, InvalidEvent if `data` is no bytes or has more than 127 KiB.
        """
        name = self.event.headers.get(ID)
        if name is None:
            raise UsageError(f"{self!r} is not a request: nobody waits for a reply")
        if self.settled:
            raise UsageError(f"{self!r} was settled before")
        self._protocol.answers.append((name, check_data(data, messages.MAX_REPLY_DATA_BYTES)))
        self.ack()

    def nack(self, delay: float = 0.0) -> None:
        """Not processed: it is delivered again, not before `delay` seconds."""
        if self.settled:
            raise UsageError(f"{self!r} was settled before")
        if not 0 <= delay <= 86400 * 30:
            raise UsageError(f"delay is {delay} s; it must be between 0 and 30 days")
        self.settled = True
        self._protocol.begun.pop(self.event.offset, None)
        self._protocol.nacks.append((self._epoch, self.event.offset, delay))
        self._protocol.withhold(self.event.key)
        self._worker.flush_soon()

    def extend(self) -> None:
        """Renew the lease: the handler needs more time. Sent at once, whatever thread or task calls it."""
        self._protocol.extends.append((self._epoch, self.event.offset))
        self._worker.flush_now()


class _Settler:
    """A thread that sends what was settled while the application is busy with something else. `stop` joins it."""

    def __init__(self, send: Callable[[], bool]) -> None:
        """`send` says whether it could send; if not, it is called again."""
        self._send = send
        self._timer = Timer()
        self._armed = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def arm(self) -> None:
        """Call `send` in SETTLE_S, unless that is already arranged."""
        if not self._armed and not self._stopping:
            self._armed = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="brokerless settle", daemon=True)
                self._thread.start()
            self._timer.set(int(SETTLE_S * 1e9))

    def _run(self) -> None:
        while True:
            self._timer.wait()
            if self._stopping:
                return
            self._armed = False
            if not self._send():
                self.arm()

    def stop(self) -> None:
        """End the thread. A signal handler may call this while the thread waits for what its own thread holds: then the
        thread ends a moment later."""
        self._stopping = True
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        for _ in range(100):  # somebody may set the timer at the same time
            self._timer.set(1)
            thread.join(0.01)
            if not thread.is_alive():
                self._timer.close()
                return


class Worker(FollowsPublishers, Announced, Closing):
    """One worker of a group: `for delivery in worker: …; delivery.ack()`.

    Every group gets every event, one worker of it gets each. An event that was delivered before has
    `attempt > 1`. After `max_deliver` attempts it goes to the publisher's dead-letter journal. With
    `key_affinity` events of one key go to one worker, in order. A group that is new begins at the oldest event
    (`start="live"`: at the next one; a datetime: at the first one at or after it); a known one goes on where it was.

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
        start: Literal["oldest", "live"] | datetime = "oldest",
        prefetch: int = PREFETCH,
        lease_s: float = LEASE_S,
        max_deliver: int = MAX_DELIVER,
        key_affinity: bool = False,
        on_loss: Callable[[Lost], None] | None = None,
        curve: ClientKeys | None = None,
        announce: bool = True,
        metrics: str = "",
    ) -> None:
        """Connect in the background.

        `address` is one publisher's, or several; `discover:PATTERN` stands for every publisher whose source matches
        (`discover:orders-*`) and that announces itself, as they come, move and go. The lease, `max_deliver`, topics and
        affinity are the group's: the newest worker's values count. `announce=False` keeps it out of `brokerless ps`;
        `metrics` is a host:port where this process serves `/metrics` for Prometheus.
        """
        texts = [address] if isinstance(address, str) else list(address)
        if not texts:
            raise ConfigError("address", "give at least one")
        messages.check_name("group", group)
        if isinstance(start, datetime):
            first = messages.start_at(microseconds(start))
        elif start in ("oldest", "live"):
            first = start
        else:
            problem = f"{start!r} is not oldest, live or a datetime; a known group goes on where it was"
            raise ConfigError("start", problem)
        if not 0 < prefetch <= MAX_CREDIT:
            raise ConfigError("prefetch", f"must be 1 to {MAX_CREDIT}")
        if not 0 < lease_s <= 86400:
            raise ConfigError("lease_s", "must be more than 0 and at most a day")
        if not 1 <= max_deliver <= 10_000:
            raise ConfigError("max_deliver", "must be 1 to 10,000")
        self.group = group
        self.on_loss = on_loss
        self._loss_log = LossLog("brokerless.direct.worker")
        self.losses: deque[Lost] = deque(maxlen=1000)
        self.counters = WorkerCounters()
        self.waiting = False
        self._stopped = False
        self._driver = Driver()
        self._settler = _Settler(self._flush_if_free)
        self._protocols: list[WorkerProtocol] = []
        self._batch: tuple[WorkerProtocol, DeliveryBatch] | None = None
        self._affinity = key_affinity
        self._flushed_at = time.monotonic()
        policy = messages.Policy(
            lease_s, max_deliver, key_affinity, check_topics(topics, messages.MAX_TOPICS)
        )
        self._hello = partial(messages.Hello, messages.VERSION, group=group, policy=policy)
        self._prefetch = prefetch
        self._start = first
        self._since = time.time()
        self._turns: Iterator[WorkerProtocol] = iter(())
        patterns = [pattern for text in texts if (pattern := pattern_of(text)) is not None]
        try:
            for text in texts:
                if pattern_of(text) is None:
                    channel = self._driver.add(parse_address(text), self._new_protocol(first), curve)
                    self._driver.failovers.append(Failover(self._driver, channel, curve))
            if patterns:
                self._driver.discovered = Discovered(self._driver, patterns, curve, self._found)
                self._driver.discovered.update(time.monotonic())
        except BaseException:
            self._driver.close()
            raise
        self._announce("direct.worker", group, texts, enabled=announce, metrics=metrics)

    def _new_protocol(self, start: str) -> WorkerProtocol:
        """The protocol for one publisher."""
        protocol = WorkerProtocol(
            self._hello(secrets.token_hex(16), start=start),
            prefetch=self._prefetch,
            counters=self.counters,
            random=random.random,
            now=time.monotonic(),
        )
        self._protocols.append(protocol)
        self._turns = itertools.cycle(self._protocols)
        return protocol

    def _found(self, found: Found) -> WorkerProtocol:
        """The protocol for a publisher that was found.

        One that was started after us is worked on from its oldest event: a group that is new there would otherwise miss
        its first moments.
        """
        return self._new_protocol("oldest" if found.started > self._since else self._start)

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
        """The next delivery of the current batch."""
        if self._batch is None:
            return None
        protocol, batch = self._batch
        now = time.monotonic()
        self._give_back_expired(now)
        if now - self._flushed_at > SETTLE_S:
            self._settle(now)
        while (begun := protocol.begin()) is not None:
            event, attempt = begun
            if event.headers and is_over(event, attempt, time.time_ns() // 1000):
                protocol.begun.pop(event.offset, None)
                protocol.acks.append((batch.epoch, event.offset))
                self.counters.over += 1
                continue
            self.counters.delivered += 1
            if attempt > 1:
                self.counters.redelivered += 1
            return Delivery(event, attempt, batch.epoch, protocol, self)
        self._batch = None
        return None

    def _give_back_expired(self, now: float) -> None:
        """If the lease of the current batch is over, give back what is left of it. Any thread may call this."""
        current = self._batch
        if current is None:
            return
        protocol, batch = current
        if now > batch.until or batch.instance != protocol.instance:
            # The publisher leases these again; handling them now would be handling them twice.
            self.counters.expired += protocol.drop_current()
            if self._affinity:
                # Others have these keys now, and what came before in them.
                self.counters.expired += protocol.drop_ready()

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
                self._driver.run(self._driver.wait, 0 if self._has_settles_to_send() else seconds)
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
                await self._driver.wait_async(0 if self._has_settles_to_send() else seconds)
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
        for _ in self._protocols:
            protocol = next(self._turns)
            while protocol.ready:
                item = protocol.ready[0]
                if isinstance(item, DeliveryBatch):
                    protocol.current = deque(item.events)
                    self._batch = (protocol, item)
                    protocol.ready.popleft()
                    return True
                protocol.ready.popleft()
                self.losses.append(item)
                (self.on_loss or self._loss_log)(item)
        return False

    # ---- settling --------------------------------------------------------------------------------------

    def _has_settles_to_send(self) -> bool:
        return any(protocol.has_settles_to_send for protocol in self._protocols)

    def _settle(self, now: float) -> None:
        """Send what was settled, and take what has arrived: credit comes back with acknowledgements."""
        self._flushed_at = now
        self._driver.run(self._exchange, now)

    def _exchange(self, now: float) -> None:
        for protocol in self._protocols:
            protocol.flush()
        self._driver.pump(now)

    def wake(self) -> None:
        """Make a waiting iteration send what was settled by another thread."""
        self._driver.wake()

    def flush_soon(self) -> None:
        """Something was settled: send it now if nothing was sent for a while, otherwise with what else comes soon.

        If its lease was over, the publisher must learn in the same message that the rest of the batch was not begun.
        """
        now = time.monotonic()
        self._give_back_expired(now)
        if self.waiting:
            self.wake()
        elif now - self._flushed_at <= SETTLE_S or not self._flush_if_free():
            self._settler.arm()

    def _flush_if_free(self) -> bool:
        """Send what was settled, unless another thread uses the sockets; that one is woken."""
        if not self._has_settles_to_send():
            return True
        self._flushed_at = time.monotonic()
        if self._driver.attempt(self._send):
            return True
        self.wake()
        return False

    def flush_now(self) -> None:
        """Send what was settled now: the caller may not ask for another delivery for a while."""
        self._flushed_at = 0.0
        if self.waiting:
            self.wake()  # another thread or task waits for deliveries: it sends, or lets us
        while not self._driver.attempt(self._send):
            time.sleep(_TURN_S)
            if not any(protocol.extends for protocol in self._protocols):
                return
            self.wake()
        if self.waiting:
            self.wake()  # sending can consume the socket's signal that something has arrived

    def _send(self) -> None:
        if self._driver.closing:
            return
        for protocol in self._protocols:
            protocol.flush()
        for channel in self._driver.channels:
            channel.quiet = False
            channel.send()

    # ---- closing ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the iteration after the current delivery. For handlers of signals and for other threads.

        What has arrived and was not begun is given back by `close()`.
        """
        self._stopped = True
        self._driver.wake()

    def close(self) -> None:
        """Send what was settled, give back the rest, close. Ends iterations that wait in other threads."""
        self._driver.close(self._end)
        self._withdraw()
        self._settler.stop()

    def _state(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        return {
            "group": self.group,
            "counters": self.counters.snapshot(),
            "losses": [
                [lost.source, lost.first, lost.last, str(lost.reason)] for lost in list(self.losses)[-20:]
            ],
        }

    def _end(self) -> None:
        self._stopped = True
        self._loss_log.close()
        for protocol in self._protocols:
            protocol.close()
