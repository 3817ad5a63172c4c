"""What inputs and the collector know of each other, and the thread that every input runs in.

Inputs depend on the `CollectorInterface` here, never on the collector itself.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from brokerless.core import Backoff, Frame, Lost, Position
from brokerless.core.errors import BrokerlessError, Closed
from brokerless.spark_collector.collector.counters import CollectorCounters

log = logging.getLogger(__name__)
# A disk that is full or a peer that is away: try soon, then every ten seconds.
RETRY = Backoff(first_s=0.2, limit_s=10.0)
Ack = Callable[[], None]


class InputStatus(msgspec.Struct):
    """The state of one input. `behind`: events known to exist and not yet in the spool, -1 if unknown."""

    name: str
    transport: str
    connected: bool = False
    behind: int = -1
    events: int = 0
    error: str = ""


class CollectorInterface(Protocol):
    """What an input may ask of the collector. All methods can be called from any thread."""

    name: str
    path: str  # the spool's directory: inputs keep their own files there
    fsync: Literal["never", "interval", "batch"]
    counters: CollectorCounters

    def accept(
        self,
        transport: str,
        frames: Sequence[Frame],
        ack: Ack | None = None,
        *,
        received: int | None = None,
        complete: bool = False,
    ) -> int:
        """Append what is new of these frames; returns the number of new events."""
        ...

    def sent_counts(self, transport: str, source: str, epoch: int, offset: int, seqs: dict[str, int]) -> None:
        """Record a producer's statement of its next offset and next seqs."""
        ...

    def all_received(self, transport: str, source: str, epoch: int, offset: int) -> None:
        """Record that everything before `offset` was received and nothing more was sent."""
        ...

    def lost(self, transport: str, lost: Lost) -> None:
        """Record that these events will not come."""
        ...

    def flush(self) -> None:
        """Sync what was appended and give the acknowledgements that wait for it."""
        ...

    def positions(self) -> dict[str, Position]:
        """The position after the newest spooled event, per source."""
        ...

    def resume(self, source: str, epochs: list[tuple[int, int]], end: int) -> int:
        """The first offset of a journal that is not in the spool."""
        ...


class CollectorInput(Protocol):
    """Something that feeds a collector, in a thread of its own between `start` and `stop`."""

    status: InputStatus

    def start(self, sink: CollectorInterface) -> None:
        """Begin; returns at once."""
        ...

    def stop(self) -> None:
        """End, and join the thread. What was not acknowledged is delivered again."""
        ...


class InputThread:
    """Runs `loop` until `stopping` is set; if it raises, it is called again with back-off."""

    def __init__(self, status: InputStatus, loop: Callable[[CollectorInterface], None]) -> None:
        self.status = status
        self.stopping = threading.Event()
        self._loop = loop
        self._thread: threading.Thread | None = None

    def start(self, sink: CollectorInterface) -> None:
        """Start the thread."""
        name = f"input {self.status.name}"
        self._thread = threading.Thread(target=self._run, args=(sink,), name=name, daemon=True)
        self._thread.start()

    def _run(self, sink: CollectorInterface) -> None:
        attempt = 0
        while not self.stopping.is_set():
            before = self.status.events
            try:
                self._loop(sink)
                self.status.error = ""
            except Closed:
                return
            except Exception as error:  # whatever it is, an input that ends for good would lose data silently
                expected = isinstance(error, (BrokerlessError, OSError))
                self.status.error = str(error) if expected else f"{type(error).__name__}: {error}"
                self.status.connected = False
                sink.counters.restarts += 1
                log.error("input %s: %s", self.status.name, self.status.error, exc_info=not expected)
                attempt = 0 if self.status.events > before else attempt + 1
                self.stopping.wait(RETRY.delay_s(attempt, random.random))

    def stop(self) -> None:
        """Ask the loop to end and wait for it."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join()
