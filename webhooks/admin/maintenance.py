"""What a dispatcher does beside delivering: shards, messages of other processes, pending endpoints, forgetting."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from brokerless.core.errors import BrokerlessError
from brokerless.core.rate_limit import Backoff
from brokerless.core.runtime.clock import elapsed_s
from brokerless.webhooks.admin.endpoints import expired
from brokerless.webhooks.admin.managers import EndpointManager, now_us
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.delivery.deliverer import Deliverer
from brokerless.webhooks.models import DeliveryState, Endpoint
from brokerless.webhooks.outbox.database import Session
from brokerless.webhooks.outbox.notices import Notices
from brokerless.webhooks.outbox.outbox import Outbox
from brokerless.webhooks.outbox.shards import Plan, shard_of
from brokerless.webhooks.outbox.store import CLOCK_STEP_S, Store
from brokerless.webhooks.rules import US

logger = logging.getLogger("brokerless.webhooks")
# A process looks this often for shards of processes that are gone: a death costs about a second.
RENEW_S = 1.0
# Waiting deliveries that are read at once after the clock was set back.
LOOK_AT_ONCE = 1000
# How often old rows are forgotten, how many in one transaction, and when messages and deleted endpoints are old.
SWEEP_S = 60.0
PURGE_AT_ONCE = 500
SEAL_AT_ONCE = 100
OLD_NOTES_S = 60.0
OLD_TOMBSTONES_S = 3600.0
# The pending deliveries are counted again this often if other processes change it, and not more often than so
# that counting takes a twentieth of the time.
COUNT_S = 1.0
COUNT_SHARE = 20
# Pending endpoints are asked again after 10 s, 20 s, … 10 min.
ASK_AGAIN = Backoff(first_s=10.0, factor=2.0, limit_s=600.0, jitter=0.0)
ASK_AT_ONCE = 8


class Maintenance:
    """Owns the dispatcher's periodic tasks and the thread that listens to other processes."""

    def __init__(
        self, outbox: Outbox, deliverer: Deliverer, endpoints: EndpointManager, config: DispatcherConfig
    ) -> None:
        self._outbox = outbox
        self._deliverer = deliverer
        self._endpoints = endpoints
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._notices: Notices | None = None
        self._stopping: frozenset[int] = frozenset()
        self._taken: frozenset[int] = frozenset()
        self._purge_after = 0
        self._unknown: dict[str, bool] = {}
        self._count_interval_s = COUNT_S
        self._look_again = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._check_due = asyncio.Event()
        self._wall_offset_s = 0.0

    async def start(self) -> None:
        """Take a share of the shards, then keep the tasks running."""
        await self.renew()
        loop = asyncio.get_running_loop()
        self._notices = Notices(
            self._outbox.target,
            poll_s=self._config.poll_s,
            on_message=lambda text: loop.call_soon_threadsafe(self._told, text),
        )
        self._notices.start()
        renew_s = min(RENEW_S, self._config.lease_s / 3)
        self._tasks = [
            asyncio.create_task(self._forever(self.renew, partial(self._pause, self._renew_now, renew_s))),
            asyncio.create_task(self._forever(self.route_new, self._look_again.wait)),
            asyncio.create_task(self._forever(self.bring_forward, self._check_due.wait)),
            asyncio.create_task(self._forever(self.count, lambda: asyncio.sleep(self._count_interval_s))),
            asyncio.create_task(self._forever(self.ask_pending, lambda: asyncio.sleep(5.0))),
            asyncio.create_task(self._forever(self.sweep, lambda: asyncio.sleep(SWEEP_S))),
        ]
        if self._outbox.vault.name:
            pauses = iter((RENEW_S,))
            self._tasks.append(
                asyncio.create_task(
                    self._forever(self.seal_anew, lambda: asyncio.sleep(next(pauses, SWEEP_S)))
                )
            )

    async def stop(self) -> None:
        """Cancel and join."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._notices is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._notices.stop)
            self._notices = None

    async def _forever(
        self, work: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[object]]
    ) -> None:
        while True:
            await pause()
            try:
                await work()
            except BrokerlessError as error:
                # The writer has counted it and goes on trying; the next round does too.
                logger.warning("%s", error)
                await asyncio.sleep(RENEW_S)

    async def _pause(self, event: asyncio.Event, longest_s: float) -> None:
        try:
            async with asyncio.timeout(longest_s):
                await event.wait()
        except TimeoutError:
            pass
        event.clear()

    # ── shards ───────────────────────────────────────────────────────────────

    async def renew(self) -> None:
        """Renew the leases; take shards that are free, and give up those beyond a fair share when they are idle."""
        outbox, deliverer = self._outbox, self._deliverer
        release = frozenset(shard for shard in self._stopping if deliverer.idle(shard))
        lease_us = int(self._config.lease_s * US)
        began, wall_offset_s = elapsed_s(), time.time() - time.monotonic()
        was_valid = outbox.lease_valid()

        def lease(store: Store) -> tuple[Plan, int]:
            return store.lease(outbox.owner, outbox.shards, release, lease_us)

        plan, members = await outbox.call_async(lease)
        outbox.leased(plan.keep | plan.take | plan.give_up, members, began)
        self._stopping = plan.give_up
        if plan.lost:
            logger.warning("%d shards were taken over by another process", len(plan.lost))
        deliverer.set_shards(plan.keep | plan.take)
        if not was_valid:
            deliverer.resume()
        outbox.counters.takeovers += bool(plan.take)
        self._taken |= plan.take
        if self._taken:
            # Counted when they are ours: others tell of what they add from now on. If it fails, the next round does it.
            pending = await self._recount()
            outbox.counters.recovered += sum(n for e, n in pending.items() if shard_of(e) in self._taken)
            self._taken = frozenset()
            deliverer.look_after(pending)
        # Results that were stamped before the look at the clock are committed: the writer had them before the lease.
        # The clock may have been ahead between two looks, too: attempts tell.
        ahead_s, deliverer.wall_offset_s = max(self._wall_offset_s, deliverer.wall_offset_s), 0.0
        self._wall_offset_s = max(ahead_s, wall_offset_s)
        if plan.take or wall_offset_s < ahead_s - CLOCK_STEP_S:
            self._wall_offset_s = wall_offset_s
            self._check_due.set()
        if wall_offset_s > deliverer.lowest_wall_offset_s + CLOCK_STEP_S:
            # It was behind, and is not any more: what is waited for by then is due now.
            deliverer.lowest_wall_offset_s = math.inf
            for endpoint_id, count in list(outbox.backlog.by_endpoint.items()):
                if count:
                    deliverer.more(endpoint_id, resume=False)

    async def bring_forward(self) -> None:
        """After a takeover, or when the clock was set back: nothing waits until the clock has caught up."""
        self._check_due.clear()
        outbox = self._outbox
        try:
            for endpoint_id, pending in list(outbox.backlog.by_endpoint.items()):
                if pending and outbox.owns(endpoint_id):
                    await self._bring_forward(endpoint_id)
        except BrokerlessError:
            self._check_due.set()
            raise

    async def _bring_forward(self, endpoint_id: str) -> None:
        total = 0
        after: tuple[int, int] | None = (now_us(), 0)
        while after is not None:
            look = partial(_stamped_ahead, endpoint=endpoint_id, after=after)
            ahead, after = await self._outbox.read(look)
            if ahead:
                await self._outbox.call_async(partial(_reschedule, changes=ahead))
                total += len(ahead)
        if total:
            logger.warning("the clock was set back: %d deliveries to %s are due earlier", total, endpoint_id)
            self._deliverer.more(endpoint_id, resume=False)

    # ── what other processes did ─────────────────────────────────────────────

    def _told(self, text: str) -> None:
        """A message of another process (or of this one)."""
        word, *endpoints = text.split(" ")
        if word in {"work", "send"}:
            for endpoint_id in endpoints:
                if endpoint_id in self._outbox.routes.endpoints:
                    self._deliverer.more(endpoint_id, resume=word == "send")
                else:
                    # Registered a moment ago by another process: first take over the change.
                    self._unknown[endpoint_id] = word == "send" or self._unknown.get(endpoint_id, False)
                    self._look_again.set()
        elif word == "shards":
            self._renew_now.set()
        else:
            self._look_again.set()
            if word == "*":
                self._renew_now.set()
                for endpoint_id, pending in list(self._outbox.backlog.by_endpoint.items()):
                    if pending:
                        self._deliverer.more(endpoint_id, resume=False)

    async def route_new(self) -> None:
        """Take over changes of endpoints, and make deliveries for events of callers' transactions."""
        self._look_again.clear()
        outbox = self._outbox

        def route(store: Store) -> bool:
            # The writer has taken over changed endpoints at the beginning of this transaction.
            return outbox.accept.route_new(store, outbox.routes, outbox.batch, now_us())

        unknown, self._unknown = self._unknown, {}
        if await outbox.call_async(route):
            self._look_again.set()
        for endpoint_id, resume in unknown.items():
            self._deliverer.more(endpoint_id, resume=resume)

    async def count(self) -> None:
        """Correct the number of pending deliveries by what other processes added and finished."""
        if self._outbox.members == 1 and not self._outbox.foreign_commits:
            return
        began = time.monotonic()
        pending = await self._recount()
        self._count_interval_s = max(COUNT_S, COUNT_SHARE * (time.monotonic() - began))
        self._deliverer.look_after(pending)
        await self._outbox.call_async(self._enforce)
        await self._withdraw()

    async def _recount(self) -> dict[str, int]:
        """Count the pending deliveries: in the writer if that is quick (and exact), else beside it."""
        outbox = self._outbox
        outbox.foreign_commits = False
        if self._count_interval_s <= COUNT_S:

            def count(store: Store) -> dict[str, int]:
                found = store.pending()
                self._correct(store, found)
                return found

            return await outbox.call_async(count)
        await outbox.call_async(lambda _store: outbox.backlog.begin_read())
        pending = await outbox.read(lambda session: Store(session).pending())
        await outbox.call_async(lambda store: self._correct(store, pending))
        return pending

    def _correct(self, store: Store, pending: dict[str, int]) -> None:
        self._outbox.backlog.correct(pending)
        store.set_meta("pending", str(self._outbox.backlog.total))

    def _enforce(self, store: Store) -> None:
        """What others added may exceed an endpoint's share."""
        outbox = self._outbox
        now = now_us()
        for endpoint_id, pending in list(outbox.backlog.by_endpoint.items()):
            if outbox.owns(endpoint_id) and pending > self._config.max_pending_per_endpoint:
                outbox.accept.enforce_share(store, endpoint_id, outbox.batch, now)

    async def _withdraw(self) -> None:
        """End what is pending for endpoints that were deleted: in that moment, or by a process that died meanwhile."""
        outbox = self._outbox
        known, pending = outbox.routes.endpoints, outbox.backlog.by_endpoint
        deleted = [name for name in list(pending) if name not in known and outbox.owns(name)]
        for endpoint_id in deleted:
            if pending.get(endpoint_id, 0) > 0:
                await self._endpoints.end_pending(endpoint_id, DeliveryState.WITHDRAWN)

        def forget(_store: Store) -> None:
            for endpoint_id in deleted:
                if not outbox.backlog.by_endpoint.get(endpoint_id):
                    outbox.backlog.by_endpoint.pop(endpoint_id, None)

        if deleted:
            await outbox.call_async(forget)

    # ── pending endpoints ────────────────────────────────────────────────────

    async def ask_pending(self) -> None:
        """Ask the owners of some endpoints that have not agreed and are due."""
        now = now_us()
        mine = [e for e in list(self._outbox.routes.endpoints.values()) if self._outbox.owns(e.id)]
        # Those that have waited longest first: however many hang, each has its turn.
        waiting = sorted((due, e.id) for e in mine if (due := self.due(e, now)) is not None)
        async with asyncio.TaskGroup() as group:
            for _, endpoint_id in waiting[:ASK_AT_ONCE]:
                group.create_task(self.ask(endpoint_id))

    async def ask(self, endpoint_id: str) -> None:
        """Ask the owner of a pending endpoint again."""
        try:
            await self._endpoints.verify(endpoint_id, tenant=None)
        except BrokerlessError as error:
            logger.warning("asking endpoint %s failed: %s", endpoint_id, error)

    def due(self, endpoint: Endpoint, now: int) -> int | None:
        """Since when (µs) a pending endpoint should be asked again; None: not now."""
        if endpoint.state != "pending" or endpoint.verification == "none":
            return None
        since = endpoint.asked_since or endpoint.created
        if since > now:
            return now  # the clock was ahead then; the answer is recorded with the right time
        due_s = sum(ASK_AGAIN.delay_s(number, lambda: 0.0) for number in range(endpoint.verify_tries))
        at = since + int(due_s * US)
        return at if at <= now <= since + self._config.verify_for_s * US else None

    # ── forgetting ───────────────────────────────────────────────────────────

    async def sweep(self) -> None:
        """Forget what is old. Every process looks after its own endpoints; the owner of shard 0 after the rest."""
        outbox = self._outbox
        self._deliverer.client.renew_certificate()
        if not outbox.shards:
            return
        await outbox.call_async(self._expire)
        await self._give_up()
        await self._withdraw()
        if 0 not in outbox.shards:
            return
        await outbox.call_async(self._tidy)
        while True:
            before = now_us() - int(self._config.retain_s * US)

            def purge(store: Store, before: int = before) -> int | None:
                return store.purge(before, self._config.retain_events, self._purge_after, PURGE_AT_ONCE)[1]

            after = await outbox.call_async(purge)
            self._purge_after = after or 0
            if after is None:
                return

    def _expire(self, store: Store) -> None:
        """Forget keys after their overlap."""
        outbox = self._outbox
        now = now_us()
        for endpoint in list(outbox.routes.endpoints.values()):
            if not outbox.owns(endpoint.id):
                continue
            if expired(endpoint, now):
                current = store.endpoint(endpoint.id, lock=True)
                if current is not None:
                    old = expired(current, now)
                    kept = [secret for secret in current.secrets if secret not in old]
                    store.save_endpoint(msgspec.structs.replace(current, secrets=kept))

    async def _give_up(self) -> None:
        """Deliveries that wait for a disabled endpoint longer than the schedule are dead letters."""
        outbox = self._outbox
        before = now_us() - int(self._config.schedule.span_s * US)
        for endpoint in list(outbox.routes.endpoints.values()):
            waiting = not endpoint.active and outbox.backlog.by_endpoint.get(endpoint.id)
            if waiting and outbox.owns(endpoint.id):
                gave_up = DeliveryState.GAVE_UP
                ended = await self._endpoints.end_pending(endpoint.id, gave_up, created_before=before)
                if ended:
                    self._endpoints.note_gave_up(endpoint.id, [], ended, "the endpoint is disabled")

    async def seal_anew(self) -> None:
        """Encrypt secrets that are plain or encrypted with an older key; the owner of shard 0 does that."""
        total = 0
        while 0 in self._outbox.shards:
            count = await self._outbox.call_async(lambda store: store.seal_anew(SEAL_AT_ONCE))
            total += count
            if count < SEAL_AT_ONCE:
                break
        if total:
            logger.info(
                "secrets of %d endpoints are encrypted with key %s now", total, self._outbox.vault.name
            )

    def _tidy(self, store: Store) -> None:
        """Messages and deleted endpoints that everybody has noticed."""
        now = now_us()
        store.forget_notes(now - int(OLD_NOTES_S * US))
        store.forget_deleted(now - int(OLD_TOMBSTONES_S * US))


def _stamped_ahead(
    session: Session, *, endpoint: str, after: tuple[int, int]
) -> tuple[list[tuple[int, int, int]], tuple[int, int] | None]:
    # The time of this very read: what others schedule meanwhile does not lie ahead of it.
    return Store(session).stamped_ahead(endpoint, now_us(), after, LOOK_AT_ONCE)


def _reschedule(store: Store, *, changes: list[tuple[int, int, int]]) -> None:
    store.reschedule(changes)
