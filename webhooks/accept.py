"""Accepting events inside the writer's transaction: the bound, its three answers, routing, idempotency."""

import asyncio
import concurrent.futures
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.database import Row
from brokerless.webhooks.errors import Conflict, OutboxFull
from brokerless.webhooks.models import DeliveryState, Endpoint, Finish, Item, Published, StoredEvent
from brokerless.webhooks.routing import Routes
from brokerless.webhooks.store import Store

US = 1_000_000
# What OutboxFull and `Retry-After` advise: long enough for lanes to make room, short enough to be tried
# again.
RETRY_AFTER_S = 5.0
# Events of others that are routed in one transaction.
ROUTE_AT_ONCE = 1000


class NewEvent(msgspec.Struct, gc=False):
    """An event on its way in; `deadline` (µs) is when a blocked caller is told that there was no room."""

    id: str
    tenant: str
    topic: str
    time: int
    data: bytes
    content_type: str
    future: "asyncio.Future[Published] | concurrent.futures.Future[Published]"
    loop: asyncio.AbstractEventLoop | None
    deadline: int
    key: str = ""


class Batch(msgspec.Struct):
    """What one transaction did: for the dispatcher's lanes, and for the callers."""

    items: dict[str, list[Item]] = {}
    finished: list[Finish] = []
    evicted: list[tuple[int, str]] = []
    blocked: list[NewEvent] = []
    answers: list[tuple[Any, Any, bool]] = []
    touched: bool = False


class Acceptor:
    """Keeps the numbers of pending deliveries; lives in the writer thread."""

    def __init__(self, config: DispatcherConfig, counters: DispatcherCounters) -> None:
        self.config = config
        self.counters = counters
        self.total = 0
        self.by_endpoint: dict[str, int] = {}
        self._saved: tuple[int, dict[str, int]] = (0, {})
        self._counted: dict[str, int] = {}

    def load(self, store: Store) -> None:
        """Count afresh from the rows."""
        self.by_endpoint = store.pending()
        self.total = sum(self.by_endpoint.values())
        self.keep()

    def follow(self, store: Store) -> None:
        """Of a process that stands by: take over the number that the delivering one wrote last."""
        self.total = int(store.meta("pending") or 0)
        self._saved = (self.total, {})

    def keep(self) -> None:
        """The transaction was committed: what it counted counts."""
        self._saved = (self.total, {})
        for name, amount in self._counted.items():
            setattr(self.counters, name, getattr(self.counters, name) + amount)
        self._counted = {}

    def undo(self) -> None:
        """The transaction was rolled back: forget what it counted."""
        self.total, before = self._saved
        self.by_endpoint.update(before)
        self._saved = (self.total, {})
        self._counted = {}

    def count(self, name: str, amount: int) -> None:
        """Add to a counter if the transaction commits."""
        self._counted[name] = self._counted.get(name, 0) + amount

    def add(self, endpoint: str, amount: int) -> None:
        """Change the number that is pending for an endpoint."""
        before = self.by_endpoint.get(endpoint, 0)
        self._saved[1].setdefault(endpoint, before)
        self.by_endpoint[endpoint] = before + amount
        self.total += amount

    def recount(self, store: Store, endpoint: str) -> None:
        """After a call changed many rows of an endpoint."""
        self.add(endpoint, store.pending_of(endpoint) - self.by_endpoint.get(endpoint, 0))

    def finished(self, results: Sequence[Finish]) -> None:
        """Those that are no longer pending leave room."""
        for result in results:
            if result.state:
                self.add(result.endpoint, -1)
                self.count(DeliveryState(result.state).name.lower(), 1)

    # ── events ───────────────────────────────────────────────────────────────

    def events(
        self, store: Store, routes: Routes, events: Sequence[NewEvent], now: int, *, leading: bool
    ) -> Batch:
        """Insert what fits, with its deliveries if this process delivers; decide about the rest."""
        batch = Batch()
        fitting: list[tuple[NewEvent, tuple[Endpoint, ...]]] = []
        planned = 0
        keys: dict[tuple[str, str], NewEvent] = {}
        store.lock_keys((event.tenant, event.key) for event in events if event.key)
        for event in events:
            if event.key and self._known(store, event, keys, batch):
                continue
            targets, skipped = routes.route(event.tenant, event.topic) if leading else ((), 0)
            room = len(targets) if leading else 1
            lacking = self.total + planned + room - self.config.max_pending
            if room and lacking > 0 and not self._make_room(store, event, batch, lacking, room, now):
                keys.pop((event.tenant, event.key), None)
                continue
            planned += room
            fitting.append((event, targets))
            if skipped:
                self.count("skipped", skipped)
        if fitting:
            self._insert(store, batch, fitting, now, leading=leading)
        return batch

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
                # The rest of the room is taken by events of this very transaction: after it they can be
                # evicted.
                batch.blocked.append(event)
            return len(evicted) == lacking
        if self.config.on_full == "block" and now < event.deadline:
            batch.blocked.append(event)
            return False
        full = OutboxFull(self.total, self.config.max_pending, RETRY_AFTER_S)
        self.counters.rejected += 1
        batch.answers.append((event, full, False))
        return False

    def drop(self, evicted: list[tuple[int, str]], batch: Batch) -> None:
        """Count and tell deliveries that lost their place."""
        for _, endpoint in evicted:
            self.add(endpoint, -1)
        batch.evicted += evicted
        self.count("evicted", len(evicted))

    def _insert(
        self,
        store: Store,
        batch: Batch,
        fitting: list[tuple[NewEvent, tuple[Endpoint, ...]]],
        now: int,
        *,
        leading: bool,
    ) -> None:
        routed = int(leading)
        rows: list[Row] = [
            (e.id, e.tenant, e.topic, e.time, e.data, e.content_type, routed) for e, _ in fitting
        ]
        numbers = store.insert_events(rows)
        pairs = []
        for (event, targets), number in zip(fitting, numbers, strict=True):
            if event.key:
                store.remember(event.tenant, event.key, number, event.id, event_digest(event))
            published = Published(event.id, number, len(targets) if leading else None)
            batch.answers.append((event, published, True))
            if targets:
                stored = StoredEvent(
                    number, event.id, event.tenant, event.topic, event.time, event.data, event.content_type
                )
                pairs.append((stored, targets))
        if not leading:
            self.total += len(fitting)
        self.count("published", len(fitting))
        batch.touched = True
        self._deliver(store, batch, pairs, now)

    def _deliver(
        self, store: Store, batch: Batch, pairs: Sequence[tuple[StoredEvent, tuple[Endpoint, ...]]], now: int
    ) -> None:
        """One delivery per event and target; lanes get them without asking the database again."""
        rows: list[Row] = []
        made: list[tuple[str, StoredEvent]] = []
        for event, targets in pairs:
            for target in targets:
                rows.append((event.n, target.id, 0, 0 if target.fifo else now, 0, now, ""))
                made.append((target.id, event))
        if not rows:
            return
        for (endpoint, event), number in zip(made, store.insert_deliveries(rows), strict=True):
            batch.items.setdefault(endpoint, []).append(Item(number, event))
        self.count("routed", len(rows))
        for endpoint, items in batch.items.items():
            self.add(endpoint, len(items))
            over = self.by_endpoint[endpoint] - self.config.max_pending_per_endpoint
            if over > 0:
                self.drop(store.evict(over, now, endpoint=endpoint), batch)

    def route_new(self, store: Store, routes: Routes, now: int) -> Batch:
        """Deliveries for events that others committed: `connection=`, other processes."""
        batch = Batch()
        events = store.unrouted(ROUTE_AT_ONCE)
        pairs = []
        for event in events:
            targets, skipped = routes.route(event.tenant, event.topic)
            self.count("skipped", skipped)
            if targets:
                pairs.append((event, targets))
        if events:
            store.mark_routed([event.n for event in events])
            self._deliver(store, batch, pairs, now)
            if self.config.on_full == "evict" and self.total > self.config.max_pending:
                self.drop(store.evict(self.total - self.config.max_pending, now), batch)
        batch.touched = bool(events)
        return batch


def event_digest(event: NewEvent) -> str:
    """What must be equal for an idempotency key to mean the same event."""
    head = f"{event.topic}\0{event.content_type}\0".encode()
    return hashlib.sha256(head + event.data).hexdigest()
