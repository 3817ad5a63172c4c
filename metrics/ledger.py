"""One client's ledger: which of its datagrams arrived, and what its counters must be. Pure.

For each counter the client is believed up to its last total (`told`, true for all datagrams up to number
`upto`); what arrived in later datagrams is added, scaled up for those that are missing. While any is missing
the counter is open, even if it seems quiet: it may have been counted in those. Heartbeats hold no lines of
counters: neither those that arrived nor those that are missing are among these datagrams.
"""

from collections.abc import Iterable
from math import inf, sqrt

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.metrics.audit import Heartbeat
from brokerless.metrics.estimate import Sampled, estimate
from brokerless.metrics.numbers import small
from brokerless.metrics.parser import Number
from brokerless.metrics.window import ClientWindow, Part, SegmentPool

# Ranges of numbers kept per client; with more gaps than that the oldest are only remembered as a count.
MAX_RANGES = 4096


class Key(msgspec.Struct):
    """One counter of one client. `total`, `variance` and `open` are what was last published.

    It is exact when nothing after `upto` is missing and neither `blur` nor `doubt` is left.
    """

    # Of the client's last total, what is ours; and the datagram that told it.
    confirmed: Number = 0
    upto: int = 0
    # How many heartbeats there were up to that datagram.
    heartbeats: int = 0
    told: bool = False
    # What of the client's total is not ours: counted before this daemon listened, or deleted.
    before: Number = 0
    # Variance of `before`, which no later total takes away.
    doubt: float = 0.0
    # What arrived in later datagrams, and the newest of these.
    part: Part = msgspec.field(default_factory=Part)
    last: int = 0
    # Variance of what may be counted twice or not at all, until the next total.
    blur: float = 0.0
    # Size of a usual line of it.
    usual: float = 0.0
    sampled_before: int = 0
    total: Number = 0
    variance: float = 0.0
    open: bool = False

    def tame(self) -> None:
        """Make sums beyond 64 bits, which cannot be written down, floats."""
        self.confirmed, self.before, self.total = map(small, (self.confirmed, self.before, self.total))
        self.part.tame()


class LedgerState(msgspec.Struct):
    """A ledger, to be written down."""

    fields: dict[str, int | float | str | bool | None]
    seen: list[tuple[int, int]]
    beats: list[tuple[int, int]]
    keys: dict[str, Key]


# What of a ledger is written down beside its keys and ranges.
_KEPT = [
    "client",
    "name",
    "base",
    "newest",
    "heartbeats_before",
    "heartbeats",
    "since_start",
    "complete_upto",
    "complete_heartbeats",
    "hidden",
    "failed",
    "lines",
    "lines_told",
    "duplicates",
    "late",
    "ended",
    "active_at",
    "healed",
    "_resumed",
    "_based",
    "_told_keys",
    "_forgotten",
    "_forgotten_upto",
    "_beats_forgotten",
    "_beats_forgotten_upto",
    "_sampled",
]


class Change(msgspec.Struct):
    """What a window changed in one counter of a client: new total and variance, and the window's own.

    `open`: something that may belong to it is missing, or in doubt.
    """

    total: Number
    variance: float
    window_variance: float
    open: bool


class ClientLedger:
    """All that is known of one client.

    There were `heartbeats_before` heartbeats before `first`. `resumed` is for a client that was forgotten and is
    back: the datagrams before `first` are settled.
    """

    def __init__(
        self, client: str, first: int, heartbeats_before: int, now: float, *, resumed: bool = False
    ) -> None:
        self.client = client
        self.name = ""
        self.base = first - 1
        self.newest = first - 1
        # Heartbeats up to `base`, and up to `newest`, as the client says.
        self.heartbeats_before = self.heartbeats = heartbeats_before
        # It began while we listened, so that all its numbers from 1 and all of its totals are for us.
        self.since_start = False
        # All counters that it had at this datagram have been told; any other is newer, and wholly ours.
        self.complete_upto = 0
        self.complete_heartbeats = 0
        # Datagrams are missing that may hold counters of which nothing is known.
        self.hidden = False
        self.failed = 0
        self.lines = 0
        self.lines_told: int | None = None
        self.duplicates = 0
        self.late = 0
        self.ended = False
        self.active_at = now
        self.keys: dict[str, Key] = {}
        self.healed = 0
        # How many more counters may be remembered; set by the owner of all ledgers before each fold.
        self.room = 1_000_000
        # What arrived in the last fold of counters that could not be remembered.
        self.unkept: dict[str, Number] = {}
        self._resumed = resumed
        # Whether `base` is final: from the first heartbeat on, `before` depends on it.
        self._based = resumed
        self._told_keys = 0
        self._seen = IntervalSet()
        self._forgotten = 0
        self._forgotten_upto = 0
        # Heartbeats that arrived.
        self._beats = IntervalSet()
        self._beats_forgotten = 0
        self._beats_forgotten_upto = 0
        self._sampled = 0

    def state(self) -> LedgerState:
        """All of it, to be written down."""
        fields = {name: getattr(self, name) for name in _KEPT}
        return LedgerState(fields, list(self._seen), list(self._beats), self.keys)

    @classmethod
    def restored(cls, state: LedgerState) -> "ClientLedger":
        """The ledger that was written down."""
        ledger = cls("", 1, 0, 0.0)
        for name in _KEPT:
            setattr(ledger, name, state.fields[name])
        ledger.keys = state.keys
        ledger._seen = IntervalSet(state.seen)
        ledger._beats = IntervalSet(state.beats)
        return ledger

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
        if window.newest > self.newest:
            self.newest, self.heartbeats = window.newest, window.heartbeats
        self.unkept = {}
        if not self._based and window.first <= self.base:
            self.base, self.heartbeats_before = window.first - 1, window.heartbeats_before
        if any(_began_here(beat, daemon_start_ms) for beat in window.beats) and not self._resumed:
            self.since_start = True
            self.base = self.heartbeats_before = 0
        twice = self._arrived(window)
        told: set[str] = set()
        steps: list[tuple[int, int, SegmentPool | Heartbeat]] = []
        steps += [(segment.last, 0, segment) for segment in window.segments]
        steps += [(beat.number, 1, beat) for beat in window.beats]
        for _, _, step in sorted(steps, key=lambda item: item[:2]):
            if isinstance(step, SegmentPool):
                self._segment(step, twice)
            else:
                self._beat(step, told)
        return self._changes(told)

    @property
    def _introduced(self) -> bool:
        """Whether it is known which of its datagrams were meant for us: by a heartbeat, or it began with 1."""
        return self._based or not self.base

    def _arrived(self, window: ClientWindow) -> float:
        """Note the numbers that arrived; returns the share of them that another process had received too.

        The lines of these are counted twice until totals come.
        """
        twice = total = 0
        floor = max(self.base, self._forgotten_upto)
        for first, last in window.seen:
            total += last - first + 1
            twice += (last - first + 1) - self._seen.add(max(first, floor + 1), last)
        self.duplicates += twice
        while len(self._seen) > MAX_RANGES:
            first, last = self._seen.pop_lowest()[0]
            self._forgotten += last - first + 1
            self._forgotten_upto = last
        for beat in window.beats:
            if beat.number > max(floor, self._beats_forgotten_upto):
                self._beats.add(beat.number, beat.number)
        while len(self._beats) > MAX_RANGES:
            first, last = self._beats.pop_lowest()[0]
            self._beats_forgotten += last - first + 1
            self._beats_forgotten_upto = last
        return twice / total if total else 0.0

    def _key(self, series: str) -> Key | None:
        key = self.keys.get(series)
        if key is None:
            if self.room <= 0:
                return None
            self.room -= 1
            key = self.keys[series] = Key()
        return key

    def _segment(self, segment: SegmentPool, twice: float) -> None:
        self._sampled += segment.pool.sampled
        for series, part in segment.pool.parts.items():
            key = self._key(series)
            if key is None:
                self.unkept[series] = self.unkept.get(series, 0) + part.amount
                continue
            upto = max(key.upto, self.base)
            if segment.last <= upto:
                continue  # late: the client's total has it already
            key.last = max(key.last, segment.last)
            behind = upto - segment.first + 1
            share = 1.0 if behind <= 0 else (segment.last - upto) / (segment.last - segment.first + 1)
            key.part.add(part, share)
            key.blur += part.squares * (share * (1 - share) + twice)

    def _beat(self, beat: Heartbeat, told: set[str]) -> None:
        self._based = True
        self.name = beat.name or self.name
        self.ended = self.ended or beat.end
        self.failed = max(self.failed, beat.failed or 0)
        if beat.lines is not None:
            self.lines_told = max(self.lines_told or 0, beat.lines)
        for series, total in beat.totals.items():
            self._told(series, total, beat)
            told.add(series)
        complete = beat.counters is not None and self._told_keys >= beat.counters
        if complete and beat.number > self.complete_upto:
            self.complete_upto, self.complete_heartbeats = beat.number, beat.heartbeats

    def _told(self, series: str, total: Number, beat: Heartbeat) -> None:
        key, number = self._key(series), beat.number
        if key is None:
            self.unkept.setdefault(series, 0)
            return
        if number <= max(key.upto, self.base):
            return
        if not key.told:
            self._told_keys += 1
            if self.base and not (self.since_start or self.complete_upto):
                # The client is older than this daemon: what it counted before is somebody else's. One whose
                # first datagram came here had counted nothing before.
                ours, key.doubt, missing = self._estimate(key)
                key.before = total - (round(ours) if missing else ours)
        key.told = True
        self.healed += 1
        part = key.part
        if part.amount:
            key.usual = min(abs(part.squares / part.amount), sqrt(part.squares))
        rest = Part()
        key.blur = 0.0
        if key.last > number:
            # A total that is older than some of what has arrived and cannot be parted any more.
            share = (key.last - number) / max(1, key.last - key.upto)
            rest.add(part, share)
            key.blur = part.squares * share * (1 - share)
        key.part = rest
        key.confirmed = total - key.before
        key.upto, key.heartbeats = number, beat.heartbeats
        key.sampled_before = self._sampled

    def restart(self, series: str) -> None:
        """Count one counter from 0 again."""
        key = self.keys.get(series)
        if key is not None:
            key.before += key.total
            key.confirmed -= key.total
            key.doubt = key.variance
            key.total = 0

    def _begin(self, key: Key) -> tuple[int, int]:
        """The datagram from which on a counter is not told, and how many heartbeats there were up to it."""
        if key.upto > self.base:
            return key.upto, key.heartbeats
        return self.base, self.heartbeats_before

    def _after(self, begins: dict[int, int]) -> dict[int, tuple[int, int]]:
        """For each number: how many later datagrams that may hold counters have arrived, how many are missing.

        `begins` gives the heartbeats up to each number; what is no heartbeat may hold any counter.
        """
        found: dict[int, tuple[int, int]] = {}
        arrived, beats = _count_after(self._seen, begins), _count_after(self._beats, begins)
        for begin, heartbeats in begins.items():
            missing = self.newest - begin - arrived[begin]
            if begin < self._forgotten_upto:
                # Only how many are missing of all the forgotten ones is known.
                span = self._forgotten_upto - self.base
                missing -= round(self._forgotten * (self._forgotten_upto - begin) / max(1, span))
            here = beats[begin] + (self._beats_forgotten if begin < self._beats_forgotten_upto else 0)
            received = self.newest - begin - missing - here
            missing -= max(0, self.heartbeats - heartbeats - here)
            if begin < self._forgotten_upto:
                missing = max(1, missing)  # to be safe
            found[begin] = max(0, received), max(0, missing)
        return found

    def _estimate(self, key: Key, after: tuple[int, int] | None = None) -> tuple[Number, float, int]:
        if after is None:
            begin, heartbeats = self._begin(key)
            after = self._after({begin: heartbeats})[begin]
        received, missing = after
        part = key.part
        if not self._introduced:
            # Not heard from the start: whether all before was lost, or before our time, its heartbeat will say.
            return key.confirmed + part.amount, inf, max(1, missing)
        if missing <= 0:
            return key.confirmed + part.amount, key.doubt + key.blur, 0
        if part.squares:
            sample = Sampled(part.sum, part.sum_squares, part.diagonal)
            sampled = self._sampled - key.sampled_before
            found = estimate(part.amount, part.squares, received, missing, sample, sampled)
        else:
            # None arrived; the first to come may have been in a missing one. Every datagram received says so.
            usual = key.usual or max(1.0, abs(key.confirmed))
            found = estimate(0, usual * usual, received, missing, None, received)
        return key.confirmed + found.total, found.variance + key.doubt + key.blur, missing

    def _changes(self, told: set[str]) -> dict[str, Change]:
        changes: dict[str, Change] = {}
        after: dict[int, tuple[int, int]] = {}
        complete = max((self.complete_upto, self.complete_heartbeats), (self.base, self.heartbeats_before))
        if self.lost:
            after = self._after(dict([complete, *map(self._begin, self.keys.values())]))
        _, missing = after.get(complete[0], (0, 0))
        self.hidden = bool(missing) or not self._introduced
        for series, key in self.keys.items():
            changed = after or key.part.squares or key.open or series in told or not self._introduced
            if not changed:
                continue
            total, variance, gone = self._estimate(key, after.get(self._begin(key)[0], (0, 0)))
            is_open = bool(gone or variance)
            if (total, variance, is_open) == (key.total, key.variance, key.open):
                continue
            window_variance = _window_variance(key.variance, variance, series in told)
            changes[series] = Change(total, variance, window_variance, is_open)
            key.total, key.variance, key.open = total, variance, is_open
        return changes


def _count_after(numbers: IntervalSet, begins: Iterable[int]) -> dict[int, int]:
    """For each of `begins`, how many of `numbers` are larger; all in one walk over the ranges."""
    found: dict[int, int] = {}
    ranges = list(numbers)
    count = 0
    for begin in sorted(begins, reverse=True):
        while ranges and ranges[-1][0] > begin:
            first, last = ranges.pop()
            count += last - first + 1
        found[begin] = count + (max(0, ranges[-1][1] - begin) if ranges else 0)
    return found


def _began_here(beat: Heartbeat, daemon_start_ms: int) -> bool:
    return beat.start_ms is not None and beat.start_ms >= daemon_start_ms


def _window_variance(before: float, after: float, told: bool) -> float:
    """The variance of the difference between two published totals."""
    if inf in (before, after):
        return inf
    # Without new totals the later error contains the earlier one; with them the earlier one was put right
    # now.
    return before + after if told else abs(after - before)
