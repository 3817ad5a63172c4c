"""The dispatcher: publish into the outbox, and deliver from it."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from brokerless.core.errors import Closed, ConfigError, InvalidEvent, UsageError
from brokerless.core.event import check_data
from brokerless.webhooks.accept import Batch, NewEvent
from brokerless.webhooks.cloudevents import CloudEvent, check
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.delivery import Deliverer
from brokerless.webhooks.endpoints import check_tenant
from brokerless.webhooks.errors import CloudEventError, OutboxError
from brokerless.webhooks.identity import event_id
from brokerless.webhooks.management import Management
from brokerless.webhooks.models import Published
from brokerless.webhooks.outbox import Outbox
from brokerless.webhooks.store import Store
from brokerless.webhooks.topics import check_publish_topic
from brokerless.webhooks.transaction import publish_in, publish_in_async
from brokerless.webhooks.upkeep import Upkeep

logger = logging.getLogger("brokerless.webhooks")
T = TypeVar("T")
US = 1_000_000
# How long shutdown waits for attempts under way; what is cut off is made again with the same id.
GRACE_S = 5.0


class Dispatcher(Management):
    """Webhooks of one application: `async with dispatcher:` starts it, and leaving stops it.

    `outbox` is a file (SQLite) or `postgresql://…`. `source` is the CloudEvents source of all events. Several
    processes may run one on the same outbox: one of them delivers, the others stand by.
    """

    def __init__(
        self,
        outbox: str | Path,
        *,
        source: str = "brokerless",
        config: DispatcherConfig | None = None,
    ) -> None:
        self.config = config or DispatcherConfig()
        try:
            check(CloudEvent(id="-", source=source, type="-"))
        except CloudEventError as error:
            raise ConfigError("source", error.problem) from None
        self.source = source
        self.counters = DispatcherCounters()
        self.outbox = Outbox(str(outbox), self.config, self.counters)
        self.deliverer = Deliverer(self.outbox, self.config, self.counters, source)
        self.deliverer.on_failing = self._failing
        self.deliverer.on_dead = self._dead
        self._upkeep = Upkeep(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__()

    # ── life ─────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Open the outbox for `publish_sync` alone, without delivering; `close()` ends it."""
        self.outbox.open()

    def close(self) -> None:
        """Close what `open` opened."""
        self.outbox.close()

    async def start(self) -> None:
        """Open the outbox, and deliver if no other process does."""
        if self._loop is not None:
            raise UsageError("this dispatcher has been started already")
        self._loop = loop = asyncio.get_running_loop()
        try:
            await self.deliverer.start()
            await loop.run_in_executor(None, self.outbox.open)
            self.outbox.on_commit = self._on_commit
            await self._upkeep.start()
        except BaseException:
            await self.deliverer.stop(0)
            self._loop = None
            raise

    async def stop(self) -> None:
        """Wait a moment for attempts under way, commit their results, give the lease back, and end all
        tasks.
        """
        if self._loop is None:
            return
        await self._upkeep.stop()
        await self.cancel_tasks()
        await self.deliverer.stop(GRACE_S)
        await asyncio.get_running_loop().run_in_executor(None, self.outbox.close)
        self._loop = None

    async def __aenter__(self) -> "Dispatcher":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """For Starlette: `Starlette(routes=[Mount("/webhooks", app)], lifespan=dispatcher.lifespan)`."""
        async with self:
            yield

    @property
    def running(self) -> bool:
        """Whether it was started (it delivers, or stands by)."""
        return self._loop is not None and self.outbox.is_open

    @property
    def delivering(self) -> bool:
        """Whether this process is the one that delivers."""
        return self.deliverer.active

    @property
    def trouble(self) -> OutboxError | None:
        """What is wrong with the database at the moment, if anything."""
        return self.outbox.failing

    def _on_commit(self, batch: Batch) -> None:
        """In the writer thread: pass the transaction on to the loop."""
        if batch.items or batch.finished or batch.evicted:
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.deliverer.committed, batch)

    # ── publish ──────────────────────────────────────────────────────────────

    async def publish(
        self,
        topic: str,
        data: bytes,
        *,
        tenant: str = "default",
        content_type: str = "application/json",
        connection: Any = None,
        idempotency_key: str | None = None,
    ) -> Published:
        """Accept an event; it is durable when this returns (with `connection`: when the caller commits).

        Raises InvalidEvent, OutboxFull (by `on_full`), OutboxError, Conflict (key used with another event).
        """
        if connection is not None:
            self._check_event(topic, data, tenant, content_type)
            return await publish_in_async(
                connection,
                topic,
                data,
                tenant=tenant,
                content_type=content_type,
                max_pending=self._room_in_transaction(idempotency_key),
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Published] = loop.create_future()
        self.outbox.submit(self._event(topic, data, tenant, content_type, idempotency_key, future, loop))
        return await future

    def publish_sync(
        self,
        topic: str,
        data: bytes,
        *,
        tenant: str = "default",
        content_type: str = "application/json",
        connection: Any = None,
        idempotency_key: str | None = None,
    ) -> Published:
        """`publish` for plain threads: waits for the commit. Not for the event loop's own thread."""
        if connection is not None:
            self._check_event(topic, data, tenant, content_type)
            return publish_in(
                connection,
                topic,
                data,
                tenant=tenant,
                content_type=content_type,
                max_pending=self._room_in_transaction(idempotency_key),
            )
        future: concurrent.futures.Future[Published] = concurrent.futures.Future()
        self.outbox.submit(self._event(topic, data, tenant, content_type, idempotency_key, future, None))
        try:
            # The writer answers every event, also when its database fails; the timeout is for bugs.
            return future.result(self.config.block_timeout_s + 60)
        except concurrent.futures.TimeoutError:
            raise OutboxError(self.outbox.name, "the writer did not answer in time") from None

    def _check_event(self, topic: str, data: bytes, tenant: str, content_type: str) -> None:
        check_publish_topic(topic)
        check_data(data, self.config.max_event_bytes)
        check_tenant(tenant)
        if not content_type.isascii() or not content_type.isprintable() or len(content_type) > 200:
            raise InvalidEvent("content_type", "must be printable ASCII, at most 200 characters")

    def _event(
        self,
        topic: str,
        data: bytes,
        tenant: str,
        content_type: str,
        key: str | None,
        future: Any,
        loop: asyncio.AbstractEventLoop | None,
    ) -> NewEvent:
        self._check_event(topic, data, tenant, content_type)
        now = time.time_ns() // 1000
        deadline = now + int(self.config.block_timeout_s * US)
        identity = event_id(now)
        return NewEvent(
            identity, tenant, topic, now, bytes(data), content_type, future, loop, deadline, key or ""
        )

    def _room_in_transaction(self, idempotency_key: str | None) -> int:
        if idempotency_key is not None:
            raise UsageError("idempotency_key needs a transaction of the outbox's own: leave out connection")
        # Evicting is done when the event is routed; blocking would hold the lock that delivery needs.
        return 2**62 if self.config.on_full == "evict" else self.config.max_pending

    # ── delivering or standing by ────────────────────────────────────────────

    def lead(self, store: Store) -> tuple[bool, dict[str, int]]:
        """Take or renew the lease (in the writer thread); also tells what is pending."""
        leading = self.outbox.try_lead(store)
        return leading, dict(self.outbox.accept.by_endpoint)


class BlockingDispatcher:
    """A Dispatcher for programs without asyncio: runs its loop in a thread of its own.

    with BlockingDispatcher("var/outbox.sqlite") as dispatcher:
        dispatcher.publish("order.paid", b"{}")
    """

    def __init__(
        self, outbox: str | Path, *, source: str = "brokerless", config: DispatcherConfig | None = None
    ) -> None:
        self.dispatcher = Dispatcher(outbox, source=source, config=config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread and the dispatcher; raises what starting it raises."""
        if self._thread is not None:
            raise UsageError("this dispatcher has been started already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="brokerless-dispatcher", daemon=True
        )
        self._thread.start()
        try:
            self.call(self.dispatcher.start())
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Stop the dispatcher and join the thread."""
        if self._thread is not None:
            self.call(self.dispatcher.stop())
            self._end_thread()

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._loop = self._thread = None

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Run a coroutine method of `self.dispatcher` in its loop and wait for it."""
        if self._loop is None:
            coroutine.close()
            raise Closed("the dispatcher")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def publish(self, topic: str, data: bytes, **options: Any) -> Published:
        """`Dispatcher.publish_sync`."""
        return self.dispatcher.publish_sync(topic, data, **options)

    def __enter__(self) -> "BlockingDispatcher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
