"""Requests and answers of the registration endpoint: tokens, limits, bodies, problems."""

import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

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
from brokerless.core.pace import TokenBucket
from brokerless.webhooks.api_schema import Problem
from brokerless.webhooks.endpoints import check_tenant
from brokerless.webhooks.errors import Conflict, NotFound, OutboxError, OutboxFull

T = TypeVar("T")
# The tenant that sees all others.
OPERATOR = "*"
# A token shorter than this can be guessed.
MIN_TOKEN = 16
# Callers whose rate is kept in memory; the least recently made are forgotten.
MAX_BUCKETS = 10_000
Auth = Mapping[str, str] | Callable[[Request], Awaitable[str | None] | str | None]
_encoder = msgspec.json.Encoder()
_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Content too large",
    415: "Unsupported media type",
    422: "Cannot be done",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available",
}


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may use."""

    max_endpoints: int = 100
    """More than that is rather a mistake in a loop than a hundred consumers."""
    publish_per_s: float = 0.0
    """Events by `POST /events` per second, with bursts of one second's worth; 0: no limit."""
    max_pending: int = 250_000
    """Undelivered deliveries: a quarter of the default outbox, so that one tenant cannot fill it."""


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


class Gate:
    """Who asks, and whether they may ask so often."""

    def __init__(self, auth: Auth, limits: TenantLimits | Mapping[str, TenantLimits]) -> None:
        self._ask: Callable[[Request], str | Awaitable[str | None] | None]
        if isinstance(auth, Mapping):
            # Compared by digest: looking a token up tells nothing about how much of it was right.
            self._tokens = {_digest(check_token(token)): _tenant(name) for token, name in auth.items()}
            if not self._tokens:
                raise ConfigError("auth", "has no tokens: nobody could use the endpoint")
            self._ask = self._by_token
        else:
            self._ask = auth
        self._limits = limits
        self._buckets: dict[str, TokenBucket] = {}

    async def tenant(self, request: Request) -> str:
        """The tenant (or OPERATOR) of a request, or 401."""
        found = self._ask(request)
        name = await found if inspect.isawaitable(found) else found
        if name is None:
            wanted = {"WWW-Authenticate": 'Bearer realm="webhooks"'}
            raise Refused(401, "a valid bearer token is needed", headers=wanted)
        return name

    def _by_token(self, request: Request) -> str | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._tokens.get(_digest(token.strip())) if scheme.lower() == "bearer" else None

    def limits(self, tenant: str) -> TenantLimits:
        """What the tenant may use."""
        if isinstance(self._limits, TenantLimits):
            return self._limits
        return self._limits.get(tenant) or self._limits.get(OPERATOR) or TenantLimits()

    def pace(self, tenant: str) -> None:
        """Count one published event, or 429."""
        rate = self.limits(tenant).publish_per_s
        if not rate:
            return
        now = time.monotonic()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= MAX_BUCKETS:
                self._buckets.pop(next(iter(self._buckets)))
            bucket = self._buckets[tenant] = TokenBucket(rate, max(1.0, rate), now)
        if not bucket.take(1, now):
            wait = max(1, round(bucket.wait_s(1, now)))
            raise Refused(429, f"more than {rate:g} events per second", headers={"Retry-After": str(wait)})


def check_token(token: str) -> str:
    """Return the token, or ConfigError."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("token", f"must be at least {MIN_TOKEN} printable characters without spaces")
    return token


def _tenant(name: str) -> str:
    return name if name == OPERATOR else check_tenant(name)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, limit: int) -> bytes:
    """The body, or 413 as soon as it is longer than `limit`."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 16 and int(length) > limit:
        raise Refused(413, f"the body may have {limit} bytes")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise Refused(413, f"the body may have {limit} bytes")
    except ClientDisconnect:
        raise Refused(400, "the body is incomplete") from None
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
    """Decode, with the problem's field named."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        raise Refused(400, text, field=field_of(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"not valid JSON: {error}") from None


def field_of(path: str) -> str:
    """The field in msgspec's own way of naming places: "`$.topics[0]`", "`key` in `$.headers`"."""
    return path.rpartition("$")[2].strip("`").lstrip(".")


def parse_query(request: Request, kind: type[T]) -> T:
    """The query as a Struct of optional fields; 400 if it is not one."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise Refused(400, "is there twice", field=name)
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        raise Refused(400, text, field=field_of(path)) from None
