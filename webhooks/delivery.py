"""The delivering part of a dispatcher: lanes, workers and timers in one event loop."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from brokerless.core.errors import BrokerlessError, Closed
from brokerless.webhooks.accept import Batch
from brokerless.webhooks.client import DeliveryClient, Reply, prepare
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.lane import Lane
from brokerless.webhooks.message import Writer
from brokerless.webhooks.models import Attempt, DeliveryState, Endpoint, Finish, Item
from brokerless.webhooks.outbox import Outbox
from brokerless.webhooks.routing import Routes
from brokerless.webhooks.schedule import Outcome, Verdict, judge
from brokerless.webhooks.store import Store

logger = logging.getLogger("brokerless.webhooks")
US = 1_000_000
_encode = msgspec.json.Encoder().encode
# (items, whether the database has more that is due, when the next one will be due in µs)
_Due = tuple[list[Item], bool, int | None]


class Deliverer:
    """Attempts what is pending while it is active. All methods belong to the event loop.

    `on_failing(endpoint, since)` tells when an endpoint begins to fail and (None) when it works again;
    `on_dead(endpoint, reason, gone)` that it should be disabled.
    """

    def __init__(
        self, outbox: Outbox, config: DispatcherConfig, counters: DispatcherCounters, source: str
    ) -> None:
        self.outbox = outbox
        self.config = config
        self.counters = counters
        self.source = source
        self.active = False
        self.workers = 0
        self.memory = 0
        self.on_failing: Callable[[str, int | None], None] = lambda _endpoint, _since: None
        self.on_dead: Callable[[str, str, bool], None] = lambda _endpoint, _reason, _gone: None
        self._lanes: dict[str, Lane] = {}
        self._writers: dict[str, Writer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starved: deque[Lane] = deque()
        self._client: DeliveryClient | None = None

    @property
    def client(self) -> DeliveryClient:
        """The HTTP client, while started."""
        if self._client is None:
            raise Closed("the dispatcher")
        return self._client

    # ── life ─────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Make the HTTP client; imports and certificates take long, so not in the loop's own thread."""
        context = await asyncio.get_running_loop().run_in_executor(None, prepare, self.config)
        self._client = DeliveryClient(self.config, context)

    def activate(self, routes: Routes, pending: dict[str, int]) -> None:
        """Begin: this process delivers now. `pending` says which endpoints have something waiting."""
        self.active = True
        self.routes_changed(routes)
        for endpoint in routes.endpoints.values():
            if pending.get(endpoint.id):
                self._kick(self._lane(endpoint))

    def deactivate(self) -> None:
        """Another process delivers; attempts under way end by themselves."""
        self.active = False
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        for lane in self._lanes.values():
            self._empty(lane)
        self._lanes.clear()
        self._writers.clear()
        self._starved.clear()

    async def stop(self, grace_s: float) -> None:
        """Begin nothing new, wait for attempts under way, then cancel them (they will be made again)."""
        self.deactivate()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    def routes_changed(self, routes: Routes) -> None:
        """Endpoints were added, changed or removed."""
        for endpoint_id, lane in list(self._lanes.items()):
            endpoint = routes.endpoints.get(endpoint_id)
            if endpoint is None or not endpoint.active:
                self._empty(lane)
                self._cancel_timer(endpoint_id)
                del self._lanes[endpoint_id]
                self._writers.pop(endpoint_id, None)
            elif endpoint is not lane.endpoint:
                reordered = endpoint.fifo != lane.endpoint.fifo
                lane.update(endpoint, time.monotonic())
                self._writers[endpoint_id] = Writer(endpoint, self.source)
                if reordered:
                    self._empty(lane)
                self._kick(lane)

    def _empty(self, lane: Lane) -> None:
        """Forget what waits in a lane; what is under way still counts as memory until it ends."""
        self.memory -= lane.bytes
        lane.clear()
        self.memory += lane.bytes

    def _lane(self, endpoint: Endpoint) -> Lane:
        lane = self._lanes.get(endpoint.id)
        if lane is None:
            lane = self._lanes[endpoint.id] = Lane(endpoint, time.monotonic())
            self._writers[endpoint.id] = Writer(endpoint, self.source)
        return lane

    # ── what transactions tell ───────────────────────────────────────────────

    def committed(self, batch: Batch) -> None:
        """A transaction of the writer was committed; called in their order."""
        if not self.active:
            return
        touched: dict[str, Lane] = {}
        endpoints = self.outbox.routes.endpoints
        for endpoint_id, items in batch.items.items():
            endpoint = endpoints.get(endpoint_id)
            if endpoint is not None and endpoint.active:
                lane = touched[endpoint_id] = self._lane(endpoint)
                self.memory += lane.offer(items, self.memory < self.config.memory_bytes)
        if batch.finished:
            offset = time.monotonic() - time.time()
            for result in batch.finished:
                found = self._lanes.get(result.endpoint)
                if found is None:
                    continue
                if result.state:
                    found.committed(result.n, None)
                elif not found.endpoint.fifo:
                    found.committed(result.n, result.due / US + offset)
                    touched[result.endpoint] = found
        for number, endpoint_id in batch.evicted:
            holder = self._lanes.get(endpoint_id)
            if holder is not None:
                self.memory -= holder.drop(number)
        for lane in touched.values():
            self._kick(lane)

    def more(self, endpoint_id: str, *, resume: bool = True) -> None:
        """The database has new work for an endpoint; `resume` if somebody asked for it now (retry, replay, enable)."""
        endpoint = self.outbox.routes.endpoints.get(endpoint_id)
        if self.active and endpoint is not None and endpoint.active:
            lane = self._lane(endpoint)
            if endpoint.fifo:
                # Older ones may have come back: read again in order.
                self._empty(lane)
            lane.more = True
            if resume:
                lane.paused_until = 0.0
            self._kick(lane)

    # ── starting work ────────────────────────────────────────────────────────

    def _kick(self, lane: Lane) -> None:
        """Start what may be started, read what is wanted, and set the timer for the rest."""
        if not self.active or self._lanes.get(lane.endpoint.id) is not lane:
            return
        if lane.wants():
            self._load(lane)
        now = time.monotonic()
        for _ in range(lane.can_start(now)):
            if not self._has_slot(lane):
                if lane not in self._starved:
                    self._starved.append(lane)
                break
            lane.workers += 1
            self.workers += 1
            task = asyncio.create_task(self._work(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._arm(lane, now)

    def _has_slot(self, lane: Lane) -> bool:
        """Every lane's first attempt may use all slots, further ones three quarters, slow lanes half."""
        cap = self.config.max_in_flight
        if lane.slow:
            return self._slow() < max(1, cap // 2) and self.workers < cap
        return self.workers < (cap if lane.workers == 0 else max(1, cap * 3 // 4))

    def _slow(self) -> int:
        return sum(lane.workers for lane in self._lanes.values() if lane.slow)

    def _arm(self, lane: Lane, now: float) -> None:
        endpoint_id = lane.endpoint.id
        self._cancel_timer(endpoint_id)
        delay = lane.ready_in(now)
        if delay is not None and (lane.workers == 0 or lane.next_due is not None):
            # Not below a millisecond: a timer that is early by rounding would spin.
            loop = asyncio.get_running_loop()
            self._timers[endpoint_id] = loop.call_later(max(delay, 0.001), self._wake, lane)

    def _cancel_timer(self, endpoint_id: str) -> None:
        handle = self._timers.pop(endpoint_id, None)
        if handle is not None:
            handle.cancel()

    def _wake(self, lane: Lane) -> None:
        if lane.next_due is not None and time.monotonic() >= lane.next_due:
            lane.next_due = None
            lane.more = True
        self._kick(lane)

    def _load(self, lane: Lane) -> None:
        """Read the next deliveries of a lane in the writer's order of things."""
        free = self.config.memory_bytes - self.memory
        room = lane.target - len(lane.window)
        if free <= 0:
            room = 0
        elif lane.held:
            average = max(1, lane.bytes // max(1, len(lane.held)))
            room = min(room, max(1, free // average))
        if room <= 0:
            if lane.window:
                return
            room = 1  # every lane makes progress, however full the memory is
        lane.loading = True
        limit = room + len(lane.held)
        read = partial(_due, endpoint=lane.endpoint.id, limit=limit)
        try:
            self.outbox.call_then(read, partial(self._loaded, lane), partial(self._not_loaded, lane))
        except Closed:
            lane.loading = False

    def _loaded(self, lane: Lane, found: _Due) -> None:
        lane.loading = False
        if self._lanes.get(lane.endpoint.id) is not lane:
            return
        items, more, next_due = found
        offset = time.monotonic() - time.time()
        due = None if next_due is None else next_due / US + offset
        self.memory += lane.loaded(items, more=more, next_due=due)
        if lane.window or more or due is not None:
            self._kick(lane)

    def _not_loaded(self, lane: Lane, error: BaseException) -> None:
        lane.loading = False
        lane.more = True
        logger.warning("reading deliveries of %s failed: %s", lane.endpoint.id, error)
        if self.active:
            lane.paused_until = max(lane.paused_until, time.monotonic() + 1.0)
            asyncio.get_running_loop().call_later(1.0, self._kick, lane)

    # ── attempts ─────────────────────────────────────────────────────────────

    async def _work(self, lane: Lane) -> None:
        """Make attempts until there is nothing to do, or another lane waits for a slot."""
        try:
            while self.active:
                batch = self.config.batch_events if lane.endpoint.mode == "batch" else 1
                items = lane.take(time.monotonic(), batch)
                if not items:
                    break
                reply = await self.attempt(lane.endpoint, items)
                self._settle(lane, items, reply)
                if self.outbox.behind:
                    await self._catch_up()
                if self._starved:
                    break
                if lane.wants() and self.active:
                    self._load(lane)
        finally:
            lane.workers -= 1
            self.workers -= 1
        while self._starved and self.active:
            waiting = self._starved.popleft()
            self._kick(waiting)
            if waiting in self._starved:
                break
        self._kick(lane)

    async def _catch_up(self) -> None:
        """The database is behind or away: do not outrun it."""
        while self.outbox.behind and self.active:  # noqa: ASYNC110 (the writer thread has no asyncio event to set)
            await asyncio.sleep(0.05)

    async def attempt(self, endpoint: Endpoint, items: list[Item]) -> Reply:
        """One request with these items; whatever happens is in the reply."""
        writer = self._writers.get(endpoint.id)
        if writer is None or writer.endpoint is not endpoint:
            writer = Writer(endpoint, self.source)
        try:
            headers, body = writer.request([item.event for item in items], time.time())
        except BrokerlessError as error:
            return Reply(None, 0.0, error=str(error)[:200])
        return await self.client.post(writer.url, headers, body)

    def _settle(self, lane: Lane, items: list[Item], reply: Reply) -> None:
        now, clock = time.time(), time.monotonic()
        verdict = judge(reply.status, reply.retry_after, now)
        lane.settle(items, verdict, clock, random.random)
        counters = self.counters
        counters.attempts += 1
        if reply.blocked:
            counters.blocked += 1
        now_us = int(now * US)
        tried = Attempt(
            now_us - int(reply.duration_s * US),
            round(reply.duration_s * 1000, 1),
            reply.status,
            reply.error,
            reply.excerpt,
        )
        log = _encode(tried).decode() + "\n"
        back: list[Item] = []
        until = 0.0
        for item in items:
            if item.evicted:
                lane.held.discard(item.n)
                self.memory -= lane.let_go(item)
                continue
            state, delay = self._next(item, verdict)
            due = 0
            if state is DeliveryState.PENDING:
                counters.failures += 1
                if lane.endpoint.fifo:
                    item.attempts += 1
                    until = max(until, clock + delay)
                    back.append(item)
                else:
                    due = now_us + int(delay * US)
            finished = None if state is DeliveryState.PENDING else now_us
            self.outbox.finish(Finish(item.n, int(state), due, finished, reply.status, log, lane.endpoint.id))
            if not back or back[-1] is not item:
                self.memory -= lane.let_go(item)
        if back:
            lane.put_back(back, until)
        self._judge_endpoint(lane, verdict, now_us)

    def _next(self, item: Item, verdict: Verdict) -> tuple[DeliveryState, float]:
        """What becomes of a delivery: its new state, and the delay if that is PENDING."""
        if verdict.outcome is Outcome.DELIVERED:
            return DeliveryState.DELIVERED, 0.0
        if verdict.outcome is not Outcome.RETRY:
            return DeliveryState.GAVE_UP, 0.0
        delay = self.config.schedule.delay_s(item.attempts + 1, random.random)
        if delay is None:
            return DeliveryState.GAVE_UP, 0.0
        return DeliveryState.PENDING, max(delay, verdict.pause_s or 0.0)

    def _judge_endpoint(self, lane: Lane, verdict: Verdict, now_us: int) -> None:
        endpoint_id = lane.endpoint.id
        if verdict.outcome is Outcome.DELIVERED:
            if lane.failing_since is not None:
                lane.failing_since = None
                self.on_failing(endpoint_id, None)
            return
        if verdict.outcome is Outcome.GONE:
            self.on_dead(endpoint_id, "the endpoint answered 410 Gone", True)
            return
        if lane.failing_since is None:
            lane.failing_since = now_us
            self.on_failing(endpoint_id, now_us)
        elif now_us - lane.failing_since > self.config.disable_after_s * US:
            days = (now_us - lane.failing_since) / US / 86400
            self.on_dead(endpoint_id, f"every attempt failed for {days:.1f} days", False)

    def in_flight(self) -> int:
        """Attempts under way."""
        return sum(lane.in_flight for lane in self._lanes.values())


def _due(store: Store, *, endpoint: str, limit: int) -> _Due:
    now = time.time_ns() // 1000
    items = store.due(endpoint, now, limit)
    more = len(items) >= limit
    return items, more, None if more else store.next_due(endpoint, now)
