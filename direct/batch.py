"""What a subscriber hands out: batches of events that are decoded on first use."""

from collections.abc import Iterator

from brokerless.core import Event, Frame
from brokerless.core.errors import UsageError
from brokerless.core.journal.key_state import StateBlock
from brokerless.core.topics import TopicFilter


class Batch:
    """Consecutive events of one source. `len()` counts those that match the subscriber's topics.

    Iterating, `events` and `datas` decode on first use; `datas` does not build events.
    """

    __slots__ = ("_events", "_filter", "_frame", "count", "first_offset", "next_offset")

    def __init__(self, frame: Frame, count: int, wanted: TopicFilter) -> None:
        self._frame = frame
        self._filter = wanted
        self._events: list[Event] | None = None
        self.count = count
        self.first_offset = frame.header.first_offset
        self.next_offset = self.first_offset + frame.header.count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"Batch({self.count} of {self.frame!r})"

    @property
    def frame(self) -> Frame:
        """The frame that the events came in; it may have others, too."""
        return self._frame

    @property
    def source(self) -> str:
        """The producer's name."""
        return self._frame.header.source

    @property
    def epoch(self) -> int:
        """The producer's epoch."""
        return self._frame.header.epoch

    @property
    def topics(self) -> list[tuple[str, int, int]]:
        """`(topic, first seq, count)` for each topic in the frame."""
        return self._frame.header.topics

    @property
    def events(self) -> list[Event]:
        """The events, in order."""
        events = self._events
        if events is None:
            events = self._events = self._decode()
        return events

    def after(self, offset: int) -> "Batch":
        """The part from `offset` on."""
        given = sum(event.offset < offset for event in self.events)
        return Batch(self.frame.slice(offset, self.next_offset), self.count - given, self._filter)

    def _decode(self) -> list[Event]:
        if not self.count:
            return []
        if self.count == self._frame.header.count:
            return self._frame.events()
        wanted = self._filter
        return [event for event in self._frame.events() if wanted(event.topic)]

    @property
    def datas(self) -> list[bytes]:
        """The data of the events, in order; cheaper than `events`."""
        if self.count == self._frame.header.count:
            return self._frame.datas()
        return [event.data for event in self.events]


class Single(Batch):
    """A batch of one event, which was made when its frame was checked. The frame is parsed if somebody asks for it.

    What an idle publisher sends. Both processes have slept since the last one and find their caches cold, so what
    counts is how little code an event passes on its way to the application.
    """

    __slots__ = ("_event", "_raw", "epoch", "source")

    count = 1

    def __init__(self, raw: bytes, event: Event) -> None:
        self._raw = raw
        self._event = event
        self._events = None
        # Each is asked for several times.
        self.source: str = event.source
        self.epoch: int = event.epoch
        self.first_offset = event.offset
        self.next_offset = event.offset + 1

    @property
    def frame(self) -> Frame:
        return Frame.parse(self._raw, verify=False)

    @property
    def topics(self) -> list[tuple[str, int, int]]:
        return [(self._event.topic, self._event.seq, 1)]

    @property
    def events(self) -> list[Event]:
        self._events = events = [self._event]
        return events

    @property
    def datas(self) -> list[bytes]:
        return [self._event.data]


class StateBatch(Batch):
    """Events of a snapshot: the newest of their keys, with what was compacted between their offsets left out."""

    __slots__ = ("block",)

    def __init__(
        self, block: StateBlock, count: int, wanted: TopicFilter, first_offset: int, next_offset: int
    ) -> None:
        super().__init__(block.frame, count, wanted)
        self.block = block
        self.first_offset = first_offset
        self.next_offset = next_offset

    @property
    def frame(self) -> Frame:
        """Raises UsageError: these events have no frame that says where they are."""
        raise UsageError("the events of a snapshot have no frame in common; take events or datas")

    def after(self, offset: int) -> "StateBatch":
        given = sum(event.offset < offset for event in self.events)
        return StateBatch(self.block, self.count - given, self._filter, offset, self.next_offset)

    def _decode(self) -> list[Event]:
        wanted, first, after = self._filter, self.first_offset, self.next_offset
        return [e for e in self.block.events() if first <= e.offset < after and wanted(e.topic)]

    @property
    def datas(self) -> list[bytes]:
        return [event.data for event in self.events]
