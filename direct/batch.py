"""What a subscriber gets: batches of events that are decoded only when somebody looks at them."""

from collections.abc import Sequence

from brokerless.core import Event, Frame
from brokerless.core.errors import ConfigError

# Known topics per subscriber whose match is remembered; when full, it is forgotten and found out again.
_REMEMBERED = 65_536


class Filter:
    """Topics by prefix, as ZeroMQ has it: `orders.` matches `orders.eu`; nothing given matches everything."""

    __slots__ = ("_known", "prefixes")

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        self.prefixes = tuple(prefixes)
        self._known: dict[str, bool] = {}

    @property
    def everything(self) -> bool:
        """Whether no topic is left out."""
        return not self.prefixes or "" in self.prefixes

    def __call__(self, topic: str) -> bool:
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[topic] = self.everything or topic.startswith(self.prefixes)
        return known


def check_topics(topics: Sequence[str], limit: int) -> tuple[str, ...]:
    """Topics as the caller gave them, or ConfigError: a sequence of short str, not one str."""
    if isinstance(topics, str):
        raise ConfigError("topics", f"must be a list of prefixes: [{topics!r}]")
    checked = tuple(topics)
    if len(checked) > limit:
        raise ConfigError("topics", f"{len(checked)} prefixes, the limit is {limit}")
    for topic in checked:
        if not isinstance(topic, str) or len(topic.encode()) > 255:
            raise ConfigError("topics", f"{topic!r} is not a str of at most 255 bytes")
    return checked


class Batch:
    """Consecutive events of one source. `len()` counts those that match the subscriber's topics.

    `events` and `datas` decode on first use. Whoever needs only bytes saves building events.
    """

    __slots__ = ("_count", "_events", "_filter", "frame")

    def __init__(self, frame: Frame, count: int, wanted: Filter) -> None:
        self.frame = frame
        self._count = count
        self._filter = wanted
        self._events: list[Event] | None = None

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Batch({self._count} of {self.frame!r})"

    @property
    def source(self) -> str:
        """The producer's name."""
        return self.frame.header.source

    @property
    def epoch(self) -> int:
        """The producer's epoch."""
        return self.frame.header.epoch

    @property
    def next_offset(self) -> int:
        """The position after this batch."""
        return self.frame.next_offset

    @property
    def events(self) -> list[Event]:
        """The events, in order."""
        events = self._events
        if events is None:
            if not self._count:
                events = []
            elif self._count == self.frame.header.count:
                events = self.frame.events()
            else:
                wanted = self._filter
                events = [event for event in self.frame.events() if wanted(event.topic)]
            self._events = events
        return events

    @property
    def datas(self) -> list[bytes]:
        """The data of the events, in order; cheaper than `events`."""
        if self._count == self.frame.header.count:
            return self.frame.datas()
        return [event.data for event in self.events]
