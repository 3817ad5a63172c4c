"""Webhooks: a durable outbox, a registration endpoint, delivery, and a kit for receivers.

The two questions: a producer that is faster than its consumers fills the outbox up to `max_pending` and
then is
refused, held back, or costs the oldest deliveries, as `on_full` says. A consumer that is away loses nothing
for three
days; a sender that is killed loses nothing that `publish` accepted.
"""

from brokerless.webhooks.addresses import AddressPolicy
from brokerless.webhooks.api import registration_app
from brokerless.webhooks.api_http import TenantLimits
from brokerless.webhooks.cloudevents import CloudEvent
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters, ReceiverCounters
from brokerless.webhooks.dispatcher import BlockingDispatcher, Dispatcher
from brokerless.webhooks.errors import (
    BlockedAddress,
    CloudEventError,
    Conflict,
    NotFound,
    OutboxError,
    OutboxFull,
    VerificationError,
)
from brokerless.webhooks.listing import DeliveryQuery
from brokerless.webhooks.models import Attempt, Delivery, Endpoint, OutboxAccount, Published
from brokerless.webhooks.receiver import Receiver, receiver_app
from brokerless.webhooks.schedule import Schedule
from brokerless.webhooks.signing import Verified, Verifier, verify
from brokerless.webhooks.transaction import publish_in

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
    "NotFound",
    "OutboxAccount",
    "OutboxError",
    "OutboxFull",
    "Published",
    "Receiver",
    "ReceiverCounters",
    "Schedule",
    "TenantLimits",
    "VerificationError",
    "Verified",
    "Verifier",
    "publish_in",
    "receiver_app",
    "registration_app",
    "verify",
]
