"""`brokerless.multicast`: MoldUDP64 on loopback, without repair, with a journal in memory, on disk."""

from collections.abc import Iterable
from functools import partial
from itertools import islice

from brokerless.losstest.adapters.base import (
    Consumer,
    Loss,
    Message,
    Position,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.adapters.direct import (
    BATCH,
    COMMIT_EVERY_S,
    TOPIC,
    JournalKind,
    declared,
    make_journal,
)
from brokerless.losstest.adapters.udp import CHARGE
from brokerless.losstest.model import Promise, Traits
from brokerless.losstest.relay import CONSUMER_GROUP, PRODUCER_GROUP

SESSION = "LOSS"
GIVE_UP_S = 5.0  # the default of 10 s is most of a run's drain; still many times every retry


def _consumer_group(setup: Setup) -> str:
    """With a relay in between, consumers listen to another group than the producer sends to."""
    relayed = setup.listen(0)[0] != setup.connect(0)[0]
    return f"{CONSUMER_GROUP if relayed else PRODUCER_GROUP}:{setup.ports[0]}"


class MulticastProducer(Producer):
    """A Publisher on 127.0.0.1 with TTL 0; its request server answers from the journal."""

    def __init__(self, setup: Setup, *, kind: JournalKind) -> None:
        from brokerless.core.errors import JournalError, JournalFull
        from brokerless.multicast import Publisher

        self._refusals = (JournalFull, JournalError)
        host, port = setup.listen(setup.consumers)
        self._publisher = Publisher(
            f"{PRODUCER_GROUP}:{setup.ports[0]}",
            SESSION,
            journal=make_journal(kind, setup),
            requests=None if kind == "none" else f"{host}:{port}",
        )

    def send(self, data: bytes) -> Position:
        """Publish; a full or failing journal refuses."""
        try:
            receipt = self._publisher.publish(TOPIC, data)
        except self._refusals as error:
            raise Rejected(str(error)) from error
        return Position(receipt.epoch, receipt.offset)

    def close(self) -> None:
        self._publisher.close()


class MulticastConsumer(Consumer):
    """A Subscriber, with a cursor file where there is a journal to ask."""

    def __init__(self, setup: Setup, *, kind: JournalKind) -> None:
        from brokerless.multicast import RepairPolicy, Subscriber

        host, port = setup.connect(setup.consumers)
        self._losses: list[Loss] = []
        repairs = kind != "none"
        self._subscriber = Subscriber(
            _consumer_group(setup),
            SESSION,
            request_servers=[f"{host}:{port}"] if repairs else [],
            start="cursor" if repairs else "live",
            cursor=setup.state / "cursor" if repairs else None,
            commit_every_s=COMMIT_EVERY_S,
            repair=RepairPolicy(give_up_s=GIVE_UP_S),
            receive_buffer_bytes=max(4096, setup.buffer_events * (CHARGE + setup.size) // 2),
            on_loss=lambda lost: self._losses.append(declared(lost)),
        )
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        for event in islice(self._subscriber.events(timeout_s), BATCH):
            yield Message(event.data)

    def losses(self) -> list[Loss]:
        told, self._losses = self._losses, []
        return told

    def close(self) -> None:
        self._open = False
        self._subscriber.close()


_GONE = Promise(
    "must", ("offline", "in_flight", "gave_up", "overflow_receiver"), "nothing repairs what was missed"
)
_LINK = Promise("must", ("in_flight", "gave_up"), "nothing repairs a lost datagram")
_FULL = Promise(
    "must", ("overflow_receiver", "gave_up", "in_flight"), "the kernel drops, and nothing repairs it"
)
_EVICTED = Promise(
    "must", ("evicted",), "retention was shorter than the outage: exactly the evicted are lost"
)
_CRASH = Promise("may", ("producer_crash",), "a journal in memory dies with the producer")


def _promises(kind: JournalKind) -> dict[str, Promise]:
    if kind == "none":
        return {
            **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late"), _GONE),
            **dict.fromkeys(("loss", "burst", "partition", "partition-to"), _LINK),
            "pause-long": _FULL,
            "reorder": Promise(
                "may", ("in_flight", "gave_up"), "what comes later than the reorder wait is given up"
            ),
            "producer-kill": Promise(
                "may", ("producer_crash", "offline", "gave_up"), "a new session is found late"
            ),
        }
    result = {"beyond-retention": _EVICTED}
    return result | {"producer-kill": _CRASH} if kind == "memory" else result


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
            journal=kind,
            link="multicast",
            connects="consumer",
            ports=1,  # the request server
            overflow_at="receiver",
            quiet_s=1.0 if kind == "none" else 2.5,  # heartbeats come every second when a stream is idle
            promises=_promises(kind),
            summary=f"MoldUDP64 multicast, {what[kind]}",
        ),
    )


TRANSPORTS = [_transport(kind) for kind in ("none", "memory", "disk")]
