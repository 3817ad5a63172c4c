"""One numbered client as it arrives: duplicates dropped, order restored, split at its heartbeats. Pure.

Datagrams beyond a gap are held for a moment, because they may only have overtaken the missing one. So what
leaves here is in the client's own order unless a datagram was more than `HOLD` behind, and when a heartbeat
leaves, all that came before it has left: its totals replace exactly that.
"""

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.metrics.aggregate.line_counts import LineCounts, new_line_counts
from brokerless.metrics.limits import LOSSY_WINDOWS, MAX_RANGES
from brokerless.metrics.sequence_lines import PREFIX, Heartbeat, parse_totals

# Reordering on one path is a handful of datagrams; 64 is a receive batch, about 90 KB per client with gaps.
HOLD = 64
# A number that is so far ahead is a damaged or a forged one: 28 hours at a thousand datagrams a second.
MAX_JUMP = 10**8
# Late datagrams kept apart in one window; more are put together, which is exact again with the next heartbeat.
MAX_LATE = 256


class SegmentLines(msgspec.Struct):
    """Datagrams of one client between two of its heartbeats: numbers `first` to `last`, and their lines."""

    first: int
    last: int
    counts: LineCounts


class Reorder:
    """State of one client in the process that receives it."""

    __slots__ = (
        "_floor",
        "_held",
        "_lossy_windows",
        "_next",
        "_ordered",
        "_run",
        "_seen",
        "beats",
        "client",
        "duplicates",
        "first",
        "fresh",
        "heartbeats",
        "heartbeats_before",
        "held_bytes",
        "implausible",
        "late",
        "max_ranges",
        "newest",
        "newest_payload",
        "ready",
        "segment_first",
        "segments",
        "stale",
    )

    def __init__(self, client: bytes, number: int, ordered: list[bytes]) -> None:
        self.client = client
        self.first = number
        self.newest = number - 1
        self.newest_payload = b""
        # What the client said of its heartbeats: how many there were before `first`, and up to `newest`.
        self.heartbeats_before = 0
        self.heartbeats = 0
        self.segment_first = number
        # Handed over, in order, and not yet in the counts of the last segment.
        self.ready: list[bytes] = []
        self.segments: list[SegmentLines] = []
        self.beats: list[Heartbeat] = []
        self.fresh = IntervalSet()
        self.duplicates = 0
        self.late = 0
        self.stale = 0
        self.implausible = 0
        self._ordered = ordered
        self._next = number
        # Start of the run of numbers that ends at _next - 1 and is not yet in _seen and fresh.
        self._run = number
        self._seen = IntervalSet()
        self._held: dict[int, tuple[bytes, int]] = {}
        # Bytes held back, for the owner of all clients to bound.
        self.held_bytes = 0
        self.max_ranges = MAX_RANGES
        self._floor = 0
        self._lossy_windows = 0

    def offer(self, number: int, payload: bytes, heartbeats: int = 0) -> bool:
        """Take a datagram; False when it is a duplicate (or too old to tell), and then nothing changed."""
        if number == self._next and not self._held:
            self._next = number + 1
            self.newest = number
            self.newest_payload = payload
            self.heartbeats = heartbeats
            if payload.startswith(PREFIX):
                self._control(number, payload, heartbeats)
            else:
                self.ready.append(payload)
            return True
        return self._out_of_order(number, payload, heartbeats)

    def _out_of_order(self, number: int, payload: bytes, heartbeats: int) -> bool:
        if number < self._next:
            return self._late(number, payload, heartbeats)
        if number - self.newest > MAX_JUMP:
            self.implausible += 1
            return False
        if number in self._held:
            self.duplicates += 1
            return False
        self._held[number] = payload, heartbeats
        self.held_bytes += len(payload)
        if number > self.newest:
            self.newest, self.newest_payload, self.heartbeats = number, payload, heartbeats
        if number == self._next:
            self._release(self._next)
        elif self.newest - self._next >= HOLD:
            self._release(self.newest - HOLD + 1)
        return True

    def _release(self, upto: int) -> None:
        """Hand over what is held, in order; gaps below `upto` are given up, the first other one stops."""
        for number in sorted(self._held):
            if number != self._next:
                if self._next >= upto:
                    return
                self._end_run()
                self._lossy_windows = LOSSY_WINDOWS
                self._next = self._run = min(number, upto)
                if number > upto:
                    return
            self._next = number + 1
            payload, heartbeats = self._held.pop(number)
            self.held_bytes -= len(payload)
            if payload.startswith(PREFIX):
                self._control(number, payload, heartbeats)
            else:
                self.ready.append(payload)

    def _late(self, number: int, payload: bytes, heartbeats: int) -> bool:
        self._end_run()
        if number <= self._floor:
            self.stale += 1
            return False
        if not self._seen.add(number, number):
            self.duplicates += 1
            return False
        self.fresh.add(number, number)
        if number < self.first:
            self.first, self.heartbeats_before = number, heartbeats - payload.startswith(PREFIX)
        self.late += 1
        if payload.startswith(PREFIX):
            beat, payload = parse_totals(self.client, number, payload, heartbeats)
            self.beats.append(beat)
            if not payload:
                return True
        if number >= self.segment_first:
            self.ready.append(payload)
        else:
            self._late_segment(number, payload)
        return True

    def _late_segment(self, number: int, payload: bytes) -> None:
        """From before the last heartbeat, whose totals may include it already: kept apart, by its number."""
        if len(self.segments) < MAX_LATE:
            counts = new_line_counts(self._ordered)
            self.segments.insert(0, SegmentLines(number, number, counts))
        else:
            segment = self.segments[0]
            segment.first, segment.last = min(segment.first, number), max(segment.last, number)
            counts = segment.counts
        counts.add([payload])

    def _end_run(self) -> None:
        if self._run < self._next:
            self._seen.add(self._run, self._next - 1)
            self.fresh.add(self._run, self._next - 1)
            self._run = self._next
            while len(self._seen) > self.max_ranges:
                first, self._floor = next(iter(self._seen))
                self._seen.remove(first, self._floor)

    def _control(self, number: int, payload: bytes, heartbeats: int) -> None:
        beat, rest = parse_totals(self.client, number, payload, heartbeats)
        if rest:
            self.ready.append(rest)
        self.close_segment(number)
        self.beats.append(beat)

    def drain(self) -> None:
        """Put what is ready into the counts of the current segment."""
        if not self.ready:
            return
        segments = self.segments
        if not segments or segments[-1].first != self.segment_first:
            segments.append(
                SegmentLines(self.segment_first, self.segment_first, new_line_counts(self._ordered))
            )
        segment = segments[-1]
        segment.last = max(segment.last, self._next - 1)
        segment.counts.add(self.ready)
        self.ready = []

    def release_held(self) -> None:
        """Wait no longer for what is missing."""
        if self._held:
            self._release(self.newest + 1)

    def close_segment(self, number: int) -> None:
        """End the current segment: what follows has larger numbers than `number`."""
        self.drain()
        self.segment_first = number + 1

    def close_window(self) -> None:
        """The window ends: hand over everything, held or not, and report all numbers seen in `fresh`."""
        self.release_held()
        self._end_run()
        self.close_segment(self._next - 1)
        self._lossy_windows = max(0, self._lossy_windows - 1)

    @property
    def lossy(self) -> bool:
        """Whether numbers were missing lately: then whole datagrams are worth looking at."""
        return bool(self._lossy_windows or self._held)

    def collect_into(self, ordered: list[bytes]) -> None:
        """From now on, put what must stay in order into this list."""
        self._ordered = ordered

    def taken(self) -> None:
        """What was reported (segments, beats, numbers, counts) has been taken; start over."""
        self.segments = []
        self.beats = []
        self.fresh = IntervalSet()
        self.duplicates = self.late = self.stale = self.implausible = 0

    @property
    def distinct(self) -> int:
        """Distinct lines in the current segment."""
        return self.segments[-1].counts.distinct if self.segments else 0
