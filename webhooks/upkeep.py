"""What a dispatcher does beside delivering: the lease, rows of others, pending endpoints, and forgetting."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from brokerless.core.errors import BrokerlessError
from brokerless.core.pace import Backoff
from brokerless.webhooks.accept import Batch
from brokerless.webhooks.endpoints import expired
from brokerless.webhooks.models import DeliveryState, Endpoint
from brokerless.webhooks.routing import Routes
from brokerless.webhooks.store import Store

if TYPE_CHECKING:
    from brokerless.webhooks.dispatcher import Dispatcher

logger = logging.getLogger("brokerless.webhooks")
US = 1_000_000
# A standby looks this often whether the delivering process is gone: its death costs about a second.
STANDBY_S = 1.0
# How often old rows are forgotten, and how many in one transaction.
SWEEP_S = 60.0
PURGE_AT_ONCE = 500
# Pending endpoints are asked again after 10 s, 20 s, … 10 min.
ASK_AGAIN = Backoff(first_s=10.0, factor=2.0, limit_s=600.0, jitter=0.0)
ASK_AT_ONCE = 8


class Upkeep:
    """Owns the dispatcher's periodic tasks."""

    def __init__(self, dispatcher: "Dispatcher") -> None:
        self._dispatcher = dispatcher
        self._tasks: list[asyncio.Task[None]] = []
        self._purge_after = 0

    async def start(self) -> None:
        """Try to become the one that delivers, then keep the tasks running."""
        await self._lead_once()
        self._tasks = [
            asyncio.create_task(self._forever(self._lead_once, self._lead_interval)),
            asyncio.create_task(self._forever(self._poll, lambda: self._dispatcher.config.poll_s)),
            asyncio.create_task(self._forever(self._ask_pending, lambda: 5.0)),
            asyncio.create_task(self._forever(self._sweep, lambda: SWEEP_S)),
        ]

    async def stop(self) -> None:
        """Cancel and join."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _forever(self, work: Callable[[], Awaitable[None]], interval: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(interval())
            try:
                await work()
            except BrokerlessError as error:
                # The writer has counted it and goes on trying; the next round does too.
                logger.warning("%s", error)

    # ── lease ────────────────────────────────────────────────────────────────

    def _lead_interval(self) -> float:
        third = self._dispatcher.config.lease_s / 3
        return third if self._dispatcher.delivering else min(STANDBY_S, third)

    async def _lead_once(self) -> None:
        dispatcher = self._dispatcher
        leading, pending = await dispatcher.outbox.call_async(dispatcher.lead)
        if leading and not dispatcher.delivering:
            dispatcher.deliverer.activate(dispatcher.outbox.routes, pending)
        elif not leading and dispatcher.delivering:
            logger.warning("another process delivers now")
            dispatcher.deliverer.deactivate()

    # ── rows of others ───────────────────────────────────────────────────────

    async def _poll(self) -> None:
        """Look for endpoints and events that others committed."""
        dispatcher = self._dispatcher
        if not dispatcher.delivering:
            if dispatcher.outbox.leading:
                await self._lead_once()
            return
        if not dispatcher.outbox.leading:
            await self._lead_once()
            return
        dispatcher.outbox.call_then(self._look, self._found, self._not_found)

    def _look(self, store: Store) -> tuple[Batch, bool]:
        """In the writer thread."""
        outbox = self._dispatcher.outbox
        reloaded = store.session.changed() and store.foreign_changes()
        if reloaded:
            outbox.routes = Routes(store.endpoints())
            outbox.accept.load(store)
        return outbox.accept.route_new(store, outbox.routes, time.time_ns() // 1000), reloaded

    def _found(self, found: tuple[Batch, bool]) -> None:
        batch, reloaded = found
        dispatcher = self._dispatcher
        if reloaded and dispatcher.delivering:
            dispatcher.deliverer.routes_changed(dispatcher.outbox.routes)
            # Another process may have enabled an endpoint or asked for a replay.
            for endpoint_id, pending in list(dispatcher.outbox.accept.by_endpoint.items()):
                if pending:
                    dispatcher.deliverer.more(endpoint_id, resume=False)
        if batch.touched:
            dispatcher.deliverer.committed(batch)
            # There may be more than one transaction's worth.
            if dispatcher.running:
                dispatcher.outbox.call_then(self._look, self._found, self._not_found)

    def _not_found(self, error: BaseException) -> None:
        logger.warning("looking for new events failed: %s", error)

    # ── pending endpoints ────────────────────────────────────────────────────

    async def _ask_pending(self) -> None:
        dispatcher = self._dispatcher
        if not dispatcher.delivering:
            return
        now = time.time_ns() // 1000
        waiting = [e for e in dispatcher.outbox.routes.endpoints.values() if self._is_due(e, now)]
        async with asyncio.TaskGroup() as group:
            for endpoint in waiting[:ASK_AT_ONCE]:
                group.create_task(self._ask(endpoint.id))

    async def _ask(self, endpoint_id: str) -> None:
        try:
            await self._dispatcher.verify_endpoint(endpoint_id)
        except BrokerlessError as error:
            logger.warning("asking endpoint %s failed: %s", endpoint_id, error)

    def _is_due(self, endpoint: Endpoint, now: int) -> bool:
        if endpoint.state != "pending" or endpoint.verification == "none":
            return False
        age_s = (now - endpoint.created) / US
        tries = endpoint.verify_tries
        due_s = sum(ASK_AGAIN.delay_s(number, lambda: 0.0) for number in range(tries))
        return due_s <= age_s <= self._dispatcher.config.verify_for_s

    # ── forgetting ───────────────────────────────────────────────────────────

    async def _sweep(self) -> None:
        dispatcher = self._dispatcher
        if not dispatcher.delivering:
            return
        await dispatcher.outbox.call_async(self._expire)
        while True:
            before = time.time_ns() // 1000 - int(dispatcher.config.retain_s * US)

            def purge(store: Store, before: int = before) -> int | None:
                keep = dispatcher.config.retain_events
                return store.purge(before, keep, self._purge_after, PURGE_AT_ONCE)[1]

            after = await dispatcher.outbox.call_async(purge)
            self._purge_after = after or 0
            if after is None:
                return

    def _expire(self, store: Store) -> None:
        """Keys after their overlap, and deliveries that wait for a disabled endpoint longer than the
        schedule.
        """
        outbox, config = self._dispatcher.outbox, self._dispatcher.config
        now = time.time_ns() // 1000
        for endpoint in list(outbox.routes.endpoints.values()):
            old = expired(endpoint, now)
            if old:
                kept = [secret for secret in endpoint.secrets if secret not in old]
                changed = msgspec.structs.replace(endpoint, secrets=kept)
                store.save_endpoint(changed)
                outbox.routes = outbox.routes.with_endpoint(changed)
            if endpoint.state == "disabled" and outbox.accept.by_endpoint.get(endpoint.id):
                before = now - int(config.schedule.span_s * US)
                ended = store.end_pending(endpoint.id, DeliveryState.GAVE_UP, now, created_before=before)
                outbox.accept.recount(store, endpoint.id)
                outbox.accept.count("gave_up", ended)
