"""The registration endpoint: a Starlette app to serve or to mount."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from brokerless.core.counters import PROMETHEUS_TEXT, prometheus
from brokerless.core.errors import BrokerlessError
from brokerless.core.event import microseconds
from brokerless.webhooks.api.http import (
    OPERATOR,
    AccessControl,
    Auth,
    Limits,
    Refused,
    TenantLimits,
    answer,
    parse_query,
    problem,
    read_json,
    refuse,
)
from brokerless.webhooks.api.openapi import document
from brokerless.webhooks.api.portal import Pages
from brokerless.webhooks.api.schemas import (
    DeliveriesQuery,
    DeliveryList,
    EndpointCreated,
    EndpointDeliveriesQuery,
    EndpointIn,
    EndpointList,
    EndpointOut,
    EndpointPatch,
    EndpointsQuery,
    EventAccepted,
    EventIn,
    EventList,
    EventsQuery,
    EventTypeIn,
    EventTypeList,
    Health,
    ReplayIn,
    ReplayOut,
    RetryIn,
    RetryOut,
    RotateIn,
    SecretOut,
    TenantQuery,
    account_out,
    delivery_out,
    endpoint_fields,
    event_out,
    event_summary,
    event_type_out,
    moment,
    test_out,
)
from brokerless.webhooks.errors import Conflict, NotFound
from brokerless.webhooks.outbox.queries import DeliveryQuery, EventQuery
from brokerless.webhooks.rules import (
    DeliveryId,
    EndpointId,
    EventId,
    IdempotencyKey,
    Topic,
    check_tenant,
    matches,
)

if TYPE_CHECKING:
    from brokerless.webhooks.dispatcher import Dispatcher

logger = logging.getLogger("brokerless.webhooks")
# An endpoint's description, headers and patterns fit well into this.
MAX_JSON = 128 * 1024
# Open streams of changes: of one tenant (people who have the portal open), and so that they stay a small part of
# the descriptors.
MAX_STREAMS_PER_TENANT, MAX_STREAMS = 50, 500
# A stream ends after this time, and the page asks again: with a token that is still valid, and of the process that a
# load balancer chooses then.
STREAM_S = 60.0
# Each message makes a page ask for what it shows: not more often than this, and without any change this often, which
# also shows what other processes did.
QUIET_S, REMIND_S, REMIND_SHARED_S = 0.5, 15.0, 2.0
Handler = Callable[[Request, str], Awaitable[Response]]
T = TypeVar("T")


def registration_app(
    dispatcher: "Dispatcher",
    *,
    auth: Auth,
    limits: Limits | None = None,
    embed_in: Sequence[str] = (),
    manage_dispatcher: bool = True,
) -> Starlette:
    """The app. `auth` maps bearer tokens to tenants, or is a callable `(request) → tenant or None`; `limits` are those
    of all tenants, a mapping, or a callable `(tenant) → TenantLimits`. `embed_in` are origins
    (`https://app.example.com`) whose pages may show the portal in a frame, beside this app's own.

    Served by itself it starts and stops the dispatcher. Mounted, the outer app must do that
    (`lifespan=dispatcher.lifespan`), because Starlette does not run the lifespan of mounted apps.
    """
    access = AccessControl(auth, limits or TenantLimits(), dispatcher.portal_visitor)
    api = _Api(dispatcher, access, Pages(embed_in))
    app = Starlette(
        routes=api.routes(),
        lifespan=dispatcher.lifespan if manage_dispatcher else None,
        exception_handlers={HTTPException: _http_problem, Exception: _crash},
    )
    # A path with a slash too many is wrong, not somewhere else.
    app.router.redirect_slashes = False
    return app


async def _http_problem(_request: Request, error: Exception) -> Response:
    """What Starlette itself refuses (no route, wrong method), in our format."""
    assert isinstance(error, HTTPException)
    return problem(Refused(error.status_code, error.detail, headers=error.headers))


async def _crash(_request: Request, _error: Exception) -> Response:
    return problem(Refused(500, "unexpected error"))


class _Api:
    def __init__(self, dispatcher: "Dispatcher", access: AccessControl, pages: Pages) -> None:
        self.dispatcher = dispatcher
        self.pages = pages
        self.access = access
        self._openapi = msgspec.json.encode(document())

    def routes(self) -> list[Route]:
        one = "/endpoints/{id}"
        return [
            self._route("/endpoints", POST=self.create, GET=self.list_endpoints),
            self._route(one, GET=self.show, PATCH=self.change, DELETE=self.delete),
            self._route(one + "/rotate-secret", POST=self.rotate),
            self._route(one + "/test", POST=self.test),
            self._route(one + "/enable", POST=self.enable),
            self._route(one + "/disable", POST=self.disable),
            self._route(one + "/verify", POST=self.verify),
            self._route(one + "/deliveries", GET=self.deliveries),
            self._route(one + "/replay", POST=self.replay),
            self._route("/deliveries", GET=self.all_deliveries),
            self._route("/retries", POST=self.retry_many),
            self._route("/deliveries/{id}", GET=self.delivery),
            self._route("/deliveries/{id}/retry", POST=self.retry),
            self._route("/account", GET=self.account),
            self._route("/changes", GET=self.changes),
            self._route("/events", POST=self.publish, GET=self.events),
            self._route("/events/{id}", GET=self.event),
            self._route("/event-types", GET=self.event_types),
            self._route(
                "/event-types/{topic}",
                GET=self.event_type,
                PUT=self.set_event_type,
                DELETE=self.forget_event_type,
            ),
            Route("/", self.portal, methods=["GET"]),
            Route("/docs", self.reference, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            self._route("/metrics", GET=self.metrics),
        ]

    def _route(self, path: str, **handlers: Handler) -> Route:
        """One route per path, so that a wrong method is answered with all that are right."""

        async def handle(request: Request) -> Response:
            try:
                method = "GET" if request.method == "HEAD" else request.method
                return await handlers[method](request, await self.access.tenant(request))
            except Refused as refused:
                return problem(refused)
            except BrokerlessError as error:
                told = refuse(error)
                if told.problem.status >= 500:
                    logger.warning("%s %s: %s", request.method, request.url.path, error)
                return problem(told)

        return Route(path, handle, methods=list(handlers))

    # ── endpoints ────────────────────────────────────────────────────────────

    async def create(self, request: Request, tenant: str) -> Response:
        asked = await read_json(request, EndpointIn, MAX_JSON)
        owner = self._acting(request, tenant)
        limit = self.access.limits(owner).max_endpoints
        with self.access.asking(tenant):
            endpoint, secret = await self.dispatcher.register(
                _lower_headers(asked), tenant=owner, max_endpoints=limit
            )
        where = {"Location": f"{request.url.path.rstrip('/')}/{endpoint.id}", "Cache-Control": "no-store"}
        return answer(EndpointCreated(secret=secret, **endpoint_fields(endpoint)), 201, where)

    async def list_endpoints(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, EndpointsQuery)
        owner = _visible(tenant, query)
        found = await self.dispatcher.endpoints(tenant=owner, after=query.after or "", limit=query.limit + 1)
        chosen = found[: query.limit]
        following = chosen[-1].id if len(found) > len(chosen) else None
        pending = self.dispatcher.outbox.backlog.by_endpoint
        oldest = await self.dispatcher.oldest_pending([e.id for e in chosen if pending.get(e.id)])
        shown = [
            EndpointOut(
                backlog=pending.get(e.id, 0),
                waiting_since=moment(oldest[e.id]) if e.id in oldest else None,
                **endpoint_fields(e),
            )
            for e in chosen
        ]
        return answer(EndpointList(shown, following))

    async def show(self, request: Request, tenant: str) -> Response:
        endpoint = await self.dispatcher.endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def change(self, request: Request, tenant: str) -> Response:
        endpoint_id = _endpoint_id(request)
        asked = await read_json(request, EndpointPatch, MAX_JSON)
        changes = _lower_headers(asked)
        with self.access.asking(tenant):
            endpoint = await self.dispatcher.update_endpoint(endpoint_id, changes, tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def delete(self, request: Request, tenant: str) -> Response:
        await self.dispatcher.remove_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return Response(status_code=204)

    async def rotate(self, request: Request, tenant: str) -> Response:
        endpoint_id = _endpoint_id(request)
        asked = await read_json(request, RotateIn, MAX_JSON, empty=b"{}")
        own = None if asked.secret is UNSET else asked.secret
        endpoint, secret = await self.dispatcher.rotate_secret(endpoint_id, secret=own, tenant=_scope(tenant))
        until = next((s.expires for s in endpoint.secrets if s.expires is not None), None)
        shown = SecretOut(secret, None if until is None else moment(until))
        return answer(shown, headers={"Cache-Control": "no-store"})

    async def test(self, request: Request, tenant: str) -> Response:
        with self.access.asking(tenant):
            reply = await self.dispatcher.test_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(test_out(reply))

    async def enable(self, request: Request, tenant: str) -> Response:
        with self.access.asking(tenant):
            endpoint = await self.dispatcher.enable_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def disable(self, request: Request, tenant: str) -> Response:
        endpoint = await self.dispatcher.disable_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def verify(self, request: Request, tenant: str) -> Response:
        with self.access.asking(tenant):
            endpoint = await self.dispatcher.verify_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    # ── deliveries ───────────────────────────────────────────────────────────

    async def deliveries(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, EndpointDeliveriesQuery)
        endpoint = await self.dispatcher.endpoint(_endpoint_id(request), tenant=_scope(tenant))
        async with self.access.reading(tenant):
            return await self._deliveries(query, None, endpoint.id)

    async def all_deliveries(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, DeliveriesQuery)
        owner = _visible(tenant, query)
        async with self.access.reading(tenant):
            return await self._deliveries(query, owner, query.endpoint)

    async def _deliveries(
        self, query: EndpointDeliveriesQuery, owner: str | None, endpoint: str | None
    ) -> Response:
        found = await self.dispatcher.deliveries(
            DeliveryQuery(
                tenant=owner,
                endpoint=endpoint,
                event=query.event,
                state=query.state,
                topic=query.topic,
                since=None if query.since is None else microseconds(query.since),
                until=None if query.until is None else microseconds(query.until),
                after=query.after,
                limit=query.limit,
            )
        )
        following = found[-1].id if len(found) == query.limit else None
        return answer(DeliveryList([delivery_out(delivery) for delivery in found], following))

    async def delivery(self, request: Request, tenant: str) -> Response:
        return answer(
            delivery_out(await self.dispatcher.delivery(_delivery_id(request), tenant=_scope(tenant)))
        )

    async def replay(self, request: Request, tenant: str) -> Response:
        endpoint_id = _endpoint_id(request)
        asked = await read_json(request, ReplayIn, MAX_JSON)
        async with self.access.reading(tenant):
            replayed = await self.dispatcher.replay(
                endpoint_id,
                microseconds(asked.since),
                None if asked.until is None else microseconds(asked.until),
                only=asked.only,
                dry_run=asked.dry_run,
                tenant=_scope(tenant),
                max_pending=None if tenant == OPERATOR else self.access.limits(tenant).max_pending,
            )
        return answer(ReplayOut(replayed.deliveries, replayed.complete), 200 if asked.dry_run else 202)

    async def retry(self, request: Request, tenant: str) -> Response:
        delivery_id = _delivery_id(request)
        self._check_pending(tenant)
        delivery = await self.dispatcher.retry(delivery_id, tenant=_scope(tenant))
        return answer(delivery_out(delivery), 202)

    async def retry_many(self, request: Request, tenant: str) -> Response:
        asked = await read_json(request, RetryIn, MAX_JSON)
        self._check_pending(tenant)
        out = RetryOut(0, {})
        for delivery_id in asked.deliveries:
            try:
                await self.dispatcher.retry(delivery_id, tenant=_scope(tenant))
                out.retried += 1
            except (NotFound, Conflict) as error:
                out.refused[delivery_id] = str(error)
        return answer(out, 202)

    async def account(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, TenantQuery)
        owner = _visible(tenant, query)
        async with self.access.reading(tenant):
            return answer(account_out(await self.dispatcher.account(owner)))

    async def changes(self, request: Request, tenant: str) -> Response:
        """Server-sent events: a message whenever something that the caller may see has changed."""
        owner = _visible(tenant, parse_query(request, TenantQuery))
        watched = self.dispatcher.outbox.changes
        if len(watched) >= MAX_STREAMS or watched.watching(owner) >= MAX_STREAMS_PER_TENANT:
            raise Refused(429, "too many pages are open", headers={"Retry-After": "10"})
        # `server_for` ends it when the server stops.
        request.scope["endless"] = True
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        kind = "text/event-stream"
        if request.method == "HEAD":
            return Response(headers=headers, media_type=kind)
        return StreamingResponse(self._stream(owner), headers=headers, media_type=kind)

    async def _stream(self, owner: str | None) -> AsyncIterator[bytes]:
        ends = time.monotonic() + STREAM_S
        outbox = self.dispatcher.outbox
        with outbox.changes.watch(owner) as changed:
            if outbox.changes.watching(owner) > MAX_STREAMS_PER_TENANT:
                return  # many came at once
            yield b"data: connected\n\n"
            while time.monotonic() < ends:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REMIND_S if outbox.members == 1 else REMIND_SHARED_S):
                        await changed.wait()
                changed.clear()
                yield b"data: changed\n\n"
                await asyncio.sleep(QUIET_S)

    # ── events ───────────────────────────────────────────────────────────────

    async def publish(self, request: Request, tenant: str) -> Response:
        owner = self._acting(request, tenant)
        key = request.headers.get("idempotency-key")
        if key is not None and not matches(IdempotencyKey, key):
            raise Refused(400, "must be 1 to 255 printable characters", field="Idempotency-Key")
        # Base64 makes data a third longer.
        limit = self.dispatcher.config.max_event_bytes * 4 // 3 + 4096
        asked = await read_json(request, EventIn, limit)
        self.access.limit_rate(owner)
        self._check_pending(owner)
        accepted = await self.dispatcher.publish(
            asked.topic, _data(asked), tenant=owner, content_type=asked.content_type, idempotency_key=key
        )
        status = 200 if accepted.duplicate else 202
        return answer(EventAccepted(accepted.id, accepted.deliveries, accepted.duplicate), status)

    async def events(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, EventsQuery)
        wanted = EventQuery(
            tenant=_visible(tenant, query),
            topic=query.topic,
            since=None if query.since is None else microseconds(query.since),
            until=None if query.until is None else microseconds(query.until),
            after=query.after,
            limit=query.limit,
        )
        async with self.access.reading(tenant):
            found = await self.dispatcher.events(wanted)
        following = found[-1].id if len(found) == query.limit else None
        return answer(EventList([event_summary(event) for event in found], following))

    async def event(self, request: Request, tenant: str) -> Response:
        event_id = request.path_params["id"]
        if not matches(EventId, event_id):
            raise NotFound("event", event_id)
        found = await self.dispatcher.event(event_id, tenant=_scope(tenant))
        deliveries = await self.dispatcher.deliveries(DeliveryQuery(event=event_id, limit=100))
        return answer(event_out(found, deliveries))

    # ── the catalogue ────────────────────────────────────────────────────────

    async def event_types(self, _request: Request, _tenant: str) -> Response:
        return answer(EventTypeList([event_type_out(found) for found in await self.dispatcher.event_types()]))

    async def event_type(self, request: Request, _tenant: str) -> Response:
        return answer(event_type_out(await self.dispatcher.event_type(_topic(request))))

    async def set_event_type(self, request: Request, tenant: str) -> Response:
        topic = _topic(request)
        _operator_only(tenant)
        asked = await read_json(request, EventTypeIn, MAX_JSON)
        found = await self.dispatcher.set_event_type(topic, **msgspec.structs.asdict(asked))
        return answer(event_type_out(found))

    async def forget_event_type(self, request: Request, tenant: str) -> Response:
        topic = _topic(request)
        _operator_only(tenant)
        await self.dispatcher.remove_event_type(topic)
        return Response(status_code=204)

    def _check_pending(self, tenant: str) -> None:
        if tenant == OPERATOR:
            return
        limit = self.access.limits(tenant).max_pending
        pending = self.dispatcher.outbox.pending_of(tenant)
        if pending >= limit:
            detail = f"tenant {tenant!r} has {pending} deliveries pending, the limit is {limit}"
            raise Refused(429, detail, headers={"Retry-After": "5"})

    def _acting(self, request: Request, tenant: str) -> str:
        """The tenant that something is made for: the caller's, or the operator's choice."""
        query = parse_query(request, TenantQuery)
        if tenant == OPERATOR:
            return check_tenant(query.tenant or "default")
        if query.tenant not in {None, tenant}:
            raise Refused(403, "only the operator can act for another tenant", field="tenant")
        return tenant

    # ── the service itself ───────────────────────────────────────────────────

    async def openapi(self, request: Request) -> Response:
        # Mounted below a path, the operations are there too.
        root = request.scope.get("root_path", "")
        body = self._openapi if not root else msgspec.json.encode(document(server=root))
        return Response(body, media_type="application/json")

    async def portal(self, _request: Request) -> Response:
        return self.pages.answer("portal.html")

    async def reference(self, _request: Request) -> Response:
        return self.pages.answer("reference.html")

    async def healthz(self, _request: Request) -> Response:
        return answer(Health("ok"))

    async def readyz(self, _request: Request) -> Response:
        dispatcher = self.dispatcher
        if not dispatcher.running:
            return problem(
                Refused(
                    503, "the dispatcher is not running; a mounted app needs lifespan=dispatcher.lifespan"
                )
            )
        if dispatcher.trouble is not None:
            return problem(Refused(503, "the outbox cannot be used at the moment"))
        return answer(Health("ready", dispatcher.delivering))

    async def metrics(self, _request: Request, tenant: str) -> Response:
        _operator_only(tenant, "see how much all tenants do")
        dispatcher = self.dispatcher
        gauges = {
            "pending": ("undelivered deliveries", dispatcher.outbox.backlog.total),
            "in_flight": ("attempts under way", dispatcher.deliverer.in_flight()),
            "delivering": ("1 if this process delivers", int(dispatcher.delivering)),
            "endpoints": ("registered endpoints", len(dispatcher.outbox.routes.endpoints)),
            "body_bytes": ("bodies in memory", dispatcher.deliverer.memory),
        }
        lines = []
        for name, (text, value) in gauges.items():
            full = f"brokerless_webhooks_dispatcher_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge", f"{full} {value}"]
        body = prometheus(dispatcher.counters) + "\n".join(lines) + "\n"
        return Response(body, media_type=PROMETHEUS_TEXT)


def _scope(tenant: str) -> str | None:
    return None if tenant == OPERATOR else tenant


def _visible(tenant: str, query: TenantQuery) -> str | None:
    """Whose things a list shows: the caller's own, or those of the tenant that the operator chose."""
    if tenant == OPERATOR:
        return query.tenant
    if query.tenant not in {None, tenant}:
        raise Refused(403, "only the operator can look at another tenant", field="tenant")
    return tenant


def _endpoint_id(request: Request) -> str:
    text: str = request.path_params["id"]
    if not matches(EndpointId, text):
        raise NotFound("endpoint", text)
    return text


def _topic(request: Request) -> str:
    text: str = request.path_params["topic"]
    if not matches(Topic, text):
        raise NotFound("event type", text)
    return text


def _operator_only(tenant: str, what: str = "change the catalogue") -> None:
    """What concerns all tenants; the catalogue is the producer's."""
    if tenant != OPERATOR:
        raise Refused(403, f"only the operator can {what}")


def _delivery_id(request: Request) -> str:
    text: str = request.path_params["id"]
    if not matches(DeliveryId, text):
        raise NotFound("delivery", text)
    return text


def _lower_headers(asked: T) -> T:
    """The same with the names of headers in lower case: two spellings are one header."""
    headers = getattr(asked, "headers", UNSET)
    if headers is UNSET:
        return asked
    lower = {name.lower(): value for name, value in headers.items()}
    return msgspec.structs.replace(asked, headers=lower)  # type: ignore[type-var]


def _data(asked: EventIn) -> bytes:
    if asked.data_base64 is UNSET:
        return b"null" if asked.data is UNSET else bytes(asked.data)
    if asked.data is not UNSET:
        raise Refused(422, "only one of data and data_base64 can be given", field="data")
    return base64.b64decode(asked.data_base64)
