"""What `direct` and `multicast` have in common: publishers with a journal, consumers that are told what is lost."""

from abc import abstractmethod
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from brokerless.losstest.adapters.base import Consumer, Loss, Message, Position, Producer, Rejected, Setup
from brokerless.losstest.model import Promise

if TYPE_CHECKING:
    from brokerless.core import Journal, Lost

JournalKind = Literal["none", "memory", "disk"]
TOPIC = "losstest"
BATCH = 64  # events between two looks at the supervisor's instructions
# A killed subscriber repeats at most this; the default of 1 s would be most of a quick run.
COMMIT_EVERY_S = 0.1
EVICTED = Promise("must", ("evicted",), "retention was shorter than the outage: exactly the evicted are lost")
MEMORY_CRASH = Promise("may", ("producer_crash",), "a journal in memory dies with the producer")


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
    fsync: Literal["never", "batch"] = "batch" if setup.sync else "never"
    return DiskJournal(setup.state / "journal", retention=retention, fsync=fsync, segment_bytes=segment)


class JournaledProducer(Producer):
    """A `Publisher` of either package, made by `open()`."""

    def __init__(self, setup: Setup, *, kind: JournalKind, scheme: str = "") -> None:
        from brokerless.core.errors import JournalError, JournalFull

        self._refusals = (JournalFull, JournalError)
        self._publisher = self.open(setup, kind, scheme)

    @abstractmethod
    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> Any:
        """Make the publisher; `scheme` is that of its address, where there is a choice."""

    def send(self, data: bytes) -> Position:
        """Publish; a full or failing journal refuses."""
        try:
            receipt = self._publisher.publish(TOPIC, data)
        except self._refusals as error:
            raise Rejected(str(error)) from error
        return Position(receipt.epoch, receipt.offset)

    def close(self) -> None:
        self._publisher.close()


class JournaledConsumer(Consumer):
    """A `Subscriber` or `Worker` of either package, made by `open()`, which is to tell losses to `lost()`."""

    def __init__(self, setup: Setup, *, kind: JournalKind, scheme: str = "") -> None:
        self._losses: list[Loss] = []
        self._source = self.open(setup, kind, scheme)
        self._repairs = kind != "none" and hasattr(self._source, "ledger")
        self._closed = False

    @abstractmethod
    def open(self, setup: Setup, kind: JournalKind, scheme: str) -> Any:
        """Make the consumer, with `on_loss=self.lost`."""

    def lost(self, lost: "Lost") -> None:
        """The library's `Lost` as the loss test's. One topic only, so offsets and seqs are the same numbers."""
        self._losses.append(Loss(lost.epoch, lost.first, lost.last, str(lost.reason)))

    def messages(self, timeout_s: float) -> Iterable[Message]:
        """What has arrived, without an end while more comes."""
        return (Message(event.data) for event in self._source.events(timeout_s))

    def receive(self, timeout_s: float) -> Iterable[Message]:
        return () if self._closed else islice(self.messages(timeout_s), BATCH)

    def pending(self) -> int:
        """Gaps that the ledger knows, as long as there is a journal to repair them from."""
        return int(self._source.ledger.account().pending) if self._repairs and not self._closed else 0

    def losses(self) -> list[Loss]:
        told, self._losses = self._losses, []
        return told

    def close(self) -> None:
        self._closed = True
        self._source.close()
