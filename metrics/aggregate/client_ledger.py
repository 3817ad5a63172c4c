"""One client's ledger: which of its datagrams arrived, and what its counters must be. Pure.

For each counter the client is believed up to its last total (`reported`, true for all datagrams up to number
`upto`); what arrived in later datagrams is added, scaled up for those that are missing. While any is missing
the counter is open, even if it seems quiet: it may have been counted in those. Heartbeats hold no lines of
counters: neither those that arrived nor those that are missing are among these datagrams.
"""

from collections.abc import Iterable
from math import inf, sqrt

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.metrics.aggregate.estimate import Z95, Sampled, estimate
from brokerless.metrics.aggregate.reorder import HOLD
from brokerless.metrics.aggregate.window import ClientWindow, CounterSums, DatagramSums, SegmentSums
from brokerless.metrics.limits import HEARTBEAT_S, MAX_RANGES
from brokerless.metrics.numbers import fit_64_bits
from brokerless.metrics.parser import Number
from brokerless.metrics.sequence_lines import Heartbeat

# So many heartbeats missed in a row by chance, at 20 % loss: once in 125 times.
SILENT_HEARTBEATS = 3.0
# Sums of floats in another order differ by less.
ROUNDING = 1e-6


class ClientCounter(msgspec.Struct):
    """One counter of one client. `total`, `variance` and `open` are what was last published.

    It is exact when nothing after `upto` is missing and neither `split_variance` nor `before_variance` is left.
    """

    # Of the client's last total, what is ours; and the datagram that reported it.
    confirmed: Number = 0
    upto: int = 0
    # How many heartbeats there were up to that datagram.
    heartbeats: int = 0
    reported: bool = False
    # What of the client's total is not ours: counted before this daemon listened, or deleted.
    before: Number = 0
    # Variance of `before`, which no later total takes away.
    before_variance: float = 0.0
    # What arrived in later datagrams, and the newest of these.
    sums: CounterSums = msgspec.field(default_factory=CounterSums)
    last: int = 0
    # Variance of what may be counted twice or not at all, until the next total.
    split_variance: float = 0.0
    # Size of a usual line of it, and how much of it is in one datagram.
    usual: float = 0.0
    per_datagram: float = 0.0
    sampled_before: int = 0
    total: Number = 0
    variance: float = 0.0
    open: bool = False

    def fit_64_bits(self) -> None:
        """Make sums beyond 64 bits, which cannot be written down, floats."""
        self.confirmed, self.before, self.total = map(fit_64_bits, (self.confirmed, self.before, self.total))
        self.sums.fit_64_bits()


class LedgerState(msgspec.Struct):
    """A ledger, to be written down."""

    fields: dict[str, int | float | str | bool | None]
    seen: list[tuple[int, int]]
    beats: list[tuple[int, int]]
    counters: dict[str, ClientCounter]
    newest_sums: DatagramSums | None = None


# What of a ledger is written down beside its counters and ranges.
_SAVED = [
    "client",
    "name",
    "start_ms",
    "base",
    "newest",
    "heartbeats_before",
    "heartbeats",
    "since_start",
    "complete_upto",
    "complete_heartbeats",
    "may_hide",
    "failed",
    "lines",
    "lines_reported",
    "duplicates",
    "late",
    "ended",
    "heartbeat_s",
    "silent",
    "unresolved",
    "partial",
    "first_at",
    "active_at",
    "healed",
    "_resumed",
    "_based",
    "_reported_counters",
    "_forgotten",
    "_forgotten_upto",
    "_beats_forgotten",
    "_beats_forgotten_upto",
    "_sampled",
]


class CounterChange(msgspec.Struct, gc=False):
    """What a window changed in one counter of a client: new total and variance, and the window's own.

    `open`: something that may belong to it is missing, or in before_variance.
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
        # When it began, as it says.
        self.start_ms: int | None = None
        self.base = first - 1
        self.newest = first - 1
        # Heartbeats up to `base`, and up to `newest`, as the client says.
        self.heartbeats_before = self.heartbeats = heartbeats_before
        # It began while we listened, so that all its numbers from 1 and all of its totals are for us.
        self.since_start = False
        # All counters that it had at this datagram have been reported; any other is newer, and wholly ours.
        self.complete_upto = 0
        self.complete_heartbeats = 0
        # Datagrams are missing that may hold counters of which nothing is known.
        self.may_hide = False
        self.failed = 0
        self.lines = 0
        self.lines_reported: int | None = None
        self.duplicates = 0
        self.late = 0
        self.ended = False
        # Seconds between its heartbeats, as it says.
        self.heartbeat_s = HEARTBEAT_S
        # It has missed heartbeats and said no goodbye: what was in its buffer may have died with it.
        self.silent = False
        # It was forgotten before it had said anything of itself: what it lost until then is never known.
        self.unresolved = False
        # Its first datagrams were counted as unnumbered ones, or settled before: nobody knows which.
        self.partial = False
        # Its totals contradict what arrived, although nothing is missing; or two senders use its id.
        self.conflict = False
        # Windows with heartbeats far behind the newest number, since that last rose.
        self._stalled = 0
        self.first_at = now
        self.active_at = now
        self.counters: dict[str, ClientCounter] = {}
        self.healed = 0
        # How many more counters may be remembered; set by the owner of all ledgers before each fold.
        self.room = 1_000_000
        # What arrived in the last fold of counters that could not be remembered.
        self.not_remembered: dict[str, Number] = {}
        # Counters that are new in the last fold, where earlier windows may have lacked some of them.
        self._surfaced: set[str] = set()
        self._resumed = resumed
        # Whether `base` is final: from the first heartbeat on, `before` depends on it.
        self._based = resumed
        self._reported_counters = 0
        self._newest_beat = 0
        # Lines up to this datagram were refused by a filter or a limit: totals have more than what was counted.
        self._refused_upto = 0
        self._seen = IntervalSet()
        self._forgotten = 0
        self._whole = True  # every datagram up to the heartbeat in question is in the sums, if it arrived
        self._forgotten_upto = 0
        # Heartbeats that arrived.
        self._beats = IntervalSet()
        self._beats_forgotten = 0
        self._beats_forgotten_upto = 0
        self._sampled = 0
        # What is in the newest datagram, if that is known and it is no heartbeat.
        self._newest_sums: DatagramSums | None = None

    def state(self) -> LedgerState:
        """All of it, to be written down."""
        fields = {name: getattr(self, name) for name in _SAVED}
        return LedgerState(fields, list(self._seen), list(self._beats), self.counters, self._newest_sums)

    @classmethod
    def restored(cls, state: LedgerState) -> "ClientLedger":
        """The ledger that was written down."""
        ledger = cls("", 1, 0, 0.0)
        for name in _SAVED:
            setattr(ledger, name, state.fields[name])
        ledger.counters = state.counters
        ledger._seen = IntervalSet(state.seen)
        ledger._beats = IntervalSet(state.beats)
        ledger._newest_sums = state.newest_sums
        ledger._newest_beat = max((counter.upto for counter in ledger.counters.values()), default=0)
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

    def fold(self, window: ClientWindow, now: float, daemon_start_ms: int) -> dict[str, CounterChange]:
        """Take in a window and return the counters that it changed."""
        self.active_at = now
        self.silent = False
        self.duplicates += window.duplicates
        self.late += window.late
        self.lines += window.lines
        self._check_order(window)
        if window.newest > self.newest:
            self.newest, self.heartbeats = window.newest, window.heartbeats
            self._newest_sums = window.newest_sums
        self.not_remembered, self._surfaced = {}, set()
        if not self._based and window.first <= self.base:
            self.base, self.heartbeats_before = window.first - 1, window.heartbeats_before
        if any(_began_here(beat, daemon_start_ms) for beat in window.beats) and not self._resumed:
            self.since_start = True
            self.base = self.heartbeats_before = 0
        twice = self._arrived(window)
        reported: set[str] = set()
        steps: list[tuple[int, int, SegmentSums | Heartbeat]] = []
        steps += [(segment.last, 0, segment) for segment in window.segments]
        steps += [(beat.number, 1, beat) for beat in window.beats]
        steps.sort(key=lambda item: item[:2])
        # Another process divides its segments at other heartbeats: one that is folded later may have older datagrams.
        later_from = newest = window.newest + 1
        begins: list[int] = []
        for _, _, step in reversed(steps):
            begins.append(later_from)
            later_from = min(later_from, step.first if isinstance(step, SegmentSums) else newest)
        for (_, _, step), begin in zip(steps, reversed(begins), strict=True):
            if isinstance(step, SegmentSums):
                self._segment(step, twice)
            else:
                self._whole = begin > step.number
                self._beat(step, reported)
        return self._changes(reported)

    def _check_order(self, window: ClientWindow) -> None:
        """Note a conflict where heartbeats come in two windows far behind the newest number, which stands still.

        They are of another sender than that number: one of the two is forged, or a copy of the client runs
        elsewhere. In one window they may have been delayed together.
        """
        if window.newest > self.newest:
            self._stalled = 0
        elif any(b.number < self.newest - HOLD and b.number not in self._beats for b in window.beats):
            self._stalled += 1
            self.conflict |= self._stalled > 1

    def check_silence(self, now: float) -> dict[str, CounterChange]:
        """For a client that sent nothing in this window; returns the counters that this changes."""
        if self.silent or self.ended or now - self.active_at <= SILENT_HEARTBEATS * self.heartbeat_s:
            return {}
        self.silent = True
        return self._changes(set())

    @property
    def has_heartbeat(self) -> bool:
        """Whether it has said of itself what a client of ours says; a number alone may be anybody's."""
        return self._based

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

    def _counter(self, series: str) -> ClientCounter | None:
        counter = self.counters.get(series)
        if counter is None:
            if self.room <= 0:
                return None
            self.room -= 1
            counter = self.counters[series] = ClientCounter()
            if self.may_hide:
                self._surfaced.add(series)
        return counter

    def _segment(self, segment: SegmentSums, twice: float) -> None:
        self._sampled += segment.sums.sampled
        if segment.refused:
            self._refused_upto = max(self._refused_upto, segment.last)
        for series, sums in segment.sums.counters.items():
            counter = self._counter(series)
            if counter is None:
                self.not_remembered[series] = self.not_remembered.get(series, 0) + sums.amount
                continue
            upto = max(counter.upto, self.base)
            if segment.last <= upto:
                continue  # late: the client's total has it already
            counter.last = max(counter.last, segment.last)
            behind = upto - segment.first + 1
            share = 1.0 if behind <= 0 else (segment.last - upto) / (segment.last - segment.first + 1)
            counter.sums.add(sums, share)
            counter.split_variance += sums.squares * (share * (1 - share) + twice)

    def _beat(self, beat: Heartbeat, reported: set[str]) -> None:
        self._based = True
        self.name = beat.name or self.name
        self.ended = self.ended or beat.end
        if beat.start_ms is not None:
            # It tells two beginnings: they are two clients.
            self.conflict |= self.start_ms not in (None, beat.start_ms)
            self.start_ms = beat.start_ms
        self.failed = max(self.failed, beat.failed or 0)
        if beat.every_ms:
            self.heartbeat_s = beat.every_ms / 1000
        if beat.lines is not None:
            self.lines_reported = max(self.lines_reported or 0, beat.lines)
        for series, total in beat.totals.items():
            self._reported(series, total, beat)
            reported.add(series)
        # A late heartbeat proves nothing: what was reported since may be counters that it did not know yet.
        in_order = beat.number >= max(self._newest_beat, self.base + 1)
        self._newest_beat = max(self._newest_beat, beat.number)
        if in_order and beat.counters is not None and self._reported_counters >= beat.counters:
            self.complete_upto, self.complete_heartbeats = beat.number, beat.heartbeats

    def _reported(self, series: str, total: Number, beat: Heartbeat) -> None:
        counter, number = self._counter(series), beat.number
        if counter is None:
            self.not_remembered.setdefault(series, 0)
            return
        if number <= max(counter.upto, self.base):
            return
        if not counter.reported:
            if self.base and not (self.since_start or self.complete_upto):
                # The client is older than this daemon: what it counted before is somebody else's. One whose
                # first datagram came here had counted nothing before.
                if not self._whole or counter.last > number:
                    return  # it is not known how much of ours came before it; the next total will do
                ours, counter.before_variance, missing = self._estimate(series, counter)
                counter.before = total - (round(ours) if missing else ours)
            self._reported_counters += 1
        elif self._contradicts(counter, total, number):
            self.conflict = True
        counter.reported = True
        self.healed += 1
        sums = counter.sums
        if sums.amount:
            counter.usual = min(abs(sums.squares / sums.amount), sqrt(sums.squares))
            datagrams = number - max(counter.upto, self.base) - (beat.heartbeats - counter.heartbeats)
            counter.per_datagram = abs(sums.amount) / max(1, datagrams)
        rest = CounterSums()
        counter.split_variance = 0.0
        if counter.last > number:
            # A total that is older than some of what has arrived and cannot be parted any more.
            share = (counter.last - number) / max(1, counter.last - max(counter.upto, self.base))
            rest.add(sums, share)
            counter.split_variance = sums.squares * share * (1 - share)
        counter.sums = rest
        counter.confirmed = total - counter.before
        counter.upto, counter.heartbeats = number, beat.heartbeats
        counter.sampled_before = self._sampled

    def _contradicts(self, counter: ClientCounter, total: Number, number: int) -> bool:
        """Whether a total differs from the one before it plus what arrived since, where nothing is missing.

        Not looked at where lines were refused here, by a filter or a limit.
        """
        if not self._whole or self._refused_upto > counter.upto or counter.last > number:
            return False
        if counter.split_variance or counter.before_variance:
            return False
        begin = max(counter.upto, self.base)
        if begin < self._forgotten_upto or self._seen.missing(begin + 1, number):
            return False
        expected = counter.confirmed + counter.before + counter.sums.amount
        return abs(total - expected) > ROUNDING * (1 + abs(total) + sqrt(counter.sums.squares))

    def restart(self, series: str) -> None:
        """Count one counter from 0 again."""
        counter = self.counters.get(series)
        if counter is not None:
            counter.before += counter.total
            counter.confirmed -= counter.total
            counter.before_variance = counter.variance
            counter.total = 0

    def _begin(self, counter: ClientCounter) -> tuple[int, int]:
        """The datagram from which on a counter is not reported, and how many heartbeats there were up to it."""
        if counter.upto > self.base:
            return counter.upto, counter.heartbeats
        if self.complete_upto > self.base and not counter.reported:
            return self.complete_upto, self.complete_heartbeats  # it is younger
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

    def _estimate(
        self, series: str, counter: ClientCounter, after: tuple[int, int] | None = None
    ) -> tuple[Number, float, int]:
        """Its total, the variance of that, and how many datagrams are missing that may hold some of it."""
        if after is None:
            begin, heartbeats = self._begin(counter)
            after = self._after({begin: heartbeats})[begin]
        received, missing = after
        sums = counter.sums
        if not self._introduced or self.unresolved:
            # Not heard from the start: whether all before was lost, or before our time, its heartbeat will say.
            return counter.confirmed + sums.amount, inf, max(1, missing)
        doubt = counter.before_variance + counter.split_variance + self._unsent_variance(counter)
        if missing <= 0:
            return counter.confirmed + sums.amount, doubt, 0
        sampled = self._sampled - counter.sampled_before
        newest = CounterSums()
        if self._newest_sums is not None and not counter.split_variance:
            # It is known because it arrived: no sample of those that may be lost.
            newest = self._newest_sums.counters.get(series, newest)
            sums = msgspec.structs.replace(sums)
            sums.add(newest, -1)
            received, sampled = received - 1, sampled - self._newest_sums.sampled
        if sums.squares > 0:
            sample = Sampled(sums.sum, sums.sum_squares, sums.diagonal, sums.sum_fourth, sums.holding)
            found = estimate(sums.amount, sums.squares, received, missing, sample, sampled)
        else:
            # None arrived; the first to come may have been in a missing one. Every datagram received says so.
            usual = counter.usual or sqrt(newest.squares) or max(1.0, abs(counter.confirmed))
            found = estimate(0, usual * usual, received, missing, None, received)
        return counter.confirmed + newest.amount + found.total, found.variance + doubt, missing

    def _unsent_variance(self, counter: ClientCounter) -> float:
        """A client that was killed had at most one datagram in its buffer, which nobody will ever see."""
        if not self.silent:
            return 0.0
        datagrams = self.newest - max(counter.upto, self.base)
        recent = abs(counter.sums.amount) / max(1, datagrams)
        usual = counter.usual or sqrt(counter.sums.squares) or max(1.0, abs(counter.confirmed))
        unsent = 2 * max(counter.per_datagram, recent) + usual
        return (unsent / Z95) * (unsent / Z95)

    def _changes(self, reported: set[str]) -> dict[str, CounterChange]:
        changes: dict[str, CounterChange] = {}
        after: dict[int, tuple[int, int]] = {}
        complete = max((self.complete_upto, self.complete_heartbeats), (self.base, self.heartbeats_before))
        if self.lost:
            after = self._after(dict([complete, *map(self._begin, self.counters.values())]))
        _, missing = after.get(complete[0], (0, 0))
        self.may_hide = bool(missing) or not self._introduced or self.unresolved
        for series, counter in self.counters.items():
            changed = after or counter.sums.squares or counter.open or series in reported
            changed = changed or not self._introduced or self.silent
            if not changed:
                continue
            total, variance, gone = self._estimate(
                series, counter, after.get(self._begin(counter)[0], (0, 0))
            )
            is_open = bool(gone or variance)
            same = (total, variance, is_open) == (counter.total, counter.variance, counter.open)
            if same and variance < inf:  # of what is not known, more may be missing now
                continue
            before = inf if series in self._surfaced else counter.variance
            window_variance = _window_variance(before, variance, series in reported)
            changes[series] = CounterChange(total, variance, window_variance, is_open)
            counter.total, counter.variance, counter.open = total, variance, is_open
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


def _window_variance(before: float, after: float, reported: bool) -> float:
    """The variance of the difference between two published totals."""
    if inf in (before, after):
        return inf
    # Without new totals the later error contains the earlier one; with them the earlier one was put right now.
    return before + after if reported else abs(after - before)
