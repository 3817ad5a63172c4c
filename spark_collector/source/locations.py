"""Where rows come from: journals on a file system, and publishers' addresses.

The planner asks a location what it holds, executors ask it for a range. Spark's checkpoint keeps a `LocationOffset` per
location: which journal it was, and how far it was read.
"""

import os
from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

import msgspec

from brokerless.core import Frame, JournalReader
from brokerless.core.errors import Evicted, Fault, UsageError
from brokerless.core.journal.meta import META
from brokerless.spark_collector.collector.spool import Corrupt, segment_of

# One read call; large enough for sequential speed, small enough that a task's memory stays bounded.
READ_BYTES = 4 * 1024 * 1024


class LocationOffset(msgspec.Struct, frozen=True):
    """A position in a location, as the checkpoint keeps it.

    Of journal `id`, within `epoch`, everything before `next`.
    """

    id: str
    epoch: int
    next: int


class Extent(msgspec.Struct, frozen=True):
    """What a location holds now: offsets `[oldest, next)`.

    `epochs` has `(epoch, first offset)`, oldest first.
    """

    id: str
    oldest: int
    next: int
    epochs: list[tuple[int, int]]
    source: str

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return self.epochs[-1][0] if self.epochs else 0

    def at(self, offset: int) -> LocationOffset:
        """A position in it."""
        return LocationOffset(self.id, self.epoch, offset)


class MissingRange(msgspec.Struct, frozen=True):
    """Offsets `first` to `last` of a location cannot be read: `reason` is `evicted` or `corrupt`."""

    first: int
    last: int
    reason: str


class DataLoss(Fault):
    """Wanted events are gone, and failOnDataLoss is on; the numbers say which."""

    def __init__(self, location: str, first: int, last: int, why: str) -> None:
        super().__init__(
            f"{location}: events at offsets {first} to {last} are gone ({why}); nothing was skipped. Set "
            "failOnDataLoss=false to go on after them and get the range as a row of kind 'lost'"
        )
        self.location = location
        self.first = first
        self.last = last


class LocationMissing(UsageError):
    """A location that the options name is not there; `location` is its path or address."""

    def __init__(self, location: str, problem: str) -> None:
        super().__init__(f"{location}: {problem}")
        self.location = location


class Replaced(Fault):
    """The journal at a location is not the one that was planned to be read; Spark tries the batch again."""

    def __init__(self, location: str) -> None:
        super().__init__(f"{location}: another journal is there now than when the batch was planned")
        self.location = location


class Location(Protocol):
    """What the data source needs of a location. Picklable; opens nothing until it is asked."""

    key: str

    def extent(self) -> Extent | None:
        """What it holds now; None if it cannot be reached at the moment. Raises JournalError if unusable."""
        ...

    def frames(
        self, first: int, stop: int, *, id: str = "", epoch: int = 0
    ) -> Iterator[Frame | MissingRange]:
        """Frames that cover `[first, stop)`, and ranges of it that are gone, in order.

        With `id` and `epoch` it must be that journal. Raises Replaced.
        """
        ...

    def offset_at(self, time_us: int, extent: Extent) -> int:
        """The first offset of `extent` whose event is of that time or later; its end if there is none.

        The time of a spool is when its collector received the frame. Assumes that times rise.
        """
        ...

    def corruption_error(self, gone: MissingRange) -> Exception:
        """The error for a corrupt range: it names the file."""
        ...


class JournalLocation:
    """A journal's directory: a collector's spool or a producer's own."""

    def __init__(self, path: str) -> None:
        self.key = os.path.abspath(path)

    def extent(self) -> Extent | None:
        """What the journal holds; None while the directory (or its file system) is away."""
        if not os.path.exists(os.path.join(self.key, META)):
            return None
        with JournalReader(self.key) as reader:
            meta = reader.meta
            held = reader.next
            return Extent(meta.salt, min(reader.oldest, held), held, list(meta.epochs), meta.source)

    def frames(
        self, first: int, stop: int, *, id: str = "", epoch: int = 0
    ) -> Iterator[Frame | MissingRange]:
        """Read the range; what retention drops meanwhile is reported like what it dropped before."""
        with JournalReader(self.key) as reader:
            if id and reader.meta.salt != id:
                raise Replaced(self.key)
            while first < stop:
                try:
                    chunk = reader.read(first, max_bytes=READ_BYTES)
                except Evicted:
                    oldest = min(stop, max(first + 1, reader.oldest))
                    yield MissingRange(first, oldest - 1, "evicted")
                    first = oldest
                    continue
                found: list[Frame | MissingRange] = list(chunk.frames)
                found += [
                    MissingRange(max(a, first), min(b, stop - 1), "corrupt")
                    for a, b in chunk.gone
                    if a < stop
                ]
                found.sort(
                    key=lambda part: part.first if isinstance(part, MissingRange) else part.first_offset
                )
                for part in found:
                    if isinstance(part, MissingRange) or part.first_offset < stop:
                        yield part
                if chunk.next <= first:
                    # The checkpoint knows more than the journal: it was cut after a power loss.
                    yield MissingRange(first, stop - 1, "evicted")
                    return
                first = chunk.next

    def offset_at(self, time_us: int, extent: Extent) -> int:
        """By the journal's own search over segments and their indexes."""
        with JournalReader(self.key) as reader:
            return min(max(reader.offset_at(time_us), extent.oldest), extent.next)

    def locate(self, offset: int) -> tuple[int, int, str] | None:
        """Where the files hold `offset`: segment, position of a record at or before it, salt in hex.

        None if that takes a search, or the directory is away.
        """
        try:
            with JournalReader(self.key) as reader:
                found = reader.locate(offset)
                return None if found is None else (*found, reader.meta.salt)
        except Fault:
            return None  # whoever reads it meets the same, and says so

    def corruption_error(self, gone: MissingRange) -> Exception:
        """The error that names the damaged segment."""
        with JournalReader(self.key) as reader:
            return Corrupt(self.key, segment_of(reader, gone.first), gone.first, gone.last)


def is_replaced(offset: LocationOffset, extent: Extent) -> bool:
    """Whether the journal is not the one that `offset` is of; what the old one had after it is then unknown.

    A newer epoch that begins at offset 0 is a new journal, too: a publisher with a memory journal was restarted.
    """
    if not offset.id:
        return False
    return offset.id != extent.id or any(e > offset.epoch and first == 0 for e, first in extent.epochs)


def resume_at(offset: LocationOffset, extent: Extent) -> int:
    """Where to go on in a location after `offset`.

    The journal's own cut is followed: after a power loss its offsets go back to the cut and a new epoch begins there,
    so a position beyond the cut goes back too, or the new events at those offsets would be skipped.
    """
    if is_replaced(offset, extent):
        return extent.oldest
    cuts = [first for epoch, first in extent.epochs if epoch > offset.epoch]
    return min([offset.next, *cuts])


def offset_in(parts: Iterator[Frame | MissingRange], time_us: int, end: int) -> int:
    """The first offset in these frames whose event is of that time or later; `end` if there is none."""
    for part in parts:
        if isinstance(part, Frame):
            times = memoryview(part.columns().times).cast("q")
            if times[-1] >= time_us:
                return part.first_offset + bisect_left(times, time_us)
    return end
