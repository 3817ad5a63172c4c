"""What can be done with endpoints and deliveries: the REST resources, the CLI and applications call these."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from brokerless.core.errors import BrokerlessError, ConfigError
from brokerless.webhooks.admin.endpoints import (
    changed_endpoint,
    check_endpoint,
    new_endpoint,
    rotated,
    switched,
)
from brokerless.webhooks.admin.states import Action, shown, step
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.delivery import verification as ownership
from brokerless.webhooks.delivery.ssrf import AddressGuard
from brokerless.webhooks.errors import Conflict, NotFound, OutboxError
from brokerless.webhooks.models import (
    Delivery,
    DeliveryState,
    Endpoint,
    EndpointChanges,
    EndpointSettings,
    OutboxAccount,
    Replayed,
    StoredEvent,
)
from brokerless.webhooks.outbox import queries
from brokerless.webhooks.outbox.identity import endpoint_id as new_endpoint_id
from brokerless.webhooks.outbox.identity import event_id
from brokerless.webhooks.outbox.outbox import Outbox
from brokerless.webhooks.outbox.queries import DeliveryQuery, EventQuery
from brokerless.webhooks.outbox.routing import wants
from brokerless.webhooks.outbox.store import END_AT_ONCE, Store
from brokerless.webhooks.rules import ReplayChoice, check_tenant
from brokerless.webhooks.signing import SECRET_BYTES, parse_secret, shown_secret

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("brokerless.webhooks")
T = TypeVar("T")
# Deliveries that a replay reopens in one transaction, so that publishing goes on meanwhile.
REPLAY_AT_ONCE = 500
# First failures of many endpoints are recorded together.
RECORD_S = 0.2


# Dead letters of one endpoint within this time are told in one event, with so many ids of events.
REPORT_S = 2.0
MAX_TOLD = 20
GAVE_UP_TOPIC = "brokerless.delivery.gave_up"


class DeadLetters(msgspec.Struct):
    """What `brokerless.delivery.gave_up` tells: how many, the first of their events, and the last answer."""

    count: int = 0
    events: list[str] = []
    problem: str = ""

    def add(self, events: Sequence[str], count: int, problem: str) -> None:
        """More of them."""
        self.count += count
        self.problem = problem
        self.events += events[: MAX_TOLD - len(self.events)]


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def owned_endpoint(store: Store, endpoint_id: str, tenant: str | None, *, lock: bool = False) -> Endpoint:
    """The endpoint, or NotFound: there is none, or it is another tenant's. `tenant=None`: whoever's it is."""
    found = store.endpoint(endpoint_id, lock=lock)
    if found is None or (tenant is not None and found.tenant != tenant):
        raise NotFound("endpoint", endpoint_id)
    return found


class EndpointManager:
    """Registers, changes, verifies and disables endpoints. `wake(endpoint_id)` makes its lane look at the database."""

    def __init__(
        self,
        outbox: Outbox,
        config: DispatcherConfig,
        *,
        source: str,
        client: Callable[[], "httpx.AsyncClient"],
        wake: Callable[[str], None],
    ) -> None:
        self._outbox = outbox
        self._config = config
        self._source = source
        self._client = client
        self._wake = wake
        self._guard = AddressGuard(config.policy)
        self._failing: dict[str, int | None] = {}
        self._gave_up: dict[str, DeadLetters] = {}
        self._recording: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Record what waits, and end background work."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failing and self._outbox.is_open:
            await self._quietly(self._record_failing())
        if self._gave_up and self._outbox.is_open:
            await self._quietly(self._report_gave_up())

    # ── by request ───────────────────────────────────────────────────────────

    async def add(
        self, settings: EndpointSettings, *, tenant: str, max_endpoints: int
    ) -> tuple[Endpoint, str]:
        """Register, and ask the owner of the URL at once; returns the endpoint and its secret."""
        endpoint = new_endpoint(
            settings,
            endpoint_id=new_endpoint_id(),
            tenant=check_tenant(tenant),
            config=self._config,
            random=secrets.token_bytes(SECRET_BYTES),
            now=now_us(),
        )
        check_endpoint(endpoint, self._guard)
        parse_secret(endpoint.secrets[0].key)

        def save(store: Store) -> None:
            count = store.count_endpoints(tenant)
            if count >= max_endpoints:
                raise Conflict(f"tenant {tenant!r} has {count} endpoints, which is the limit")
            store.save_endpoint(endpoint)

        await self._outbox.call_async(save)
        found = await self.verify(endpoint.id, tenant=None) if endpoint.state == "pending" else endpoint
        return found, shown_secret(endpoint.secrets[0].key)

    async def update(self, endpoint_id: str, changes: EndpointChanges, *, tenant: str | None) -> Endpoint:
        """Change some settings; a new URL makes it pending until its owner agrees."""

        def change(store: Store) -> Endpoint:
            before = owned_endpoint(store, endpoint_id, tenant, lock=True)
            random = secrets.token_bytes(SECRET_BYTES)
            after = changed_endpoint(before, changes, config=self._config, random=random, now=now_us())
            check_endpoint(after, self._guard)
            if after.fifo and not before.fifo:
                # What came since the steps below; the other way round, 0 is a time at which they are due.
                while store.set_order(endpoint_id) == END_AT_ONCE:
                    pass
            store.save_endpoint(after)
            if after.active and not before.active:
                self._announce(store, endpoint_id)
            return after

        def put_in_order(store: Store) -> int:
            before = owned_endpoint(store, endpoint_id, tenant, lock=True)
            return 0 if before.fifo else store.set_order(endpoint_id)

        if changes.given().get("fifo"):
            # In bounded steps, so that others go on meanwhile.
            while await self._outbox.call_async(put_in_order) == END_AT_ONCE:
                pass
        endpoint = await self._outbox.call_async(change)
        self._wake(endpoint_id)
        if endpoint.state == "pending":
            endpoint = await self.verify(endpoint_id, tenant=None)
        return endpoint

    async def remove(self, endpoint_id: str, *, tenant: str | None) -> None:
        """Delete; what was pending for it is withdrawn."""

        def remove(store: Store) -> None:
            owned_endpoint(store, endpoint_id, tenant, lock=True)
            store.delete_endpoint(endpoint_id, now_us())

        await self._outbox.call_async(remove)
        # If this process dies before the end, the one that owns the endpoint's shard goes on (see Maintenance).
        await self.end_pending(endpoint_id, DeliveryState.WITHDRAWN)

    async def end_pending(
        self, endpoint_id: str, state: DeliveryState, *, created_before: int | None = None
    ) -> int:
        """All that is pending for an endpoint (and older than that) ends so, in bounded steps; returns how many."""
        outbox = self._outbox

        def end(store: Store) -> int:
            ended = store.end_pending(endpoint_id, state, now_us(), created_before=created_before)
            # What other processes added may not be counted here yet.
            outbox.backlog.add(endpoint_id, -min(ended, outbox.backlog.by_endpoint.get(endpoint_id, 0)))
            outbox.backlog.count(state.label, ended)
            return ended

        total = 0
        while True:
            ended = await outbox.call_async(end)
            total += ended
            if ended < END_AT_ONCE:
                return total

    async def rotate_secret(
        self, endpoint_id: str, *, secret: str | None, tenant: str | None
    ) -> tuple[Endpoint, str]:
        """A new secret; the old one signs too for `rotation_overlap_s`."""
        if secret is not None:
            parse_secret(secret)

        def rotate(store: Store) -> Endpoint:
            before = owned_endpoint(store, endpoint_id, tenant, lock=True)
            random, overlap_s = secrets.token_bytes(SECRET_BYTES), self._config.rotation_overlap_s
            after = rotated(before, overlap_s, random=random, now=now_us(), secret=secret)
            store.save_endpoint(after)
            return after

        endpoint = await self._outbox.call_async(rotate)
        return endpoint, shown_secret(endpoint.secrets[0].key)

    async def switch(self, endpoint_id: str, *, on: bool, tenant: str | None) -> Endpoint:
        """Enable (what is pending goes out at once) or disable."""

        def switch(store: Store) -> Endpoint:
            before = owned_endpoint(store, endpoint_id, tenant, lock=True)
            after = switched(before, on=on, now=now_us())
            store.save_endpoint(after)
            if after.active:
                self._announce(store, endpoint_id)
            return after

        endpoint = await self._outbox.call_async(switch)
        self._wake(endpoint_id)
        if endpoint.state == "pending":
            endpoint = await self.verify(endpoint_id, tenant=None)
        return endpoint

    async def verify(self, endpoint_id: str, *, tenant: str | None) -> Endpoint:
        """Ask the owner of the URL now; `state` and `reason` tell the result."""
        endpoint = await self.get(endpoint_id, tenant=tenant)
        if endpoint.state != "pending":
            return endpoint
        agreement = await ownership.ask(
            self._client(),
            endpoint,
            source=self._source,
            origin=self._config.origin,
            timeout_s=self._config.connect_timeout_s,
            now=time.time(),
        )

        def record(store: Store) -> Endpoint:
            current = owned_endpoint(store, endpoint_id, tenant, lock=True)
            if current.state != "pending" or current.url != endpoint.url:
                return current
            after = msgspec.structs.replace(
                current,
                state=step(current.state, Action.AGREE if agreement.agreed else Action.REFUSE),
                reason=agreement.problem,
                allowed_rate=agreement.allowed_rate,
                verify_tries=current.verify_tries + 1,
                asked_since=min(current.asked_since or current.created, now_us()),
            )
            store.save_endpoint(after)
            if after.active:
                self._announce(store, endpoint_id)
            return after

        found = await self._outbox.call_async(record)
        self._wake(endpoint_id)
        return found

    async def get(self, endpoint_id: str, *, tenant: str | None) -> Endpoint:
        """One endpoint; NotFound if there is none, or it is another tenant's."""
        return await self._outbox.read(lambda session: owned_endpoint(Store(session), endpoint_id, tenant))

    async def list_all(self, *, tenant: str | None, after: str, limit: int | None) -> list[Endpoint]:
        """Endpoints (of a tenant), by id."""
        return await self._outbox.read(lambda session: Store(session).list_endpoints(tenant, after, limit))

    async def oldest_pending(self, endpoint_ids: Sequence[str]) -> dict[str, int]:
        """When the oldest delivery that waits was created (µs since 1970), for those that have any."""
        if not endpoint_ids:
            return {}
        return await self._outbox.read(lambda session: Store(session).oldest_pending(endpoint_ids))

    def _announce(self, store: Store, endpoint_id: str) -> None:
        """The process that delivers for the endpoint should look at the database now."""
        if not self._outbox.owns(endpoint_id):
            store.note_endpoints("send", [endpoint_id])

    # ── what deliveries say about endpoints ──────────────────────────────────

    def note_failing(self, endpoint_id: str, since: int | None) -> None:
        """Remember since when an endpoint fails, so that restarts do not forget it."""
        self._failing[endpoint_id] = since
        if self._recording is None:
            self._recording = self._spawn(self._record_later())

    async def _record_later(self) -> None:
        try:
            while self._failing:
                await asyncio.sleep(RECORD_S)
                await self._quietly(self._record_failing())
        finally:
            self._recording = None

    async def _record_failing(self) -> None:
        since, self._failing = self._failing, {}

        def record(store: Store) -> None:
            store.record_failing(list(since.items()))
            known = self._outbox.routes.endpoints
            self._outbox.batch.tenants |= {known[name].tenant for name in since if name in known}

        try:
            await self._outbox.call_async(record)
        except OutboxError:
            # Again later; what was noted meanwhile is newer.
            self._failing = since | self._failing
            raise

    def note_dead(self, endpoint_id: str, reason: str, gone: bool) -> None:
        """Disable an endpoint that answered 410 or failed for too long."""
        self._spawn(self._disable(endpoint_id, reason, gone))

    async def _disable(self, endpoint_id: str, reason: str, gone: bool) -> None:
        """Disable it, and publish the dispatcher's own event about that."""

        def disable(store: Store) -> bool:
            at = now_us()
            current = store.endpoint(endpoint_id, lock=True)
            if current is None or not current.active:
                return False
            self._outbox.backlog.count("disabled", 1)
            state = step(current.state, Action.FAIL)
            store.save_endpoint(msgspec.structs.replace(current, state=state, reason=reason, updated=at))
            told = {
                "endpoint": endpoint_id,
                "url": current.url,
                "reason": reason,
                "since": current.failing_since,
            }
            tenants = {current.tenant, self._config.operator_tenant} - {""}
            publish_own(store, current.tenant, "brokerless.endpoint.disabled", told, at, tenants)
            return True

        if await self._outbox.call_async(disable):
            logger.warning("endpoint %s was disabled: %s", endpoint_id, reason)
            if gone and (ended := await self.end_pending(endpoint_id, DeliveryState.GAVE_UP)):
                self.note_gave_up(endpoint_id, [], ended, reason)

    def note_gave_up(self, endpoint_id: str, events: Sequence[str], count: int, problem: str) -> None:
        """Deliveries became dead letters: tell so, once for all of an endpoint that come within a moment."""
        self._gave_up.setdefault(endpoint_id, DeadLetters()).add(events, count, problem)
        if self._reporting is None:
            self._reporting = self._spawn(self._report_later())

    async def _report_later(self) -> None:
        try:
            while self._gave_up:
                await asyncio.sleep(REPORT_S)
                await self._quietly(self._report_gave_up())
        finally:
            self._reporting = None

    async def _report_gave_up(self) -> None:
        found, self._gave_up = self._gave_up, {}
        routes = self._outbox.routes

        def insert(store: Store) -> None:
            for endpoint_id, dead in found.items():
                endpoint = routes.endpoints.get(endpoint_id)
                if endpoint is None:
                    continue
                told = {"endpoint": endpoint_id, "url": endpoint.url, **msgspec.structs.asdict(dead)}
                tenants = [
                    name
                    for name in {endpoint.tenant, self._config.operator_tenant} - {""}
                    if routes.wanted(name, GAVE_UP_TOPIC)
                ]
                publish_own(store, endpoint.tenant, GAVE_UP_TOPIC, told, now_us(), tenants)

        try:
            await self._outbox.call_async(insert)
        except OutboxError:
            since, self._gave_up = self._gave_up, found
            for endpoint_id, dead in since.items():
                found.setdefault(endpoint_id, DeadLetters()).add(dead.events, dead.count, dead.problem)
            raise

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BrokerlessError as error:
            logger.warning("what became of endpoints could not be recorded: %s", error)


def publish_own(
    store: Store, tenant: str, topic: str, content: dict[str, Any], at: int, tenants: Collection[str]
) -> None:
    """Insert an event of the dispatcher itself, about something of `tenant`, for each of `tenants`."""
    if not tenants:
        return
    data = msgspec.json.encode({**content, "tenant": tenant})
    rows = [(event_id(at), name, topic, at, data, "application/json", 0, "") for name in sorted(tenants)]
    store.insert_events(rows)
    store.note("new")


class DeliveryManager:
    """Lists deliveries and events, and sends them again."""

    def __init__(self, outbox: Outbox, config: DispatcherConfig, *, wake: Callable[[str], None]) -> None:
        self._outbox = outbox
        self._config = config
        self._wake = wake

    async def find(self, query: DeliveryQuery) -> list[Delivery]:
        """Deliveries, newest first."""
        return await self._outbox.read(lambda session: queries.deliveries(session, query))

    async def events(self, query: EventQuery) -> list[StoredEvent]:
        """Events, newest first."""
        return await self._outbox.read(lambda session: queries.events(session, query))

    async def event(self, identity: str, *, tenant: str | None) -> StoredEvent:
        """One event as it was published, as long as it is kept."""
        found = await self._outbox.read(lambda session: queries.event(session, identity))
        if found is None or (tenant is not None and found.tenant != tenant):
            raise NotFound("event", identity)
        return found

    async def get(self, delivery_id: str, *, tenant: str | None) -> Delivery:
        """One delivery by its id."""

        def find(session: Any) -> Delivery:
            found = queries.delivery(session, delivery_id)
            if found is None or not _may_see(Store(session), found, tenant):
                raise NotFound("delivery", delivery_id)
            return found

        return await self._outbox.read(find)

    async def account(self, tenant: str | None) -> OutboxAccount:
        """The accounting, from the database."""
        return await self._outbox.read(lambda session: Store(session).account(tenant))

    async def retry(self, delivery_id: str, *, tenant: str | None) -> Delivery:
        """Send a delivery now, whether it is finished (with a fresh schedule) or waits for its next attempt."""

        def send(store: Store) -> Delivery:
            found = queries.delivery(store.session, delivery_id)
            if found is None or not _may_see(store, found, tenant):
                raise NotFound("delivery", delivery_id)
            try:
                endpoint = owned_endpoint(store, found.endpoint, tenant)
            except NotFound:
                raise Conflict("its endpoint was deleted") from None
            if not endpoint.active:
                raise Conflict(f"its endpoint is {shown(endpoint.state)}")
            number = store.number_of(found.event, found.endpoint)
            assert number is not None
            if store.send_now(number, 0 if endpoint.fifo else now_us()):
                self._outbox.backlog.add(endpoint.id, 1)
            self._announce(store, endpoint.id)
            again = queries.delivery(store.session, delivery_id)
            assert again is not None
            return again

        delivery = await self._outbox.call_async(send)
        self._wake(delivery.endpoint)
        return delivery

    async def replay(
        self,
        endpoint_id: str,
        since: int,
        until: int | None,
        *,
        only: ReplayChoice,
        tenant: str | None,
        dry_run: bool,
        max_pending: int | None = None,
    ) -> Replayed:
        """Send events of a time range again, some hundred per transaction, up to the bounds of the outbox.

        `max_pending` bounds what is pending for all endpoints of `tenant`, too.
        """
        if only not in {"failed", "all"}:
            raise ConfigError("only", "must be 'failed' or 'all'")
        end = now_us() if until is None else until
        failed_only = only == "failed"
        if dry_run:
            return await self._outbox.read(
                lambda session: Replayed(
                    _count_replay(Store(session), endpoint_id, tenant, since, end, failed_only)
                )
            )
        total, after = 0, 0
        while True:

            def reopen(store: Store, after: int = after) -> tuple[int, int | None, bool]:
                endpoint = self._replayable(store, endpoint_id, tenant)
                limit = min(REPLAY_AT_ONCE, self._room(endpoint, max_pending))
                found = store.to_replay(endpoint_id, since, end, after, limit + 1, failed_only=failed_only)
                chosen = [number for number, _ in found[:limit]]
                count = store.reopen(chosen, 0 if endpoint.fifo else now_us())
                self._outbox.backlog.add(endpoint_id, count)
                self._announce(store, endpoint_id)
                if len(found) <= limit:
                    return count, None, True
                return count, (chosen[-1] if chosen else None), bool(chosen)

            count, following, complete = await self._outbox.call_async(reopen)
            total += count
            self._wake(endpoint_id)
            if following is None:
                break
            after = following
        if complete and not failed_only:
            missed = await self._replay_missed(endpoint_id, since, end, tenant, max_pending)
            total, complete = total + missed.deliveries, missed.complete
        self._wake(endpoint_id)
        return Replayed(total, complete)

    def _replayable(self, store: Store, endpoint_id: str, tenant: str | None) -> Endpoint:
        endpoint = owned_endpoint(store, endpoint_id, tenant)
        if not endpoint.active:
            raise Conflict(f"the endpoint is {shown(endpoint.state)}")
        return endpoint

    def _room(self, endpoint: Endpoint, max_pending: int | None) -> int:
        """How many deliveries may become pending for an endpoint before a bound is reached."""
        backlog = self._outbox.backlog
        room = [
            self._config.max_pending_per_endpoint - backlog.by_endpoint.get(endpoint.id, 0),
            self._config.max_pending - backlog.total,
        ]
        if max_pending is not None:
            room.append(max_pending - self._outbox.pending_of(endpoint.tenant))
        return max(0, min(room))

    async def _replay_missed(
        self, endpoint_id: str, since: int, until: int, tenant: str | None, max_pending: int | None
    ) -> Replayed:
        """Events that the endpoint never had a delivery of: it did not exist, or had not agreed."""
        after, total = 0, 0
        while True:

            def page(store: Store, after: int = after) -> tuple[int | None, int, bool]:
                endpoint = self._replayable(store, endpoint_id, tenant)
                missed = store.missed(endpoint, since, until, after, REPLAY_AT_ONCE)
                wanted = [e.n for e in missed if wants(endpoint, e.topic, e.data, e.content_type)]
                room = self._room(endpoint, max_pending)
                at = now_us()
                due = 0 if endpoint.fifo else at
                chosen = wanted[:room]
                store.insert_deliveries([(n, endpoint_id, 0, due, 0, at, "") for n in chosen])
                store.mark_routed([(n, 1) for n in chosen])
                self._outbox.backlog.add(endpoint_id, len(chosen))
                self._announce(store, endpoint_id)
                if len(chosen) < len(wanted):
                    return None, len(chosen), False
                return (missed[-1].n if len(missed) == REPLAY_AT_ONCE else None), len(chosen), True

            more, count, complete = await self._outbox.call_async(page)
            total += count
            if more is None:
                return Replayed(total, complete)
            after = more

    def _announce(self, store: Store, endpoint_id: str) -> None:
        if not self._outbox.owns(endpoint_id):
            store.note_endpoints("send", [endpoint_id])


def _may_see(store: Store, delivery: Delivery, tenant: str | None) -> bool:
    """Whether a delivery is the tenant's: by its event, because the endpoint may be gone."""
    if tenant is None:
        return True
    event = queries.event(store.session, delivery.event)
    return event is not None and event.tenant == tenant


def _count_replay(
    store: Store, endpoint_id: str, tenant: str | None, since: int, until: int, failed_only: bool
) -> int:
    """How many deliveries a replay would make pending."""
    endpoint = owned_endpoint(store, endpoint_id, tenant)
    total = store.count_replay(endpoint_id, since, until, failed_only=failed_only)
    after = 0
    while not failed_only:
        missed = store.missed(endpoint, since, until, after, REPLAY_AT_ONCE)
        total += sum(wants(endpoint, e.topic, e.data, e.content_type) for e in missed)
        if len(missed) < REPLAY_AT_ONCE:
            break
        after = missed[-1].n
    return total
