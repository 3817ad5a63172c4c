"""Requests and answers of the registration endpoint: tokens, limits, bodies, problems."""

import asyncio
import hashlib
import inspect
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from brokerless.core.errors import (
    BrokerlessError,
    Closed,
    ConfigError,
    InvalidEvent,
    MissingDependency,
    UsageError,
)
from brokerless.core.rate_limit import TokenBucket
from brokerless.webhooks.api.schemas import Problem
from brokerless.webhooks.errors import Conflict, NotFound, OutboxError, OutboxFull
from brokerless.webhooks.rules import check_tenant, check_token, explain

T = TypeVar("T")
# The tenant that sees all others.
OPERATOR = "*"
# Callers whose rate is kept in memory; the least recently made are forgotten.
MAX_BUCKETS = 10_000
# A body of a megabyte comes in time over 1 Mbit/s; whoever sends one byte a second does not hold a place for long.
BODY_TIMEOUT_S = 10.0
# Requests of one tenant that may wait for an answer of its endpoints (tests, handshakes): each holds a descriptor, for
# up to the timeout of an attempt, beside those that deliveries may use.
MAX_ASKING = 32
# Lists and counts of one tenant that are read at a time: they may walk over millions of rows, and all share the
# outbox's few readers.
MAX_READING = 2
Auth = Mapping[str, str] | Callable[[Request], Awaitable[str | None] | str | None]
_encoder = msgspec.json.Encoder()
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]")
_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    409: "Conflict",
    413: "Content too large",
    415: "Unsupported media type",
    422: "Cannot be done",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available",
}


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may use."""

    max_endpoints: int = 100
    """More than that is rather a mistake in a loop than a hundred consumers."""
    publish_per_s: float = 0.0
    """Events by `POST /events` per second, with bursts of one second's worth; 0: no limit."""
    max_pending: int = 250_000
    """Undelivered deliveries: a quarter of the default outbox, so that one tenant cannot fill it."""


Limits = TenantLimits | Mapping[str, TenantLimits] | Callable[[str], TenantLimits]


class Refused(Exception):
    """An answer other than success, raised anywhere in a handler."""

    def __init__(
        self, status: int, detail: str, *, field: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title=_TITLES.get(status, "Error"), status=status, detail=detail, field=field)
        self.headers = dict(headers or {})


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encoder.encode(value), status, dict(headers or {}), media_type="application/json")


def problem(refused: Refused) -> Response:
    """A problem+json answer."""
    body = _encoder.encode(refused.problem)
    return Response(body, refused.problem.status, refused.headers, media_type="application/problem+json")


def refuse(error: BrokerlessError) -> Refused:
    """The answer to an error of the dispatcher."""
    match error:
        case OutboxFull():
            wait = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            return Refused(429, str(error), headers=wait)
        case NotFound():
            return Refused(404, str(error))
        case Conflict():
            return Refused(409, str(error))
        case ConfigError() | InvalidEvent():
            return Refused(422, error.problem, field=error.field)
        case Closed():
            return Refused(
                503,
                "the dispatcher is not running; a mounted app needs lifespan=dispatcher.lifespan in the outer app",
                headers={"Retry-After": "5"},
            )
        case OutboxError():
            return Refused(503, "the outbox cannot be used at the moment", headers={"Retry-After": "5"})
        case UsageError() | MissingDependency():
            return Refused(422, str(error))
        case _:
            return Refused(500, "unexpected error")


class TokenTable:
    """Bearer tokens and their tenants."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        # Compared by digest: looking a token up tells nothing about how much of it was right.
        self._tokens = {_digest(check_token(token)): _tenant(name) for token, name in tokens.items()}
        if not self._tokens:
            raise ConfigError("auth", "has no tokens: nobody could use the endpoint")

    def tenant(self, request: Request) -> str | None:
        """The tenant of a request's token, or None."""
        return self._tokens.get(_digest(bearer(request)))


def bearer(request: Request) -> str:
    """The bearer token of a request; empty if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class AccessControl:
    """Authentication and rate limits of requests. `portal` reads the tokens of portal links."""

    def __init__(self, auth: Auth, limits: Limits, portal: Callable[[str], str | None] | None = None) -> None:
        self._ask: Callable[[Request], str | Awaitable[str | None] | None]
        self._ask = TokenTable(auth).tenant if isinstance(auth, Mapping) else auth
        self._portal = portal
        self._limits = limits
        self._buckets: dict[str, TokenBucket] = {}
        self._asking: Counter[str] = Counter()
        # Each lives as long as somebody waits for it.
        self._reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def tenant(self, request: Request) -> str:
        """The tenant (or OPERATOR) of a request, or 401."""
        if self._portal is not None and (visitor := self._portal(bearer(request))) is not None:
            return visitor
        found = self._ask(request)
        name = await found if inspect.isawaitable(found) else found
        if name is None:
            wanted = {"WWW-Authenticate": 'Bearer realm="webhooks"'}
            raise Refused(401, "a valid bearer token is needed", headers=wanted)
        return name

    def limits(self, tenant: str) -> TenantLimits:
        """What the tenant may use."""
        if isinstance(self._limits, TenantLimits):
            return self._limits
        if not isinstance(self._limits, Mapping):
            return self._limits(tenant)
        return self._limits.get(tenant) or self._limits.get(OPERATOR) or TenantLimits()

    @contextmanager
    def asking(self, tenant: str) -> Iterator[None]:
        """While a request waits for an endpoint's answer; 429 if too many of the tenant's do."""
        if self._asking[tenant] >= MAX_ASKING and tenant != OPERATOR:
            wait = {"Retry-After": "1"}
            raise Refused(
                429, f"{MAX_ASKING} requests to endpoints of {tenant!r} are under way", headers=wait
            )
        self._asking[tenant] += 1
        try:
            yield
        finally:
            self._asking[tenant] -= 1
            if not self._asking[tenant]:
                del self._asking[tenant]

    @asynccontextmanager
    async def reading(self, tenant: str) -> AsyncIterator[None]:
        """While a list is read: others of the same tenant wait for their turn."""
        if tenant == OPERATOR:
            yield
            return
        turns = self._reading.get(tenant)
        if turns is None:
            turns = self._reading[tenant] = asyncio.Semaphore(MAX_READING)
        async with turns:
            yield

    def limit_rate(self, tenant: str) -> None:
        """Count one published event, or 429."""
        rate = self.limits(tenant).publish_per_s
        if not rate:
            return
        now = time.monotonic()
        bucket = self._buckets.get(tenant)
        if bucket is None or bucket.rate != rate:
            if len(self._buckets) >= MAX_BUCKETS:
                self._buckets.pop(next(iter(self._buckets)))
            bucket = self._buckets[tenant] = TokenBucket(rate, max(1.0, rate), now)
        if not bucket.take(1, now):
            wait = max(1, round(bucket.wait_s(1, now)))
            raise Refused(429, f"more than {rate:g} events per second", headers={"Retry-After": str(wait)})


def _tenant(name: str) -> str:
    return name if name == OPERATOR else check_tenant(name)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, limit: int) -> bytes:
    """The body, 413 as soon as it is longer than `limit`, or 408 if it does not come in time."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 16 and int(length) > limit:
        raise Refused(413, f"the body may have {limit} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise Refused(413, f"the body may have {limit} bytes")
    except ClientDisconnect:
        raise Refused(400, "the body is incomplete") from None
    except TimeoutError:
        raise Refused(
            408, f"the body did not come within {BODY_TIMEOUT_S:g} s", headers={"Connection": "close"}
        ) from None
    return bytes(body)


async def read_json(request: Request, kind: type[T], limit: int, *, empty: bytes | None = None) -> T:
    """The body as a Struct; 400 if it is not one, 415 if it does not claim to be JSON."""
    body = await read_body(request, limit)
    if not body and empty is not None:
        body = empty
    else:
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise Refused(415, "the content type must be application/json")
    return parse(body, kind)


def parse(body: bytes, kind: type[T]) -> T:
    """Decode, with the problem in words and its field named."""
    try:
        # msgspec does not look into text that it passes on undecoded.
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, field = explain(error, kind)
        raise Refused(400, text, field=field) from None
    except UnicodeDecodeError:
        raise Refused(400, "the body is not valid UTF-8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"not valid JSON: {error}") from None


def parse_query(request: Request, kind: type[T]) -> T:
    """The query as a Struct of optional fields; 400 if it is not one."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise Refused(400, "is there twice", field=name)
        values[name] = value
    for item in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        # msgspec would also read a number of seconds as a time.
        if item.name in values and "datetime" in str(item.type) and not _DATE.match(values[item.name]):
            raise Refused(400, "must be an RFC 3339 time", field=item.name)
    try:
        found = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text, field = explain(error, kind)
        raise Refused(400, text, field=field) from None
    for name in values:
        # msgspec reads the text "null" as nothing.
        if getattr(found, name, name) is None:
            raise Refused(400, "must not be null: leave it out", field=name)
    return found
