"""Which ranges of which places the next batch reads, and how they are divided among tasks."""

import contextlib
import json
import logging
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from brokerless.core import Frame, JournalReader
from brokerless.core.errors import Fault
from brokerless.spark_collector.options import SourceOptions
from brokerless.spark_collector.places import (
    DataLoss,
    Extent,
    Gone,
    JournalPlace,
    Mark,
    Place,
    find_places,
    place_of,
    resume_at,
)
from brokerless.spark_collector.spool import as_items, is_nested
from brokerless.spark_collector.tally import frame_counts, tally

log = logging.getLogger(__name__)
# A task has to start before its first row: fewer events than this are not worth another one.
MIN_TASK_EVENTS = 20_000

Marks = dict[str, Mark]


class Piece(msgspec.Struct, frozen=True):
    """What one task reads: offsets `[first, stop)` of a place.

    `lost` ones are gone, and become a row instead.
    """

    key: str
    first: int
    stop: int
    source: str
    epoch: int
    lost: str = ""


class Planner:
    """Looks at the places; lives in Spark's planning process. Its state is a cache and can be lost."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._target: Marks | None = None
        self._missing: set[str] = set()

    def places(self, known: Marks) -> dict[str, Place]:
        """All places of the options by key, and those that a checkpoint remembers."""
        found = {p.key: p for p in find_places(self.options.paths, self.options.endpoints)}
        for key in known:
            if key not in found:
                found[key] = place_of(key)
        return found

    def extents(self, known: Marks) -> dict[str, Extent]:
        """What all places that can be reached hold now. One that is away is behind, not lost.

        It is left out.
        """
        extents = {}
        for key, place in self.places(known).items():
            extent = place.extent()
            if extent is not None:
                extents[key] = extent
                self._missing.discard(key)
            elif key not in self._missing:
                self._missing.add(key)
                log.warning("%s cannot be reached; its rows will come when it is back", key)
        return extents

    def initial(self) -> Marks:
        """Where a new query begins."""
        starting = self.options.starting
        extents = self.extents({})
        if isinstance(starting, dict):
            return {
                k: e.mark(starting[k].next) if k in starting else e.mark(e.oldest) for k, e in extents.items()
            }
        return {k: e.mark(e.next if starting == "latest" else e.oldest) for k, e in extents.items()}

    def latest(self, start: Marks, max_events: int = 0) -> Marks:
        """How far the next batch may read: everything there is, or about `max_events` more (0: no limit).

        Frames are not divided: a batch has more than `max_events` only if its first frame has.
        """
        extents = self.extents(start)
        ends = dict(start)
        todo = {}
        for key, extent in extents.items():
            stop = extent.next
            if self._target is not None:
                stop = min(stop, self._target[key].next) if key in self._target else 0
            first = resume_at(start[key], extent) if key in start else extent.oldest
            if stop > first:
                todo[key] = (first, stop)
            elif key in start and start[key].id != extent.id:
                ends[key] = extent.mark(first)
        places = self.places(start)
        share = -(-max_events // len(todo)) if max_events and todo else 0
        for key, (first, stop) in todo.items():
            reach = _limit(places[key], max(first, extents[key].oldest), stop, share) if share else stop
            ends[key] = extents[key].mark(reach)
        return ends

    def aim(self, start: Marks) -> None:
        """Remember what there is now; `latest` goes no further (Trigger.AvailableNow)."""
        self._target = None
        self._target = self.latest(start)

    def pieces(self, start: Marks, end: Marks) -> list[Piece]:
        """The tasks for the batch from `start` to `end`.

        Raises DataLoss if something of it is gone and must not be.
        """
        extents = self.extents(end)
        ranges: list[Piece] = []
        lost: list[Piece] = []
        for key, mark in end.items():
            if start.get(key) == mark:
                continue
            extent = extents.get(key)
            if extent is None:
                # Planned when it was there: waiting for it is the task's error, and Spark tries again.
                before = start.get(key, Mark(mark.id, mark.epoch, 0))
                if (before.id or mark.id, before.epoch) != (mark.id, mark.epoch):
                    raise Fault(
                        f"{key} cannot be reached, and only it knows where the batch begins that was planned before "
                        "it was cut or replaced: start the query again when it is back"
                    )
                ranges.append(Piece(key, before.next, mark.next, "", mark.epoch))
                continue
            first = self._first(key, start, extent, lost)
            if mark.next > first:
                ranges.append(Piece(key, first, mark.next, extent.source, mark.epoch))
        return lost + self._divide(ranges, extents)

    def everything(self) -> list[Piece]:
        """The tasks for a batch query: all between startingOffsets and endingOffsets. Raises DataLoss."""
        start = self.initial()
        end = self.latest(start)
        if isinstance(self.options.ending, dict):
            for key, mark in self.options.ending.items():
                if key in end:
                    end[key] = msgspec.structs.replace(end[key], next=min(end[key].next, mark.next))
        return self.pieces(start, end)

    def _first(self, key: str, start: Marks, extent: Extent, lost: list[Piece]) -> int:
        """Where the batch begins in this place; what it wanted and cannot have goes to `lost`."""
        if key not in start:
            return extent.oldest
        mark = start[key]
        first = resume_at(mark, extent)
        if mark.id and mark.id != extent.id:
            why = "another journal lies there now; how many the old one had is not known"
            if self.options.fail_on_data_loss:
                raise DataLoss(key, mark.next, mark.next, why)
            lost.append(Piece(key, mark.next, mark.next, extent.source, extent.epoch, "replaced"))
            return extent.oldest
        if first < extent.oldest:
            if self.options.fail_on_data_loss:
                raise DataLoss(
                    key, first, extent.oldest - 1, f"retention has passed them, the oldest is {extent.oldest}"
                )
            lost.append(Piece(key, first, extent.oldest, extent.source, extent.epoch, "evicted"))
            return extent.oldest
        return first

    def _divide(self, ranges: list[Piece], extents: dict[str, Extent]) -> list[Piece]:
        total = sum(r.stop - r.first for r in ranges)
        places = self.places({r.key: Mark("", 0, 0) for r in ranges})
        pieces = []
        for r in ranges:
            size = r.stop - r.first
            parts = max(1, round(self.options.partitions * size / total))
            if r.key in extents and not _holds_frames(places[r.key], r.first, r.stop):
                parts = min(parts, max(1, size // MIN_TASK_EVENTS))
            parts = min(parts, size)
            cuts = [r.first + size * n // parts for n in range(parts + 1)]
            pieces += [msgspec.structs.replace(r, first=a, stop=b) for a, b in pairwise(cuts) if b > a]
        return pieces

    def backlog(self, done: Marks) -> int:
        """Offsets that exist and are not read yet."""
        extents = self.extents(done)
        return sum(e.next - (resume_at(done[k], e) if k in done else e.oldest) for k, e in extents.items())


def dump_marks(marks: Marks) -> str:
    """Marks as the checkpoint keeps them; the same marks are always the same text."""
    return json.dumps({key: msgspec.to_builtins(mark) for key, mark in sorted(marks.items())})


def load_marks(text: str) -> Marks:
    """The marks of a checkpoint."""
    return msgspec.json.decode(text, type=Marks)


def _limit(place: Place, first: int, stop: int, max_events: int) -> int:
    """The offset up to which at most `max_events` come (at least one frame's): headers are read, not data."""
    if isinstance(place, JournalPlace):
        with contextlib.suppress(Fault), JournalReader(place.key) as reader:
            counts = tally(reader, first, stop)
            if counts is None:  # each offset is one event: no need to look
                return min(stop, first + max_events)
            if (reach := _reach(counts, first, max_events)) > first:
                return reach
    # A publisher's journal, or something is gone at the very beginning: over that only a real read gets.
    for part in place.frames(first, stop):
        if isinstance(part, Gone):
            return part.last + 1
        if is_nested(part):
            return max(first + 1, _reach(frame_counts(part, first, stop), first, max_events))
        return min(stop, first + max_events)
    return stop


def _reach(counts: Iterator[tuple[int, int]], first: int, max_events: int) -> int:
    """How far the counted frames go with at most `max_events`, but at least one of them."""
    seen, at = 0, first
    for after, count in counts:
        if seen and seen + count > max_events:
            break
        seen, at = seen + count, after
    return at


def _holds_frames(place: Place, first: int, stop: int) -> bool:
    for part in place.frames(first, min(stop, first + 1)):
        if isinstance(part, Frame):
            return is_nested(part)
    return True


def read_piece(place: Place, piece: Piece, options: SourceOptions) -> Iterator["object"]:
    """The Arrow batches of one task. Raises DataLoss or Corrupt, unless the options say to go on."""
    import time

    from brokerless.spark_collector.rows import RowBuilder, lost_batch

    now = time.time_ns() // 1000
    if piece.lost:
        yield lost_batch(piece.source, piece.epoch, piece.first, piece.stop - 1, piece.lost, now)
        return
    builder = RowBuilder()
    for part in place.frames(piece.first, piece.stop):
        if isinstance(part, Gone):
            refuse(place, part, options)
            yield lost_batch(piece.source, piece.epoch, part.first, part.last, part.reason, now)
            continue
        for item in as_items(part, max(piece.first, part.first_offset), min(piece.stop, part.next_offset)):
            builder.add(item)
            if builder.full:
                yield builder.take()
    if builder.rows:
        yield builder.take()


def refuse(place: Place, gone: Gone, options: SourceOptions) -> None:
    """Raise DataLoss or Corrupt for a range that is gone, unless the options say to go on."""
    if gone.reason == "corrupt":
        if not options.quarantine_corrupt:
            raise place.blame(gone)
    elif options.fail_on_data_loss:
        raise DataLoss(place.key, gone.first, gone.last, "retention dropped them while they were read")
