"""`brokerless.multicast`: MoldUDP64 on loopback, without repair, with a journal in memory, on disk."""

from functools import partial
from typing import TYPE_CHECKING

from brokerless.losstest.adapters.base import Setup, Transport
from brokerless.losstest.adapters.journaled import (
    COMMIT_EVERY_S,
    EVICTED,
    MEMORY_CRASH,
    JournaledConsumer,
    JournaledProducer,
    JournalKind,
    make_journal,
)
from brokerless.losstest.adapters.udp import CHARGE
from brokerless.losstest.faults.relay import CONSUMER_GROUP, PRODUCER_GROUP
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    from brokerless.multicast import Publisher, Subscriber

SESSION = "LOSS"


def _consumer_group(setup: Setup) -> str:
    """With a relay in between, consumers listen to another group than the producer sends to."""
    relayed = setup.listen(0)[0] != setup.connect(0)[0]
    return f"{CONSUMER_GROUP if relayed else PRODUCER_GROUP}:{setup.ports[0]}"


class MulticastProducer(JournaledProducer):
    """A Publisher on 127.0.0.1 with TTL 0; its request server answers from the journal."""

    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> "Publisher":
        from brokerless.multicast import Publisher

        host, port = setup.listen(setup.consumers)
        return Publisher(
            f"{PRODUCER_GROUP}:{setup.ports[0]}",
            SESSION,
            journal=make_journal(kind, setup),
            requests=None if kind == "none" else f"{host}:{port}",
        )


class MulticastConsumer(JournaledConsumer):
    """A Subscriber, with a cursor file where there is a journal to ask."""

    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> "Subscriber":
        from brokerless.multicast import RepairPolicy, Subscriber

        host, port = setup.connect(setup.consumers)
        repairs = kind != "none"
        return Subscriber(
            _consumer_group(setup),
            SESSION,
            request_servers=[f"{host}:{port}"] if repairs else [],
            start="cursor" if repairs else "live",
            cursor=setup.state / "cursor" if repairs else None,
            commit_every_s=COMMIT_EVERY_S,
            repair=RepairPolicy(give_up_s=setup.patience_s),
            receive_buffer_bytes=max(4096, setup.buffer_events * (CHARGE + setup.size) // 2),
            on_loss=self.lost,
        )


_GONE = Promise("must", ("offline", "in_flight"), "nothing repairs what was missed")
_LINK = Promise("must", ("in_flight",), "nothing repairs a lost datagram")
_FULL = Promise("must", ("overflow_receiver",), "the kernel drops, and nothing repairs it")


_PASSED = Promise("may", ("in_flight",), "what comes later than the reorder wait counts as lost")


def _promises(kind: JournalKind) -> dict[str, Promise]:
    if kind == "none":
        return {
            **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late"), _GONE),
            **dict.fromkeys(("loss", "burst", "partition", "partition-to"), _LINK),
            "pause-long": _FULL,
            "random": Promise("may", ("offline", "in_flight", "overflow_receiver"), "nothing is repaired"),
            **dict.fromkeys(("reorder", "latency"), _PASSED),
            "producer-kill": Promise(
                "may",
                ("producer_crash", "offline"),
                "the last datagrams of a killed producer may never leave; a new session is found late",
            ),
        }
    result = {"beyond-retention": EVICTED}
    return result | {"producer-kill": MEMORY_CRASH} if kind == "memory" else result


def _transport(kind: JournalKind) -> Transport:
    what = {
        "none": "without repair",
        "memory": "retransmit buffer in memory",
        "disk": "retransmit buffer on disk",
    }
    return Transport(
        f"mcast-{kind}",
        partial(MulticastProducer, kind=kind),
        partial(MulticastConsumer, kind=kind),
        Traits(
            family="multicast",
            enclosed=True,
            journal=kind,
            link="multicast",
            connects="consumer",
            ports=1,  # the request server
            overflow_at="receiver",
            quiet_s=1.0 if kind == "none" else 2.5,  # heartbeats come every second when a stream is idle
            promises=_promises(kind),
            summary=f"MoldUDP64 multicast, {what[kind]}",
        ),
        preload=("brokerless.multicast",),
    )


TRANSPORTS = [_transport(kind) for kind in ("none", "memory", "disk")]
