"""The dispatcher: publish into the outbox, deliver from it, manage endpoints and deliveries."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from brokerless.core.errors import Closed, ConfigError, UsageError
from brokerless.core.event import check_data
from brokerless.core.exporter import Exporter
from brokerless.core.presence import Announcement, announce
from brokerless.webhooks.admin.event_types import EventTypeManager
from brokerless.webhooks.admin.maintenance import Maintenance
from brokerless.webhooks.admin.managers import DeliveryManager, EndpointManager, now_us
from brokerless.webhooks.admin.states import shown
from brokerless.webhooks.cloudevents import CloudEvent, check
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.delivery.client import Reply
from brokerless.webhooks.delivery.deliverer import Deliverer
from brokerless.webhooks.errors import CloudEventError, Conflict, OutboxError
from brokerless.webhooks.models import (
    Delivery,
    Endpoint,
    EndpointChanges,
    EndpointSettings,
    EventType,
    Item,
    OutboxAccount,
    PayloadFilter,
    Published,
    Replayed,
    StoredEvent,
)
from brokerless.webhooks.outbox.accept import Batch, NewEvent
from brokerless.webhooks.outbox.identity import event_id
from brokerless.webhooks.outbox.outbox import Outbox
from brokerless.webhooks.outbox.queries import DeliveryQuery, EventQuery
from brokerless.webhooks.outbox.transaction import publish_in, publish_in_async
from brokerless.webhooks.outbox.vault import Vault
from brokerless.webhooks.portal_token import make_token, read_token
from brokerless.webhooks.rules import (
    HeaderStyle,
    Mode,
    ReplayChoice,
    SignatureVersion,
    Verification,
    check_content_type,
    check_tenant,
    convert,
)
from brokerless.webhooks.topics import check_publish_topic

# How long shutdown waits for attempts in flight; what is cut off is made again with the same id.
GRACE_S = 5.0
# Endpoints of one tenant, unless the caller says otherwise.
MAX_ENDPOINTS = 10_000
# Endpoints that are announced one by one.
_ENDPOINTS_SHOWN = 200


class Dispatcher:
    """Webhooks of one application: `async with dispatcher:` starts it, and leaving stops it.

    `outbox` is a file (SQLite) or `postgresql://…`. `source` is the CloudEvents source of all events. Several processes
    may run one on the same outbox: they share the endpoints, and each endpoint has one process at a time.
    `encryption_keys` (see `brokerless webhooks key`) encrypt endpoints' secrets and headers in the database: the first
    encrypts, all decrypt. `metrics` is a host:port where this process serves `/metrics` for Prometheus.

    It is made of an `Outbox` (accepts and stores), a `Deliverer` (attempts), an `EndpointManager`, an
    `EventTypeManager` and a `DeliveryManager` (what can be asked for), and `Maintenance` (shards, other
    processes, forgetting).
    """

    def __init__(
        self,
        outbox: str | Path,
        *,
        source: str = "brokerless",
        config: DispatcherConfig | None = None,
        encryption_keys: Sequence[str] = (),
        metrics: str = "",
    ) -> None:
        self.config = config or DispatcherConfig()
        try:
            check(CloudEvent(id="-", source=source, type="-"))
        except CloudEventError as error:
            raise ConfigError("source", error.problem) from None
        self.source = source
        self._metrics = metrics
        self.counters = DispatcherCounters()
        self.outbox = Outbox(str(outbox), self.config, self.counters, Vault(encryption_keys))
        self.deliverer = Deliverer(self.outbox, self.config, self.counters, source)
        self._endpoints = EndpointManager(
            self.outbox,
            self.config,
            source=source,
            client=lambda: self.deliverer.client.httpx,
            wake=self.deliverer.more,
        )
        self._types = EventTypeManager(self.outbox)
        self._deliveries = DeliveryManager(self.outbox, self.config, wake=self.deliverer.more)
        self.maintenance = Maintenance(self.outbox, self.deliverer, self._endpoints, self.config)
        self.deliverer.on_failing = self._endpoints.note_failing
        self.deliverer.on_dead = self._endpoints.note_dead
        self.deliverer.on_gave_up = self._endpoints.note_gave_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._presence: Announcement | None = None
        self._clock_lock = threading.Lock()
        self._last_time = 0

    # ── life ─────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Open the outbox for `publish_sync` alone, without delivering; `close()` ends it."""
        self.outbox.open()

    def close(self) -> None:
        """Close what `open` opened."""
        self.outbox.close()

    async def start(self) -> None:
        """Open the outbox, and deliver for a share of the endpoints."""
        if self._loop is not None:
            raise UsageError("this dispatcher has been started already")
        self._loop = loop = asyncio.get_running_loop()
        try:
            await self.deliverer.start()
            await loop.run_in_executor(None, self.outbox.open)
            self.outbox.on_commit = self._on_commit
            await self.maintenance.start()
        except BaseException:
            await self.deliverer.stop(0)
            self._loop = None
            raise
        # A database's name is without its password.
        self._presence = announce("webhooks.dispatcher", self.source, [self.outbox.name], self._state)
        if self._metrics:
            try:
                exporter = Exporter.add(self._metrics, self._presence)
            except BaseException:
                await self.stop()
                raise
            self._presence.exporter, self._presence.metrics_address = exporter, exporter.address

    def _state(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        return {
            "counters": self.counters.snapshot(),
            "pending": self.outbox.backlog.total,
            "endpoints": self._endpoint_states(),
            "delivering": self.delivering,
            "trouble": str(self.trouble or ""),
        }

    def _endpoint_states(self) -> list[list[Any]]:
        """Id, tenant, scheme and host of its URL, state, failing since, pending; the most pending first."""
        pending = dict(self.outbox.backlog.by_endpoint)
        endpoints = list(self.outbox.routes.endpoints.values())
        endpoints.sort(key=lambda each: -pending.get(each.id, 0))
        return [
            [
                each.id,
                each.tenant,
                _without_secrets(each.url),
                each.state,
                each.failing_since,
                pending.get(each.id, 0),
            ]
            for each in endpoints[:_ENDPOINTS_SHOWN]
        ]

    async def stop(self) -> None:
        """Wait a moment for attempts in flight, commit their results, give the endpoints up, and end all tasks."""
        if self._loop is None:
            return
        if self._presence is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._presence.close)
        await self.maintenance.stop()
        await self.deliverer.stop(GRACE_S)
        await self._endpoints.close()
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
        """Whether it was started."""
        return self._loop is not None and self.outbox.is_open

    @property
    def metrics_address(self) -> str:
        """Where Prometheus finds this process's metrics; empty without `metrics=`."""
        return "" if self._presence is None else self._presence.metrics_address

    @property
    def delivering(self) -> bool:
        """Whether this process delivers for any endpoints (there are fewer shards than processes otherwise)."""
        return self.deliverer.active

    @property
    def trouble(self) -> OutboxError | None:
        """What is wrong with the database at the moment, if anything."""
        return self.outbox.trouble

    def _on_commit(self, batch: Batch) -> None:
        """In the writer thread: pass the transaction on to the loop."""
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
        self._check_event(topic, data, tenant, content_type)
        with self.deliverer.tracing.publishing(topic, self.source) as trace:
            if connection is not None:
                return await publish_in_async(
                    connection,
                    topic,
                    data,
                    tenant=tenant,
                    content_type=content_type,
                    max_pending=self._room_in_transaction(idempotency_key),
                    trace=trace,
                )
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Published] = loop.create_future()
            self.outbox.submit(
                self._event(topic, data, tenant, content_type, idempotency_key, future, loop, trace)
            )
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
        self._check_event(topic, data, tenant, content_type)
        with self.deliverer.tracing.publishing(topic, self.source) as trace:
            if connection is not None:
                return publish_in(
                    connection,
                    topic,
                    data,
                    tenant=tenant,
                    content_type=content_type,
                    max_pending=self._room_in_transaction(idempotency_key),
                    trace=trace,
                )
            future: concurrent.futures.Future[Published] = concurrent.futures.Future()
            self.outbox.submit(
                self._event(topic, data, tenant, content_type, idempotency_key, future, None, trace)
            )
            try:
                # The writer answers every event, also when its database fails; the timeout is for bugs.
                return future.result(self.config.block_timeout_s + 60)
            except concurrent.futures.TimeoutError:
                raise OutboxError(self.outbox.name, "the writer did not answer in time") from None

    def _check_event(self, topic: str, data: bytes, tenant: str, content_type: str) -> None:
        check_publish_topic(topic)
        check_data(data, self.config.max_event_bytes)
        check_tenant(tenant)
        check_content_type(content_type)
        self.outbox.catalogue.check(topic, data, content_type)

    def _event(
        self,
        topic: str,
        data: bytes,
        tenant: str,
        content_type: str,
        key: str | None,
        future: Any,
        loop: asyncio.AbstractEventLoop | None,
        trace: str,
    ) -> NewEvent:
        with self._clock_lock:
            # Strictly rising: `ce-sequence` is made of it.
            now = self._last_time = max(time.time_ns() // 1000, self._last_time + 1)
        deadline = time.monotonic() + self.config.block_timeout_s
        return NewEvent(
            event_id(now),
            tenant,
            topic,
            now,
            bytes(data),
            content_type,
            future,
            loop,
            deadline,
            key or "",
            trace,
        )

    def _room_in_transaction(self, idempotency_key: str | None) -> int:
        if idempotency_key is not None:
            raise UsageError("idempotency_key needs a transaction of the outbox's own: leave out connection")
        # Evicting is done when the event is routed; blocking would hold the lock that delivery needs.
        return 2**62 if self.config.on_full == "evict" else self.config.max_pending

    # ── endpoints ────────────────────────────────────────────────────────────

    async def add_endpoint(
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
        """Register an endpoint; returns it and its secret, which is shown this once.

        `topics` are patterns (`order.*`), `filters` conditions on the data that must all hold; `rate` is requests per
        second (0: no limit), `concurrency` attempts at a time, `secret` one of your own instead of a new one. The owner
        of the URL is asked at once; `state` tells the result (`pending`: not agreed yet). Raises ConfigError that names
        the field, and Conflict if the tenant has `max_endpoints`.
        """
        fields: dict[str, Any] = {
            "url": url,
            "topics": list(topics),
            "description": description,
            "rate": rate,
            "concurrency": concurrency,
            "fifo": fifo,
            "headers": dict(headers or {}),
            "mode": mode,
            "signature": signature,
            "header_style": header_style,
            "filters": list(filters),
        }
        if verification is not None:
            fields["verification"] = verification
        if secret is not None:
            fields["secret"] = secret
        settings = convert(fields, EndpointSettings, what="endpoint")
        return await self._endpoints.add(settings, tenant=tenant, max_endpoints=max_endpoints)

    async def register(
        self, settings: EndpointSettings, *, tenant: str = "default", max_endpoints: int = MAX_ENDPOINTS
    ) -> tuple[Endpoint, str]:
        """`add_endpoint` with its arguments in one record."""
        return await self._endpoints.add(settings, tenant=tenant, max_endpoints=max_endpoints)

    async def update_endpoint(
        self, endpoint_id: str, changes: EndpointChanges, *, tenant: str | None = None
    ) -> Endpoint:
        """Change some settings: `update_endpoint(id, EndpointChanges(rate=5))`. A new URL must agree again.

        With `tenant`, an endpoint of another tenant is NotFound (so in all methods below).
        """
        checked = convert(changes.given(), EndpointChanges, what="endpoint")
        return await self._endpoints.update(endpoint_id, checked, tenant=tenant)

    async def remove_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> None:
        """Delete; what was pending for it is withdrawn."""
        await self._endpoints.remove(endpoint_id, tenant=tenant)

    async def rotate_secret(
        self, endpoint_id: str, *, secret: str | None = None, tenant: str | None = None
    ) -> tuple[Endpoint, str]:
        """A new secret (or your own), shown this once; the old one signs too for `rotation_overlap_s`."""
        return await self._endpoints.rotate_secret(endpoint_id, secret=secret, tenant=tenant)

    async def enable_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Active again after it was disabled, if its URL agreed before; what is pending goes out at once."""
        return await self._endpoints.switch(endpoint_id, on=True, tenant=tenant)

    async def disable_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Stop delivering to it; events that match are recorded as skipped, and can be replayed."""
        return await self._endpoints.switch(endpoint_id, on=False, tenant=tenant)

    async def verify_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Ask the owner of the URL now; `state` and `reason` tell the result."""
        return await self._endpoints.verify(endpoint_id, tenant=tenant)

    async def test_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Reply:
        """Send a `brokerless.test` event now, beside the outbox, and return the answer."""
        endpoint = await self._endpoints.get(endpoint_id, tenant=tenant)
        if endpoint.state in {"pending", "disabled_pending"}:
            raise Conflict(f"the endpoint is {shown(endpoint.state)} and has not agreed yet; use /verify")
        at = now_us()
        event = StoredEvent(
            0, event_id(at), endpoint.tenant, "brokerless.test", at, b'{"test":true}', "application/json"
        )
        return await self.deliverer.attempt(endpoint, [Item(0, event)])

    async def endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """One endpoint; NotFound if there is none."""
        return await self._endpoints.get(endpoint_id, tenant=tenant)

    async def endpoints(
        self, *, tenant: str | None = None, after: str = "", limit: int | None = None
    ) -> list[Endpoint]:
        """Endpoints (of a tenant) by id: those after the id `after`, at most `limit` (None: all)."""
        return await self._endpoints.list_all(tenant=tenant, after=after, limit=limit)

    async def oldest_pending(self, endpoint_ids: Sequence[str]) -> dict[str, int]:
        """When the oldest delivery that waits was created (µs since 1970), for those of the endpoints that have any."""
        return await self._endpoints.oldest_pending(endpoint_ids)

    # ── the catalogue of event types ─────────────────────────────────────────

    async def set_event_type(
        self,
        topic: str,
        *,
        description: str = "",
        schema: Mapping[str, Any] | None = None,
        example: Any = None,
        validate: bool = False,
    ) -> EventType:
        """Describe a topic, for all tenants: what it means, the JSON Schema of its data, an example.

        With `validate`, `publish` refuses data that does not fit the schema (InvalidEvent says where). Other processes
        know it within a moment. Raises ConfigError that names what is wrong.
        """
        found = EventType(
            topic=check_publish_topic(topic),
            description=description,
            schema=None if schema is None else dict(schema),
            example=example,
            validate=validate,
            updated=now_us(),
        )
        return await self._types.set(found)

    async def remove_event_type(self, topic: str) -> None:
        """Take a topic out of the catalogue; its events are accepted as they come again."""
        await self._types.remove(topic)

    async def event_types(self) -> list[EventType]:
        """The catalogue, by topic."""
        return await self._types.list_all()

    async def event_type(self, topic: str) -> EventType:
        """One topic of the catalogue; NotFound if it is not in it."""
        return await self._types.get(topic)

    # ── the portal ───────────────────────────────────────────────────────────

    def portal_link(self, tenant: str, *, base: str = "/", valid_s: float = 3600.0) -> str:
        """A link that lets a visitor of your application into the portal as `tenant`, for `valid_s` seconds.

        `base` is where the registration app is (`https://hooks.example.com/`). The token stands behind the `#`, so it
        is not sent to servers or written to their logs. Links are valid in every process of the outbox. Closed if the
        dispatcher is neither started nor opened: the key is in the outbox.
        """
        check_tenant(tenant)
        if not self.outbox.portal_key:
            raise Closed("the dispatcher")
        token = make_token(self.outbox.portal_key, tenant, int(time.time() + valid_s))
        return f"{base.rstrip('/')}/#token={token}"

    def portal_visitor(self, token: str) -> str | None:
        """The tenant of a portal link's token; None if it is none or has expired."""
        return read_token(self.outbox.portal_key, token, time.time()) if self.outbox.portal_key else None

    # ── deliveries and events ────────────────────────────────────────────────

    async def deliveries(self, query: DeliveryQuery) -> list[Delivery]:
        """Deliveries, newest first."""
        return await self._deliveries.find(query)

    async def delivery(self, delivery_id: str, *, tenant: str | None = None) -> Delivery:
        """One delivery; NotFound if there is none."""
        return await self._deliveries.get(delivery_id, tenant=tenant)

    async def events(self, query: EventQuery) -> list[StoredEvent]:
        """Events, newest first, as long as they are kept."""
        return await self._deliveries.events(query)

    async def event(self, event_id: str, *, tenant: str | None = None) -> StoredEvent:
        """One event as it was published, as long as it is kept."""
        return await self._deliveries.event(event_id, tenant=tenant)

    async def account(self, tenant: str | None = None) -> OutboxAccount:
        """What was accepted and what became of it, from the database."""
        return await self._deliveries.account(tenant)

    async def retry(self, delivery_id: str, *, tenant: str | None = None) -> Delivery:
        """Send a delivery now, with the same `webhook-id`: a finished one with a fresh schedule, or a pending one."""
        return await self._deliveries.retry(delivery_id, tenant=tenant)

    async def replay(
        self,
        endpoint_id: str,
        since: int,
        until: int | None = None,
        *,
        only: ReplayChoice = "failed",
        dry_run: bool = False,
        tenant: str | None = None,
        max_pending: int | None = None,
    ) -> Replayed:
        """Send events published in [since, until) (µs since 1970) again, up to the bounds of the outbox (and, with
        `max_pending`, to so many deliveries that wait for all endpoints of the tenant).

        `only="failed"`: dead letters, evicted and skipped ones. `only="all"`: also those that were delivered, and those
        from before the endpoint was there. `dry_run` only counts them.
        """
        return await self._deliveries.replay(
            endpoint_id, since, until, only=only, tenant=tenant, dry_run=dry_run, max_pending=max_pending
        )


def _without_secrets(url: str) -> str:
    """Scheme and host: user, path and query of a webhook's URL are often what authorises its sender."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
