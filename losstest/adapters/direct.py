"""`brokerless.direct` over ZeroMQ and NNG: fan-out and groups, without a journal, in memory, on disk."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from brokerless.losstest.adapters.base import Consumer, Loss, Message, Setup, Transport
from brokerless.losstest.adapters.journaled import (
    COMMIT_EVERY_S,
    EVICTED,
    MEMORY_CRASH,
    JournaledConsumer,
    JournaledProducer,
    JournalKind,
    make_journal,
)
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    from brokerless.direct import Publisher, Subscriber, Worker

# A killed worker's events come again after this at the latest; the default is for real handlers.
LEASE_S = 1.0
MIN_LEASE_S = 0.25  # a busy machine needs that to acknowledge
PREFETCH = 64
MAX_LIVE_QUEUE = 8192  # what the library takes
# Without a journal an event waits for a worker with room: as long as by default, or as the scenario's buffers last.
UNCLAIMED_S = 1.0


def _ports(setup: Setup, producer: int) -> tuple[int, int]:
    """Of a producer: the control socket's port, and that of its live stream."""
    if not producer:
        return setup.ports[0], setup.ports[setup.consumers]
    first = setup.consumers + 1 + 2 * (producer - 1)
    return setup.ports[first], setup.ports[first + 1]


def _live_queue(setup: Setup) -> int:
    """The buffers in front of a slow subscriber, at both ends: over NNG its own drops when it is full."""
    return min(MAX_LIVE_QUEUE, max(2, setup.buffer_events))


def _addresses(setup: Setup, scheme: str) -> list[str]:
    """Where consumers reach the producers."""
    host = setup.connect(0)[0]
    return [f"{scheme}://{host}:{_ports(setup, producer)[0]}" for producer in range(setup.producers)]


class DirectProducer(JournaledProducer):
    """A Publisher."""

    def __init__(self, setup: Setup, *, scheme: str, kind: JournalKind) -> None:
        super().__init__(setup, kind=kind, scheme=scheme)
        self._evicted: dict[str, int] = {}
        self._replays = kind != "none"

    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> "Publisher":
        from brokerless.direct import Publisher

        control, live = _ports(setup, setup.index)
        host = setup.listen_host
        return Publisher(
            f"{scheme}://{host}:{control}",
            source=f"losstest-{setup.index}",
            journal=make_journal(kind, setup),
            live=f"{scheme}://{host}:{live}",
            live_queue=_live_queue(setup),
            unclaimed_s=min(UNCLAIMED_S, setup.buffer_events / setup.rate),
        )

    def pending(self) -> int:
        """What groups have not had; all of it while nobody is connected who could have it."""
        publisher = self._publisher
        workers = sum(group.workers for group in publisher.groups().values())
        if self._replays and not workers and not publisher.subscribers:
            return int(publisher.journal.next - publisher.journal.oldest)
        return sum(group.pending for group in publisher.groups().values())

    def losses(self) -> list[Loss]:
        """What groups lost by eviction while none of their workers was there to be told.

        The publisher tells a number; the range ends at the group's cursor. Its beginning is widened by what
        workers may have held and acknowledged in between: those are not missing, so they are not counted.
        """
        found = []
        for name, group in self._publisher.groups().items():
            evicted = group.lost_by_reason.get("evicted", 0)
            newly = evicted - self._evicted.get(name, 0)
            if newly > 0:
                self._evicted[name] = evicted
                first = max(0, group.cursor - newly - PREFETCH)
                found.append(Loss(self._publisher.journal.epoch, first, group.cursor - 1, "evicted"))
        return found


class DirectSubscriber(JournaledConsumer):
    """A Subscriber with a cursor file, or live only where there is no journal to replay from."""

    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> "Subscriber":
        from brokerless.direct import Subscriber

        return Subscriber(
            _addresses(setup, scheme),
            start="live" if kind == "none" else "cursor",
            cursor=None if kind == "none" else setup.state / "cursor",
            live_queue=_live_queue(setup),
            commit_every_s=COMMIT_EVERY_S,
            on_loss=self.lost,
        )


class DirectWorker(JournaledConsumer):
    """A Worker of a group; acknowledges after the effect is recorded."""

    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> "Worker":
        from brokerless.direct import Worker

        return Worker(
            _addresses(setup, scheme),
            group="losstest",
            lease_s=max(MIN_LEASE_S, LEASE_S / setup.compress),
            prefetch=PREFETCH,
            max_deliver=1000,  # faults here last longer than a few attempts; giving up is another test
            on_loss=self.lost,
        )

    def messages(self, timeout_s: float) -> Iterable[Message]:
        return (
            Message(d.event.data, ack=d.ack, attempt=d.attempt) for d in self._source.deliveries(timeout_s)
        )


_AWAY = Promise(
    "must",
    ("offline", "in_flight", "overflow_sender"),
    "no journal: what a subscriber missed cannot be sent again",
)
_FULL = Promise(
    "may", ("overflow_sender", "offline"), "no journal: what the live queue dropped cannot be sent again"
)
_HELD = Promise(
    "may", ("overflow_sender", "in_flight", "offline"), "no journal: a cut link loses what overflows"
)
_CRASH = Promise(
    "may",
    ("producer_crash", "offline", "overflow_sender"),
    "no journal: what was not sent dies with the producer",
)
_EVICTED_GROUP = Promise(
    "must",
    ("evicted", "in_flight"),
    "as for fan-out; what the killed worker held was evicted before it could come again",
)
_BUG = Promise("may", ("in_flight",), "the worker acknowledged and died: no producer can repair that")
_OUTAGES = ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late")


# A group without a journal: one worker gets each event, once, if it has room in time.
_ONCE = Promise(
    "may",
    ("offline", "overflow_sender", "in_flight"),
    "no journal: an event waits 1 s for a worker with room, and what a worker held when it left is gone; "
    "until a dead worker is missed, its absence looks like a lack of room",
)
_NO_ROOM = Promise(
    "may", ("overflow_sender",), "no journal: an event waits 1 s for a worker with room, or less"
)
_BEFORE = Promise("must", ("offline",), "no journal: a group begins with its first worker")
_CRASH_ONCE = Promise(
    "may",
    ("producer_crash", "offline", "overflow_sender"),
    "no journal: what waited dies with the producer, and a new one has no group until a worker has found it",
)


def promises(kind: JournalKind, group: bool) -> dict[str, Promise]:
    """What each kind of journal promises."""
    if kind == "none" and group:
        return {
            **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling"), _ONCE),
            **dict.fromkeys(("partition", "partition-to", "partition-from", "ack-then-die"), _ONCE),
            **dict.fromkeys(("pause-long", "slow", "pause-short", "bandwidth", "latency"), _NO_ROOM),
            **dict.fromkeys(("reset", "random"), _ONCE),
            "late": _BEFORE,
            "producer-kill": _CRASH_ONCE,
        }
    if kind == "none":
        return {
            **dict.fromkeys(_OUTAGES, _AWAY),
            **dict.fromkeys(("pause-long", "slow", "pause-short", "bandwidth", "latency"), _FULL),
            **dict.fromkeys(("partition", "partition-to", "partition-from", "reset", "random"), _HELD),
            "producer-kill": _CRASH,
        }
    result = {"beyond-retention": _EVICTED_GROUP if group else EVICTED}
    if group:
        result["ack-then-die"] = _BUG
    if kind == "memory":
        result["producer-kill"] = MEMORY_CRASH
    return result


def _missing_nng() -> str:
    return "" if find_spec("pynng") else "the package pynng (pip install 'brokerless[nng]')"


def _transport(library: str, kind: JournalKind, group: bool) -> Transport:
    scheme = "tcp" if library == "zmq" else "nng+tcp"
    shape = "group" if group else "fanout"
    consumer: Callable[..., Consumer] = DirectWorker if group else DirectSubscriber
    memory = {"none": "no journal", "memory": "journal in memory", "disk": "journal on disk"}[kind]
    return Transport(
        f"{library}-{shape}-{kind}",
        partial(DirectProducer, scheme=scheme, kind=kind),
        partial(consumer, scheme=scheme, kind=kind),
        Traits(
            family="direct",
            enclosed=True,
            journal=kind,
            link="tcp",
            connects="consumer",
            ports=1,  # the live stream beside the control socket
            compressible=True,  # what it waits for is far below a second, but for the lease
            many_producers=kind != "none",  # without a journal, who is not connected yet misses something
            ports_per_producer=2,
            group=group,
            acks=group,
            # Missed heartbeats (0.75 s) and the back-off of HELLO (up to 1 s) come before a late repair; a
            # worker notices a new publisher within 3 s.
            quiet_s=3.5 if group else 1.0 if kind == "none" else 2.0,
            promises=promises(kind, group),
            summary=f"direct over {'ZeroMQ' if library == 'zmq' else 'NNG'}, {shape}, {memory}",
        ),
        _missing_nng if library == "nng" else lambda: "",
        (
            "zmq",
            "brokerless.direct",
            *(["pynng", "brokerless.direct.io.nng"] if library == "nng" else []),
        ),
    )


TRANSPORTS = [
    _transport(library, kind, group)
    for group in (False, True)
    for library in ("zmq", "nng")
    for kind in ("none", "memory", "disk")
]
