"""Accepting events inside the writer's transaction: the bound, its three answers, routing, idempotency."""

import asyncio
import concurrent.futures
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.errors import Conflict, OutboxFull
from brokerless.webhooks.models import AttemptResult, DeliveryState, Item, Published, StoredEvent
from brokerless.webhooks.outbox.backlog import Backlog
from brokerless.webhooks.outbox.database import Row
from brokerless.webhooks.outbox.routing import Routes, Targets
from brokerless.webhooks.outbox.store import ROUTING_LOCK, Store

# What OutboxFull and `Retry-After` advise: long enough for lanes to make room, short enough to be tried again.
RETRY_AFTER_S = 5.0
# Events of others that are routed in one transaction.
ROUTE_AT_ONCE = 1000


class NewEvent(msgspec.Struct, gc=False):
    """An event that waits for its transaction; at `deadline` (monotonic) a blocked caller is told: no room."""

    id: str
    tenant: str
    topic: str
    time: int
    data: bytes
    content_type: str
    future: "asyncio.Future[Published] | concurrent.futures.Future[Published]"
    loop: asyncio.AbstractEventLoop | None
    deadline: float
    key: str = ""
    trace: str = ""


class Batch(msgspec.Struct):
    """What one transaction did: for the lanes, and for the callers."""

    items: dict[str, list[Item]] = {}
    finished: list[AttemptResult] = []
    evicted: list[tuple[int, str]] = []
    blocked: list[NewEvent] = []
    answers: list[tuple[Any, Any, bool]] = []
    changed: list[str] = []
    elsewhere: set[str] = set()
    tenants: set[str] = set()
    """Of the events and endpoints that it wrote."""
    recounted: tuple[str, ...] = ()
    """Endpoints whose number of pending deliveries it changed."""
    touched: bool = False

    @property
    def concerns_lanes(self) -> bool:
        """Whether the deliverer should know."""
        return bool(self.items or self.finished or self.evicted or self.changed)


class Acceptor:
    """Inserts events and their deliveries; lives in the writer thread.

    `owns(endpoint_id)` tells whether this process delivers for an endpoint; others get a message.
    """

    def __init__(self, config: DispatcherConfig, backlog: Backlog, owns: Callable[[str], bool]) -> None:
        self.config = config
        self.backlog = backlog
        self._owns = owns

    def finished(self, results: Sequence[AttemptResult]) -> None:
        """Those that are no longer pending leave room."""
        for result in results:
            if result.state:
                self.backlog.add(result.endpoint, -1)
                self.backlog.count(DeliveryState(result.state).label, 1)

    # ── events ───────────────────────────────────────────────────────────────

    def events(
        self, store: Store, routes: Routes, events: Sequence[NewEvent], batch: Batch, now: int
    ) -> None:
        """Insert what fits, with its deliveries; decide about the rest."""
        fitting: list[tuple[NewEvent, Targets]] = []
        planned = 0
        keys: dict[tuple[str, str], NewEvent] = {}
        store.lock_keys((event.tenant, event.key) for event in events if event.key)
        for event in events:
            if event.key and self._known(store, event, keys, batch):
                continue
            targets = routes.route(event.tenant, event.topic, event.data, event.content_type)
            room = len(targets.active)
            lacking = self.backlog.total + planned + room - self.config.max_pending
            if room and lacking > 0 and not self._make_room(store, event, batch, lacking, room, now):
                keys.pop((event.tenant, event.key), None)
                continue
            planned += room
            fitting.append((event, targets))
        if fitting:
            self._insert(store, batch, fitting, now)

    def _known(
        self, store: Store, event: NewEvent, keys: dict[tuple[str, str], NewEvent], batch: Batch
    ) -> bool:
        """Answer an event whose idempotency key was used before."""
        digest = event_digest(event)
        twin = keys.get((event.tenant, event.key))
        if twin is not None:
            # The same key twice in one transaction: the second waits for the next one.
            batch.blocked.append(event)
            return True
        found = store.idempotent(event.tenant, event.key)
        if found is None:
            keys[(event.tenant, event.key)] = event
            return False
        number, event_id, known = found
        if known == digest:
            batch.answers.append((event, Published(event_id, number, None, duplicate=True), True))
        else:
            problem = Conflict("this idempotency key was used with a different event")
            batch.answers.append((event, problem, False))
        return True

    def _make_room(
        self, store: Store, event: NewEvent, batch: Batch, lacking: int, room: int, now: int
    ) -> bool:
        """The three answers to a full outbox; True if the event may go in."""
        if self.config.on_full == "evict" and room <= self.config.max_pending:
            evicted = store.evict(lacking, now)
            self.drop(evicted, batch)
            if len(evicted) < lacking:
                # The rest of the room is taken by events of this very transaction: after it they can be evicted.
                batch.blocked.append(event)
            return len(evicted) == lacking
        if self.config.on_full == "block" and time.monotonic() < event.deadline:
            batch.blocked.append(event)
            return False
        full = OutboxFull(self.backlog.total, self.config.max_pending, RETRY_AFTER_S)
        self.backlog.count("rejected", 1)
        batch.answers.append((event, full, False))
        return False

    def drop(self, evicted: list[tuple[int, str]], batch: Batch) -> None:
        """Count deliveries that were evicted, and tell the lanes."""
        for _, endpoint in evicted:
            self.backlog.add(endpoint, -1)
        batch.evicted += evicted
        self.backlog.count("evicted", len(evicted))

    def _insert(self, store: Store, batch: Batch, fitting: list[tuple[NewEvent, Targets]], now: int) -> None:
        rows: list[Row] = [
            (e.id, e.tenant, e.topic, e.time, e.data, e.content_type, routing(targets), e.trace)
            for e, targets in fitting
        ]
        numbers = store.insert_events(rows)
        pairs = []
        for (event, targets), number in zip(fitting, numbers, strict=True):
            if event.key:
                store.remember(event.tenant, event.key, number, event.id, event_digest(event))
            batch.answers.append((event, Published(event.id, number, len(targets.active)), True))
            stored = StoredEvent(
                number,
                event.id,
                event.tenant,
                event.topic,
                event.time,
                event.data,
                event.content_type,
                event.trace,
            )
            pairs.append((stored, targets))
        self.backlog.count("published", len(fitting))
        batch.touched = True
        self._deliver(store, batch, pairs, now)

    def _deliver(
        self, store: Store, batch: Batch, pairs: Sequence[tuple[StoredEvent, Targets]], now: int
    ) -> None:
        """One delivery per event and target; lanes get them without asking the database again."""
        rows: list[Row] = []
        made: list[tuple[str, StoredEvent]] = []
        skipped: list[Row] = []
        pending, skip = int(DeliveryState.PENDING), int(DeliveryState.SKIPPED)
        for event, targets in pairs:
            batch.tenants.add(event.tenant)
            for target in targets.active:
                rows.append((event.n, target.id, pending, 0 if target.fifo else now, 0, now, ""))
                made.append((target.id, event))
            skipped += [(event.n, target.id, skip, 0, 0, now, "") for target in targets.disabled]
        if skipped:
            store.insert_deliveries(skipped)
            self.backlog.count("skipped", len(skipped))
        if not rows:
            return
        by_endpoint: dict[str, list[Item]] = {}
        for (endpoint, event), number in zip(made, store.insert_deliveries(rows), strict=True):
            by_endpoint.setdefault(endpoint, []).append(Item(number, event))
        self.backlog.count("routed", len(rows))
        for endpoint, items in by_endpoint.items():
            self.backlog.add(endpoint, len(items))
            if self._owns(endpoint):
                batch.items.setdefault(endpoint, []).extend(items)
                self.enforce_share(store, endpoint, batch, now)
            else:
                batch.elsewhere.add(endpoint)

    def enforce_share(self, store: Store, endpoint: str, batch: Batch, now: int) -> None:
        """Evict an endpoint's own oldest beyond `max_pending_per_endpoint`; only the process that owns it does."""
        over = self.backlog.by_endpoint.get(endpoint, 0) - self.config.max_pending_per_endpoint
        if over > 0:
            self.drop(store.evict(over, now, endpoint=endpoint), batch)

    def route_new(self, store: Store, routes: Routes, batch: Batch, now: int) -> bool:
        """Deliveries for events of callers' transactions; True if there may be more.

        One process at a time does this, so that events reach FIFO endpoints in their order.
        """
        if not store.try_lock(ROUTING_LOCK):
            return False
        events = store.unrouted(ROUTE_AT_ONCE)
        pairs = [(e, routes.route(e.tenant, e.topic, e.data, e.content_type)) for e in events]
        if not events:
            return False
        store.mark_routed([(event.n, routing(targets)) for event, targets in pairs])
        self._deliver(store, batch, pairs, now)
        if self.config.on_full == "evict" and self.backlog.total > self.config.max_pending:
            self.drop(store.evict(self.backlog.total - self.config.max_pending, now), batch)
        batch.touched = True
        return len(events) == ROUTE_AT_ONCE


def routing(targets: Targets) -> int:
    """How an event is marked: 1 if anybody wanted it, 2 if nobody did."""
    return 1 if targets.active or targets.disabled else 2


def event_digest(event: NewEvent) -> str:
    """What must be equal for an idempotency key to mean the same event."""
    head = f"{event.topic}\0{event.content_type}\0".encode()
    return hashlib.sha256(head + event.data).hexdigest()
