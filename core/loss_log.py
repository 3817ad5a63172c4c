"""Loss speaks up by default: a rate-limited WARNING per source and reason, with range and count.

Every consumer, worker, dispatcher, daemon and collector has a `LossLog` and calls it where it declares something lost,
unless the application has a handler of its own. The loggers are named in docs/guides/logging.md.
"""

import logging
import time
from collections.abc import Callable

from brokerless.core.event import Lost

# At most one record per source and reason in this time: a burst of a thousand gaps is one line, not a full disk.
INTERVAL_S = 10.0
# So many pairs of source and reason are remembered; a stranger who invents sources costs no more than this.
MAX_STREAMS = 1000


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

    What is summed up is logged with the next loss after the interval, by `flush`, and by `close`, so that no loss stays
    unsaid. Use it from one thread at a time.
    """

    def __init__(
        self,
        logger: str,
        *,
        unit: str = "events",
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`logger` is the name of a logger below "brokerless"; `unit` is what it counts; `clock` never goes back."""
        self._logger = logging.getLogger(logger)
        self._unit = unit
        self._interval_s = interval_s
        self._clock = clock
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
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                oldest = next(iter(self._streams))
                self._log(*oldest, self._streams.pop(oldest))
            stream = self._streams[key] = _Stream()
        stream.count += count
        stream.ranges += 1
        if first is not None and last is not None:
            stream.first = first if stream.first is None else min(stream.first, first)
            stream.last = last if stream.last is None else max(stream.last, last)
        if self._clock() - stream.logged_at >= self._interval_s:
            self._log(source, reason, stream)

    def flush(self) -> None:
        """Log what is due: for components that have a timer anyway."""
        now = self._clock()
        for (source, reason), stream in self._streams.items():
            if stream.count and now - stream.logged_at >= self._interval_s:
                self._log(source, reason, stream)

    def close(self) -> None:
        """Log everything that was not logged yet."""
        for (source, reason), stream in self._streams.items():
            self._log(source, reason, stream)

    def _log(self, source: str, reason: str, stream: _Stream) -> None:
        if not stream.count:
            return
        where = "" if stream.first is None else f", offsets {stream.first} to {stream.last}"
        if stream.ranges > 1:
            where += f" in {stream.ranges} ranges"
        self._logger.warning(
            "lost %d %s of %s (%s%s)",
            stream.count,
            self._unit,
            source,
            reason,
            where,
            extra={
                "source": source,
                "reason": reason,
                "first": stream.first,
                "last": stream.last,
                "count": stream.count,
            },
        )
        stream.clear()
        stream.logged_at = self._clock()
