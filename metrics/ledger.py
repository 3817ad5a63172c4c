"""One client's ledger: which of its datagrams arrived, and what its counters must be. Pure.

For each counter the client is believed up to its last total (`told`, true for all datagrams up to number
`upto`); what arrived in later datagrams is added, scaled up for those that are missing.
"""

from math import inf

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.metrics.audit import Heartbeat
from brokerless.metrics.estimate import Sampled, estimate
from brokerless.metrics.parser import Number
from brokerless.metrics.window import ClientWindow, Part, SegmentPool

# Ranges of numbers kept per client; with more gaps than that the oldest are only remembered as a count.
MAX_RANGES = 4096


class Key(msgspec.Struct):
    """One counter of one client. `total` and `variance` are what was last published."""

    confirmed: Number = 0
    upto: int = 0
    last: int = 0
    told: bool = False
    before: Number = 0
    part: Part = msgspec.field(default_factory=Part)
    sampled_before: int = 0
    total: Number = 0
    variance: float = 0.0


class Change(msgspec.Struct):
    """What a window changed in one counter of a client: new total and variance, and the window's own."""

    total: Number
    variance: float
    window_variance: float
    missing: int


class ClientLedger:
    """All that is known of one client."""

    def __init__(self, client: str, first: int, now: float) -> None:
        self.client = client
        self.name = ""
        self.base = first - 1
        self.newest = first - 1
        self.since_start = False
        self.failed = 0
        self.lines = 0
        self.lines_told: int | None = None
        self.duplicates = 0
        self.late = 0
        self.ended = False
        self.active_at = now
        self.heartbeat_at: float | None = None
        self.keys: dict[str, Key] = {}
        self.healed = 0
        # How many more counters may be remembered; set by the owner of all ledgers before each fold.
        self.room = 1_000_000
        self.keys_refused = 0
        self._seen = IntervalSet()
        self._forgotten = 0
        self._forgotten_upto = 0
        self._sampled = 0

    @property
    def received(self) -> int:
        """Distinct datagrams that arrived."""
        return self._seen.total + self._forgotten

    @property
    def sent(self) -> int:
        """Datagrams the client is known to have sent since this daemon listens."""
        return self.newest - self.base

    @property
    def lost(self) -> int:
        """Sent and not received."""
        return self.sent - self.received

    def fold(self, window: ClientWindow, now: float, daemon_start_ms: int) -> dict[str, Change]:
        """Take in a window and return the counters that it changed."""
        self.active_at = now
        self.duplicates += window.duplicates
        self.late += window.late
        self.lines += window.lines
        self.newest = max(self.newest, window.newest)
        self.base = min(self.base, window.first - 1)
        for first, last in window.seen:
            # Numbers that two processes received: the second one's lines are in the figures until totals
            # come.
            self.duplicates += (last - first + 1) - self._seen.add(first, last)
        self._forget_ranges()
        told: set[str] = set()
        steps: list[tuple[int, int, SegmentPool | Heartbeat]] = []
        steps += [(segment.last, 0, segment) for segment in window.segments]
        steps += [(beat.number, 1, beat) for beat in window.beats]
        for _, _, step in sorted(steps, key=lambda item: item[:2]):
            if isinstance(step, SegmentPool):
                self._segment(step)
            else:
                self._beat(step, now, daemon_start_ms, told)
        return self._changes(told)

    def _forget_ranges(self) -> None:
        while len(self._seen) > MAX_RANGES:
            first, last = next(iter(self._seen))
            self._seen.remove(first, last)
            self._forgotten += last - first + 1
            self._forgotten_upto = last

    def _key(self, series: str) -> Key | None:
        key = self.keys.get(series)
        if key is None:
            if self.room <= 0:
                self.keys_refused += 1
                return None
            self.room -= 1
            key = self.keys[series] = Key()
        return key

    def _segment(self, segment: SegmentPool) -> None:
        self._sampled += segment.pool.sampled
        for series, part in segment.pool.parts.items():
            key = self._key(series)
            if key is None:
                continue
            if segment.last <= key.upto:
                continue  # late: the client's total has it already
            key.last = max(key.last, segment.last)
            behind = key.upto - segment.first + 1
            share = 1.0 if behind <= 0 else (segment.last - key.upto) / (segment.last - segment.first + 1)
            key.part.add(part, share)

    def _beat(self, beat: Heartbeat, now: float, daemon_start_ms: int, told: set[str]) -> None:
        self.heartbeat_at = now
        self.newest = max(self.newest, beat.number)
        self.name = beat.name or self.name
        self.ended = self.ended or beat.end
        if beat.start_ms is not None and beat.start_ms >= daemon_start_ms and not self.since_start:
            # It began while we listened, so that all its numbers from 1 were meant for us.
            self.since_start = True
            self.base = 0
        self.failed = max(self.failed, beat.failed or 0)
        if beat.lines is not None:
            self.lines_told = max(self.lines_told or 0, beat.lines)
        for series, total in beat.totals.items():
            self._told(series, total, beat.number)
            told.add(series)

    def _told(self, series: str, total: Number, number: int) -> None:
        key = self._key(series)
        if key is None:
            return
        if key.told and number <= key.upto:
            return
        if not key.told and not self.since_start:
            # The client is older than this daemon: what it counted before is somebody else's.
            ours, _, missing = self._estimate(key)
            key.before = total - (round(ours) if missing else ours)
        key.told = True
        self.healed += 1
        if key.last <= number:
            key.part = Part()
        else:
            rest = Part()
            rest.add(key.part, (key.last - number) / max(1, key.last - key.upto))
            key.part = rest
        key.confirmed = total - key.before
        key.upto = number
        key.sampled_before = self._sampled

    def _received_after(self, number: int) -> int:
        received = sum(last - first + 1 for first, last in self._seen.overlap(number + 1, self.newest))
        if number < self._forgotten_upto:
            span = self._forgotten_upto - self.base
            received += round(
                self._forgotten * (self._forgotten_upto - max(number, self.base)) / max(1, span)
            )
        return received

    def _estimate(self, key: Key, received: int | None = None) -> tuple[Number, float, int]:
        begin = max(key.upto, self.base)
        if received is None:
            received = self._received_after(begin)
        missing = self.newest - begin - received
        part = key.part
        sample = Sampled(part.sum, part.sum_squares, part.diagonal)
        sampled = self._sampled - key.sampled_before
        found = estimate(part.amount, part.squares, received, missing, sample, sampled)
        if missing <= 0:
            return key.confirmed + part.amount, 0.0, 0
        return key.confirmed + found.total, found.variance, missing

    def _changes(self, told: set[str]) -> dict[str, Change]:
        received: dict[int, int] = {}
        changes: dict[str, Change] = {}
        for series, key in self.keys.items():
            if not key.part.squares and series not in told and not key.variance:
                continue
            begin = max(key.upto, self.base)
            if begin not in received:
                received[begin] = self._received_after(begin)
            if key.part.squares or not key.told:
                total, variance, missing = self._estimate(key, received[begin])
            else:
                total, variance, missing = key.confirmed, 0.0, 0
            if total == key.total and variance == key.variance:
                continue
            changes[series] = Change(
                total, variance, _window_variance(key.variance, variance, series in told), missing
            )
            key.total, key.variance = total, variance
        return changes


def _window_variance(before: float, after: float, told: bool) -> float:
    """The variance of the difference between two published totals."""
    if inf in (before, after):
        return inf
    # Without new totals the later error contains the earlier one; with them the earlier one was put right
    # now.
    return before + after if told else abs(after - before)
