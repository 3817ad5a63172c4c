"""Which ranges of which locations the next batch reads, and how they are divided among tasks."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import msgspec

from brokerless.core import Frame, JournalReader
from brokerless.core.errors import ConfigError, Fault
from brokerless.spark_collector.collector.spool import as_items, is_nested
from brokerless.spark_collector.source.counting import Size, event_counts, frame_counts
from brokerless.spark_collector.source.discovery import find_locations, location_of
from brokerless.spark_collector.source.locations import (
    DataLoss,
    Extent,
    JournalLocation,
    Location,
    LocationMissing,
    LocationOffset,
    MissingRange,
    is_replaced,
    resume_at,
)
from brokerless.spark_collector.source.options import SourceOptions
from brokerless.spark_collector.source.remote import MAX_ASKED_AT_ONCE, RemoteLocation, why_no_tier
from brokerless.spark_collector.tier.object_store import SCHEMES

log = logging.getLogger(__name__)
# A task has to start before its first row: fewer events than this are not worth another one.
MIN_TASK_EVENTS = 20_000
# How long a publisher or tier that is away is left alone.
AWAY_RETRY_S = 10.0
# More events or bytes than any batch has; a share of it is still more.
UNLIMITED = 1 << 62
UNLIMITED_SHARE = 1 << 40

Offsets = dict[str, LocationOffset]


class Partition(msgspec.Struct, frozen=True):
    """What one task reads: offsets `[first, stop)` of journal `id` at a location.

    `lost` ones are gone, and become a row instead.
    """

    key: str
    first: int
    stop: int
    source: str
    epoch: int
    lost: str = ""
    id: str = ""


class Planner:
    """Looks at the locations; lives in Spark's planning process. Its state is a cache and can be lost."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._target: Offsets | None = None
        self._missing: dict[str, float] = {}
        self._found: dict[str, Location] | None = None
        self._seen: dict[str, Extent] = {}
        # Where nobody tells how many the cluster has: one task for each keeps a machine busy.
        self.cores = os.cpu_count() or 2

    def locations(self, known: Offsets, *, look: bool = False) -> dict[str, Location]:
        """All locations of the options by key, and those that a checkpoint remembers.

        `look`: list the globs again, which in an object store takes a request, and one for each new tier.
        """
        if look or self._found is None:
            options = self.options
            listed = find_locations(
                options.paths, options.endpoints, options.storage_options, self._found or {}
            )
            self._found = {location.key: location for location in listed}
        found = dict(self._found)
        for key in known:
            if key not in found:
                found[key] = location_of(key, self.options.storage_options)
        return found

    def extents(self, known: Offsets, *, look: bool = False) -> dict[str, Extent]:
        """What all locations that can be reached hold now. One that is away is behind, not lost: it is left out.

        Publishers are asked at the same time, and one that did not answer is not asked again for a while, so that
        many that are away cost no more than one.
        """
        wanted = self.locations(known, look=look)
        now = time.monotonic()
        wait = {k for k, since in self._missing.items() if "://" in k and now - since < AWAY_RETRY_S}
        asked = {key: location for key, location in wanted.items() if key not in wait}
        remote = [location for key, location in asked.items() if "://" in key]
        answers: dict[str, Extent | None] = {}
        if remote:
            with ThreadPoolExecutor(min(len(remote), MAX_ASKED_AT_ONCE)) as pool:
                answers = dict(
                    zip((r.key for r in remote), pool.map(lambda r: r.extent(), remote), strict=True)
                )
        extents = {}
        for key, location in asked.items():
            extent = answers[key] if key in answers else location.extent()
            if extent is not None:
                extents[key] = extent
                self._missing.pop(key, None)
                continue
            if key in known and key not in self._missing:
                why = f" ({location.problem})" if isinstance(location, RemoteLocation) else ""
                log.warning("%s cannot be reached%s; its rows will come when it is back", key, why)
            self._missing[key] = now
        return extents

    def initial(self) -> Offsets:
        """Where a new stream begins. Raises LocationMissing, ConfigError: what was never there is a mistake."""
        if self.options.ending_time is not None or self.options.ending != "latest":
            option = "endingOffsets" if self.options.ending_time is None else "endingTimestamp"
            raise ConfigError(option, "is for batch queries: a stream has no end")
        return self._begin()

    def _begin(self) -> Offsets:
        starting = self.options.starting
        extents = self.extents({}, look=True)
        self._require(extents)
        if isinstance(starting, dict):
            self._require_known("startingOffsets", starting, extents)
            return {k: e.at(starting[k].next if k in starting else e.oldest) for k, e in extents.items()}
        if self.options.starting_time is not None:
            return self._at_time(extents, self.options.starting_time)
        return {k: e.at(e.next if starting == "latest" else e.oldest) for k, e in extents.items()}

    def _at_time(self, extents: dict[str, Extent], time_us: int) -> Offsets:
        """The first offset at or after a time in each location; where there is none yet, its end."""
        locations = self.locations({})
        return {k: e.at(locations[k].offset_at(time_us, e)) for k, e in extents.items()}

    def _require(self, extents: dict[str, Extent]) -> None:
        for key, location in self.locations({}).items():
            if key not in extents and isinstance(location, RemoteLocation):
                raise LocationMissing(key, location.problem)
            if key not in extents and "://" in key:
                raise LocationMissing(key, "the publisher does not answer")
            if key not in extents:
                raise LocationMissing(key, "there is no spool or journal (no meta.json in this directory)")
        if not extents:
            for path in self.options.paths:
                if path.startswith(SCHEMES):
                    raise LocationMissing(path, why_no_tier(path, self.options.storage_options))
            raise LocationMissing(", ".join(self.options.paths), "no spool or journal matches")

    @staticmethod
    def _require_known(option: str, named: Offsets, extents: dict[str, Extent]) -> None:
        for key in named:
            if key not in extents:
                known = ", ".join(sorted(extents))
                raise ConfigError(option, f"{key} is not among the locations that are read: {known}")

    def latest(self, start: Offsets, max_events: int = 0, max_bytes: int = 0) -> Offsets:
        """How far the next batch may read: everything there is, or about so many events and bytes more (0: no limit).

        Frames are not divided: a batch has more than `max_events` only if its first frame has. Each location gets its
        share in proportion to what it has, but at least a quarter of an equal one, so that a small location never
        waits for a large backlog; what one does not need is left to the larger ones.
        """
        extents = self._seen = self.extents(start, look=True)
        start = self._follow_moves(start, extents)
        ends = dict(start)
        todo = {}
        for key, extent in extents.items():
            stop = extent.next
            if self._target is not None:
                stop = min(stop, self._target[key].next) if key in self._target else 0
            first = resume_at(start[key], extent) if key in start else extent.oldest
            if stop > first:
                todo[key] = (max(first, extent.oldest), stop)
            elif key in start and is_replaced(start[key], extent):
                ends[key] = extent.at(first)
        locations = self.locations(start)
        left, waiting = Limit(max_events or UNLIMITED, max_bytes or UNLIMITED), len(todo)
        offsets = sum(stop - first for first, stop in todo.values())
        for key, (first, stop) in sorted(todo.items(), key=lambda t: t[1][1] - t[1][0]):
            reach = stop
            if max_events or max_bytes:
                share = left.share(stop - first, offsets, waiting)
                reach, used = _limit(locations[key], first, stop, share)
                left = left.without(used)
            ends[key] = extents[key].at(reach)
            offsets, waiting = offsets - (stop - first), waiting - 1
        return ends

    def _follow_moves(self, start: Offsets, extents: dict[str, Extent]) -> Offsets:
        """A journal that is read at another location now (its remote tier, another mount) goes on where it was."""
        named = self.locations({})
        by_id = {offset.id: key for key, offset in start.items() if offset.id and key not in named}
        moved = dict(start)
        for key in named:
            extent = extents.get(key)
            if extent is not None and key not in start and extent.id in by_id:
                before = by_id.pop(extent.id)
                moved[key] = moved.pop(before)
                extents.pop(before, None)
        return moved

    def fix_target(self, start: Offsets) -> None:
        """Fix the end to what there is now; `latest` goes no further (Trigger.AvailableNow)."""
        self._target = None
        self._target = self.latest(start)

    def partitions(self, start: Offsets, end: Offsets) -> list[Partition]:
        """The tasks for the batch from `start` to `end`.

        Raises DataLoss if something of it is gone and must not be.
        """
        extents = self.extents(end)
        start, end = (self._follow_moves(offsets, extents) for offsets in (start, end))
        ranges: list[Partition] = []
        lost: list[Partition] = []
        for key, offset in end.items():
            if start.get(key) == offset:
                continue
            extent = extents.get(key)
            if extent is None:
                # Planned when it was there: waiting for it is the task's error, and Spark tries again.
                before = start.get(key, LocationOffset(offset.id, offset.epoch, 0))
                if (before.id or offset.id, before.epoch) != (offset.id, offset.epoch):
                    raise Fault(
                        f"{key} cannot be reached, and only it knows where the batch begins that was planned before "
                        "it was cut or replaced: start the query again when it is back"
                    )
                ranges.append(Partition(key, before.next, offset.next, "", offset.epoch, id=offset.id))
                continue
            first = self._first(key, start, extent, lost)
            if offset.next > first:
                ranges.append(Partition(key, first, offset.next, extent.source, offset.epoch, id=extent.id))
        return lost + self._divide(ranges, extents)

    def everything(self) -> list[Partition]:
        """The tasks for a batch query: all between startingOffsets and endingOffsets. Raises DataLoss."""
        start = self._begin()
        end = self.latest(start)
        if self.options.ending_time is not None:
            for key, offset in self._at_time(self.extents({}), self.options.ending_time).items():
                end[key] = msgspec.structs.replace(end[key], next=min(end[key].next, offset.next))
        if isinstance(self.options.ending, dict):
            self._require_known("endingOffsets", self.options.ending, self.extents(end))
            for key, limit in self.options.ending.items():
                end[key] = msgspec.structs.replace(end[key], next=min(end[key].next, limit.next))
        return self.partitions(start, end)

    def _first(self, key: str, start: Offsets, extent: Extent, lost: list[Partition]) -> int:
        """Where the batch begins in this location; what it wanted and cannot have goes to `lost`."""
        if key not in start:
            return extent.oldest
        offset = start[key]
        first = resume_at(offset, extent)
        if is_replaced(offset, extent):
            why = "another journal lies there now; how many the old one had is not known"
            if self.options.fail_on_data_loss:
                raise DataLoss(key, offset.next, offset.next, why)
            lost.append(Partition(key, offset.next, offset.next, extent.source, extent.epoch, "replaced"))
            return extent.oldest
        if first < extent.oldest:
            if self.options.fail_on_data_loss:
                raise DataLoss(
                    key, first, extent.oldest - 1, f"retention has passed them, the oldest is {extent.oldest}"
                )
            lost.append(Partition(key, first, extent.oldest, extent.source, extent.epoch, "evicted"))
            return extent.oldest
        return first

    def _divide(self, ranges: list[Partition], extents: dict[str, Extent]) -> list[Partition]:
        total = sum(r.stop - r.first for r in ranges)
        locations = self.locations({r.key: LocationOffset("", 0, 0) for r in ranges})
        partitions = []
        for r in ranges:
            size = r.stop - r.first
            parts = max(1, round((self.options.partitions or self.cores) * size / total))
            if r.key in extents and not _holds_frames(locations[r.key], r.first, r.stop):
                parts = min(parts, max(1, size // MIN_TASK_EVENTS))
            if self.options.min_partitions > 1:  # asked for, whatever we think of so small tasks
                parts = max(parts, -(-self.options.min_partitions * size // total))
            parts = min(parts, size)
            cuts = [r.first + size * n // parts for n in range(parts + 1)]
            location = locations[r.key]
            if isinstance(location, RemoteLocation) and parts > 1:
                # Where objects end: each is read by one task, and whole.
                ends = [after for after, _, _ in location.sizes(r.first, r.stop)]
                cuts = [
                    r.first,
                    *(ends[len(ends) * n // parts - 1] for n in range(1, parts) if len(ends) >= parts),
                    r.stop,
                ]
            partitions += [msgspec.structs.replace(r, first=a, stop=b) for a, b in pairwise(cuts) if b > a]
        return partitions

    def newest(self) -> Offsets:
        """What there was when `latest` looked: reports of a batch ask nobody again."""
        return {key: extent.at(extent.next) for key, extent in self._seen.items()}

    def backlog(self, done: Offsets) -> int:
        """Offsets that existed when `latest` looked, and are not read yet."""
        extents = self._seen or self.extents(done)
        return sum(e.next - (resume_at(done[k], e) if k in done else e.oldest) for k, e in extents.items())


def dump_offsets(offsets: Offsets) -> str:
    """Offsets as the checkpoint keeps them; the same offsets are always the same text."""
    return json.dumps({key: msgspec.to_builtins(offset) for key, offset in sorted(offsets.items())})


def load_offsets(text: str) -> Offsets:
    """The offsets of a checkpoint."""
    return msgspec.json.decode(text, type=Offsets)


def max_rows(options: SourceOptions) -> int:
    """The row limit to report to Spark: `max_events`; UNLIMITED if only bytes are limited; 0 if nothing is."""
    return options.max_events or (UNLIMITED if options.max_bytes else 0)


class Limit(msgspec.Struct, frozen=True):
    """How much a batch may still read."""

    events: int
    bytes: int

    def share(self, size: int, total: int, waiting: int) -> "Limit":
        """The part for a location that has `size` of `total` offsets, when `waiting` locations are left."""
        return Limit(
            *(max(1, left // (4 * waiting), left * size // total) for left in (self.events, self.bytes))
        )

    def without(self, used: "Limit") -> "Limit":
        """What is left; nothing if more was used."""
        return Limit(max(0, self.events - used.events), max(0, self.bytes - used.bytes))


def _limit(location: Location, first: int, stop: int, share: Limit) -> tuple[int, Limit]:
    """The offset up to which a location reads with this share (at least one frame), and how much of it comes.

    Headers are read, not data.
    """
    if isinstance(location, JournalLocation):
        with contextlib.suppress(Fault), JournalReader(location.key) as reader:
            counts = event_counts(reader, first, stop, in_bytes=share.bytes < UNLIMITED_SHARE)
            if counts is None:  # each offset is one event: no need to look
                reach = min(stop, first + share.events)
                return reach, Limit(reach - first, 0)
            reach, used = _reach(counts, first, share)
            if reach > first:
                return reach, used
    if isinstance(location, RemoteLocation):
        return _reach(location.sizes(first, stop), first, share, at_least=stop)
    # A publisher's journal, or something is gone at the very beginning: only a real read gets over that.
    for part in location.frames(first, stop):
        if isinstance(part, MissingRange):
            return part.last + 1, Limit(0, 0)
        if is_nested(part):
            reach, used = _reach(frame_counts(part, first, stop), first, share)
            return max(first + 1, reach), used
        per_event = max(1, len(part.raw) // part.count)
        reach = min(stop, first + max(1, min(share.events, share.bytes // per_event)))
        return reach, Limit(reach - first, (reach - first) * per_event)
    reach = min(stop, first + share.events)
    return reach, Limit(reach - first, 0)


def _reach(counts: Iterator[Size], first: int, share: Limit, *, at_least: int = 0) -> tuple[int, Limit]:
    """How far the counted frames go within the share, but at least one of them, and what comes.

    `at_least` is the answer if there is none.
    """
    events, size, at = 0, 0, first
    for after, count, length in counts:
        if at > first and (events + count > share.events or size + length > share.bytes):
            break
        events, size, at = events + count, size + length, after
    return (at if at > first else max(first, at_least)), Limit(events, size)


def _holds_frames(location: Location, first: int, stop: int) -> bool:
    if isinstance(location, RemoteLocation):
        return True  # looking would cost a whole part
    for part in location.frames(first, min(stop, first + 1)):
        if isinstance(part, Frame):
            return is_nested(part)
    return True


def read_partition(location: Location, partition: Partition, options: SourceOptions) -> Iterator["object"]:
    """The Arrow batches of one task. Raises DataLoss or Corrupt, unless the options say to go on."""
    from brokerless.spark_collector.source.rows import RowBuilder, lost_batch, range_batch

    now = time.time_ns() // 1000
    if partition.lost:
        yield lost_batch(
            partition.source, partition.epoch, partition.first, partition.stop - 1, partition.lost, now
        )
        return
    if options.ranges:
        yield range_batch(partition.source, partition.epoch, partition.first, msgspec.json.encode(partition))
        return
    selection = options.selection
    builder = RowBuilder(selection)
    for part in location.frames(partition.first, partition.stop, id=partition.id, epoch=partition.epoch):
        if isinstance(part, MissingRange):
            check_allowed(location, part, options)
            yield lost_batch(partition.source, partition.epoch, part.first, part.last, part.reason, now)
            continue
        for item in as_items(
            part, max(partition.first, part.first_offset), min(partition.stop, part.next_offset)
        ):
            if not selection.is_all and not selection.wants(item.frame):
                continue
            builder.add(item)
            if builder.full:
                yield builder.take()
    if builder.rows:
        yield builder.take()


def check_allowed(location: Location, gone: MissingRange, options: SourceOptions) -> None:
    """Raise DataLoss or Corrupt for a range that is gone, unless the options say to go on."""
    if gone.reason == "corrupt":
        if not options.quarantine_corrupt:
            raise location.corruption_error(gone)
    elif options.fail_on_data_loss:
        raise DataLoss(location.key, gone.first, gone.last, "retention dropped them while they were read")
