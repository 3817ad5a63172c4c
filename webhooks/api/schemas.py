"""Bodies and queries of the registration endpoint, as Structs: they validate, and OpenAPI is made from them."""

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from brokerless.webhooks.admin.states import shown
from brokerless.webhooks.cloudevents import is_json
from brokerless.webhooks.delivery.client import Reply
from brokerless.webhooks.models import (
    Attempt,
    Delivery,
    Endpoint,
    EndpointChanges,
    EndpointSettings,
    EventType,
    OutboxAccount,
    PayloadFilter,
    StoredEvent,
)
from brokerless.webhooks.rules import (
    US,
    Base64,
    ContentType,
    DeliveryId,
    DeliveryStateName,
    Description,
    EndpointId,
    EventId,
    Headers,
    HeaderStyle,
    Mode,
    OwnSecret,
    ReplayChoice,
    SignatureVersion,
    TenantName,
    TenantVerification,
    Topic,
    Verification,
)

Moment = Annotated[datetime, Meta(tz=True)]
PageSize = Annotated[int, Meta(ge=1, le=500, description="How many at most.")]


class EndpointIn(EndpointSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A new endpoint."""

    headers: Headers = {}  # noqa: RUF012 (msgspec copies it)
    verification: TenantVerification | UnsetType = UNSET


class EndpointPatch(EndpointChanges, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to change; what is left out stays."""

    headers: Headers | UnsetType = UNSET
    verification: TenantVerification | UnsetType = UNSET


class TenantQuery(msgspec.Struct, forbid_unknown_fields=False):
    """The operator's choice of a tenant; other callers have their own."""

    tenant: TenantName | None = None


class EndpointsQuery(TenantQuery):
    """Paging of endpoints."""

    after: EndpointId | None = None
    limit: PageSize = 100


class EndpointDeliveriesQuery(TenantQuery):
    """Filters and paging of one endpoint's deliveries; times are when they were created."""

    event: EventId | None = None
    state: DeliveryStateName | None = None
    topic: Topic | None = None
    since: Moment | None = None
    until: Moment | None = None
    after: DeliveryId | None = None
    limit: PageSize = 50


class DeliveriesQuery(EndpointDeliveriesQuery):
    """Filters and paging of the deliveries of all endpoints, or of one."""

    endpoint: EndpointId | None = None


class EventsQuery(TenantQuery):
    """Filters and paging of events; times are when they were published."""

    topic: Topic | None = None
    since: Moment | None = None
    until: Moment | None = None
    after: EventId | None = None
    limit: PageSize = 50


class RotateIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Bring a secret of your own; without a body a new one is made."""

    secret: OwnSecret | UnsetType = UNSET


class RetryIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Deliveries to send now."""

    deliveries: Annotated[list[DeliveryId], Meta(min_length=1, max_length=500)]


class RetryOut(msgspec.Struct):
    """How many are on their way, and which are not and why."""

    retried: int
    refused: dict[str, str]


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
    signature: SignatureVersion
    header_style: HeaderStyle
    filters: list[PayloadFilter]
    verification: Verification
    enabled: bool
    state: Literal["pending", "active", "disabled"]
    reason: str
    allowed_rate: float
    created: datetime
    updated: datetime
    failing_since: datetime | None
    backlog: Annotated[int, Meta(description="Deliveries that wait; only in lists.")] = 0
    waiting_since: Annotated[
        datetime | None, Meta(description="When the oldest of them was created; only in lists.")
    ] = None


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

    id: str
    endpoint: str
    event: str
    topic: str
    state: DeliveryStateName
    attempts: int
    created: datetime
    next_attempt: datetime | None
    finished: datetime | None
    status: int | None
    log: list[AttemptOut]


class DeliveryList(msgspec.Struct):
    """A page of deliveries, newest first; `next` is the `after` of the next page."""

    items: list[DeliveryOut]
    next: str | None


class ReplayIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which events to send again, by the time they were published; `dry_run` only counts them."""

    since: Moment
    until: Moment | None = None
    only: ReplayChoice = "failed"
    dry_run: bool = False


class ReplayOut(msgspec.Struct):
    """How many deliveries are on their way again. `complete` is false if a bound of the outbox was reached."""

    deliveries: int
    complete: bool


class EventSummary(msgspec.Struct, kw_only=True):
    """An event without its data."""

    id: str
    topic: str
    time: datetime
    content_type: str
    size: int


class EventList(msgspec.Struct):
    """A page of events, newest first; `next` is the `after` of the next page."""

    items: list[EventSummary]
    next: str | None


class AccountOut(OutboxAccount, frozen=True, kw_only=True):
    """What was accepted and what became of it: both sums hold.

    `events = matched + unmatched + unrouted`, and `accepted = delivered + pending + lost + withdrawn`.
    """


class EventIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An event: `data` is any JSON value; `data_base64` with `content_type` is for everything else."""

    topic: Topic
    data: msgspec.Raw | UnsetType = UNSET
    data_base64: Base64 | UnsetType = UNSET
    content_type: ContentType = "application/json"


class EventTypeIn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a topic means: for people, and as the JSON Schema of its data.

    With `validate`, events whose data does not fit the schema are refused.
    """

    description: Description = ""
    schema: dict[str, Any] | None = None
    example: Any = None
    validate: bool = False


class EventTypeOut(EventTypeIn, kw_only=True):
    """A topic of the catalogue."""

    topic: str
    updated: datetime


class EventTypeList(msgspec.Struct):
    """The catalogue, by topic."""

    items: list[EventTypeOut]


class EventAccepted(msgspec.Struct):
    """The event is durable. `deliveries` is null for a duplicate."""

    id: str
    deliveries: int | None
    duplicate: bool


class EventOut(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event as it was published, and its deliveries (the newest hundred)."""

    id: str
    topic: str
    time: datetime
    content_type: str
    size: int
    deliveries: list[DeliveryOut]
    data: Any = None
    data_base64: str | None = None


class Health(msgspec.Struct):
    """Whether the service lives, or is ready."""

    status: str
    delivering: bool | UnsetType = UNSET


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
        "header_style": endpoint.header_style,
        "filters": endpoint.filters,
        "verification": endpoint.verification,
        "enabled": endpoint.active,
        "state": shown(endpoint.state),
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
        state=delivery.state,
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


def event_summary(event: StoredEvent) -> EventSummary:
    """An event in a list."""
    return EventSummary(
        id=event.id,
        topic=event.topic,
        time=moment(event.time),
        content_type=event.content_type,
        size=len(event.data),
    )


def event_type_out(found: EventType) -> EventTypeOut:
    """A topic as the API shows it."""
    return EventTypeOut(
        topic=found.topic,
        description=found.description,
        schema=found.schema,
        example=found.example,
        validate=found.validate,
        updated=moment(found.updated),
    )


def account_out(account: OutboxAccount) -> AccountOut:
    """The accounting as the API shows it."""
    return AccountOut(**msgspec.structs.asdict(account))


def event_out(event: StoredEvent, deliveries: list[Delivery]) -> EventOut:
    """An event as the API shows it: JSON as JSON, everything else as base64."""
    out = EventOut(
        id=event.id,
        topic=event.topic,
        time=moment(event.time),
        content_type=event.content_type,
        size=len(event.data),
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
