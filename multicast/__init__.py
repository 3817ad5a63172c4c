"""UDP multicast that knows what it lost: MoldUDP64 on the wire, repair from the publisher's journal.

    from brokerless.multicast import Publisher, Subscriber

    with Publisher("239.255.7.7:30001", "ORDERS") as pub:
        pub.publish("orders.eu", b"…")

    with Subscriber("239.255.7.7:30001", "ORDERS") as sub:
        for event in sub: …

Packets stay on this machine unless `interface` and `ttl` say otherwise.
"""

from brokerless.multicast.counters import PublisherCounters, RequestServerCounters, SubscriberCounters
from brokerless.multicast.policy import AnswerPolicy, FlowControl, HeartbeatPolicy, RepairPolicy
from brokerless.multicast.publisher import Publisher
from brokerless.multicast.receive.batch import Batch
from brokerless.multicast.receive.io import Stale
from brokerless.multicast.request_server import RequestServer
from brokerless.multicast.sockets import SocketFault
from brokerless.multicast.subscriber import Subscriber

__all__ = [
    "AnswerPolicy",
    "Batch",
    "FlowControl",
    "HeartbeatPolicy",
    "Publisher",
    "PublisherCounters",
    "RepairPolicy",
    "RequestServer",
    "RequestServerCounters",
    "SocketFault",
    "Stale",
    "Subscriber",
    "SubscriberCounters",
]
