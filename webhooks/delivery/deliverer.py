"""The delivering part of a dispatcher: lanes, attempts and timers in one event loop."""

import asyncio
import logging
import math
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import msgspec

from brokerless.core.errors import BrokerlessError, Closed
from brokerless.core.rate_limit import TokenBucket
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.delivery.budget import (
    FAILING_EVERY_S,
    PARK_AFTER_S,
    PARK_FAILING_AFTER_S,
    AttemptBudget,
    Health,
)
from brokerless.webhooks.delivery.client import DeliveryClient, Reply, prepare
from brokerless.webhooks.delivery.lane import Lane
from brokerless.webhooks.delivery.request import RequestWriter
from brokerless.webhooks.delivery.retry import Outcome, Verdict, judge
from brokerless.webhooks.models import Attempt, AttemptResult, DeliveryState, Endpoint, Item
from brokerless.webhooks.outbox.accept import Batch
from brokerless.webhooks.outbox.database import Session
from brokerless.webhooks.outbox.outbox import Outbox
from brokerless.webhooks.outbox.shards import shard_of
from brokerless.webhooks.outbox.store import Store
from brokerless.webhooks.rules import US
from brokerless.webhooks.topics import RESERVED
from brokerless.webhooks.tracing import tracing

logger = logging.getLogger("brokerless.webhooks")
_encode = msgspec.json.Encoder().encode
# How often attempts that wait long are looked for.
SWEEP_S = 0.1
# After a failure of our own (no descriptors, no memory: for anybody; no ports: to this endpoint) nothing new begins for
# so long.
LOCAL_PAUSE_S = 1.0
# Descriptors that are left for everything but deliveries.
RESERVED_FILES = 128
# Buckets of endpoints without a lane that are remembered, so that disabling and enabling does not renew a burst.
MAX_BUCKETS = 10_000
# Hosts that failed last time and are remembered; beyond that the first of them are forgotten.
MAX_BAD_HOSTS = 10_000
# (items, whether the database has more that is due, when the next one will be due in µs)
_Due = tuple[list[Item], bool, int | None]


class Flight(msgspec.Struct, eq=False):
    """An attempt in flight."""

    lane: Lane
    began: float
    health: Health
    parked: bool = False


class Deliverer:
    """Attempts what is pending for the endpoints of its shards. All methods belong to the event loop.

    `on_failing(endpoint, since)` tells when an endpoint begins to fail and (None) when it works again;
    `on_dead(endpoint, reason, gone)` that it should be disabled; `on_gave_up(endpoint, events, count, problem)` that
    deliveries became dead letters.
    """

    def __init__(
        self, outbox: Outbox, config: DispatcherConfig, counters: DispatcherCounters, source: str
    ) -> None:
        self.outbox = outbox
        self.config = config
        self.counters = counters
        self.source = source
        self.tracing = tracing(enabled=config.tracing)
        self.shards: frozenset[int] = frozenset()
        self.memory = 0
        self.budget = AttemptBudget(config.max_in_flight, _park_limit(config))
        self.on_failing: Callable[[str, int | None], None] = lambda _endpoint, _since: None
        self.on_dead: Callable[[str, str, bool], None] = lambda _endpoint, _reason, _gone: None
        self.on_gave_up: Callable[[str, list[str], int, str], None] = (
            lambda _endpoint, _events, _n, _problem: None
        )
        self._lanes: dict[str, Lane] = {}
        self._writers: dict[str, RequestWriter] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._flights: dict[Flight, None] = {}
        self._waiting: dict[Health, deque[Lane]] = {health: deque() for health in Health}
        self._bad_hosts: dict[str, None] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._server: asyncio.TimerHandle | None = None
        self._paused_until = 0.0
        self._told_local = 0.0
        self.wall_offset_s = (
            0.0  # of the wall clock from the monotonic one: the highest that attempts were stamped with
        )
        self.lowest_wall_offset_s = math.inf  # the lowest that times to wait for were computed with
        self._client: DeliveryClient | None = None

    @property
    def client(self) -> DeliveryClient:
        """The HTTP client, while started."""
        if self._client is None:
            raise Closed("the dispatcher")
        return self._client

    @property
    def active(self) -> bool:
        """Whether this process delivers for any endpoint."""
        return bool(self.shards)

    def owns(self, endpoint_id: str) -> bool:
        """Whether this process delivers for that endpoint."""
        return shard_of(endpoint_id) in self.shards

    # ── life ─────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Make the HTTP client; imports and certificates take long, so not in the loop's own thread."""
        context = await asyncio.get_running_loop().run_in_executor(None, prepare, self.config)
        self._client = DeliveryClient(self.config, context)

    def set_shards(self, shards: Collection[int]) -> None:
        """Deliver for these shards from now on; `look_after` what has waited for that."""
        lost = self.shards - frozenset(shards)
        self.shards = frozenset(shards)
        if lost:
            for endpoint_id in [name for name in self._lanes if shard_of(name) in lost]:
                self._drop_lane(endpoint_id)

    def look_after(self, pending: Mapping[str, int]) -> None:
        """Read deliveries that nobody told of: `pending` is how many the database has for each endpoint.

        They were there before the shard was this process's, or whoever added them could not say so in time.
        """
        for endpoint_id, count in pending.items():
            lane = self._lanes.get(endpoint_id)
            if count and (lane is None or lane.idle):
                self.more(endpoint_id, resume=False)

    def idle(self, shard: int) -> bool:
        """Whether no attempt for a shard is in flight: it can be given to another process."""
        return not any(shard_of(flight.lane.endpoint.id) == shard for flight in self._flights)

    async def stop(self, grace_s: float) -> None:
        """Begin nothing new, wait for attempts in flight, then cancel them (they will be made again)."""
        self.set_shards(())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await self.cancel()
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def cancel(self) -> None:
        """End attempts in flight without waiting for their answers."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in (self._sweeper, self._server):
            if handle is not None:
                handle.cancel()
        self._sweeper = self._server = None

    def endpoints_changed(self, endpoint_ids: Iterable[str]) -> None:
        """Endpoints were added, changed or removed."""
        for endpoint_id in endpoint_ids:
            lane = self._lanes.get(endpoint_id)
            endpoint = self.outbox.routes.endpoints.get(endpoint_id)
            if endpoint is None or not endpoint.active or not self.owns(endpoint_id):
                if lane is not None:
                    self._drop_lane(endpoint_id)
            elif lane is None:
                if self.outbox.backlog.by_endpoint.get(endpoint_id):
                    self._kick(self._lane(endpoint))
            else:
                self._update_lane(lane, endpoint)

    def _update_lane(self, lane: Lane, endpoint: Endpoint) -> None:
        before = lane.endpoint
        lane.update(endpoint, time.monotonic())
        self._writers[endpoint.id] = RequestWriter(endpoint, self.source)
        if endpoint.fifo != before.fifo:
            self._empty(lane)
        if endpoint.url != before.url:
            lane.failures, lane.worked, lane.paused_until = 0, False, 0.0
        self._kick(lane)

    def _drop_lane(self, endpoint_id: str) -> None:
        lane = self._lanes.pop(endpoint_id)
        self._empty(lane)
        self._cancel_timer(endpoint_id)
        self._writers.pop(endpoint_id, None)
        if lane.bucket.rate:
            while len(self._buckets) >= MAX_BUCKETS:
                self._buckets.pop(next(iter(self._buckets)))
            self._buckets[endpoint_id] = lane.bucket

    def _empty(self, lane: Lane) -> None:
        """Forget what waits in a lane; what is in flight still counts as memory until it ends."""
        self.memory -= lane.bytes
        lane.clear()
        self.memory += lane.bytes

    def _lane(self, endpoint: Endpoint) -> Lane:
        lane = self._lanes.get(endpoint.id)
        if lane is None:
            bucket = self._buckets.pop(endpoint.id, None)
            lane = self._lanes[endpoint.id] = Lane(endpoint, time.monotonic(), bucket)
            self._writers[endpoint.id] = RequestWriter(endpoint, self.source)
        return lane

    # ── what transactions and other processes tell ───────────────────────────

    def committed(self, batch: Batch) -> None:
        """A transaction of the writer was committed; called in their order."""
        if batch.changed:
            self.endpoints_changed(batch.changed)
        if not self.active:
            return
        touched: dict[str, Lane] = {}
        endpoints = self.outbox.routes.endpoints
        for endpoint_id, items in batch.items.items():
            endpoint = endpoints.get(endpoint_id)
            if endpoint is not None and endpoint.active and self.owns(endpoint_id):
                known = endpoint_id in self._lanes
                lane = touched[endpoint_id] = self._lane(endpoint)
                if not known and not endpoint.fifo:
                    # Where nothing else waits there is nothing to read. (In a FIFO lane what another process has
                    # just added may have to go first.)
                    lane.more = self.outbox.backlog.by_endpoint.get(endpoint_id) != len(items)
                self.memory += lane.offer(items, self.memory < self.config.memory_bytes)
        if batch.finished:
            offset = self._monotonic_offset()
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
        # Working endpoints first: their requests do not wait behind those that are likely to fail.
        for lane in sorted(touched.values(), key=self._promise):
            self._kick(lane)

    def _promise(self, lane: Lane) -> tuple[Health, bool]:
        """The order of those that may begin together: of endpoints that have not answered yet, the ones at a host
        that failed or hung last time come after the others.
        """
        health = lane.health
        return health, health is Health.UNKNOWN and lane.host in self._bad_hosts

    def _monotonic_offset(self) -> float:
        """What to add to a wall-clock time. A clock that is behind for a moment gives times that are too late."""
        wall_offset_s = time.time() - time.monotonic()
        self.lowest_wall_offset_s = min(self.lowest_wall_offset_s, wall_offset_s)
        return -wall_offset_s

    def more(self, endpoint_id: str, *, resume: bool = True) -> None:
        """The database has new work for an endpoint; `resume` if somebody asked for it now (retry, replay, enable)."""
        endpoint = self.outbox.routes.endpoints.get(endpoint_id)
        if endpoint is None or not endpoint.active or not self.owns(endpoint_id):
            return
        lane = self._lane(endpoint)
        if endpoint.fifo and resume:
            # Older ones may have come back: read again in order.
            self._empty(lane)
        lane.ask_for_more()
        if resume:
            lane.paused_until = 0.0
        self._kick(lane)

    # ── starting attempts ────────────────────────────────────────────────────

    def _kick(self, lane: Lane) -> None:
        """Start what may be started, read what is wanted, and set the timer for the rest."""
        if self._lanes.get(lane.endpoint.id) is not lane:
            return
        if lane.wants():
            self._load(lane)
        now = time.monotonic()
        if now >= self._paused_until and self.outbox.lease_valid():
            while lane.can_start(now) and self._start(lane, now):
                pass
        self._set_timer(lane, now)

    def _start(self, lane: Lane, now: float) -> bool:
        """Begin one attempt; False if there is no slot for it (then the lane waits for one)."""
        health = lane.health
        first = lane.attempts == 0
        if not self.budget.free(health, now, first=first):
            # One that may not have a second attempt looks again when its first has ended, not at every free slot.
            if not lane.waiting and (first or health is Health.WORKING):
                lane.waiting = True
                self._waiting[health].append(lane)
                self._serve_later()
            return False
        items = lane.take(now, self._batch(lane))
        if not items:
            return False
        flight = self._begin(lane, health, now)
        task = asyncio.create_task(self._work(lane, items, flight))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _batch(self, lane: Lane) -> int:
        return self.config.batch_events if lane.endpoint.mode == "batch" else 1

    def _begin(self, lane: Lane, health: Health, now: float) -> Flight:
        flight = Flight(lane, now, health)
        self.budget.begin(health, now)
        self._flights[flight] = None
        self._sweep_later()
        return flight

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _end(self, flight: Flight) -> None:
        del self._flights[flight]
        self.budget.end(flight.health, parked=flight.parked)
        if flight.parked:
            flight.lane.parked -= 1

    def _sweep(self) -> None:
        """Park attempts that wait long, so that others can begin."""
        self._sweeper = None
        now = time.monotonic()
        for flight in list(self._flights):
            if flight.parked:
                continue
            failing = flight.health is Health.FAILING
            patience_s = PARK_FAILING_AFTER_S if failing else PARK_AFTER_S
            if now - flight.began > patience_s and self.budget.park(flight.health):
                flight.parked = True
                flight.lane.parked += 1
                self._note_host(flight.lane.host, bad=True)
        self._serve_waiting()
        if self._flights:
            self._sweep_later()

    def _serve_later(self) -> None:
        if self._server is None:
            self._server = asyncio.get_running_loop().call_later(FAILING_EVERY_S, self._serve)

    def _serve(self) -> None:
        """Give slots to lanes that had to wait for time, not for the end of another's attempt."""
        self._server = None
        self._serve_waiting()
        if any(self._waiting.values()):
            self._serve_later()

    def _serve_waiting(self) -> None:
        """Give free slots to lanes that wait for one, working endpoints first."""
        now = time.monotonic()
        for health, lanes in self._waiting.items():
            for _ in range(len(lanes)):
                if not self.budget.free(health, now, first=True):
                    break
                lane = lanes.popleft()
                lane.waiting = False
                self._kick(lane)

    def _set_timer(self, lane: Lane, now: float) -> None:
        endpoint_id = lane.endpoint.id
        self._cancel_timer(endpoint_id)
        if lane.waiting:
            return
        delay = lane.ready_in(now)
        if delay is not None and (lane.attempts == 0 or lane.next_due is not None or lane.bucket.rate):
            # Not below a millisecond: a timer that is early by rounding would spin.
            delay = max(delay, self._paused_until - now, 0.001)
            self._timers[endpoint_id] = asyncio.get_running_loop().call_later(delay, self._wake, lane)

    def _cancel_timer(self, endpoint_id: str) -> None:
        handle = self._timers.pop(endpoint_id, None)
        if handle is not None:
            handle.cancel()

    def _wake(self, lane: Lane) -> None:
        if lane.next_due is not None and time.monotonic() >= lane.next_due:
            lane.next_due = None
            lane.ask_for_more()
        self._kick(lane)

    def resume(self) -> None:
        """The lease is valid again: look at all lanes."""
        for lane in list(self._lanes.values()):
            self._kick(lane)

    def _load(self, lane: Lane) -> None:
        """Read the next deliveries of a lane, beside the writer."""
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
        number = lane.begin_load()
        read = partial(_due, endpoint=lane.endpoint.id, limit=room + len(lane.held))
        self.outbox.read_then(
            read, partial(self._loaded, lane, number), partial(self._not_loaded, lane, number)
        )

    def _loaded(self, lane: Lane, number: int, found: _Due) -> None:
        if self._lanes.get(lane.endpoint.id) is not lane:
            return
        items, more, next_due = found
        offset = self._monotonic_offset()
        due = None if next_due is None else next_due / US + offset
        self.memory += lane.loaded(number, items, more=more, next_due=due)
        if lane.window or lane.more or lane.next_due is not None:
            self._kick(lane)

    def _not_loaded(self, lane: Lane, number: int, error: BaseException) -> None:
        lane.load_failed(number)
        if self._lanes.get(lane.endpoint.id) is lane:
            logger.warning("reading deliveries of %s failed: %s", lane.endpoint.id, error)
            lane.paused_until = max(lane.paused_until, time.monotonic() + 1.0)
            asyncio.get_running_loop().call_later(1.0, self._kick, lane)

    # ── attempts ─────────────────────────────────────────────────────────────

    async def _work(self, lane: Lane, items: list[Item], flight: Flight) -> None:
        """Make an attempt, and further ones while nobody else waits for the slot."""
        try:
            while True:
                reply = await self.attempt(lane.endpoint, items)
                self._end(flight)
                self._settle(lane, items, reply)
                if self.outbox.behind:
                    await self._catch_up()
                now = time.monotonic()
                if not self._may_continue(lane, now):
                    break
                items = lane.take(now, self._batch(lane))
                if not items:
                    break
                flight = self._begin(lane, lane.health, now)
                if lane.wants():
                    self._load(lane)
        except asyncio.CancelledError:
            if flight in self._flights:
                self._end(flight)
            raise
        self._serve_waiting()
        self._kick(lane)

    def _may_continue(self, lane: Lane, now: float) -> bool:
        if self._lanes.get(lane.endpoint.id) is not lane or now < self._paused_until:
            return False
        health = lane.health
        if any(self._waiting[other] for other in Health if other <= max(health, Health.UNKNOWN)):
            return False
        return self.outbox.lease_valid() and self.budget.free(health, now, first=lane.attempts == 0)

    async def _catch_up(self) -> None:
        """The database is behind or away: do not outrun it."""
        while self.outbox.behind and self.active:  # noqa: ASYNC110 (the writer thread has no asyncio event to set)
            await asyncio.sleep(0.05)

    async def attempt(self, endpoint: Endpoint, items: list[Item]) -> Reply:
        """One request with these items; whatever happens is in the reply."""
        writer = self._writers.get(endpoint.id)
        if writer is None or writer.endpoint is not endpoint:
            writer = RequestWriter(endpoint, self.source)
        events = [item.event for item in items]
        try:
            headers, body = writer.request(events, time.time())
        except BrokerlessError as error:
            return Reply(None, 0.0, error=str(error)[:200])
        if not self.config.tracing:
            return await self.client.post(writer.url, headers, body)
        with self.tracing.attempting(endpoint, events, headers) as replies:
            reply = await self.client.post(writer.url, headers, body)
            replies.append(reply)
            return reply

    def _settle(self, lane: Lane, items: list[Item], reply: Reply) -> None:
        now, clock = time.time(), time.monotonic()
        self.wall_offset_s = max(self.wall_offset_s, now - clock)
        counters = self.counters
        if reply.local:
            # Not the consumer's fault: no attempt was made, and none is counted.
            counters.local_failures += 1
            lane.not_attempted(items)
            until = clock + LOCAL_PAUSE_S
            lane.paused_until = max(lane.paused_until, until)
            who = "all deliveries" if reply.local == "all" else f"endpoint {lane.endpoint.id}"
            if clock >= self._told_local + LOCAL_PAUSE_S:
                self._told_local = clock
                logger.warning("%s pause for %g s: %s", who, LOCAL_PAUSE_S, reply.error)
            if reply.local == "all":
                self._paused_until = until
            return
        verdict = judge(reply.status, reply.retry_after, now)
        lane.settle(items, verdict, clock, random.random)
        self._note_host(lane.host, bad=verdict.outcome is not Outcome.DELIVERED)
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
        dead: list[str] = []
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
            elif state is DeliveryState.GAVE_UP and not item.event.topic.startswith(RESERVED):
                # About the dispatcher's own events nothing is told: that would not end.
                dead.append(item.event.id)
            finished = None if state is DeliveryState.PENDING else now_us
            self.outbox.finish(
                AttemptResult(item.n, int(state), due, finished, reply.status, log, lane.endpoint.id)
            )
            if not back or back[-1] is not item:
                self.memory -= lane.let_go(item)
        if back:
            lane.put_back(back, until)
        if dead:
            problem = reply.error or f"answered {reply.status}"
            self.on_gave_up(lane.endpoint.id, dead, len(dead), problem)
        self._judge_endpoint(lane, verdict, now_us)

    def _note_host(self, host: str, *, bad: bool) -> None:
        if not bad:
            self._bad_hosts.pop(host, None)
        elif host not in self._bad_hosts:
            if len(self._bad_hosts) >= MAX_BAD_HOSTS:
                del self._bad_hosts[next(iter(self._bad_hosts))]
            self._bad_hosts[host] = None

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
        if lane.failing_since is None or lane.failing_since > now_us:
            # Not later than now: the clock was ahead when it began.
            lane.failing_since = now_us
            self.on_failing(endpoint_id, now_us)
        elif now_us - lane.failing_since > self.config.disable_after_s * US:
            days = (now_us - lane.failing_since) / US / 86400
            self.on_dead(endpoint_id, f"every attempt failed for {days:.1f} days", False)

    def in_flight(self) -> int:
        """Attempts in flight, parked ones included."""
        return len(self._flights)


def _due(session: Session, *, endpoint: str, limit: int) -> _Due:
    store = Store(session)
    now = time.time_ns() // 1000
    items = store.due(endpoint, now, limit)
    more = len(items) >= limit
    return items, more, None if more else store.next_due(endpoint, now)


def _park_limit(config: DispatcherConfig) -> int:
    """As many parked attempts as configured, or as descriptors allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = files - RESERVED_FILES - config.max_in_flight
    return max(config.max_in_flight // 4, min(config.max_parked, room))
