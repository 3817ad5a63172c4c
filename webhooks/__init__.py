"""Webhooks: a durable outbox, a registration endpoint, delivery, and a kit for receivers.

The two questions: a producer that is faster than its consumers fills the outbox up to `max_pending` and is then
refused, held back, or costs the oldest deliveries, as `on_full` says. A consumer that is away loses nothing for three
days; a sender that is killed loses nothing that `publish` accepted.
"""

from brokerless.webhooks.api.app import registration_app
from brokerless.webhooks.api.http import TenantLimits
from brokerless.webhooks.blocking import BlockingDispatcher
from brokerless.webhooks.cloudevents import CloudEvent
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters, ReceiverCounters
from brokerless.webhooks.delivery.retry import Schedule
from brokerless.webhooks.delivery.ssrf import AddressPolicy
from brokerless.webhooks.dispatcher import Dispatcher
from brokerless.webhooks.errors import (
    BlockedAddress,
    CloudEventError,
    Conflict,
    NotFound,
    OutboxError,
    OutboxFull,
    VerificationError,
)
from brokerless.webhooks.models import (
    Attempt,
    Delivery,
    Endpoint,
    EndpointChanges,
    EndpointSettings,
    EventType,
    OutboxAccount,
    PayloadFilter,
    Published,
    Replayed,
    StoredEvent,
)
from brokerless.webhooks.outbox.queries import DeliveryQuery, EventQuery
from brokerless.webhooks.outbox.transaction import publish_in
from brokerless.webhooks.receiver.app import Receiver, receiver_app
from brokerless.webhooks.signing import Verified, Verifier, verify

__all__ = [
    "AddressPolicy",
    "Attempt",
    "BlockedAddress",
    "BlockingDispatcher",
    "CloudEvent",
    "CloudEventError",
    "Conflict",
    "Delivery",
    "DeliveryQuery",
    "Dispatcher",
    "DispatcherConfig",
    "DispatcherCounters",
    "Endpoint",
    "EndpointChanges",
    "EndpointSettings",
    "EventQuery",
    "EventType",
    "NotFound",
    "OutboxAccount",
    "OutboxError",
    "OutboxFull",
    "PayloadFilter",
    "Published",
    "Receiver",
    "ReceiverCounters",
    "Replayed",
    "Schedule",
    "StoredEvent",
    "TenantLimits",
    "VerificationError",
    "Verified",
    "Verifier",
    "publish_in",
    "receiver_app",
    "registration_app",
    "verify",
]
