"""What a subscriber hands out: batches of events that are decoded on first use."""

import time
from collections.abc import Iterator
from itertools import pairwise

from brokerless.core import Event
from brokerless.core.topics import TopicFilter
from brokerless.multicast.wire.message import Columns


class Batch:
    """Consecutive events of one source; `events` and `datas` have those that match the wanted topics."""

    __slots__ = (
        "_columns",
        "_events",
        "_foreign",
        "_name",
        "_wanted",
        "epoch",
        "first_offset",
        "next_offset",
        "source",
    )

    def __init__(
        self,
        columns: Columns,
        name: str,
        foreign: str,
        identity: tuple[str, int],
        wanted: TopicFilter,
    ) -> None:
        self._columns = columns
        self._name = name
        self._foreign = foreign
        self._wanted = wanted
        self._events: list[Event] | None = None
        self.source, self.epoch = identity
        self.first_offset = columns.first - 1
        self.next_offset = self.first_offset + len(columns.datas)  # the position after this batch

    def __repr__(self) -> str:
        return f"Batch({self.source}:{self.epoch}:{self.first_offset}+{self.next_offset - self.first_offset})"

    def __len__(self) -> int:
        if self._events is not None:
            return len(self._events)
        return len(self.events) if self._mixed() else len(self._columns.datas)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def after(self, offset: int) -> "Batch":
        """The part from `offset` on."""
        skip = offset - self.first_offset
        rest = self._columns.part(skip, len(self._columns.datas) - skip)
        return Batch(rest, self._name, self._foreign, (self.source, self.epoch), self._wanted)

    @property
    def events(self) -> list[Event]:
        """The events, in order."""
        events = self._events
        if events is None:
            events = self._columns.events(self._name, self._foreign, time.time_ns() // 1000)
            if self._mixed():
                events = [event for event in events if self._wanted(event.topic)]
            self._events = events
        return events

    @property
    def datas(self) -> list[bytes]:
        """The data of the events, in order; cheaper than `events`."""
        if self._mixed():
            return [event.data for event in self.events]
        return list(self._columns.datas)

    def _mixed(self) -> bool:
        """Whether some events may not match."""
        if self._wanted.everything:
            return False
        described = self._columns.described
        return len(described) != 1 or described[0] is None or not self._wanted(described[0].topic)


class LoneBatch(Batch):
    """One event that came alone, or was filtered away. There is nothing to decode: somebody waits for it."""

    __slots__ = ("events",)
    events: list[Event]

    def __init__(self, identity: tuple[str, int], offset: int, following: int, events: list[Event]) -> None:
        self.events = events
        self.source, self.epoch = identity
        self.first_offset = offset
        self.next_offset = following

    def __len__(self) -> int:
        return len(self.events)

    def after(self, offset: int) -> "Batch":
        """The part from `offset` on."""
        if offset <= self.first_offset:
            return self
        return LoneBatch((self.source, self.epoch), self.next_offset, self.next_offset, [])

    @property
    def datas(self) -> list[bytes]:
        """The data of the event."""
        return [event.data for event in self.events]


def identity_of(columns: Columns, name: str, foreign: str) -> tuple[str, int]:
    """Source and epoch of the first message."""
    one = columns.described[0]
    return (foreign, 0) if one is None else (one.source or name, one.epoch)


def by_identity(columns: Columns, name: str, foreign: str) -> list[Columns]:
    """The run cut up so that each part has one source and epoch; almost always it is one part."""
    described = columns.described
    if len(described) == 1:
        return [columns]
    who = [(foreign, 0) if one is None else (one.source or name, one.epoch) for one in described]
    if who.count(who[0]) == len(who):
        return [columns]
    cuts = [0, *(i for i in range(1, len(who)) if who[i] != who[i - 1]), len(who)]
    return [columns.part(a, b - a) for a, b in pairwise(cuts)]
