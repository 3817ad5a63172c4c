"""Bodies of the registration endpoint, as Structs: validation and OpenAPI schemas come from the same
declarations.
"""

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from brokerless.webhooks.client import Reply
from brokerless.webhooks.cloudevents import is_json
from brokerless.webhooks.models import Attempt, Delivery, Endpoint, Mode, StoredEvent, Version

US = 1_000_000
Url = Annotated[
    str,
    Meta(
        min_length=8,
        max_length=2048,
        pattern=r"^https?://([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?([/?][!-\"$-\[\]-~]*)?$",
        description="Where to deliver; by default https only, and public addresses only.",
    ),
]
Pattern = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=r"^(\*\*|\*|[A-Za-z0-9_:-]+\*?|\*[A-Za-z0-9_:-]+)(\.(\*\*|\*|[A-Za-z0-9_:-]+\*?|\*[A-Za-z0-9_:-]+))*$",
        description="Words joined by dots; `*` matches within a word, `**` any number of words.",
    ),
]
Patterns = Annotated[list[Pattern], Meta(min_length=1, max_length=100)]
Topic = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9_:-]+(\.[A-Za-z0-9_:-]+)*$",
        description="Words joined by dots; must not begin with `brokerless.`.",
    ),
]
# `[ -~]`: printable ASCII. A description may be any text without control characters.
Description = Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
Rate = Annotated[float, Meta(ge=0, le=100_000, description="Requests per second; 0: no limit.")]
# JSON has one kind of number: 8.0 is a whole one too.
Concurrency = Annotated[float, Meta(ge=1, le=256, multiple_of=1, description="Attempts at a time.")]
# Only names that cannot change how a request is read.
HeaderName = Annotated[str, Meta(pattern=r"^([Xx]-[A-Za-z0-9-]{1,64}|[Aa]uthorization)$")]
HeaderValue = Annotated[str, Meta(max_length=1024, pattern=r"^[!-~]([ -~]*[!-~])?$")]
Headers = Annotated[dict[HeaderName, HeaderValue], Meta(max_length=20)]
Asked = Literal["handshake", "challenge"]
Base64 = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        description="Binary data, instead of `data`.",
    ),
]
ContentType = Annotated[str, Meta(max_length=100, pattern=r"^[a-z]+/[a-z0-9.+-]+$")]


class EndpointIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A new endpoint."""

    url: Url
    topics: Patterns
    description: Description = ""
    rate: Rate = 0
    concurrency: Concurrency = 8
    fifo: bool = False
    headers: Headers = {}
    mode: Mode = "binary"
    signature: Version = "v1"
    verification: Asked | UnsetType = UNSET


class EndpointPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to change; what is left out stays."""

    url: Url | UnsetType = UNSET
    topics: Patterns | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    rate: Rate | UnsetType = UNSET
    concurrency: Concurrency | UnsetType = UNSET
    fifo: bool | UnsetType = UNSET
    headers: Headers | UnsetType = UNSET
    mode: Mode | UnsetType = UNSET
    signature: Version | UnsetType = UNSET
    verification: Asked | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class EndpointOut(msgspec.Struct, kw_only=True):
    """An endpoint, without its secrets and with the names but not the values of its headers."""

    id: str
    tenant: str
    url: str
    topics: list[str]
    description: str
    rate: float
    concurrency: int
    fifo: bool
    headers: list[str]
    mode: Mode
    signature: Version
    verification: Literal["handshake", "challenge", "none"]
    enabled: bool
    state: Literal["pending", "active", "disabled"]
    reason: str
    allowed_rate: float
    created: datetime
    updated: datetime
    failing_since: datetime | None


class EndpointCreated(EndpointOut, kw_only=True):
    """An endpoint with its secret, which is shown this once."""

    secret: str


class EndpointList(msgspec.Struct):
    """A page of endpoints; `next` is the `after` of the next page."""

    items: list[EndpointOut]
    next: str | None


class SecretOut(msgspec.Struct):
    """A new secret, shown this once; the one before signs along until then."""

    secret: str
    previous_valid_until: datetime | None


class TestOut(msgspec.Struct):
    """What came back from a test event."""

    delivered: bool
    status: int | None
    duration_ms: float
    error: str
    excerpt: str


class AttemptOut(msgspec.Struct):
    """One attempt."""

    at: datetime
    duration_ms: float
    status: int | None
    error: str
    excerpt: str


class DeliveryOut(msgspec.Struct, kw_only=True):
    """One event on its way to one endpoint."""

    id: int
    endpoint: str
    event: str
    topic: str
    state: Literal["pending", "delivered", "gave_up", "evicted", "withdrawn"]
    attempts: int
    created: datetime
    next_attempt: datetime | None
    finished: datetime | None
    status: int | None
    log: list[AttemptOut]


class DeliveryList(msgspec.Struct):
    """A page of deliveries, newest first; `next` is the `after` of the next page."""

    items: list[DeliveryOut]
    next: int | None


class ReplayIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which events to send again, by the time they were published."""

    since: Annotated[datetime, Meta(tz=True)]
    until: Annotated[datetime, Meta(tz=True)] | None = None
    only: Literal["failed", "all"] = "failed"


class ReplayOut(msgspec.Struct):
    """How many deliveries are on their way again."""

    deliveries: int


class EventIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An event: `data` is any JSON value; `data_base64` with `content_type` is for everything else."""

    topic: Topic
    data: msgspec.Raw | UnsetType = UNSET
    data_base64: Base64 | UnsetType = UNSET
    content_type: ContentType = "application/json"


class EventAccepted(msgspec.Struct):
    """The event is durable. `deliveries` is unknown (null) when another process routes it."""

    id: str
    deliveries: int | None
    duplicate: bool


class EventOut(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event as it was published, and its deliveries (the newest hundred)."""

    id: str
    topic: str
    time: datetime
    content_type: str
    deliveries: list[DeliveryOut]
    data: Any = None
    data_base64: str | None = None


class Health(msgspec.Struct):
    """Whether the service lives, or is ready."""

    status: str
    delivering: bool = False
    pending: int = 0


class Problem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """RFC 9457 problem details; `field` names what was wrong, if one thing was."""

    title: str
    status: int
    type: str = "about:blank"
    detail: str = ""
    field: str = ""


def moment(time_us: int) -> datetime:
    """The time of the API."""
    return datetime.fromtimestamp(time_us / US, UTC)


def micros(at: datetime) -> int:
    """The time of the outbox."""
    return int(at.timestamp() * US)


def _maybe(time_us: int | None) -> datetime | None:
    return None if time_us is None else moment(time_us)


def endpoint_fields(endpoint: Endpoint) -> dict[str, Any]:
    """The fields of EndpointOut."""
    return {
        "id": endpoint.id,
        "tenant": endpoint.tenant,
        "url": endpoint.url,
        "topics": endpoint.topics,
        "description": endpoint.description,
        "rate": endpoint.rate,
        "concurrency": endpoint.concurrency,
        "fifo": endpoint.fifo,
        "headers": sorted(endpoint.headers),
        "mode": endpoint.mode,
        "signature": endpoint.signature,
        "verification": endpoint.verification,
        "enabled": endpoint.active,
        "state": endpoint.state,
        "reason": endpoint.reason,
        "allowed_rate": endpoint.allowed_rate,
        "created": moment(endpoint.created),
        "updated": moment(endpoint.updated),
        "failing_since": _maybe(endpoint.failing_since),
    }


def delivery_out(delivery: Delivery) -> DeliveryOut:
    """A delivery as the API shows it."""
    return DeliveryOut(
        id=delivery.id,
        endpoint=delivery.endpoint,
        event=delivery.event,
        topic=delivery.topic,
        state=delivery.state,  # type: ignore[arg-type]
        attempts=delivery.attempts,
        created=moment(delivery.created),
        next_attempt=_maybe(delivery.due or None),
        finished=_maybe(delivery.finished),
        status=delivery.status,
        log=[_attempt(attempt) for attempt in delivery.log],
    )


def _attempt(attempt: Attempt) -> AttemptOut:
    return AttemptOut(moment(attempt.at), attempt.duration_ms, attempt.status, attempt.error, attempt.excerpt)


def test_out(reply: Reply) -> TestOut:
    """The result of a test event."""
    fine = reply.status is not None and 200 <= reply.status < 300
    return TestOut(fine, reply.status, round(reply.duration_s * 1000, 1), reply.error, reply.excerpt)


def event_out(event: StoredEvent, deliveries: list[Delivery]) -> EventOut:
    """An event as the API shows it: JSON as JSON, everything else as base64."""
    out = EventOut(
        id=event.id,
        topic=event.topic,
        time=moment(event.time),
        content_type=event.content_type,
        deliveries=[delivery_out(delivery) for delivery in deliveries],
    )
    if is_json(event.content_type):
        try:
            out.data = msgspec.json.decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:
            return out
    out.data_base64 = base64.b64encode(event.data).decode()
    return out
