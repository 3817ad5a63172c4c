"""Loss speaks up by default: a rate-limited WARNING per source and reason, with range and count.

Every consumer, worker, dispatcher, daemon and collector has a `LossLog` and calls it where it declares something lost,
unless the application has a handler of its own. The loggers are named in docs/guides/logging.md.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from brokerless.core.event import Lost

# At most one record per source and reason in this time: a burst of a thousand gaps is one line, not a full disk.
INTERVAL_S = 10.0
# So many pairs of source and reason are remembered; a stranger who invents sources costs no more than this.
MAX_STREAMS = 1000


# Calls a function so many seconds later; what it returns can be cancelled.
Later = Callable[[float, Callable[[], None]], threading.Timer]


def _later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.name, timer.daemon = "loss-log", True
    with contextlib.suppress(RuntimeError):  # the interpreter ends: `close` says what is left
        timer.start()
    return timer


class _Stream:
    """What was lost of one source for one reason since the last record."""

    __slots__ = ("count", "first", "last", "logged_at", "ranges")

    def __init__(self) -> None:
        self.logged_at = float("-inf")
        self.clear()

    def clear(self) -> None:
        self.count = self.ranges = 0
        self.first: int | None = None
        self.last: int | None = None


class LossLog:
    """Logs what was lost: the first loss at once, further ones summed up and logged every `interval_s` seconds.

    What is summed up is logged when the interval is over, whether or not anything else is lost, and by `close`, so that
    no loss stays unsaid. From any thread.
    """

    def __init__(
        self,
        logger: str,
        *,
        unit: str = "events",
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        later: Later = _later,
    ) -> None:
        """`logger` is the name of a logger below "brokerless"; `unit` is what it counts; `clock` never goes back."""
        self._logger = logging.getLogger(logger)
        self._unit = unit
        self._interval_s = interval_s
        self._clock = clock
        self._later = later
        self._timer: threading.Timer | None = None
        # A signal's handler may lose something while its own thread is in here.
        self._lock = threading.RLock()
        self._streams: dict[tuple[str, str], _Stream] = {}

    def __call__(self, lost: Lost) -> None:
        """A range of offsets was lost: what `on_loss` of a subscriber gets."""
        self.add(lost.source, str(lost.reason), lost.count, lost.first, lost.last)

    def add(
        self, source: str, reason: str, count: int, first: int | None = None, last: int | None = None
    ) -> None:
        """`count` events of a source were lost for this reason; `first` and `last` where they have offsets."""
        if count <= 0:
            return
        key = (source, reason)
        records: list[tuple[str, dict[str, Any]]] = []
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                if len(self._streams) >= MAX_STREAMS:
                    oldest = next(iter(self._streams))
                    self._take(oldest, self._streams.pop(oldest), records)
                stream = self._streams[key] = _Stream()
            stream.count += count
            stream.ranges += 1
            if first is not None and last is not None:
                stream.first = first if stream.first is None else min(stream.first, first)
                stream.last = last if stream.last is None else max(stream.last, last)
            self._take_if_due(key, stream, records)
        self._write(records)

    def close(self) -> None:
        """Log everything that was not logged yet."""
        records: list[tuple[str, dict[str, Any]]] = []
        with self._lock:
            timer, self._timer = self._timer, None
            for key, stream in self._streams.items():
                self._take(key, stream, records)
        if timer is not None:
            timer.cancel()
        self._write(records)
        if timer is not None and timer.is_alive() and timer is not threading.current_thread():
            timer.join(5)

    def _flush(self) -> None:
        """The timer: log what is due."""
        records: list[tuple[str, dict[str, Any]]] = []
        with self._lock:
            self._timer = None
            for key, stream in self._streams.items():
                self._take_if_due(key, stream, records)
        self._write(records)

    def _take_if_due(
        self, key: tuple[str, str], stream: _Stream, records: list[tuple[str, dict[str, Any]]]
    ) -> None:
        """Make a record of it, or see to it that it is not forgotten."""
        left = stream.logged_at + self._interval_s - self._clock()
        if left <= 0:
            self._take(key, stream, records)
        # A forked child has its parent's timer, and no thread.
        elif stream.count and (self._timer is None or not self._timer.is_alive()):
            self._timer = self._later(left, self._flush)

    def _take(self, key: tuple[str, str], stream: _Stream, records: list[tuple[str, dict[str, Any]]]) -> None:
        if not stream.count:
            return
        source, reason = key
        where = "" if stream.first is None else f", offsets {stream.first} to {stream.last}"
        if stream.ranges > 1:
            where += f" in {stream.ranges} ranges"
        fields = {
            "source": source,
            "reason": reason,
            "first": stream.first,
            "last": stream.last,
            "count": stream.count,
        }
        records.append((where, fields))
        stream.clear()
        stream.logged_at = self._clock()

    def _write(self, records: list[tuple[str, dict[str, Any]]]) -> None:
        """Without the lock: a handler may take its time, or lose something itself."""
        for where, fields in records:
            count, source, reason = fields["count"], fields["source"], fields["reason"]
            self._logger.warning(
                "lost %d %s of %s (%s%s)", count, self._unit, source, reason, where, extra=fields
            )
