"""What can be done with endpoints and deliveries: the REST resources, the CLI and applications call these."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from brokerless.core.errors import BrokerlessError, ConfigError
from brokerless.webhooks import listing, ownership
from brokerless.webhooks.addresses import AddressGuard
from brokerless.webhooks.client import Reply
from brokerless.webhooks.endpoints import (
    changed_endpoint,
    check_endpoint,
    check_tenant,
    enabled,
    new_endpoint,
    rotated,
)
from brokerless.webhooks.errors import Conflict, NotFound
from brokerless.webhooks.identity import endpoint_id as new_endpoint_id
from brokerless.webhooks.identity import event_id
from brokerless.webhooks.listing import DeliveryQuery
from brokerless.webhooks.models import (
    Delivery,
    DeliveryState,
    Endpoint,
    Item,
    OutboxAccount,
    StoredEvent,
)
from brokerless.webhooks.signing import SECRET_BYTES, shown_secret
from brokerless.webhooks.store import Store

if TYPE_CHECKING:
    from brokerless.webhooks.config import DispatcherConfig
    from brokerless.webhooks.counters import DispatcherCounters
    from brokerless.webhooks.delivery import Deliverer
    from brokerless.webhooks.outbox import Outbox

logger = logging.getLogger("brokerless.webhooks")
T = TypeVar("T")
US = 1_000_000
# Events that a replay looks at in one transaction, so that publishing goes on meanwhile.
REPLAY_AT_ONCE = 1000


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


class Management:
    """The managing half of a Dispatcher. `tenant=None` means: whoever it belongs to."""

    config: "DispatcherConfig"
    counters: "DispatcherCounters"
    outbox: "Outbox"
    deliverer: "Deliverer"
    source: str

    def __init__(self) -> None:
        self._guard = AddressGuard(self.config.policy)
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something that nobody waits for; it is cancelled and joined at stop."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("background work failed: %s", task.exception())

    async def cancel_tasks(self) -> None:
        """Cancel and join what `spawn` started."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── endpoints ────────────────────────────────────────────────────────────

    async def add_endpoint(
        self,
        url: str,
        topics: list[str],
        *,
        tenant: str = "default",
        max_endpoints: int = 10_000,
        **fields: Any,
    ) -> tuple[Endpoint, str]:
        """Register; returns the endpoint and its secret, which is shown this once.

        Asks the owner of the URL at once; the state tells the result (`pending`: not agreed yet).
        """
        endpoint = new_endpoint(
            {"url": url, "topics": topics, **fields},
            endpoint_id=new_endpoint_id(),
            tenant=check_tenant(tenant),
            config=self.config,
            random=secrets.token_bytes(SECRET_BYTES),
            now=now_us(),
        )
        check_endpoint(endpoint, self._guard)

        def save(store: Store) -> Endpoint:
            owned = self.outbox.routes.of_tenant(tenant)
            if len(owned) >= max_endpoints:
                raise Conflict(f"tenant {tenant!r} has {len(owned)} endpoints, which is the limit")
            return self._save(store, endpoint)

        await self._changed(save)
        if endpoint.state == "pending":
            endpoint = await self.verify_endpoint(endpoint.id)
        return endpoint, shown_secret(endpoint.secrets[0].key)

    async def update_endpoint(
        self, endpoint_id: str, fields: dict[str, Any], *, tenant: str | None = None
    ) -> Endpoint:
        """Change some fields; a new URL makes it pending until its owner agrees."""

        def change(store: Store) -> Endpoint:
            before = self._get(store, endpoint_id, tenant)
            if fields.get("enabled") and before.state == "pending":
                raise Conflict("the endpoint has not agreed yet; use /verify")
            random = secrets.token_bytes(SECRET_BYTES)
            after = changed_endpoint(before, fields, config=self.config, random=random, now=now_us())
            check_endpoint(after, self._guard)
            if after.fifo != before.fifo:
                store.set_order(endpoint_id, 0 if after.fifo else now_us())
            return self._save(store, after)

        endpoint = await self._changed(change)
        self.deliverer.more(endpoint_id, resume=bool(fields.get("enabled") or "url" in fields))
        if endpoint.state == "pending":
            endpoint = await self.verify_endpoint(endpoint_id)
        return endpoint

    async def remove_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> None:
        """Delete; what was pending for it is withdrawn."""

        def remove(store: Store) -> None:
            self._get(store, endpoint_id, tenant)
            withdrawn = store.delete_endpoint(endpoint_id, now_us())
            self.outbox.accept.recount(store, endpoint_id)
            self.outbox.accept.count("withdrawn", withdrawn)
            self.outbox.routes = self.outbox.routes.without(endpoint_id)

        await self._changed(remove)

    async def rotate_secret(self, endpoint_id: str, *, tenant: str | None = None) -> tuple[Endpoint, str]:
        """A new secret, shown this once; the old one signs too for `rotation_overlap_s`."""

        def rotate(store: Store) -> Endpoint:
            before = self._get(store, endpoint_id, tenant)
            random = secrets.token_bytes(SECRET_BYTES)
            return self._save(
                store, rotated(before, self.config.rotation_overlap_s, random=random, now=now_us())
            )

        endpoint = await self._changed(rotate)
        return endpoint, shown_secret(endpoint.secrets[0].key)

    async def enable_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Active again after it was disabled; what is pending goes out at once."""

        def enable(store: Store) -> Endpoint:
            before = self._get(store, endpoint_id, tenant)
            if before.state == "pending":
                raise Conflict("the endpoint has not agreed yet; use /verify")
            return self._save(store, enabled(before, now_us()))

        endpoint = await self._changed(enable)
        self.deliverer.more(endpoint_id)
        return endpoint

    async def verify_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """Ask the owner of the URL now; `state` and `reason` tell what came of it."""
        endpoint = await self._read_endpoint(endpoint_id, tenant)
        if endpoint.state != "pending":
            return endpoint
        agreement = await ownership.ask(
            self.deliverer.client.httpx,
            endpoint,
            source=self.source,
            origin=self.config.origin,
            timeout_s=self.config.connect_timeout_s,
            now=time.time(),
        )

        def record(store: Store) -> Endpoint:
            current = self._get(store, endpoint_id, tenant)
            if current.state != "pending" or current.url != endpoint.url:
                return current
            return self._save(
                store,
                msgspec.structs.replace(
                    current,
                    state="active" if agreement.agreed else "pending",
                    reason=agreement.problem,
                    allowed_rate=agreement.allowed_rate,
                    verify_tries=current.verify_tries + 1,
                ),
            )

        return await self._changed(record)

    async def test_endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Reply:
        """Send a `brokerless.test` event now, beside the outbox, and tell what came back."""
        endpoint = await self._read_endpoint(endpoint_id, tenant)
        if endpoint.state == "pending":
            raise Conflict("the endpoint has not agreed yet; use /verify")
        at = now_us()
        event = StoredEvent(
            0, event_id(at), endpoint.tenant, "brokerless.test", at, b'{"test":true}', "application/json"
        )
        return await self.deliverer.attempt(endpoint, [Item(0, event)])

    async def endpoint(self, endpoint_id: str, *, tenant: str | None = None) -> Endpoint:
        """One endpoint; NotFound if there is none, or it is another tenant's."""
        return await self._read_endpoint(endpoint_id, tenant)

    async def endpoints(self, *, tenant: str | None = None) -> list[Endpoint]:
        """All endpoints (of a tenant), by id."""
        found = await self.outbox.read(lambda session: Store(session).endpoints())
        return [endpoint for endpoint in found if tenant is None or endpoint.tenant == tenant]

    # ── deliveries and events ────────────────────────────────────────────────

    async def deliveries(self, query: DeliveryQuery) -> list[Delivery]:
        """Deliveries, newest first."""
        return await self.outbox.read(lambda session: listing.deliveries(session, query))

    async def event(self, event_id: str, *, tenant: str | None = None) -> StoredEvent:
        """One event as it was published, as long as it is kept."""
        found = await self.outbox.read(lambda session: listing.event(session, event_id))
        if found is None or (tenant is not None and found.tenant != tenant):
            raise NotFound("event", event_id)
        return found

    async def account(self, tenant: str | None = None) -> OutboxAccount:
        """The books, from the database."""
        return await self.outbox.read(lambda session: Store(session).account(tenant))

    async def retry(self, delivery_id: int, *, tenant: str | None = None) -> Delivery:
        """Send a finished delivery again, with the same `webhook-id` and a fresh schedule."""

        def reopen(store: Store) -> Delivery:
            found = listing.delivery(store.session, delivery_id)
            if found is None:
                raise NotFound("delivery", str(delivery_id))
            try:
                endpoint = self._get(store, found.endpoint, tenant)
            except NotFound:
                if tenant is not None:
                    raise NotFound("delivery", str(delivery_id)) from None
                raise Conflict("its endpoint was deleted") from None
            if not endpoint.active:
                raise Conflict(f"its endpoint is {endpoint.state}")
            if not store.reopen(delivery_id, 0 if endpoint.fifo else now_us()):
                raise Conflict("the delivery is pending already")
            self._reopened(store, endpoint.id)
            again = listing.delivery(store.session, delivery_id)
            assert again is not None
            return again

        delivery = await self.outbox.call_async(reopen)
        self.deliverer.more(delivery.endpoint)
        return delivery

    async def replay(
        self,
        endpoint_id: str,
        since: int,
        until: int | None = None,
        *,
        only: str = "failed",
        tenant: str | None = None,
    ) -> int:
        """Send events published in [since, until) (µs since 1970) again; returns how many deliveries.

        `only="failed"`: dead letters and evicted ones. `only="all"`: also those that were delivered, and
        those that the
        endpoint never got because it was disabled or did not exist yet.
        """
        if only not in {"failed", "all"}:
            raise ConfigError("only", "must be 'failed' or 'all'")
        end = now_us() if until is None else until

        def reopen(store: Store) -> int:
            endpoint = self._get(store, endpoint_id, tenant)
            if not endpoint.active:
                raise Conflict(f"the endpoint is {endpoint.state}")
            due = 0 if endpoint.fifo else now_us()
            count = store.replay(endpoint, since, end, due, failed_only=only == "failed")
            self._reopened(store, endpoint_id)
            return count

        total = await self.outbox.call_async(reopen)
        if only == "all":
            total += await self._replay_missed(endpoint_id, since, end)
        self.deliverer.more(endpoint_id)
        return total

    async def _replay_missed(self, endpoint_id: str, since: int, until: int) -> int:
        after, total = 0, 0
        while True:

            def page(store: Store, after: int = after) -> tuple[int | None, int]:
                endpoint = self._get(store, endpoint_id, None)
                missed = store.missed(endpoint, since, until, after, REPLAY_AT_ONCE)
                at = now_us()
                due = 0 if endpoint.fifo else at
                alone = type(self.outbox.routes)([endpoint])
                wanted = [n for n, topic in missed if alone.route(endpoint.tenant, topic)[0]]
                store.insert_deliveries([(n, endpoint_id, 0, due, 0, at, "") for n in wanted])
                self._reopened(store, endpoint_id)
                more = missed[-1][0] if len(missed) == REPLAY_AT_ONCE else None
                return more, len(wanted)

            more, count = await self.outbox.call_async(page)
            total += count
            if more is None:
                return total
            after = more

    # ── what deliveries say about endpoints ──────────────────────────────────

    def _failing(self, endpoint_id: str, since: int | None) -> None:
        """Remember since when an endpoint fails, so that restarts do not forget it."""

        def record(store: Store) -> None:
            current = store.endpoint(endpoint_id)
            if current is not None:
                self._save(store, msgspec.structs.replace(current, failing_since=since))

        self.spawn(self._quietly(record))

    def _dead(self, endpoint_id: str, reason: str, gone: bool) -> None:
        self.spawn(self._disable(endpoint_id, reason, gone))

    async def _disable(self, endpoint_id: str, reason: str, gone: bool) -> None:
        """Disable it, and publish the dispatcher's own event about that."""
        at = now_us()

        def disable(store: Store) -> Endpoint | None:
            current = store.endpoint(endpoint_id)
            if current is None or not current.active:
                return None
            if gone:
                ended = store.end_pending(endpoint_id, DeliveryState.GAVE_UP, at)
                self.outbox.accept.recount(store, endpoint_id)
                self.outbox.accept.count("gave_up", ended)
            self.outbox.accept.count("disabled", 1)
            after = self._save(
                store, msgspec.structs.replace(current, state="disabled", reason=reason, updated=at)
            )
            told = msgspec.json.encode(
                {
                    "endpoint": endpoint_id,
                    "url": current.url,
                    "reason": reason,
                    "since": current.failing_since,
                }
            )
            store.insert_events(
                [
                    (
                        event_id(at),
                        current.tenant,
                        "brokerless.endpoint.disabled",
                        at,
                        told,
                        "application/json",
                        0,
                    )
                ]
            )
            return after

        if await self._changed(disable) is not None:
            logger.warning("endpoint %s was disabled: %s", endpoint_id, reason)

    # ── in the writer thread ─────────────────────────────────────────────────

    def _reopened(self, store: Store, endpoint_id: str) -> None:
        """Deliveries became pending again: count them, and tell the process that delivers if it is another."""
        self.outbox.accept.recount(store, endpoint_id)
        if not self.outbox.leading:
            store.announce()

    def _save(self, store: Store, endpoint: Endpoint) -> Endpoint:
        store.save_endpoint(endpoint)
        self.outbox.routes = self.outbox.routes.with_endpoint(endpoint)
        return endpoint

    def _get(self, store: Store, endpoint_id: str, tenant: str | None) -> Endpoint:
        found = store.endpoint(endpoint_id)
        if found is None or (tenant is not None and found.tenant != tenant):
            raise NotFound("endpoint", endpoint_id)
        return found

    async def _read_endpoint(self, endpoint_id: str, tenant: str | None) -> Endpoint:
        found = await self.outbox.read(lambda session: Store(session).endpoint(endpoint_id))
        if found is None or (tenant is not None and found.tenant != tenant):
            raise NotFound("endpoint", endpoint_id)
        return found

    async def _changed(self, change: Callable[[Store], T]) -> T:
        """Run a change of endpoints, and let the lanes know."""
        result = await self.outbox.call_async(change)
        if self.deliverer.active:
            self.deliverer.routes_changed(self.outbox.routes)
        return result

    async def _quietly(self, change: Callable[[Store], Any]) -> None:
        try:
            await self._changed(change)
        except BrokerlessError as error:
            logger.warning("an endpoint could not be updated: %s", error)
