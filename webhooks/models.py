"""The records of the package: endpoints, events, deliveries and their books. No I/O."""

from enum import IntEnum
from typing import Literal

import msgspec

Mode = Literal["binary", "structured", "batch"]
Version = Literal["v1", "v1a"]
Verification = Literal["handshake", "challenge", "none"]
EndpointState = Literal["pending", "active", "disabled"]


class DeliveryState(IntEnum):
    """Where a delivery stands; only PENDING ones are attempted. Stored as numbers: never renumber."""

    PENDING = 0
    DELIVERED = 1
    GAVE_UP = 2
    EVICTED = 3
    WITHDRAWN = 4


class Secret(msgspec.Struct, frozen=True):
    """One signing key; `expires` (µs since 1970) is set when a newer one replaced it."""

    key: str
    created: int
    expires: int | None = None


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A registered consumer. Times are µs since 1970 UTC. Changed only by replacing it
    (`msgspec.structs.replace`).

    `rate` is requests per second (0: no limit), `concurrency` the number of attempts at a time.
    `allowed_rate` is
    what the endpoint allowed in the handshake, in requests per minute (0: no limit).
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
    signature: Version = "v1"
    verification: Verification = "handshake"
    state: EndpointState = "pending"
    reason: str = ""
    secrets: list[Secret] = []
    allowed_rate: float = 0.0
    created: int = 0
    updated: int = 0
    failing_since: int | None = None
    verify_tries: int = 0

    @property
    def active(self) -> bool:
        """Whether events are routed and delivered to it."""
        return self.state == "active"


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An accepted event; `n` counts all events of the outbox, `id` is the `webhook-id`."""

    n: int
    id: str
    tenant: str
    topic: str
    time: int
    data: bytes
    content_type: str


class Item(msgspec.Struct):
    """One delivery that a lane has in memory. `evicted` is set when it lost its place while under way."""

    n: int
    event: StoredEvent
    attempts: int = 0
    evicted: bool = False


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt: when (µs since 1970), how long, and what came of it."""

    at: int
    duration_ms: float
    status: int | None = None
    error: str = ""
    excerpt: str = ""


class Finish(msgspec.Struct, gc=False):
    """The result of an attempt, on its way into the outbox."""

    n: int
    state: int
    due: int
    finished: int | None
    status: int | None
    log: str
    endpoint: str


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery as shown to users."""

    id: int
    endpoint: str
    event: str
    topic: str
    state: str
    attempts: int
    created: int
    due: int | None
    finished: int | None
    status: int | None
    log: list[Attempt]


class Published(msgspec.Struct, frozen=True, gc=False):
    """What `publish` returns: the event's id and number, and to how many endpoints it goes.

    `deliveries` is None when another process (or a later moment) does the routing. `duplicate` tells that the
    idempotency key had been used with the same event before.
    """

    id: str
    n: int
    deliveries: int | None
    duplicate: bool = False


class OutboxAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The books, counted in deliveries: `accepted = delivered + pending + lost + withdrawn`.

    `unrouted` events have no deliveries yet. `withdrawn` were owed to endpoints that have been deleted.
    """

    accepted: int
    delivered: int
    pending: int
    lost: dict[str, int]
    withdrawn: int
    unrouted: int

    @property
    def balanced(self) -> bool:
        """Whether the sum holds."""
        return self.accepted == self.delivered + self.pending + sum(self.lost.values()) + self.withdrawn
