"""The outbox: one writer thread that commits many callers' events and many attempts' results together.

Everything that changes the database goes through this thread, in this order within one transaction: new
events (with
their deliveries), results of attempts, other calls. What was asked for before a call is therefore visible
to it.
"""

import asyncio
import concurrent.futures
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from brokerless.core.errors import BrokerlessError, Closed, UsageError
from brokerless.core.pace import Backoff
from brokerless.webhooks import schema
from brokerless.webhooks.accept import Acceptor, Batch, NewEvent
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.database import Session, connect
from brokerless.webhooks.errors import OutboxError, OutboxFull
from brokerless.webhooks.identity import is_gone, owner_id
from brokerless.webhooks.models import Finish
from brokerless.webhooks.routing import Routes
from brokerless.webhooks.store import Store

T = TypeVar("T")
# Callers that wait for their commit at the same time; each is a task or thread of the application.
MAX_WAITING = 20_000
# Results of attempts that wait for a commit; beyond it the lanes pause (see Dispatcher).
MAX_RESULTS = 10_000
# Nobody waits for the results of attempts, so they may gather for a moment: fewer, larger commits.
LINGER_S = 0.01
_RETRY = Backoff(first_s=0.05, limit_s=5.0)
US = 1_000_000


class _Then:
    """What `_resolve` needs of a future, calling a function at once."""

    def __init__(self, then: Callable[[Any], None], failed: Callable[[BaseException], None]) -> None:
        self.set_result = then
        self.set_exception = failed

    def done(self) -> bool:
        return False


class _Call(msgspec.Struct, gc=False):
    run: Callable[[Store], Any]
    future: "asyncio.Future[Any] | concurrent.futures.Future[Any] | _Then"
    loop: asyncio.AbstractEventLoop | None


class Outbox:
    """Owns the writer thread and its connection; `open()` before use, `close()` joins the thread."""

    def __init__(self, target: str, config: DispatcherConfig, counters: DispatcherCounters) -> None:
        self.target = target
        self.name = target
        self.config = config
        self.counters = counters
        self.owner = owner_id()
        self.routes = Routes()
        self.leading = False
        self.failing: OutboxError | None = None
        self.accept = Acceptor(config, counters)
        self.on_commit: Callable[[Batch], None] = lambda _batch: None
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._events: list[NewEvent] = []
        self._results: list[Finish] = []
        self._calls: list[_Call] = []
        self._blocked: deque[NewEvent] = deque()
        self._closing = False
        self._until = 0
        self._stale = False
        self._pid = 0
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self._readers: concurrent.futures.ThreadPoolExecutor | None = None
        self._local = threading.local()

    # ── life ─────────────────────────────────────────────────────────────────

    def open(self, timeout_s: float = 60.0) -> None:
        """Start the writer; OutboxError if the database cannot be used."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name="brokerless-outbox", daemon=True)
        self._readers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="brokerless-outbox-read")
        self._thread.start()
        try:
            self._ready.result(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = 60.0) -> None:
        """Commit what was accepted, give the lease back, and join the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)

    @property
    def is_open(self) -> bool:
        """Whether events can be accepted."""
        return self._thread is not None and not self._closing

    # ── from any thread ──────────────────────────────────────────────────────

    def submit(self, event: NewEvent) -> None:
        """Queue an event; its future is resolved after the commit. OutboxFull if too many callers wait."""
        with self._wake:
            self._check_open()
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

    def finish(self, result: Finish) -> None:
        """Queue the result of an attempt; `Batch.finished` tells when it is durable."""
        with self._wake:
            self._results.append(result)
            if len(self._results) == 1:
                self._wake.notify()

    def pending_of(self, tenant: str) -> int:
        """Undelivered deliveries of one tenant's endpoints, as of the last commit."""
        pending = self.accept.by_endpoint
        return sum(pending.get(e.id, 0) for e in self.routes.of_tenant(tenant))

    @property
    def behind(self) -> bool:
        """Whether so many results wait that the lanes should pause."""
        return len(self._results) >= MAX_RESULTS

    def call(self, run: Callable[[Store], T]) -> "concurrent.futures.Future[T]":
        """Run a function inside the writer's transaction."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._enqueue(_Call(run, future, None))
        return future

    def call_async(self, run: Callable[[Store], T]) -> "asyncio.Future[T]":
        """The same for a coroutine."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._enqueue(_Call(run, future, loop))
        return future

    def call_then(
        self, run: Callable[[Store], T], then: Callable[[T], None], failed: Callable[[BaseException], None]
    ) -> None:
        """The same with a function that the loop calls in the order of the transactions.

        A future's callbacks run one round later, when the next transaction may have been told already.
        """
        self._enqueue(_Call(run, _Then(then, failed), asyncio.get_running_loop()))

    def _enqueue(self, call: _Call) -> None:
        with self._wake:
            self._check_open()
            self._calls.append(call)
            self._wake.notify()

    async def read(self, run: Callable[[Session], T]) -> T:
        """Run a query on a connection of its own, so that long lists do not hold up commits."""
        if self._readers is None or self._closing:
            raise Closed("the outbox")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, run)

    def _read(self, run: Callable[[Session], T]) -> T:
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = connect(self.target, read_only=True)
        try:
            return run(session)
        except OutboxError:
            session.close()
            self._local.session = None
            raise

    # ── the writer thread ────────────────────────────────────────────────────

    def _main(self) -> None:
        session: Session | None = None
        try:
            session = connect(self.target, synchronous=self.config.synchronous)
            self.name = session.name
            schema.create(session, evict=self.config.on_full == "evict")
            store = Store(session)
            session.begin(write=False)
            self._load(store)
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
            fine = self._transact(session, store, events, results, calls)
            failed = 0 if fine else failed + 1
            if closing and (fine or failed > 3):
                self._finish_closing(session, store)
                return
            if not fine:
                time.sleep(_RETRY.delay_s(failed - 1, lambda: 0.5))

    def _transact(
        self,
        session: Session,
        store: Store,
        events: list[NewEvent],
        results: list[Finish],
        calls: list[_Call],
    ) -> bool:
        """One transaction; False if the database failed. Then events and calls are told, and results kept."""
        now = time.time_ns() // 1000
        answers: list[tuple[_Call, Any, bool]] = []
        try:
            session.begin()
            if self._stale:
                # A call that changed endpoints may have been rolled back.
                self._load(store)
                self._stale = False
            if self.leading and now > self._until:
                self._confirm(store, now)
            if events and not self.leading:
                self.accept.follow(store)
            batch = self.accept.events(store, self.routes, events, now, leading=self.leading)
            if results:
                self.accept.finished(store.finish(results))
                batch.finished = results
            for call in calls:
                answers.append(self._answer(session, store, call))
            if batch.touched or results:
                store.set_meta("pending", str(self.accept.total))
            session.commit()
        except OutboxError as error:
            session.rollback()
            self.counters.write_failures += 1
            self.failing = error
            self.accept.undo()
            self._stale = True
            self._resolve([(event, error, False) for event in events])
            self._resolve([(call, error, False) for call in calls])
            with self._wake:
                self._results = results + self._results
            return False
        self.failing = None
        self.accept.keep()
        self.counters.commits += 1
        self._blocked.extend(batch.blocked)
        if self._closing:
            batch.answers += [(event, Closed("the outbox"), False) for event in self._blocked]
            self._blocked.clear()
        self.on_commit(batch)
        self._resolve(batch.answers)
        self._resolve(answers)
        return True

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
                loop.call_soon_threadsafe(_tell, told)

    # ── who delivers ─────────────────────────────────────────────────────────

    def try_lead(self, store: Store) -> bool:
        """Take or renew the lease (runs as a call); True while this process is the one that delivers."""
        now = time.time_ns() // 1000
        until = now + int(self.config.lease_s * US)
        holder = store.leader()
        was = self.leading
        free = holder is None or holder[0] == self.owner or holder[1] < now or is_gone(holder[0])
        self.leading = free and store.lead(self.owner, until, instead_of=holder[0] if holder else None)
        self._until = until if self.leading else 0
        if self.leading and not was:
            self._load(store)
            self.counters.takeovers += 1
            self.counters.recovered += self.accept.total
        return self.leading

    def _confirm(self, store: Store, now: int) -> None:
        """The lease ran out while this process slept: is it still ours?"""
        holder = store.leader()
        if holder is None or holder[0] != self.owner:
            self.leading = False
        else:
            self.leading = store.lead(self.owner, now + int(self.config.lease_s * US), instead_of=self.owner)

    def _load(self, store: Store) -> None:
        store.foreign_changes()
        self.routes = Routes(store.endpoints())
        self.accept.load(store)

    def _finish_closing(self, session: Session, store: Store) -> None:
        if self.leading:
            try:
                session.begin()
                store.resign(self.owner)
                session.commit()
            except OutboxError:
                session.rollback()  # the lease runs out by itself


def _tell(told: list[tuple["asyncio.Future[Any]", Any, bool]]) -> None:
    for future, value, fine in told:
        if not future.done():
            if fine:
                future.set_result(value)
            else:
                future.set_exception(value)
