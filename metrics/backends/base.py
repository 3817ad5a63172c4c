"""Where flushes go. Each backend has its own thread and short queue: a slow one holds up nobody."""

import os
import queue
import random
import select
import threading
import time
from abc import ABC, abstractmethod

from brokerless.core.errors import BrokerlessError
from brokerless.core.rate_limit import Backoff
from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.counters import BackendCounters
from brokerless.metrics.numbers import format_number

# A minute of windows at the default interval: a Graphite that restarts gets all of them. Beyond that the
# oldest window is dropped and counted: newer figures matter more.
MAX_WAITING = 6
# Carbon answers nothing, so a connection that takes longer than this is stuck.
SEND_TIMEOUT_S = 10.0
# A reader of the console that takes nothing for this long.
STUCK_S = 1.0


class Backend(ABC):
    """Takes flushes by `put`, which never blocks, and delivers them in its own thread, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = BackendCounters()
        self.last_error = ""
        self._queue: queue.Queue[Flush | None] = queue.Queue(MAX_WAITING)
        self._stopping = threading.Event()
        self._give_up_at = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name.partition(':')[0]}")
        self._thread.start()

    def put(self, flush: Flush) -> None:
        """Hand over a flush; when too many wait, the oldest is dropped."""
        while True:
            try:
                self._queue.put_nowait(flush)
                return
            except queue.Full:
                try:
                    self._queue.get_nowait()
                    self.counters.dropped += 1
                except queue.Empty:
                    continue

    def _run(self) -> None:
        retry = Backoff(first_s=0.2, limit_s=5.0)
        while (flush := self._queue.get()) is not None:
            attempt = 0
            while True:
                try:
                    self.counters.bytes += self.deliver(flush)
                    self.counters.flushes += 1
                    break
                except (OSError, BrokerlessError) as error:
                    self.counters.errors += 1
                    self.last_error = str(error)
                    # A queue that is full has a newer window for this one's place.
                    if self._queue.full() or time.monotonic() >= self._give_up_at:
                        self.counters.dropped += 1
                        break
                    self._stopping.wait(retry.delay_s(attempt, random.random))
                    attempt += 1
                except Exception as error:
                    # A window that cannot be written down at all must not cost those that follow.
                    self.counters.errors += 1
                    self.counters.dropped += 1
                    self.last_error = repr(error)
                    break
            # Freeing 100,000 points takes time, best spent before the next window.
            del flush
        self.release()

    @abstractmethod
    def deliver(self, flush: Flush) -> int:
        """Write one flush, return its bytes; OSError or BrokerlessError makes it try again."""

    def release(self) -> None:  # noqa: B027  # most have nothing to close
        """Close what the backend holds; in its own thread, after the last delivery."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what waits, for at most `timeout_s`, and end the thread."""
        self._give_up_at = time.monotonic() + timeout_s
        while True:
            try:
                self._queue.put(None, timeout=0.2)
                break
            except queue.Full:
                if time.monotonic() >= self._give_up_at:
                    self._queue.get_nowait()
                    self.counters.dropped += 1
        self._stopping.set()
        self._thread.join(timeout_s + SEND_TIMEOUT_S)


class Console(Backend):
    """One table per flush on standard output. A window whose reader is stuck is dropped, as with any backend."""

    def __init__(self, name: str = "console", fd: int = 1) -> None:
        self._fd = fd
        self._writable = select.poll()
        self._writable.register(fd, select.POLLOUT)
        self._of: Flush | None = None
        self._rest = b""
        super().__init__(name)

    def deliver(self, flush: Flush) -> int:
        if self._of is not flush:
            self._of, self._rest = flush, console_text(flush).encode("utf-8", "replace")
        size = len(self._rest)
        while self._rest:
            # As much as a pipe takes that is writable: a blocked write could not be ended.
            if not self._writable.poll(STUCK_S * 1000):
                raise TimeoutError("nobody reads the output")
            self._rest = self._rest[os.write(self._fd, self._rest[: select.PIPE_BUF]) :]
        return size


def console_text(flush: Flush) -> str:
    """A flush as text for people: idle series are left out."""
    at = time.strftime("%H:%M:%S", time.localtime(flush.end))
    rows = [
        f"{at} window {flush.window_s:.1f} s: {flush.lines} lines in {flush.datagrams} datagrams, "
        f"lost {flush.lost_datagrams} by clients' numbers, {flush.kernel_drops} by the kernel"
    ]
    for point in flush.counters:
        if point.raw or point.corrected:
            bound = "?" if point.bound is None else f"{point.bound:.4g}"
            rows.append(
                f"  c {point.series} {format_number(point.raw)} corrected {point.corrected:.10g} ±{bound} "
                f"{point.grade.label} total {point.total:.10g}"
            )
    rows += [f"  g {series} {format_number(value)}" for series, value in flush.gauges.items()]
    for series, figures in flush.timers.items():
        if figures.get("count"):
            shown = " ".join(f"{k}={v:.6g}" for k, v in figures.items() if not isinstance(v, dict))
            rows.append(f"  t {series} {shown}")
    rows += [f"  s {series} {size}" for series, size in flush.sets.items() if size]
    rows += [f"  {p.kind} {p.series} {format_number(p.value)} at {p.timestamp}" for p in flush.timestamped]
    rows += [f"  {line.decode('utf-8', 'replace')}" for line in flush.passed]
    return "\n".join(rows) + "\n"
