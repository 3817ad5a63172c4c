"""Where rows come from: journals on a file system, and publishers' addresses.

A place is asked by the planner what it holds, and by executors for a range of it. What is kept in Spark's
checkpoint about a place is a `Mark`: which journal it was, and how far it was read.
"""

import glob
import os
from collections.abc import Iterator
from typing import Protocol

import msgspec

from brokerless.core import Frame, JournalReader
from brokerless.core.errors import Evicted, Fault
from brokerless.core.journal_meta import META

# One read call; large enough for sequential speed, small enough that a task's memory stays bounded.
READ_BYTES = 4 * 1024 * 1024


class Mark(msgspec.Struct, frozen=True):
    """A position in a place, as the checkpoint keeps it.

    Of journal `id`, within `epoch`, everything before `next`.
    """

    id: str
    epoch: int
    next: int


class Extent(msgspec.Struct, frozen=True):
    """What a place holds now: offsets `[oldest, next)`.

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

    def mark(self, offset: int) -> Mark:
        """A position in it."""
        return Mark(self.id, self.epoch, offset)


class Gone(msgspec.Struct, frozen=True):
    """Offsets `first` to `last` of a place cannot be read: `reason` is `evicted` or `corrupt`."""

    first: int
    last: int
    reason: str


class DataLoss(Fault):
    """Wanted events are gone, and failOnDataLoss is on; the numbers say which."""

    def __init__(self, place: str, first: int, last: int, why: str) -> None:
        super().__init__(
            f"{place}: events at offsets {first} to {last} are gone ({why}); nothing was skipped. Set "
            "failOnDataLoss=false to go on after them and get the range as a row of kind 'lost'"
        )
        self.place = place
        self.first = first
        self.last = last


class Place(Protocol):
    """What the data source needs of a place. Picklable; opens nothing until it is asked."""

    key: str

    def extent(self) -> Extent | None:
        """What it holds now; None if it cannot be reached at the moment. Raises JournalError if unusable."""
        ...

    def frames(self, first: int, stop: int) -> Iterator[Frame | Gone]:
        """Frames that cover `[first, stop)`, and ranges of it that are gone, in order."""
        ...

    def blame(self, gone: Gone) -> Exception:
        """The error for a corrupt range: it names the file."""
        ...


class JournalPlace:
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

    def frames(self, first: int, stop: int) -> Iterator[Frame | Gone]:
        """Read the range; what retention drops meanwhile is reported like what it dropped before."""
        with JournalReader(self.key) as reader:
            while first < stop:
                try:
                    chunk = reader.read(first, max_bytes=READ_BYTES)
                except Evicted:
                    oldest = min(stop, max(first + 1, reader.oldest))
                    yield Gone(first, oldest - 1, "evicted")
                    first = oldest
                    continue
                found: list[Frame | Gone] = list(chunk.frames)
                found += [Gone(max(a, first), min(b, stop - 1), "corrupt") for a, b in chunk.gone if a < stop]
                found.sort(key=lambda part: part.first if isinstance(part, Gone) else part.first_offset)
                for part in found:
                    if isinstance(part, Gone) or part.first_offset < stop:
                        yield part
                if chunk.next <= first:
                    # The checkpoint knows more than the journal: it was cut after a power loss.
                    yield Gone(first, stop - 1, "evicted")
                    return
                first = chunk.next

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

    def blame(self, gone: Gone) -> Exception:
        """The error that names the damaged segment."""
        from brokerless.spark_collector.spool import Corrupt, segment_of

        with JournalReader(self.key) as reader:
            return Corrupt(self.key, segment_of(reader, gone.first), gone.first, gone.last)


def find_places(paths: list[str], endpoints: list[str]) -> list[Place]:
    """All places that the options name now; a glob is looked up each time, so new spools are found.

    A plain path is taken as it is: listing nothing keeps planning independent of what lies there.
    """
    found: list[Place] = []
    for path in paths:
        if glob.has_magic(path):
            found += [JournalPlace(os.path.dirname(p)) for p in sorted(glob.glob(os.path.join(path, META)))]
        else:
            found.append(JournalPlace(path))
    if endpoints:
        from brokerless.spark_collector.replay import EndpointPlace

        found += [EndpointPlace(address) for address in endpoints]
    return found


def place_of(key: str) -> Place:
    """The place that has this key."""
    endpoint = "://" in key
    return find_places([] if endpoint else [key], [key] if endpoint else [])[0]


def resume_at(mark: Mark, extent: Extent) -> int:
    """Where to go on in a place after `mark`.

    The journal's own cut is followed: after a power loss its offsets go back to the cut and a new epoch
    begins there, so a mark beyond the cut goes back too, or the new events at those offsets would be skipped.
    """
    if mark.id != extent.id:
        return extent.oldest
    cuts = [first for epoch, first in extent.epochs if epoch > mark.epoch]
    return min([mark.next, *cuts])
