"""The methods of the PyPI `statsd` package, with tags, for whatever takes finished lines."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

from statsd.client.base import StatsClientBase

from brokerless.metrics.parser import Number

Tags = Mapping[str, object] | Sequence[str]


class StatsApi(StatsClientBase):  # type: ignore[misc]  # the package has no types
    """Makes lines and hands them to `_put`, which subclasses define. `timer` comes from the package."""

    def __init__(self, prefix: str | None, tags: str) -> None:
        self._prefix = prefix
        self._start = f"{prefix}." if prefix else ""
        self._tags = tags
        self._end = f"|#{tags}" if tags else ""

    def _put(self, line: str, lines: int = 1) -> None:
        """Take one entry, which is `lines` lines joined by newlines that belong together."""
        raise NotImplementedError

    def _invalid(self) -> None:
        """A call had arguments of a wrong type."""
        raise NotImplementedError

    def incr(self, stat: str, count: Number = 1, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Add to a counter."""
        self._send_value(stat, lambda: f"{count + 0}|c", rate, tags)

    def decr(self, stat: str, count: Number = 1, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Subtract from a counter."""
        try:
            negative = -count
        except Exception:
            self._invalid()
        else:
            self.incr(stat, negative, rate, tags=tags)

    def gauge(
        self, stat: str, value: Number, rate: float = 1, delta: bool = False, *, tags: Tags | None = None
    ) -> None:
        """Set a gauge, or move it by `value`."""
        try:
            if rate < 1 and random.random() > rate:
                return
            if value < 0 and not delta:
                # A negative number alone would be read as a movement: two lines that must not be parted.
                zero = self._line(stat, "0|g", 1, tags)
                line, lines = f"{zero}\n{self._line(stat, f'{value}|g', 1, tags)}", 2
            else:
                sign = "+" if delta and value >= 0 else ""
                line, lines = self._line(stat, f"{sign}{value + 0}|g", rate, tags), 1
        except Exception:
            self._invalid()
            return
        self._put(line, lines)

    def timing(
        self, stat: str, delta: float | timedelta, rate: float = 1, *, tags: Tags | None = None
    ) -> None:
        """Record a duration in milliseconds, or a timedelta."""

        def value() -> str:
            milliseconds = delta.total_seconds() * 1000.0 if isinstance(delta, timedelta) else delta
            return f"{milliseconds:0.6f}|ms"

        self._send_value(stat, value, rate, tags)

    def set(self, stat: str, value: object, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Add a member to a set."""
        self._send_value(stat, lambda: f"{value}|s", rate, tags)

    def histogram(self, stat: str, value: float, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Record a value (DogStatsD `h`)."""
        self._send_value(stat, lambda: f"{value + 0}|h", rate, tags)

    def distribution(self, stat: str, value: float, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Record a value for a mergeable distribution (DogStatsD `d`)."""
        self._send_value(stat, lambda: f"{value + 0}|d", rate, tags)

    def _send_value(self, stat: str, value: Callable[[], str], rate: float, tags: Tags | None) -> None:
        """Nothing raises into the application, whatever it passes: what cannot be written is counted."""
        try:
            if rate < 1 and random.random() > rate:
                return
            line = self._line(stat, value(), rate, tags)
        except Exception:
            self._invalid()
            return
        self._put(line)

    def _after(self, data: str | None) -> None:
        """The package's own way for a finished line; its subclasses and third parties use it."""
        if isinstance(data, str) and data:
            self._put(data, data.count("\n") + 1)
        elif data:
            self._invalid()

    def _send(self, data: str) -> None:
        self._after(data)

    def _line(self, stat: str, value: str, rate: float, tags: Tags | None) -> str:
        if not isinstance(stat, str) or "\n" in stat:
            raise TypeError("a name is a string without newlines")
        shown = f"|@{rate}" if rate < 1 else ""
        if tags is None:
            return f"{self._start}{stat}:{value}{shown}{self._end}"
        own = join_tags(tags)
        both = f"{self._tags},{own}" if self._tags and own else self._tags or own
        return f"{self._start}{stat}:{value}{shown}{'|#' + both if both else ''}"


class Pipeline(StatsApi):
    """Lines that are handed over together, by `send()` or at the end of a `with` block."""

    def __init__(self, client: StatsApi) -> None:
        super().__init__(client._prefix, client._tags)
        self._client = client
        self._stats: deque[tuple[str, int]] = deque()

    def _put(self, line: str, lines: int = 1) -> None:
        self._stats.append((line, lines))

    def _invalid(self) -> None:
        self._client._invalid()

    def send(self) -> None:
        """Hand the collected lines to the client, in order."""
        while self._stats:
            self._client._put(*self._stats.popleft())

    def pipeline(self) -> "Pipeline":
        """A pipeline into this pipeline."""
        return Pipeline(self)

    def close(self) -> None:
        """The same as `send`."""
        self.send()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.send()


def join_tags(tags: Tags | None) -> str:
    """`a:1,b` of a mapping or a sequence; characters that would end a tag are replaced, blanks at its end cut."""
    if not tags:
        return ""
    if isinstance(tags, Mapping):
        parts = [f"{key}:{value}" for key, value in tags.items()]
    else:
        parts = [tags] if isinstance(tags, str) else [str(tag) for tag in tags]
    # A line ends before its blanks, and a tag may be the last of a line.
    return ",".join(part.replace(",", "_").replace("|", "_").replace("\n", "_").rstrip() for part in parts)
