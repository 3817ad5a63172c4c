"""Events straight from producers to consumers over ZeroMQ or NNG: fan-out, groups, replay, with no broker."""

from brokerless.direct.publisher import Publisher
from brokerless.direct.subscriber import Subscriber

__all__ = ["Publisher", "Subscriber"]
