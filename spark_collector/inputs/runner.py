"""The thread of an input: runs its loop, and starts it again with back-off when it fails."""

import logging
import random
import threading
from collections.abc import Callable

from brokerless.core import Backoff
from brokerless.core.errors import BrokerlessError, Closed
from brokerless.spark_collector.collector import Collector, InputStatus

log = logging.getLogger(__name__)
# A disk that is full or a peer that is away: try soon, then every ten seconds.
RETRY = Backoff(first_s=0.2, limit_s=10.0)


class Runner:
    """Owns one thread. `loop` returns when `stopping` is set; if it raises, it is called again."""

    def __init__(self, status: InputStatus, loop: Callable[[Collector], None]) -> None:
        self.status = status
        self.stopping = threading.Event()
        self._loop = loop
        self._thread: threading.Thread | None = None

    def start(self, collector: Collector) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(collector,), name=f"input {self.status.name}", daemon=True
        )
        self._thread.start()

    def _run(self, collector: Collector) -> None:
        attempt = 0
        while not self.stopping.is_set():
            before = collector.counters.events
            try:
                self._loop(collector)
                self.status.error = ""
            except Closed:
                return
            except (BrokerlessError, OSError) as error:
                self.status.error = str(error)
                self.status.connected = False
                collector.counters.restarts += 1
                log.error("input %s: %s", self.status.name, error)
                attempt = 0 if collector.counters.events > before else attempt + 1
                self.stopping.wait(RETRY.delay_s(attempt, random.random))

    def stop(self) -> None:
        """Ask the loop to end and wait for it."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join()
