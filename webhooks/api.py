"""The registration endpoint: a Starlette app to serve or to mount."""

import base64
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.core.counters import prometheus
from brokerless.core.errors import BrokerlessError
from brokerless.webhooks.api_http import (
    OPERATOR,
    Auth,
    Gate,
    Refused,
    TenantLimits,
    answer,
    parse_query,
    problem,
    read_json,
    refuse,
)
from brokerless.webhooks.api_schema import (
    DeliveryList,
    EndpointCreated,
    EndpointIn,
    EndpointList,
    EndpointOut,
    EndpointPatch,
    EventAccepted,
    EventIn,
    Health,
    ReplayIn,
    ReplayOut,
    SecretOut,
    delivery_out,
    endpoint_fields,
    event_out,
    micros,
    moment,
    test_out,
)
from brokerless.webhooks.endpoints import check_tenant
from brokerless.webhooks.errors import NotFound
from brokerless.webhooks.listing import DeliveryQuery
from brokerless.webhooks.openapi import document

if TYPE_CHECKING:
    from brokerless.webhooks.dispatcher import Dispatcher

logger = logging.getLogger("brokerless.webhooks")
# An endpoint's description, headers and patterns fit well into this.
MAX_JSON = 128 * 1024
_ENDPOINT = re.compile(r"ep_[a-z2-7]{16}")
_EVENT = re.compile(r"msg_[0-9a-f]{32}")
_KEY = re.compile(r"[!-~]{1,255}")
Handler = Callable[[Request, str], Awaitable[Response]]


class TenantQuery(msgspec.Struct):
    """The operator's choice of a tenant; other callers have their own."""

    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,100}$")] | None = None


class EndpointsQuery(TenantQuery):
    """Paging of endpoints."""

    after: Annotated[str, Meta(pattern=r"^ep_[a-z2-7]{16}$")] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class DeliveriesQuery(msgspec.Struct):
    """Filters and paging of deliveries."""

    state: Literal["pending", "delivered", "gave_up", "evicted", "withdrawn"] | None = None
    topic: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None
    after: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50


def registration_app(
    dispatcher: "Dispatcher",
    *,
    auth: Auth,
    limits: TenantLimits | Mapping[str, TenantLimits] | None = None,
    manage_dispatcher: bool = True,
) -> Starlette:
    """The app. `auth` maps bearer tokens to tenants, or is a callable `(request) → tenant or None`.

    Served by itself it starts and stops the dispatcher. Mounted, the outer app must do that
    (`lifespan=dispatcher.lifespan`), because Starlette does not run the lifespan of mounted apps.
    """
    api = _Api(dispatcher, Gate(auth, limits or TenantLimits()))
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
    def __init__(self, dispatcher: "Dispatcher", gate: Gate) -> None:
        self.dispatcher = dispatcher
        self.gate = gate
        self._openapi = msgspec.json.encode(document())

    def routes(self) -> list[Route]:
        one = "/endpoints/{id}"
        return [
            self._route("/endpoints", POST=self.create, GET=self.list_endpoints),
            self._route(one, GET=self.show, PATCH=self.change, DELETE=self.delete),
            self._route(one + "/rotate-secret", POST=self.rotate),
            self._route(one + "/test", POST=self.test),
            self._route(one + "/enable", POST=self.enable),
            self._route(one + "/verify", POST=self.verify),
            self._route(one + "/deliveries", GET=self.deliveries),
            self._route(one + "/replay", POST=self.replay),
            self._route("/deliveries/{id}/retry", POST=self.retry),
            self._route("/events", POST=self.publish),
            self._route("/events/{id}", GET=self.event),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    def _route(self, path: str, **handlers: Handler) -> Route:
        """One route per path, so that a wrong method is answered with all that are right."""

        async def handle(request: Request) -> Response:
            try:
                method = "GET" if request.method == "HEAD" else request.method
                return await handlers[method](request, await self.gate.tenant(request))
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
        fields = _fields(asked)
        limit = self.gate.limits(owner).max_endpoints
        endpoint, secret = await self.dispatcher.add_endpoint(
            fields.pop("url"), fields.pop("topics"), tenant=owner, max_endpoints=limit, **fields
        )
        where = {"Location": f"{request.url.path.rstrip('/')}/{endpoint.id}", "Cache-Control": "no-store"}
        return answer(EndpointCreated(secret=secret, **endpoint_fields(endpoint)), 201, where)

    async def list_endpoints(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, EndpointsQuery)
        owner = (query.tenant if tenant == OPERATOR else tenant) or None
        found = await self.dispatcher.endpoints(tenant=owner)
        rest = [endpoint for endpoint in found if query.after is None or endpoint.id > query.after]
        page = rest[: query.limit]
        following = page[-1].id if len(rest) > len(page) else None
        return answer(EndpointList([EndpointOut(**endpoint_fields(e)) for e in page], following))

    async def show(self, request: Request, tenant: str) -> Response:
        endpoint = await self.dispatcher.endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def change(self, request: Request, tenant: str) -> Response:
        endpoint_id = _endpoint_id(request)
        asked = await read_json(request, EndpointPatch, MAX_JSON)
        fields = _fields(asked)
        endpoint = await self.dispatcher.update_endpoint(endpoint_id, fields, tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def delete(self, request: Request, tenant: str) -> Response:
        await self.dispatcher.remove_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return Response(status_code=204)

    async def rotate(self, request: Request, tenant: str) -> Response:
        endpoint, secret = await self.dispatcher.rotate_secret(_endpoint_id(request), tenant=_scope(tenant))
        until = next((s.expires for s in endpoint.secrets if s.expires is not None), None)
        shown = SecretOut(secret, None if until is None else moment(until))
        return answer(shown, headers={"Cache-Control": "no-store"})

    async def test(self, request: Request, tenant: str) -> Response:
        reply = await self.dispatcher.test_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(test_out(reply))

    async def enable(self, request: Request, tenant: str) -> Response:
        endpoint = await self.dispatcher.enable_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    async def verify(self, request: Request, tenant: str) -> Response:
        endpoint = await self.dispatcher.verify_endpoint(_endpoint_id(request), tenant=_scope(tenant))
        return answer(EndpointOut(**endpoint_fields(endpoint)))

    # ── deliveries ───────────────────────────────────────────────────────────

    async def deliveries(self, request: Request, tenant: str) -> Response:
        query = parse_query(request, DeliveriesQuery)
        endpoint = await self.dispatcher.endpoint(_endpoint_id(request), tenant=_scope(tenant))
        found = await self.dispatcher.deliveries(
            DeliveryQuery(
                endpoint=endpoint.id,
                state=query.state,
                topic=query.topic,
                since=None if query.since is None else micros(query.since),
                until=None if query.until is None else micros(query.until),
                after=query.after,
                limit=query.limit,
            )
        )
        following = found[-1].id if len(found) == query.limit else None
        return answer(DeliveryList([delivery_out(delivery) for delivery in found], following))

    async def replay(self, request: Request, tenant: str) -> Response:
        endpoint_id = _endpoint_id(request)
        asked = await read_json(request, ReplayIn, MAX_JSON)
        count = await self.dispatcher.replay(
            endpoint_id,
            micros(asked.since),
            None if asked.until is None else micros(asked.until),
            only=asked.only,
            tenant=_scope(tenant),
        )
        return answer(ReplayOut(count), 202)

    async def retry(self, request: Request, tenant: str) -> Response:
        text = request.path_params["id"]
        if not (text.isascii() and text.isdigit() and len(text) < 17):
            raise NotFound("delivery", text)
        delivery = await self.dispatcher.retry(int(text), tenant=_scope(tenant))
        return answer(delivery_out(delivery), 202)

    # ── events ───────────────────────────────────────────────────────────────

    async def publish(self, request: Request, tenant: str) -> Response:
        owner = self._acting(request, tenant)
        key = request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            raise Refused(400, "must be 1 to 255 printable characters", field="Idempotency-Key")
        # Base64 makes data a third longer.
        limit = self.dispatcher.config.max_event_bytes * 4 // 3 + 4096
        asked = await read_json(request, EventIn, limit)
        self.gate.pace(owner)
        self._check_pending(owner)
        accepted = await self.dispatcher.publish(
            asked.topic, _data(asked), tenant=owner, content_type=asked.content_type, idempotency_key=key
        )
        status = 200 if accepted.duplicate else 202
        return answer(EventAccepted(accepted.id, accepted.deliveries, accepted.duplicate), status)

    async def event(self, request: Request, tenant: str) -> Response:
        event_id = request.path_params["id"]
        if not _EVENT.fullmatch(event_id):
            raise NotFound("event", event_id)
        found = await self.dispatcher.event(event_id, tenant=_scope(tenant))
        deliveries = await self.dispatcher.deliveries(DeliveryQuery(event=event_id, limit=100))
        return answer(event_out(found, deliveries))

    def _check_pending(self, tenant: str) -> None:
        limit = self.gate.limits(tenant).max_pending
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
        return answer(Health("ready", dispatcher.delivering, dispatcher.outbox.accept.total))

    async def metrics(self, _request: Request) -> Response:
        dispatcher = self.dispatcher
        gauges = {
            "pending": ("undelivered deliveries", dispatcher.outbox.accept.total),
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
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


def _scope(tenant: str) -> str | None:
    return None if tenant == OPERATOR else tenant


def _endpoint_id(request: Request) -> str:
    text: str = request.path_params["id"]
    if not _ENDPOINT.fullmatch(text):
        raise NotFound("endpoint", text)
    return text


def _fields(asked: EndpointIn | EndpointPatch) -> dict[str, Any]:
    """What was given, as the dispatcher takes it."""
    fields = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not UNSET}
    if "headers" in fields:
        fields["headers"] = {name.lower(): value for name, value in fields["headers"].items()}
    if "concurrency" in fields:
        fields["concurrency"] = int(fields["concurrency"])
    return fields


def _data(asked: EventIn) -> bytes:
    if asked.data_base64 is UNSET:
        return b"null" if asked.data is UNSET else bytes(asked.data)
    if asked.data is not UNSET:
        raise Refused(422, "only one of data and data_base64 can be given", field="data")
    return base64.b64decode(asked.data_base64)
