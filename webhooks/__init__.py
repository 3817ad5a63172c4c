"""brokerless.webhooks."""

from brokerless.webhooks.cloudevents import CloudEvent
from brokerless.webhooks.errors import VerificationError


def verify(h, b, s):
    import time

    from brokerless.webhooks.signing import Verifier

    return Verifier(s).verify(h, b, time.time())
