"""When staged events are sent: at once when idle, in batches when busy, and never later than `max_wait_s`.

The publisher calls `tick` after every event. If the last frame went out long enough ago, the frame goes out
in the caller's thread: no hand-over, no waking of threads. Otherwise the event waits for company; the next
call that finds the time come sends them all. A thread sends what nobody else does, because publishing stopped;
it sleeps without cost as long as there is nothing to do.

How long "long enough" is follows the load: it doubles while frames are well filled and halves while they
are not, between 100 µs (10,000 small frames a second cost a tenth of one core) and `max_wait_s`.
"""

import logging
import threading
import time

from brokerless.core import Journal
from brokerless.core.errors import BrokerlessError
from brokerless.direct.counters import PublisherCounters

log = logging.getLogger(__name__)
_SHORTEST_NS = 100_000
_WELL_FILLED = 64
_SPARSE = 16
# So many empty rounds of at most `max_wait_s` until the thread goes to sleep for good.
_IDLE_ROUNDS = 50


class Flusher:
    """Owns the thread; `stop` joins it."""

    __slots__ = (
        "_armed",
        "_awake",
        "_counters",
        "_due",
        "_failing",
        "_interval",
        "_journal",
        "_longest",
        "_shortest",
        "_stopping",
        "_thread",
    )

    def __init__(
        self, journal: Journal, max_wait_s: float, counters: PublisherCounters, *, name: str
    ) -> None:
        self._journal = journal
        self._counters = counters
        self._longest = int(max_wait_s * 1e9)
        self._shortest = min(_SHORTEST_NS, self._longest)
        self._interval = self._shortest
        self._due = 0
        self._armed = False
        self._failing = False
        self._stopping = False
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"brokerless flush {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and join; what is staged stays staged."""
        self._stopping = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()

    def tick(self, now: int) -> None:
        """An event was staged at `now` (ns since 1970): send, or see to it that somebody will."""
        if now >= self._due or self._due - now > self._longest:  # the second: the clock was set back
            self._flush(now)
        elif not self._armed:
            self._armed = True
            self._awake.set()

    def _flush(self, now: int) -> None:
        try:
            frame = self._journal.flush()
        except BrokerlessError as error:
            # The events stay accepted and staged. The caller's next one is refused if there is no room left.
            self._counters.flush_errors += 1
            if not self._failing:
                log.error("batch not written, it will be tried again: %s", error)
            self._failing = True
            self._due = now + self._longest
            return
        self._failing = False
        if frame is not None:
            filled = frame.header.count
            if filled >= _WELL_FILLED:
                self._interval = min(self._longest, self._interval * 2)
            elif filled < _SPARSE:
                self._interval = max(self._shortest, self._interval // 2)
        self._due = now + self._interval

    def _run(self) -> None:
        idle = 0
        while not self._stopping:
            if not self._armed:
                idle = 0
                self._awake.wait()
                self._awake.clear()
                continue
            now = time.time_ns()
            left = self._due - now
            if 0 < left <= self._longest:
                time.sleep(left / 1e9)
            elif self._journal.staged:
                idle = 0
                self._flush(now)
            else:
                idle += 1
                if idle < _IDLE_ROUNDS:
                    time.sleep(self._longest / 1e9 or 0.001)
                else:
                    # First the flag, then a last look: whoever stages after that sees the flag and wakes us.
                    self._armed = False
                    if self._journal.staged:
                        self._armed = True
