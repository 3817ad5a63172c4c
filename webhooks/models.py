"""The records of the package: endpoints, events, deliveries and their accounting. No I/O."""

from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from brokerless.webhooks.rules import (
    MAX_FILTERS,
    Concurrency,
    DeliveryStateName,
    Description,
    FilterPath,
    HeaderStyle,
    Mode,
    OwnSecret,
    Rate,
    SignatureVersion,
    TopicPatterns,
    Url,
    Verification,
)

EndpointState = Literal["pending", "active", "disabled", "disabled_pending"]


class DeliveryState(IntEnum):
    """The states of a delivery; only PENDING ones are attempted. Stored as numbers: never renumber."""

    PENDING = 0
    DELIVERED = 1
    GAVE_UP = 2
    EVICTED = 3
    WITHDRAWN = 4
    SKIPPED = 5

    @property
    def label(self) -> DeliveryStateName:
        """The name that the API uses."""
        return _LABELS[self]


_LABELS: dict[DeliveryState, DeliveryStateName] = {
    DeliveryState.PENDING: "pending",
    DeliveryState.DELIVERED: "delivered",
    DeliveryState.GAVE_UP: "gave_up",
    DeliveryState.EVICTED: "evicted",
    DeliveryState.WITHDRAWN: "withdrawn",
    DeliveryState.SKIPPED: "skipped",
}
# What counts as lost until it is replayed.
LOST = (DeliveryState.GAVE_UP, DeliveryState.EVICTED, DeliveryState.SKIPPED)


class Secret(msgspec.Struct, frozen=True, gc=False):
    """One signing key; `expires` (µs since 1970) is set when a newer one replaced it."""

    key: str
    created: int
    expires: int | None = None


class PayloadFilter(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One condition on an event's JSON data: exactly one of `equals`, `prefix`, or a number range.

    `path` is a place in the data (`$.order.total`). `minimum` and `maximum` are inclusive; either may be left out.
    An event that has nothing at the path, or data that is not JSON, does not match.
    """

    path: FilterPath
    equals: str | float | bool | UnsetType | None = UNSET
    prefix: Annotated[str, Meta(min_length=1, max_length=500)] | UnsetType = UNSET
    minimum: float | UnsetType = UNSET
    maximum: float | UnsetType = UNSET


PayloadFilters = Annotated[list[PayloadFilter], Meta(max_length=MAX_FILTERS)]


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is set when an endpoint is registered.

    `rate` is requests per second (0: no limit), `concurrency` the number of attempts at a time. `secret` brings a v1
    secret of your own instead of a new one. `filters` must all match (beside the topics).
    """

    url: Url
    topics: TopicPatterns
    description: Description = ""
    rate: Rate = 0
    concurrency: Concurrency = 8
    fifo: bool = False
    headers: dict[str, str] = {}
    mode: Mode = "binary"
    signature: SignatureVersion = "v1"
    header_style: HeaderStyle = "standard"
    filters: PayloadFilters = []
    verification: Verification | UnsetType = UNSET
    secret: OwnSecret | UnsetType = UNSET


class EndpointChanges(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What to change of an endpoint; what is left out stays. A new `url` must agree again."""

    url: Url | UnsetType = UNSET
    topics: TopicPatterns | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    rate: Rate | UnsetType = UNSET
    concurrency: Concurrency | UnsetType = UNSET
    fifo: bool | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    mode: Mode | UnsetType = UNSET
    signature: SignatureVersion | UnsetType = UNSET
    header_style: HeaderStyle | UnsetType = UNSET
    filters: PayloadFilters | UnsetType = UNSET
    verification: Verification | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        """The fields that are set, by name."""
        return {
            name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not UNSET
        }


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A registered consumer. Times are µs since 1970 UTC.

    `allowed_rate` is what the endpoint allowed in the handshake, in requests per minute (0: no limit).
    """

    id: str
    tenant: str
    url: str
    topics: list[str]
    description: str = ""
    rate: float = 0.0
    concurrency: int = 8
    fifo: bool = False
    headers: dict[str, str] = {}
    mode: Mode = "binary"
    signature: SignatureVersion = "v1"
    header_style: HeaderStyle = "standard"
    filters: list[PayloadFilter] = []
    verification: Verification = "handshake"
    secrets: list[Secret] = []
    created: int = 0
    updated: int = 0
    asked_since: int = 0
    # Operational: columns of their own, so that recording them never rewrites the settings above.
    state: EndpointState = "pending"
    reason: str = ""
    allowed_rate: float = 0.0
    failing_since: int | None = None
    verify_tries: int = 0

    @property
    def active(self) -> bool:
        """Whether events are routed and delivered to it."""
        return self.state == "active"


OPERATIONAL = ("state", "reason", "allowed_rate", "failing_since", "verify_tries")


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An accepted event; `n` counts all events of the outbox, `id` is the `webhook-id`.

    `trace` is the W3C trace context of the span that published it, if there was one.
    """

    n: int
    id: str
    tenant: str
    topic: str
    time: int
    data: bytes
    content_type: str
    trace: str = ""


class Item(msgspec.Struct):
    """One delivery that a lane has in memory. `evicted` is set when it was evicted while in flight."""

    n: int
    event: StoredEvent
    attempts: int = 0
    evicted: bool = False


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt: when (µs since 1970), how long, and its result."""

    at: int
    duration_ms: float
    status: int | None = None
    error: str = ""
    excerpt: str = ""


class AttemptResult(msgspec.Struct, gc=False):
    """The result of an attempt, on its way into the outbox."""

    n: int
    state: int
    due: int
    finished: int | None
    status: int | None
    log: str
    endpoint: str


class EventType(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in the catalogue: what it means, and the JSON Schema of its data.

    With `validate` an event of this topic whose data does not fit the schema is refused by `publish`.
    """

    topic: str
    description: str = ""
    schema: dict[str, Any] | None = None
    example: Any = None
    validate: bool = False
    updated: int = 0


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery as shown to users; its `id` is that of its event, a dot, and that of its endpoint."""

    id: str
    endpoint: str
    event: str
    topic: str
    state: DeliveryStateName
    attempts: int
    created: int
    due: int | None
    finished: int | None
    status: int | None
    log: list[Attempt]


class Published(msgspec.Struct, frozen=True, gc=False):
    """What `publish` returns: the event's id and number, and to how many endpoints it goes.

    `deliveries` is None when the row was written in the caller's own transaction: it is routed after the commit.
    `duplicate` tells that the idempotency key had been used with the same event before.
    """

    id: str
    n: int
    deliveries: int | None
    duplicate: bool = False


class Replayed(msgspec.Struct, frozen=True):
    """How many deliveries a replay made pending (`dry_run`: would make), and whether that was all of the range.

    `complete` is False when the endpoint's or the outbox's bound was reached: replay again when there is room.
    """

    deliveries: int
    complete: bool = True


class OutboxAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The accounting of an outbox, from its rows.

    Events: `events = matched + unmatched + unrouted`. `unmatched` matched no endpoint; `unrouted` were written in a
    caller's transaction and are not routed yet. Deliveries: `accepted = delivered + pending + lost + withdrawn`, where
    `lost` is by reason (`gave_up`, `evicted`, `skipped`: the endpoint was disabled) and `withdrawn` were for endpoints
    that have been deleted.
    """

    events: int
    matched: int
    unmatched: int
    unrouted: int
    accepted: int
    delivered: int
    pending: int
    lost: dict[str, int]
    withdrawn: int

    @property
    def balanced(self) -> bool:
        """Whether both sums hold."""
        events = self.events == self.matched + self.unmatched + self.unrouted
        deliveries = self.accepted == self.delivered + self.pending + sum(self.lost.values()) + self.withdrawn
        return events and deliveries
