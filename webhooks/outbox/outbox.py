"""The outbox: one writer thread that commits many callers' events and many attempts' results together.

Everything that changes the database goes through this thread: new events with their deliveries and results of attempts
in one transaction, then other calls, each seeing what was asked for before it. Reads run on connections of their own.
"""

import asyncio
import concurrent.futures
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from brokerless.core.errors import BrokerlessError, Closed, UsageError
from brokerless.core.rate_limit import Backoff
from brokerless.core.runtime.clock import elapsed_s
from brokerless.webhooks.catalogue import Catalogue
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.errors import OutboxError, OutboxFull
from brokerless.webhooks.models import AttemptResult
from brokerless.webhooks.outbox import schema
from brokerless.webhooks.outbox.accept import Acceptor, Batch, NewEvent
from brokerless.webhooks.outbox.backlog import Backlog
from brokerless.webhooks.outbox.changes import Changes
from brokerless.webhooks.outbox.database import Session, connect, display_name, is_postgres
from brokerless.webhooks.outbox.identity import owner_id
from brokerless.webhooks.outbox.routing import Routes
from brokerless.webhooks.outbox.shards import shard_of
from brokerless.webhooks.outbox.store import Store
from brokerless.webhooks.outbox.vault import PLAIN, Vault

T = TypeVar("T")
# Callers that wait for their commit at the same time; each is a task or thread of the application.
MAX_WAITING = 20_000
# Results of attempts that wait for a commit; beyond it the lanes pause (see Deliverer).
MAX_RESULTS = 10_000
# Nobody waits for the results of attempts, so they may gather for a moment: fewer, larger commits.
LINGER_S = 0.01
# Connections for lists and counts, which may take long, and others for what lanes read: no number of slow lists
# stops deliveries.
READERS = 4
LANE_READERS = 2
# PostgreSQL: for a statement of a list or count, over tables of millions of rows.
LIST_TIMEOUT_S = 30.0
# A transaction that takes longer than this makes the outbox not ready.
STUCK_S = 2.0
_RETRY = Backoff(first_s=0.05, limit_s=5.0)
# A transaction that the database itself asks to repeat (deadlock, serialisation) is repeated at most so often.
_REPEAT = Backoff(first_s=0.005, limit_s=0.2)
REPEATS = 20


class _Call(msgspec.Struct, gc=False):
    run: Callable[[Store], Any]
    future: "asyncio.Future[Any] | concurrent.futures.Future[Any]"
    loop: asyncio.AbstractEventLoop | None


class Outbox:
    """Owns the writer thread and its connection; `open()` before use, `close()` joins the thread."""

    def __init__(
        self, target: str, config: DispatcherConfig, counters: DispatcherCounters, vault: Vault = PLAIN
    ) -> None:
        self.target = target
        self.vault = vault
        self.name = display_name(target)
        self.config = config
        self.counters = counters
        self.owner = owner_id()
        self.routes = Routes()
        self.catalogue = Catalogue()
        self.shards: frozenset[int] = frozenset()
        """Shards of this process, those included that it is about to give up."""
        self.portal_key = b""
        """Signs the tokens of portal links; the same in all processes, known once the outbox is open."""
        self.members = 1
        self.foreign_commits = False
        """Whether another process committed since the pending deliveries were counted."""
        self.failing: OutboxError | None = None
        self.backlog = Backlog(counters, self.name)
        self.changes = Changes()
        self.accept = Acceptor(config, self.backlog, self.owns)
        self.batch = Batch()
        """What the current transaction did so far: for calls, in the writer thread."""
        self.on_commit: Callable[[Batch], None] = lambda _batch: None
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._events: list[NewEvent] = []
        self._results: list[AttemptResult] = []
        self._calls: list[_Call] = []
        self._blocked: deque[NewEvent] = deque()
        self._closing = False
        self._valid_until = 0.0
        self._generation = -1
        self._stale = False
        self._busy_since: float | None = None
        self._pid = 0
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self._readers: concurrent.futures.ThreadPoolExecutor | None = None
        self._lane_readers: concurrent.futures.ThreadPoolExecutor | None = None
        self._local = threading.local()

    # ── life ─────────────────────────────────────────────────────────────────

    def open(self, timeout_s: float = 60.0) -> None:
        """Start the writer; OutboxError if the database cannot be used."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name="brokerless-outbox", daemon=True)
        self._readers = concurrent.futures.ThreadPoolExecutor(
            READERS, thread_name_prefix="brokerless-outbox-read"
        )
        self._lane_readers = concurrent.futures.ThreadPoolExecutor(
            LANE_READERS, thread_name_prefix="brokerless-outbox-lanes"
        )
        self._thread.start()
        try:
            self._ready.result(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = 60.0) -> None:
        """Commit what was accepted, give the shards back, and join the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.backlog.loss_log.close()
        for readers in (self._readers, self._lane_readers):
            if readers is not None:
                readers.shutdown(wait=True, cancel_futures=True)

    @property
    def is_open(self) -> bool:
        """Whether events can be accepted."""
        return self._thread is not None and not self._closing

    @property
    def trouble(self) -> OutboxError | None:
        """What is wrong with the database at the moment, if anything: it failed, or it does not answer."""
        busy = self._busy_since
        if busy is not None and (taken := time.monotonic() - busy) > STUCK_S:
            return OutboxError(self.name, f"has not answered for {taken:.0f} s")
        return self.failing

    # ── from any thread ──────────────────────────────────────────────────────

    def submit(self, event: NewEvent) -> None:
        """Queue an event; its future is resolved after the commit. OutboxFull if too many callers wait."""
        with self._wake:
            self._check_open()
            if (
                self.failing is not None
                and (trouble := self.trouble) is not self.failing
                and trouble is not None
            ):
                # It failed before and does not answer now: the caller need not wait to be told so.
                raise trouble
            if len(self._events) + len(self._blocked) >= MAX_WAITING:
                raise OutboxFull(MAX_WAITING, MAX_WAITING, 1.0)
            self._events.append(event)
            if len(self._events) == 1:
                self._wake.notify()

    def _check_open(self) -> None:
        if self._closing or self._thread is None:
            raise Closed("the outbox")
        if os.getpid() != self._pid:
            # Threads do not survive a fork, and a SQLite connection must not: nobody would answer.
            raise UsageError("the outbox was opened before a fork; open it in each process")

    def finish(self, result: AttemptResult) -> None:
        """Queue the result of an attempt; `Batch.finished` tells when it is durable."""
        with self._wake:
            self._results.append(result)
            if len(self._results) == 1:
                self._wake.notify()

    def pending_of(self, tenant: str) -> int:
        """Undelivered deliveries of one tenant's endpoints, as of the last commit."""
        pending = self.backlog.by_endpoint
        return sum(pending.get(e.id, 0) for e in self.routes.of_tenant(tenant))

    @property
    def behind(self) -> bool:
        """Whether so many results wait that the lanes should pause."""
        return len(self._results) >= MAX_RESULTS

    def call_async(self, run: Callable[[Store], T]) -> "asyncio.Future[T]":
        """Run a function in a transaction of the writer; it may run again if the database asks for that."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            self._check_open()
            self._calls.append(_Call(run, future, loop))
            self._wake.notify()
        return future

    async def read(self, run: Callable[[Session], T]) -> T:
        """Run a query on a connection of its own, so that it does not hold up commits.

        OutboxError at once while PostgreSQL is known not to answer: nobody needs to wait to be told so.
        """
        if is_postgres(self.target) and (trouble := self.trouble) is not None:
            raise trouble
        readers = self._pool(self._readers)
        return await asyncio.get_running_loop().run_in_executor(readers, self._read, run, LIST_TIMEOUT_S)

    def read_then(
        self, run: Callable[[Session], T], then: Callable[[T], None], failed: Callable[[BaseException], None]
    ) -> None:
        """The same for lanes, with functions that the event loop calls with the result or the error."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                found = self._read(run, self.config.database_timeout_s)
            except Exception as error:
                told: Callable[[], None] = partial(failed, error)
            else:
                told = partial(then, found)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(told)

        with suppress(Closed):
            self._pool(self._lane_readers).submit(work)

    def _pool(
        self, readers: concurrent.futures.ThreadPoolExecutor | None
    ) -> concurrent.futures.ThreadPoolExecutor:
        if readers is None or self._closing:
            raise Closed("the outbox")
        return readers

    def _read(self, run: Callable[[Session], T], timeout_s: float) -> T:
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = connect(
                self.target, read_only=True, timeout_s=timeout_s, vault=self.vault
            )
        try:
            return run(session)
        except OutboxError:
            session.close()
            self._local.session = None
            raise

    # ── which endpoints are this process's ───────────────────────────────────

    def owns(self, endpoint_id: str) -> bool:
        """Whether this process delivers for the endpoint."""
        return shard_of(endpoint_id) in self.shards

    def lease_valid(self) -> bool:
        """Whether the shards are certainly still ours, also if this machine slept."""
        return elapsed_s() < self._valid_until

    def leased(self, shards: frozenset[int], members: int, began: float) -> None:
        """The lease was renewed by a transaction that began then (`elapsed_s`)."""
        self.shards = shards
        self.members = members
        # A tenth is kept for clocks that run at different speeds.
        self._valid_until = began + self.config.lease_s * 0.9

    # ── the writer thread ────────────────────────────────────────────────────

    def _main(self) -> None:
        session: Session | None = None
        try:
            session = connect(
                self.target,
                synchronous=self.config.synchronous,
                timeout_s=self.config.database_timeout_s,
                vault=self.vault,
            )
            schema.create(session, evict=self.config.on_full == "evict")
            store = Store(session)
            session.begin()
            self._reload(store)
            self.portal_key = store.portal_key()
            self.backlog.replace(store.pending())
            store.set_meta("pending", str(self.backlog.total))
            session.commit()
        except BaseException as error:
            if session is not None:
                session.close()
            self._closing = True
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            self._loop(session, store)
        finally:
            session.close()

    def _loop(self, session: Session, store: Store) -> None:
        failed = 0
        while True:
            with self._wake:
                while not (self._events or self._results or self._calls or self._closing):
                    # The timeout looks after callers that wait for room, and nothing else.
                    if not self._wake.wait(0.5 if not self._blocked else 0.05) and self._blocked:
                        break
                if self._results and not (self._events or self._calls or self._closing):
                    self._wake.wait_for(lambda: self._events or self._calls or self._closing, LINGER_S)
                events, self._events = self._events, []
                results, self._results = self._results, []
                calls, self._calls = self._calls, []
                closing = self._closing
            if self._blocked:
                events = [*self._blocked, *events]
                self._blocked.clear()
            fine = self._round(session, store, events, results, calls)
            failed = 0 if fine else failed + 1
            if closing and (fine or failed > 3):
                self._finish_closing(session, store)
                return
            if not fine:
                time.sleep(_RETRY.delay_s(failed - 1, lambda: 0.5))

    def _round(
        self,
        session: Session,
        store: Store,
        events: list[NewEvent],
        results: list[AttemptResult],
        calls: list[_Call],
    ) -> bool:
        """Commit all that has come; False if the database failed. Then callers are told, and results kept.

        In SQLite everything is one transaction, because each costs a sync. In PostgreSQL calls have their own, which
        lock rows in one order (an endpoint, its deliveries, the generation), so that processes do not wait in a circle.
        """
        together = session.kind == "sqlite"
        if events or results or together:
            work = partial(self._accept, events=events, results=results, calls=calls if together else [])
            error = self._transaction(session, store, work)
            if error is not None:
                self._resolve([(asked, error, False) for asked in (*events, *calls)])
                with self._wake:
                    self._results = results + self._results
                return False
        if not together:
            for index, call in enumerate(calls):
                error = self._transaction(
                    session, store, partial(self._accept, events=[], results=[], calls=[call])
                )
                if error is not None:
                    self._resolve([(asked, error, False) for asked in calls[index:]])
                    return False
        return True

    def _transaction(
        self, session: Session, store: Store, work: Callable[[Session, Store, Batch], None]
    ) -> OutboxError | None:
        """One transaction, repeated when the database asks for it; its error if it failed."""
        for attempt in range(REPEATS):
            batch = self.batch = Batch()
            self._busy_since = time.monotonic()
            try:
                session.begin()
                store.changed_endpoints = False
                self._synchronise(session, store, batch)
                work(session, store, batch)
                if store.changed_endpoints:
                    self._synchronise(session, store, batch, own=True)
                session.commit()
            except OutboxError as error:
                session.rollback()
                self.backlog.roll_back()
                self._stale = True
                if error.transient and attempt + 1 < REPEATS:
                    self.counters.repeated_transactions += 1
                    time.sleep(_REPEAT.delay_s(attempt, random.random))
                    continue
                self.counters.write_failures += 1
                self.failing = error
                return error
            finally:
                self._busy_since = None
            self.failing = None
            batch.recounted = self.backlog.recounted
            self.backlog.commit()
            self.counters.commits += 1
            self._blocked.extend(batch.blocked)
            if self._closing:
                batch.answers += [(event, Closed("the outbox"), False) for event in self._blocked]
                self._blocked.clear()
            if batch.concerns_lanes:
                self.on_commit(batch)
            self.changes.committed(batch, self.routes.endpoints)
            self._resolve(batch.answers)
            return None
        raise AssertionError("the last attempt returns")

    def _accept(
        self,
        session: Session,
        store: Store,
        batch: Batch,
        *,
        events: list[NewEvent],
        results: list[AttemptResult],
        calls: list[_Call],
    ) -> None:
        now = time.time_ns() // 1000
        if events:
            self.accept.events(store, self.routes, events, batch, now)
        if results:
            self.accept.finished(store.finish(self._still_ours(store, results)))
            batch.finished = results
        for call in calls:
            batch.answers.append(self._answer(session, store, call))
        if batch.elsewhere:
            store.note_endpoints("work", sorted(batch.elsewhere))
        if session.kind == "sqlite" and (batch.touched or results):
            # In PostgreSQL this row would make all processes wait for each other: see Maintenance.
            store.set_meta("pending", str(self.backlog.total))

    def _still_ours(self, store: Store, results: list[AttemptResult]) -> list[AttemptResult]:
        """After the lease ran out (this process slept): the new owner repeats what it took over."""
        if self.lease_valid():
            return results
        owned = store.owned(self.owner)
        return [result for result in results if shard_of(result.endpoint) in owned]

    def _synchronise(self, session: Session, store: Store, batch: Batch, *, own: bool = False) -> None:
        """Take over changes of endpoints that were committed since the last transaction (`own`: by this one)."""
        if self._stale:
            # A transaction that changed endpoints may have been rolled back.
            batch.changed += self._reload(store)
            self._stale = False
            return
        if not own:
            if not session.changed():
                return
            self.foreign_commits = True
        generation = store.generation()
        if generation == self._generation:
            return
        for endpoint_id, endpoint in store.endpoints(after=self._generation).items():
            owner = endpoint or self.routes.endpoints.get(endpoint_id)
            if owner is not None:
                batch.tenants.add(owner.tenant)
            if endpoint is None:
                self.routes.remove(endpoint_id)
            else:
                self.routes.put(endpoint)
            batch.changed.append(endpoint_id)
        self.catalogue.update(store.event_types(after=self._generation))
        self._generation = generation

    def _reload(self, store: Store) -> list[str]:
        """Read all endpoints; returns the ids of those that were there before or are there now."""
        self._generation = store.generation()
        found = store.endpoints()
        before = list(self.routes.endpoints)
        self.catalogue.update(store.event_types())
        self.routes = Routes(endpoint for endpoint in found.values() if endpoint is not None)
        return list({*before, *self.routes.endpoints})

    def _answer(self, session: Session, store: Store, call: _Call) -> tuple[_Call, Any, bool]:
        """Run a call under a savepoint: one that raises changes nothing and harms no other."""
        session.execute("SAVEPOINT call")
        try:
            value = call.run(store)
        except OutboxError:
            raise
        except BrokerlessError as error:
            session.execute("ROLLBACK TO SAVEPOINT call")
            session.execute("RELEASE SAVEPOINT call")
            return (call, error, False)
        session.execute("RELEASE SAVEPOINT call")
        return (call, value, True)

    def _resolve(self, answers: Sequence[tuple[Any, Any, bool]]) -> None:
        """Tell the callers, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any, bool]]] = {}
        for asked, value, fine in answers:
            if asked.loop is not None:
                by_loop.setdefault(asked.loop, []).append((asked.future, value, fine))
            elif asked.future.set_running_or_notify_cancel():
                (asked.future.set_result if fine else asked.future.set_exception)(value)
        for loop, told in by_loop.items():
            # A closed loop has nobody left who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve_futures, told)

    def _finish_closing(self, session: Session, store: Store) -> None:
        if self.shards:
            try:
                session.begin()
                store.resign(self.owner)
                session.commit()
            except OutboxError:
                session.rollback()  # the lease runs out by itself


def _resolve_futures(told: list[tuple["asyncio.Future[Any]", Any, bool]]) -> None:
    for future, value, fine in told:
        if not future.done():
            if fine:
                future.set_result(value)
            else:
                future.set_exception(value)
