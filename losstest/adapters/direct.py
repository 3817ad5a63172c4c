"""`brokerless.direct` over ZeroMQ and NNG: fan-out and groups, without a journal, in memory, on disk."""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Literal

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
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    from brokerless.core import Journal, Lost

JournalKind = Literal["none", "memory", "disk"]
TOPIC = "losstest"
BATCH = 64  # events between two looks at the supervisor's orders
COMMIT_EVERY_S = (
    0.1  # a killed subscriber repeats at most this; the default of 1 s would be most of a quick run
)
LEASE_S = (
    1.0  # a killed worker's events come again after this at the latest; the default is for real handlers
)
PREFETCH = 64


def make_journal(kind: JournalKind, setup: Setup) -> "Journal | None":
    """The journal of a producer, as large as the scenario says."""
    from brokerless.core import DiskJournal, MemoryJournal, Retention

    retention = Retention(max_events=setup.retention_events)
    if kind == "none":
        return None
    if kind == "memory":
        return MemoryJournal(retention=retention)
    # Small segments: retention drops whole ones, and a scenario's retention is a few hundred events.
    segment = max(16 * 1024, setup.retention_events * setup.size // 16)
    return DiskJournal(setup.state / "journal", retention=retention, fsync="never", segment_bytes=segment)


def declared(lost: "Lost") -> Loss:
    """The library's word as the loss test's. One topic only, so offsets and seqs are the same numbers."""
    return Loss(lost.epoch, lost.first, lost.last, str(lost.reason))


class DirectProducer(Producer):
    """A Publisher."""

    def __init__(self, setup: Setup, *, scheme: str, kind: JournalKind) -> None:
        from brokerless.core.errors import JournalError, JournalFull
        from brokerless.direct import Publisher

        self._refusals = (JournalFull, JournalError)
        self._lost: dict[str, int] = {}
        self._replays = kind != "none"
        host, port = setup.listen(0)
        live = setup.listen(setup.consumers)[1]
        self._publisher = Publisher(
            f"{scheme}://{host}:{port}",
            source="losstest",
            journal=make_journal(kind, setup),
            live=f"{scheme}://{host}:{live}",
            # The live queue is the buffer in front of a slow subscriber; the scenario sizes it.
            live_queue=min(8192, max(2, setup.buffer_events)),
        )

    def send(self, data: bytes) -> Position:
        """Publish; a full or failing journal refuses."""
        try:
            receipt = self._publisher.publish(TOPIC, data)
        except self._refusals as error:
            raise Rejected(str(error)) from error
        return Position(receipt.epoch, receipt.offset)

    def pending(self) -> int:
        """What groups have not had; all of it while nobody is connected who could have it."""
        publisher = self._publisher
        workers = sum(group.workers for group in publisher.groups().values())
        if self._replays and not workers and not publisher.subscribers:
            return publisher.journal.next - publisher.journal.oldest
        return sum(group.pending for group in publisher.groups().values())

    def losses(self) -> list[Loss]:
        """What groups lost by eviction while none of their workers was there to be told.

        The publisher tells a number; the range ends at the group's cursor. Its beginning is widened by what
        workers may have held and acknowledged in between: those are not missing, so they are not counted.
        """
        found = []
        for name, group in self._publisher.groups().items():
            newly = group.lost - self._lost.get(name, 0)
            if newly > 0:
                self._lost[name] = group.lost
                first = max(0, group.cursor - newly - PREFETCH)
                found.append(Loss(self._publisher.journal.epoch, first, group.cursor - 1, "evicted"))
        return found

    def close(self) -> None:
        self._publisher.close()


class DirectSubscriber(Consumer):
    """A Subscriber with a cursor file, or live only where there is no journal to replay from."""

    def __init__(self, setup: Setup, *, scheme: str, kind: JournalKind) -> None:
        from brokerless.direct import Subscriber

        host, port = setup.connect(0)
        self._losses: list[Loss] = []
        cursor = setup.state / "cursor"
        self._subscriber = Subscriber(
            f"{scheme}://{host}:{port}",
            start="live" if kind == "none" else "cursor",
            cursor=None if kind == "none" else cursor,
            commit_every_s=COMMIT_EVERY_S,
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


class DirectWorker(Consumer):
    """A Worker of a group; acknowledges after the effect is recorded."""

    def __init__(self, setup: Setup, *, scheme: str, kind: JournalKind) -> None:
        from brokerless.direct import Worker

        host, port = setup.connect(0)
        self._losses: list[Loss] = []
        self._worker = Worker(
            f"{scheme}://{host}:{port}",
            group="losstest",
            lease_s=LEASE_S,
            prefetch=PREFETCH,
            max_deliver=1000,  # faults here last longer than a few attempts; giving up is another test
            on_loss=lambda lost: self._losses.append(declared(lost)),
        )
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        for delivery in islice(self._worker.deliveries(timeout_s), BATCH):
            yield Message(delivery.event.data, ack=delivery.ack, attempt=delivery.attempt)

    def losses(self) -> list[Loss]:
        told, self._losses = self._losses, []
        return told

    def close(self) -> None:
        self._open = False
        self._worker.close()


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
_MEMORY_CRASH = Promise("may", ("producer_crash",), "a journal in memory dies with the producer")
_EVICTED = Promise(
    "must", ("evicted",), "retention was shorter than the outage: exactly the evicted are lost"
)
_EVICTED_GROUP = Promise(
    "must",
    ("evicted", "in_flight"),
    "as for fan-out; what the killed worker held was evicted before it could come again",
)
_BUG = Promise("may", ("in_flight",), "the worker acknowledged and died: no producer can repair that")
_OUTAGES = ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late")


def promises(kind: JournalKind, group: bool) -> dict[str, Promise]:
    """What each kind of journal promises."""
    result: dict[str, Promise] = {"ack-then-die": _BUG} if group else {}
    if kind == "none":
        result |= dict.fromkeys(_OUTAGES, _AWAY)
        result |= dict.fromkeys(("pause-long", "slow", "pause-short"), _FULL)
        result |= dict.fromkeys(("partition", "partition-to", "partition-from"), _HELD)
        return result | {"producer-kill": _CRASH}
    result["beyond-retention"] = _EVICTED_GROUP if group else _EVICTED
    if kind == "memory":
        result["producer-kill"] = _MEMORY_CRASH
    return result


def _missing(library: str) -> Callable[[], str]:
    def missing() -> str:
        if library == "nng" and find_spec("pynng") is None:
            return "the package pynng (pip install 'brokerless[nng]')"
        with contextlib.suppress(ImportError):
            import brokerless.direct  # noqa: F401

            return ""
        return "brokerless.direct"

    return missing


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
            journal=kind,
            link="tcp",
            connects="consumer",
            ports=1,  # the live stream beside the control socket
            group=group,
            acks=group,
            # Missed heartbeats (0.75 s) and a greeting's back-off (up to 1 s) come before a late repair; a
            # worker notices a new publisher within 3 s.
            quiet_s=1.0 if kind == "none" else 3.5 if group else 2.0,
            promises=promises(kind, group),
            summary=f"direct over {'ZeroMQ' if library == 'zmq' else 'NNG'}, {shape}, {memory}",
        ),
        _missing(library),
    )


TRANSPORTS = [
    _transport(library, kind, group)
    for group in (False, True)
    for library in ("zmq", "nng")
    for kind in ("none", "memory", "disk")
    if not (group and kind == "none")  # a publisher without a journal refuses groups: it could not redeliver
]
