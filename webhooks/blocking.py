"""A Dispatcher for programs without asyncio."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from brokerless.core.errors import Closed, UsageError
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.delivery.client import Reply
from brokerless.webhooks.dispatcher import MAX_ENDPOINTS, Dispatcher
from brokerless.webhooks.errors import OutboxError
from brokerless.webhooks.models import (
    Delivery,
    Endpoint,
    EndpointChanges,
    EventType,
    OutboxAccount,
    PayloadFilter,
    Published,
    Replayed,
    StoredEvent,
)
from brokerless.webhooks.outbox.queries import DeliveryQuery, EventQuery
from brokerless.webhooks.rules import HeaderStyle, Mode, ReplayChoice, SignatureVersion, Verification

T = TypeVar("T")


class BlockingDispatcher:
    """A Dispatcher whose event loop runs in a thread of its own; every method waits for its result.

        with BlockingDispatcher("var/outbox.sqlite") as dispatcher:
            dispatcher.publish("order.paid", b"{}")

    Arguments, results and errors are those of `Dispatcher`. `timeout_s` is how long a method other than `publish` may
    take.
    """

    def __init__(
        self,
        outbox: str | Path,
        *,
        source: str = "brokerless",
        config: DispatcherConfig | None = None,
        encryption_keys: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> None:
        self._dispatcher = Dispatcher(outbox, source=source, config=config, encryption_keys=encryption_keys)
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ── life ─────────────────────────────────────────────────────────────────

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
            self._call(self._dispatcher.start())
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Stop the dispatcher and join the thread."""
        if self._thread is not None:
            try:
                self._call(self._dispatcher.stop())
            finally:
                self._end_thread()

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._loop = self._thread = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the dispatcher in its loop and wait for it."""
        if self._loop is None:
            work.close()
            raise Closed("the dispatcher")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            problem = f"did not answer within {self._timeout_s:g} s"
            raise OutboxError(self._dispatcher.outbox.name, problem) from None

    def __enter__(self) -> "BlockingDispatcher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def counters(self) -> DispatcherCounters:
        """What was counted since the start."""
        return self._dispatcher.counters

    @property
    def running(self) -> bool:
        """Whether it was started."""
        return self._dispatcher.running

    @property
    def delivering(self) -> bool:
        """Whether this process delivers for any endpoints."""
        return self._dispatcher.delivering

    # ── publish ──────────────────────────────────────────────────────────────

    def publish(
        self,
        topic: str,
        data: bytes,
        *,
        tenant: str = "default",
        content_type: str = "application/json",
        connection: Any = None,
        idempotency_key: str | None = None,
    ) -> Published:
        """Accept an event; it is durable when this returns (with `connection`: when the caller commits)."""
        return self._dispatcher.publish_sync(
            topic,
            data,
            tenant=tenant,
            content_type=content_type,
            connection=connection,
            idempotency_key=idempotency_key,
        )

    # ── endpoints ────────────────────────────────────────────────────────────

    def add_endpoint(
        self,
        url: str,
        topics: Sequence[str],
        *,
        tenant: str = "default",
        description: str = "",
        rate: float = 0.0,
        concurrency: int = 8,
        fifo: bool = False,
        headers: Mapping[str, str] | None = None,
        mode: Mode = "binary",
        signature: SignatureVersion = "v1",
        header_style: HeaderStyle = "standard",
        filters: Sequence[PayloadFilter] = (),
        verification: Verification | None = None,
        secret: str | None = None,
        max_endpoints: int = MAX_ENDPOINTS,
    ) -> tuple[Endpoint, str]:
        """Register an endpoint; returns it and its secret, which is shown this once."""
        return self._call(
            self._dispatcher.add_endpoint(
                url,
                topics,
                tenant=tenant,
                description=description,
                rate=rate,
                concurrency=concurrency,
                fifo=fifo,
                headers=headers,
                mode=mode,
                signature=signature,
                header_style=header_style,
                filters=filters,
                verification=verification,
                secret=secret,
                max_endpoints=max_endpoints,
            )
        )

    def update_endpoint(
        self, endpoint_id: str, changes: EndpointChanges, *, tenant: str | None = None
    ) -> Endpoint:
        """Change some settings: `update_endpoint(id, EndpointChanges(rate=5))`."""
        return self._call(self._dispatcher.update_endpoint(endpoint_id, changes, tenant=tenant))

    def remove_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> None:
        """Delete; what was pending for it is withdrawn."""
        self._call(self._dispatcher.remove_endpoint(endpoint_id, tenant=tenant))

    def rotate_secret(
        self, endpoint_id: str, *, secret: str | None = None, tenant: str | None = None
    ) -> tuple[Endpoint, str]:
        """A new secret (or your own), shown this once; the old one signs too for `rotation_overlap_s`."""
        return self._call(self._dispatcher.rotate_secret(endpoint_id, secret=secret, tenant=tenant))

    def enable_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Active again after it was disabled; what is pending goes out at once."""
        return self._call(self._dispatcher.enable_endpoint(endpoint_id, tenant=tenant))

    def disable_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Stop delivering to it."""
        return self._call(self._dispatcher.disable_endpoint(endpoint_id, tenant=tenant))

    def verify_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Ask the owner of the URL now."""
        return self._call(self._dispatcher.verify_endpoint(endpoint_id, tenant=tenant))

    def test_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Reply:
        """Send a test event now and return the answer."""
        return self._call(self._dispatcher.test_endpoint(endpoint_id, tenant=tenant))

    def endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """One endpoint."""
        return self._call(self._dispatcher.endpoint(endpoint_id, tenant=tenant))

    def endpoints(self, *, tenant: str | None = None) -> list[Endpoint]:
        """All endpoints (of a tenant), by id."""
        return self._call(self._dispatcher.endpoints(tenant=tenant))

    # ── the catalogue and the portal ─────────────────────────────────────────

    def set_event_type(
        self,
        topic: str,
        *,
        description: str = "",
        schema: Mapping[str, Any] | None = None,
        example: Any = None,
        validate: bool = False,
    ) -> EventType:
        """Describe a topic; with `validate`, `publish` refuses data that does not fit the schema."""
        return self._call(
            self._dispatcher.set_event_type(
                topic, description=description, schema=schema, example=example, validate=validate
            )
        )

    def remove_event_type(self, topic: str) -> None:
        """Take a topic out of the catalogue."""
        self._call(self._dispatcher.remove_event_type(topic))

    def event_types(self) -> list[EventType]:
        """The catalogue, by topic."""
        return self._call(self._dispatcher.event_types())

    def event_type(self, topic: str) -> EventType:
        """One topic of the catalogue."""
        return self._call(self._dispatcher.event_type(topic))

    def portal_link(self, tenant: str, *, base: str = "/", valid_s: float = 3600.0) -> str:
        """A link that lets a visitor of your application into the portal as `tenant` for a while."""
        return self._dispatcher.portal_link(tenant, base=base, valid_s=valid_s)

    # ── deliveries and events ────────────────────────────────────────────────

    def deliveries(self, query: DeliveryQuery) -> list[Delivery]:
        """Deliveries, newest first."""
        return self._call(self._dispatcher.deliveries(query))

    def delivery(self, delivery_id: str, *, tenant: str | None = None) -> Delivery:
        """One delivery."""
        return self._call(self._dispatcher.delivery(delivery_id, tenant=tenant))

    def events(self, query: EventQuery) -> list[StoredEvent]:
        """Events, newest first."""
        return self._call(self._dispatcher.events(query))

    def event(self, event_id: str, *, tenant: str | None = None) -> StoredEvent:
        """One event as it was published."""
        return self._call(self._dispatcher.event(event_id, tenant=tenant))

    def account(self, tenant: str | None = None) -> OutboxAccount:
        """What was accepted and what became of it, from the database."""
        return self._call(self._dispatcher.account(tenant))

    def retry(self, delivery_id: str, *, tenant: str | None = None) -> Delivery:
        """Send a delivery now, finished or pending."""
        return self._call(self._dispatcher.retry(delivery_id, tenant=tenant))

    def replay(
        self,
        endpoint_id: str,
        since: int,
        until: int | None = None,
        *,
        only: ReplayChoice = "failed",
        dry_run: bool = False,
        tenant: str | None = None,
    ) -> Replayed:
        """Send events published in [since, until) (µs since 1970) again."""
        return self._call(
            self._dispatcher.replay(endpoint_id, since, until, only=only, dry_run=dry_run, tenant=tenant)
        )
