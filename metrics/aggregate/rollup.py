"""The rollup: windows in, published figures out; what lasts from one window to the next is here. Pure.

Every counter of a flush is the sum of what arrived by ways that do not lose, what arrived in unnumbered
datagrams (scaled up for what the socket dropped), and the ledgers of numbered clients.
"""

import logging
from collections.abc import Callable, Container, Iterable
from itertools import chain
from math import inf, isinf, sqrt
from typing import TypeVar

import msgspec

from brokerless.metrics.aggregate.client_ledger import ClientLedger, CounterChange
from brokerless.metrics.aggregate.estimate import Sampled, bound, estimate
from brokerless.metrics.aggregate.filters import FilterConfig, SeriesFilter, SeriesNames
from brokerless.metrics.aggregate.flush import ClientReport, CounterPoint, Flush, add_up
from brokerless.metrics.aggregate.grades import CounterTotals, Grade, WindowChange, judge
from brokerless.metrics.aggregate.timers import Bins, Figures, TimerTotal, TimerWindow, figures
from brokerless.metrics.aggregate.window import MAX_UNNUMBERED, ClientWindow, CounterSums, Timestamped, Window
from brokerless.metrics.counters import AggregateCounters
from brokerless.metrics.parser import Number

# Counters remembered over all clients, as a multiple of max_series: many clients count the same things. A
# million take some 300 MB.
KEYS_PER_SERIES = 5
# When half of the clients or counters that may be remembered are, a client that is silent for longer than this
# goes at once: it has missed 60 heartbeats.
CROWDED_TTL_S = 300.0
# Clients that were forgotten, by their last number (100 bytes each): one that comes back must not count twice.
MAX_GONE = 100_000
# A client sends its first heartbeat after five seconds. Until then what it may have lost counts against every
# counter; after a minute without one it is not one of our clients.
INTRODUCTION_S = 60.0
# Clocks that are merely disciplined differ by less between two windows.
CLOCK_SET_S = 1.0
# Windows within which clients' numbers must show what the kernel dropped.
EXPLAIN_WINDOWS = 3
_log = logging.getLogger("brokerless.metrics")
T = TypeVar("T")


class RollupConfig(FilterConfig, kw_only=True, frozen=True):
    """The settings that the rollup uses; MetricsConfig extends them."""

    percentiles: list[float] = msgspec.field(default_factory=lambda: [90.0])
    """The classic daemon's default; negative ones are taken from the top."""
    histogram: list[Bins] = msgspec.field(default_factory=list)
    """Tables `[[histogram]]` with `metric` and `bins` for timers; the first that matches wins."""
    buckets: list[float] = msgspec.field(default_factory=list)
    """Upper limits of the buckets of Prometheus histograms, for timers in seconds; empty: summaries."""
    delete_idle: bool = False
    """Do not publish counters, timers and sets without traffic; otherwise they are published as 0 until
    `series_ttl_s`, so that graphs show a pause as a pause."""
    gauge_ttl_s: float = 0.0
    """Forget gauges that were not set for this long; 0 keeps them for ever, as the classic daemon does."""
    series_ttl_s: float = 3600.0
    """Forget idle counters, timers and sets after an hour, so that names that never return do not pile up."""
    client_ttl_s: float = 3600.0
    """Forget numbered clients after an hour of silence (five minutes when half of `max_clients` are there):
    outages up to then are healed exactly."""
    max_series: int = 200_000
    """Some 150 MB with all figures; beyond it lines are refused as `series_limit`."""
    max_clients: int = 10_000
    """Further clients are treated as unnumbered."""


class Rollup:
    """Owned by one thread. `fold` takes one window (of all processes, merged) and returns what to publish.

    `authenticated`: numbered datagrams are signed, so that a number is proof of a client, with or without heartbeat.
    `series_filter` is the aggregator's, where there is one, so that both take the same series.
    """

    def __init__(
        self,
        config: RollupConfig,
        *,
        start: float,
        authenticated: bool = False,
        series_filter: SeriesFilter | None = None,
    ) -> None:
        self.config = config
        self._authenticated = authenticated
        self.counters = AggregateCounters()
        self.refused: dict[str, int] = {}
        self.clients: dict[str, ClientLedger] = {}
        self.expired: list[str] = []
        self.start_ms = int(start * 1000)
        self._at = start
        self.series: dict[str, CounterTotals] = {}
        self._gauges: dict[str, Number] = {}
        self._gauges_at: dict[str, float] = {}
        self._timers_at: dict[str, float] = {}
        self._sets_at: dict[str, float] = {}
        # Count and sum of every timer since the daemon began, as Prometheus wants them.
        self.timer_totals: dict[str, TimerTotal] = {}
        # Upper limits of a timer's buckets, by its series; set by the server where mapping rules say it.
        self.buckets_for: Callable[[str], list[float]] = lambda _: self.config.buckets
        self._last_refused: list[tuple[str, bytes]] = []
        # What the window that is being folded changes, by series.
        self._moved: dict[str, WindowChange] = {}
        # Counters of which lines were let in in this window.
        self._admitted: Container[str] = ()
        # Counters remembered over all ledgers.
        self._keys = 0
        # Last numbers of clients that were forgotten, and heartbeats up to them; the longest gone first.
        self.gone: dict[str, tuple[int, int, bool]] = {}
        # And whether there were more than can be remembered.
        self.gone_more = False
        # Clients whose missing datagrams may hold any counter; and whether one was forgotten like that.
        self._hidden: set[str] = set()
        self.hidden_for_good = False
        # Clients that fell silent without a goodbye: killed, or cut off and still counting.
        self._silent: set[str] = set()
        # Clients of which something came after their end: whether a heartbeat did, and what counters all that had.
        self._after_end: dict[str, tuple[bool, set[str]]] = {}
        self._after_end_names = 0
        # Clients that were heard, and what was heard of them died with a daemon or a worker; and since when that is
        # known. They may have counted anything.
        self.missing_clients: dict[str, float] = {}
        # A daemon was killed: what it had read from streams since the window before is in no figure. Or a Unix datagram
        # was too long.
        self.streams_cut = False
        # Series were refused because there are too many: what a new one counted until now is not known.
        self.series_refused = False
        # Datagrams that the kernel dropped and no client's numbers have explained yet, and for how many windows.
        self._unexplained = self._unexplained_windows = self._lost_before = 0
        self._logged = False
        self._filter = series_filter or SeriesFilter(config)
        self._names = SeriesNames(config)
        # Counters with a time of their own, summed up, and gauges, the latest: for backends without times.
        self.timestamped: dict[str, Timestamped] = {}

    def set_config(self, config: RollupConfig, series_filter: SeriesFilter) -> None:
        """Use other settings from the next window on."""
        self.config = config
        self._filter, self._names = series_filter, SeriesNames(config)

    def take_over(
        self,
        start_ms: int,
        series: dict[str, CounterTotals],
        ledgers: list[ClientLedger],
        gauges: dict[str, Number],
        gone: dict[str, tuple[int, int, bool]],
        hidden_for_good: bool,
        streams_cut: bool,
        series_refused: bool,
        gone_more: bool,
    ) -> None:
        """Go on where another daemon ended: everything sent since it began is ours."""
        self.streams_cut = streams_cut
        self.series_refused, self.gone_more = series_refused, gone_more
        self.start_ms = start_ms
        self.series = series
        for entry in series.values():
            entry.active_at = self._at
        for ledger in ledgers:
            ledger.active_at = self._at  # nobody could be heard meanwhile
            self.clients[ledger.client] = ledger
            self._keys += len(ledger.counters)
            if ledger.may_hide:
                self._hidden.add(ledger.client)
            if ledger.silent:
                self._silent.add(ledger.client)
        self._gauges = dict(gauges)
        self._gauges_at = dict.fromkeys(gauges, self._at)
        self.gone = gone
        self.hidden_for_good = hidden_for_good

    def were_heard(self, clients: Iterable[str]) -> None:
        """These were heard before the last window ended: of those that are in no window, everything is missing."""
        for name in clients:
            if name not in self.clients and name not in self.gone:
                self.missing_clients[name] = self._at

    def fold(
        self, window: Window, now: float, heard: Iterable[str] = (), elapsed_s: float | None = None
    ) -> Flush:
        """Close the window that ends at `now`; `heard` are clients that should be in it, or in one before.

        `elapsed_s` is its length by a clock that nobody sets; without it, that of `now` is believed.
        """
        if elapsed_s is not None:
            self._shift_times(now - self._at - elapsed_s)
        flush = Flush(self._at, now, max(now - self._at, 1e-3), since=self.start_ms / 1000)
        self._at = now
        self._take_counts(window, flush, heard)
        flush.counters = self._counters(window, now)
        flush.gauges = self._fold_gauges(window, now)
        flush.timers = self._fold_timers(window, now, flush.window_s)
        flush.sketches = {s: t.sketch for s, t in window.timers.items() if t.sketch is not None}
        flush.sets = self._fold_sets(window, now)
        flush.timestamped = window.timestamped
        flush.passed = window.passed
        flush.kernel_drops = window.kernel_drops
        flush.pause_s, flush.pause_cpu_s = window.pause_s, window.pause_cpu_s
        flush.datagrams = window.unnumbered.datagrams + sum(
            last - first + 1 for client in window.clients.values() for first, last in client.seen
        )
        self._expire(now)
        flush.clients = self.reports(now)
        flush.refused = dict(self.refused)
        flush.refused_samples = self._last_refused
        flush.rollup = self.counters.snapshot()
        flush.timer_totals = self.timer_totals
        flush.timestamped_totals = list(self.timestamped.values())
        self._admitted = ()
        return self._renamed(flush, window)

    def _shift_times(self, by_s: float) -> None:
        """The wall clock jumped: move every remembered time along, so that silence and expiry are judged as before."""
        if abs(by_s) < CLOCK_SET_S:
            return
        self._at += by_s
        for ledger in self.clients.values():
            ledger.active_at += by_s
            ledger.first_at += by_s
        for entry in self.series.values():
            entry.active_at += by_s
        for table in (self._gauges_at, self._timers_at, self._sets_at, self.missing_clients):
            for name in table:
                table[name] += by_s

    def _renamed(self, flush: Flush, window: Window) -> Flush:
        """With the namespace and the global tags. Series that these make equal become one."""
        name = self._names.published
        if not self._names.changes:
            return flush
        for point in flush.counters:
            point.series = name(point.series)
        counters = _by_name(flush.counters, lambda point: point.series)
        flush.counters = [add_up(found) for found in counters.values()]
        copies = []
        for stamped in (flush.timestamped, flush.timestamped_totals):
            copies.append([msgspec.structs.replace(point, series=name(point.series)) for point in stamped])
        flush.timestamped, flush.timestamped_totals = copies
        gauges, timers, totals, sets = flush.gauges, flush.timers, flush.timer_totals, flush.sets
        # The latest wins.
        at = self._gauges_at
        flush.gauges = self._by_published(gauges, lambda found: gauges[max(found, key=at.__getitem__)])
        joined: dict[str, TimerWindow] = {}

        def join(found: list[str]) -> Figures:
            whole = joined[name(found[0])] = _whole_timer(window, found)
            return self._figures(found[0], whole, flush.window_s)

        flush.timers = self._by_published(timers, join)
        flush.sketches = {name(series): value for series, value in flush.sketches.items()}
        flush.sketches |= {
            series: timer.sketch for series, timer in joined.items() if timer.sketch is not None
        }
        flush.timer_totals = self._by_published(
            totals, lambda found: TimerTotal.of([totals[s] for s in found])
        )
        members = window.sets
        flush.sets = self._by_published(
            sets, lambda found: len(set().union(*(members.get(s, ()) for s in found)))
        )
        return flush

    def _by_published(self, table: dict[str, T], join: Callable[[list[str]], T]) -> dict[str, T]:
        """A table under the published names; `join` makes one of several that have the same."""
        groups = _by_name(table, self._names.published)
        return {shown: table[found[0]] if len(found) == 1 else join(found) for shown, found in groups.items()}

    def _take_counts(self, window: Window, flush: Flush, heard: Iterable[str]) -> None:
        self._admitted = window.counters
        counters = self.counters
        counters.flushes += 1
        counters.lines += window.lines
        flush.lines = window.lines
        for reason, n in window.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + n
            counters.refused += n
        self._last_refused = (window.refused_samples + self._last_refused)[:20]
        counters.misplaced += window.misplaced
        counters.passed_dropped += window.passed_dropped
        counters.timestamped += window.timestamped_lines
        counters.timestamped_dropped += window.timestamped_dropped
        counters.ignored_fields += window.ignored_fields
        counters.faults += window.faults
        self._fold_timestamped(window)
        checks = sum(line.startswith(b"_sc") for line in window.passed)
        counters.checks += checks
        counters.events += len(window.passed) - checks
        before = counters.lost_datagrams
        self._fold_clients(window)
        self._note_unnumbered(window.unnumbered_clients)
        self.were_heard(heard)
        self._fold_missing_clients()
        flush.lost_datagrams = counters.lost_datagrams - before

    def _fold_clients(self, window: Window) -> None:
        self._moved = {}
        for name, client in window.clients.items():
            ledger = self.clients.get(name) or self._new_client(name, client)
            if ledger is None:
                continue
            before, healed, counters = ledger.lost, ledger.healed, len(ledger.counters)
            ledger.room = KEYS_PER_SERIES * self.config.max_series - self._keys
            try:
                changes = ledger.fold(client, self._at, self.start_ms)
                for series, change in changes.items():
                    self._client_changed(name, series, change)
            except Exception:
                self._fault("client %s", name)
                ledger.conflict = True
            for series in ledger.counters if ledger.partial else ():
                if series in self.series:
                    self.series[series].worst = max(self.series[series].worst, Grade.SOCKET_ONLY)
            for series, amount in ledger.not_remembered.items():
                self.counters.keys_refused += 1
                self._not_remembered(series, amount)
                if series in self.series:
                    self.series[series].limited = True
            self.counters.lost_datagrams += ledger.lost - before
            self.counters.healed += ledger.healed - healed
            self._keys += len(ledger.counters) - counters
            if ledger.conflict:
                self._distrust(name)
        for name, ledger in self.clients.items():
            if name not in window.clients:
                for series, change in ledger.check_silence(self._at).items():
                    self._client_changed(name, series, change)
            known = self._is_known(ledger) or self._at - ledger.first_at <= INTRODUCTION_S
            (self._hidden.add if ledger.may_hide and known else self._hidden.discard)(name)
            (self._silent.add if ledger.silent else self._silent.discard)(name)

    def _fold_missing_clients(self) -> None:
        """One that is back tells its totals; one that has not come back after a minute never will."""
        for name, since in list(self.missing_clients.items()):
            if name in self.clients:
                del self.missing_clients[name]
            elif self._at - since > INTRODUCTION_S:
                del self.missing_clients[name]
                self._hidden.discard(name)
                self._leave_hidden(True)
            else:
                self._hidden.add(name)

    def _note_unnumbered(self, clients: set[str]) -> None:
        """Should one of these be taken for numbered later, its totals must not count once more what was counted."""
        self.gone_more |= len(clients) > MAX_UNNUMBERED
        for name in clients:
            if name not in self.clients and name not in self.gone:
                if len(self.gone) < MAX_GONE:
                    self.gone[name] = (0, 0, True)
                else:
                    self.gone_more = True

    def _is_known(self, ledger: ClientLedger) -> bool:
        """Whether it is a client for sure: a number that is not signed may be anybody's."""
        return ledger.has_heartbeat or self._authenticated

    def _fault(self, what: str, *arguments: object) -> None:
        """An exception that costs one client or one series; called where it is handled."""
        self.counters.faults += 1
        if not self._logged:
            self._logged = True
            _log.exception("cannot account for " + what + "; further faults are only counted", *arguments)

    def _series_fault(self, series: str) -> None:
        """An exception of one counter; called where it is handled."""
        self._fault("counter %s", series)
        if series in self.series:
            self.series[series].worst = Grade.UNKNOWN

    def _distrust(self, name: str) -> None:
        """Its numbers or totals contradict each other: what was published of it stays, and nothing is claimed."""
        self.counters.conflicts += 1
        ledger = self.clients.pop(name)
        self._keys -= len(ledger.counters)
        self._hidden.discard(name)
        self._silent.discard(name)
        # The next datagram begins a new ledger, whatever its number; what was counted before is settled.
        self.gone[name] = (0, 0, True)
        self.expired.append(name)
        for series in ledger.counters:
            entry = self.series.get(series)
            if entry is not None:
                total, _, _ = entry.clients.pop(name, (0, 0.0, True))
                entry.settled += total
                entry.worst = Grade.UNKNOWN
                self._moved.setdefault(series, WindowChange()).grade = Grade.UNKNOWN

    def _new_client(self, name: str, client: ClientWindow) -> ClientLedger | None:
        """The ledger of a client that is new, or was forgotten and is back; None for a late word of one."""
        newest, heartbeats, resolved = self.gone.get(name, (0, 0, True))
        if not newest:
            counted = self.gone.pop(name, None) is not None or (self.gone_more and client.first > 1)
            ledger = ClientLedger(name, client.first, client.heartbeats_before, self._at, resumed=counted)
            ledger.partial = counted
            self.clients[name] = ledger
            return ledger
        goes_on = client.newest > newest
        if client.first <= newest or name in self._after_end:
            self._came_after_end(name, client, goes_on)
        if not goes_on:
            self.counters.after_end += sum(last - first + 1 for first, last in client.seen)
            if not resolved:
                # No total has these, and whether they are repeats is no longer known.
                for segment in client.segments:
                    for series in segment.sums.counters:
                        self._not_remembered(series, 0)
                # It was a client after all, and what it lost before it was forgotten may be any counter.
                self._leave_hidden(bool(client.beats))
            return None
        del self.gone[name]
        ledger = ClientLedger(name, newest + 1, heartbeats, self._at, resumed=True)
        ledger.unresolved = not resolved
        self.clients[name] = ledger
        return ledger

    def _came_after_end(self, name: str, client: ClientWindow, goes_on: bool) -> None:
        """Something of a client that said goodbye, or was forgotten, below its last number.

        It may be late or repeated. If heartbeats come in two windows, or the client goes on, the goodbye or that number
        was somebody else's: then nothing is claimed of its counters. A signed one was its own.
        """
        if self._authenticated:
            return
        named = {series for segment in client.segments for series in segment.sums.counters}
        named.update(*(beat.totals for beat in client.beats))
        beaten, before = self._after_end.pop(name, (False, set()))
        self._after_end_names -= len(before)
        named |= before
        goes_on_below = beaten and bool(client.beats)
        room = self._after_end_names + len(named) <= self.config.max_series
        if room and not goes_on and not goes_on_below:
            self._after_end[name] = beaten or bool(client.beats), named
            self._after_end_names += len(named)
            return
        self.counters.conflicts += 1
        if not goes_on:
            # Its next datagram begins a new ledger, whatever its number.
            self.gone[name] = (0, 0, True)
            self.expired.append(name)
        for series in named:
            self._not_remembered(series, 0)

    def _client_changed(self, client: str, series: str, change: CounterChange) -> None:
        entry = self._entry(series)
        if entry is None:
            return
        before = entry.clients[client][0] if client in entry.clients else 0
        entry.clients[client] = (change.total, change.variance, change.open)
        moved = self._moved.setdefault(series, WindowChange())
        moved.corrected += change.total - before
        moved.variance += change.window_variance
        if isinf(change.window_variance):
            moved.grade = Grade.UNKNOWN
        elif change.open or change.window_variance:
            moved.grade = max(moved.grade, Grade.LEDGER)

    def _not_remembered(self, series: str, amount: Number) -> None:
        """Counters beyond what may be remembered: what arrived is counted, and nothing is claimed."""
        entry = self._entry(series)
        if entry is not None:
            entry.settled += amount
            entry.worst = Grade.UNKNOWN
            moved = self._moved.setdefault(series, WindowChange())
            moved.corrected += amount
            moved.grade = Grade.UNKNOWN

    def _entry(self, series: str) -> CounterTotals | None:
        entry = self.series.get(series)
        if entry is None:
            if self._full:
                self.counters.series_dropped += 1
                self.series_refused = True
                return None
            # Who read its lines has let it in, each process by limits of its own.
            if series not in self._admitted and self._filter.refusal(series) is not None:
                return None
            entry = self.series[series] = CounterTotals(self._at, limited=self.series_refused, began=self._at)
        entry.active_at = self._at
        return entry

    def _counters(self, window: Window, now: float) -> list[CounterPoint]:
        moved = self._moved
        self._fold_unnumbered(window)
        for series, amount in window.lossless.items():
            entry = self._entry(series)
            if entry is not None:
                entry.settled += amount
                entry.streamed = True
                moved.setdefault(series, WindowChange()).corrected += amount
        self.streams_cut |= window.lossless_cut
        for series, entry in self.series.items() if window.lossless_cut else ():
            if entry.streamed:
                change = moved.setdefault(series, WindowChange())
                change.grade = max(change.grade, Grade.SOCKET_ONLY)
        for series, amount in window.counters.items():
            entry = self._entry(series)
            if entry is not None:
                entry.raw += amount
        for series in window.rounded:
            entry = self._entry(series)
            if entry is not None:
                entry.worst = moved.setdefault(series, WindowChange()).grade = Grade.UNKNOWN
        for series in self.series if window.limited_more else window.limited:
            if series in self.series:
                self.series[series].limited = True
        self.series_refused |= "series_limit" in window.refused
        points = []
        for series, entry in self.series.items():
            if entry.active_at < now and self.config.delete_idle:
                continue
            try:
                points.append(self._point(series, entry, window.counters.get(series, 0), moved.get(series)))
            except Exception:
                self._series_fault(series)
        return points

    def _fold_unnumbered(self, window: Window) -> None:
        """Unnumbered datagrams: of what the socket dropped, their share among all that arrived.

        Where none arrived, the drops should be numbered clients' own; what their numbers do not explain within
        EXPLAIN_WINDOWS was sent by somebody of whom nothing is known.
        """
        sums = window.unnumbered
        known = dict(window.lossless)
        numbered = 0
        for client in window.clients.values():
            numbered += sum(last - first + 1 for first, last in client.seen)
            for segment in client.segments:
                for series, part in segment.sums.counters.items():
                    known[series] = known.get(series, 0) + part.amount
        drops = window.kernel_drops
        missing = drops * sums.datagrams / (sums.datagrams + numbered) if sums.datagrams else 0.0
        self._explain(0 if sums.datagrams else drops)
        counted: set[str] = set()
        for series, raw in window.counters.items():
            amount = raw
            if series in known:
                amount = raw - known[series]
                if amount.__class__ is float and not _has_fractions(window, series):
                    # Only those of numbered clients: added up in another order, they differ in the last digit.
                    amount = round(amount)
                if not amount:
                    continue
            if missing:
                counted.add(series)
            try:
                self._count_unnumbered(window, series, amount, missing)
            except Exception:
                self._series_fault(series)
        if missing:
            self._may_be_dropped(window, counted, missing)

    def _count_unnumbered(self, window: Window, series: str, amount: Number, missing: float) -> None:
        entry = self._entry(series)
        if entry is None:
            return
        total, variance = (amount, 0.0) if not missing else self._scaled(window, series, amount, missing)
        self._add_unnumbered(series, entry, total, variance)
        lines = window.unnumbered.counters.get(series)
        if lines is not None and lines.squares:
            usual = min(abs(lines.squares / lines.amount), sqrt(lines.squares)) if lines.amount else 0.0
            entry.usual = usual

    def _add_unnumbered(self, series: str, entry: CounterTotals, total: Number, variance: float) -> None:
        entry.settled += total
        entry.unnumbered = True
        grade = Grade.UNKNOWN if isinf(variance) else Grade.SOCKET_ONLY
        entry.worst = max(entry.worst, grade)
        entry.settled_variance += variance if variance < inf else 0.0
        moved = self._moved.setdefault(series, WindowChange())
        moved.corrected += total
        moved.variance += variance
        moved.grade = max(moved.grade, grade)

    def _may_be_dropped(self, window: Window, counted: set[str], missing: float) -> None:
        """Any counter may have been in what the socket dropped, those of which nothing arrived included."""
        received = window.unnumbered.datagrams
        for series, entry in self.series.items():
            if series in counted:
                continue
            usual = entry.usual or 1.0
            found = estimate(0, usual * usual, received, missing, None, received)
            self._add_unnumbered(series, entry, 0, found.variance)

    def _explain(self, drops: int) -> None:
        revealed = self.counters.lost_datagrams - self._lost_before
        self._lost_before = self.counters.lost_datagrams
        self._unexplained = max(0, self._unexplained + drops - max(0, revealed))
        self._unexplained_windows = self._unexplained_windows + 1 if self._unexplained else 0
        if self._unexplained_windows > EXPLAIN_WINDOWS:
            self._unexplained = self._unexplained_windows = 0
            for entry in self.series.values():
                entry.worst = Grade.UNKNOWN

    def _scaled(self, window: Window, series: str, amount: Number, missing: float) -> tuple[Number, float]:
        """What arrived of a counter, scaled up for `missing` datagrams, and the variance of that."""
        pool = window.unnumbered
        part = pool.counters.get(series) or CounterSums()
        # Squares were only kept from when the socket began to drop; before it was the same traffic.
        squares = part.squares * (amount / part.amount) if part.amount else part.squares
        sample = Sampled(part.sum, part.sum_squares, part.diagonal, part.sum_fourth, part.holding)
        found = estimate(amount, abs(squares), pool.datagrams, missing, sample, pool.sampled)
        return found.total, found.variance

    def _point(
        self, series: str, entry: CounterTotals, raw: Number, moved: WindowChange | None
    ) -> CounterPoint:
        moved = moved or WindowChange()
        total, variance, grade = judge(
            entry,
            moved,
            silent=bool(self._silent) and not self._silent.isdisjoint(entry.clients),
            # How much of it is in datagrams of which nothing is known, nobody can say.
            hidden=bool(self._unexplained) or (not entry.unnumbered and self._may_be_hidden(entry)),
            hidden_for_good=self.hidden_for_good,
            streams_cut=self.streams_cut,
        )
        return CounterPoint(
            series,
            raw,
            moved.corrected,
            None if moved.grade is Grade.UNKNOWN else bound(moved.variance),
            moved.grade,
            entry.raw,
            total,
            None if grade is Grade.UNKNOWN else bound(variance),
            grade,
            entry.began,
        )

    def standing(self) -> Flush:
        """Every counter as it stands, under the name that is published."""
        found = [self._point(series, entry, 0, None) for series, entry in self.series.items()]
        stamped = list(self.timestamped.values())
        flush = Flush(self._at, self._at, 0.0, counters=found, timestamped_totals=stamped)
        return self._renamed(flush, Window())

    def _may_be_hidden(self, entry: CounterTotals) -> bool:
        """Whether a client of which nothing is known about this counter may have lost some of it."""
        hidden = self._hidden
        return len(hidden) > len(entry.clients) or not hidden <= entry.clients.keys()

    def _fold_gauges(self, window: Window, now: float) -> dict[str, Number]:
        gauges = self._gauges
        for series, change in window.gauges.items():
            if series not in gauges and self._full:
                self.counters.series_dropped += 1
                continue
            try:
                value = change.value if change.value is not None else gauges.get(series, 0) + change.delta
            except Exception:
                self._fault("gauge %s", series)
                continue
            gauges[series] = value
            self._gauges_at[series] = now
        return dict(gauges)

    def _fold_timers(self, window: Window, now: float, window_s: float) -> dict[str, Figures]:
        totals = dict(self.timer_totals)
        for series, timer in list(window.timers.items()):
            if series not in self._timers_at and self._full:
                self.counters.series_dropped += 1
                del window.timers[series]
                continue
            self._timers_at[series] = now
            try:
                totals[series] = totals.get(series, TimerTotal()).add(timer, self.buckets_for(series))
            except Exception:
                self._fault("timer %s", series)
        self.timer_totals = totals
        out: dict[str, Figures] = {}
        for series in window.timers if self.config.delete_idle else self._timers_at:
            timer = window.timers.get(series) or TimerWindow()
            try:
                out[series] = self._figures(series, timer, window_s)
            except Exception:
                self._fault("timer %s", series)
        return out

    def _figures(self, series: str, timer: TimerWindow, window_s: float) -> Figures:
        # The first histogram whose text is in the name, as the classic daemon chooses it.
        bins = next((h.bins for h in self.config.histogram if h.metric in series), None)
        return figures(timer, window_s=window_s, percentiles=self.config.percentiles, bins=bins)

    def _fold_sets(self, window: Window, now: float) -> dict[str, int]:
        for series in list(window.sets):
            if series not in self._sets_at and self._full:
                self.counters.series_dropped += 1
                del window.sets[series]
                continue
            self._sets_at[series] = now
        shown = window.sets if self.config.delete_idle else self._sets_at
        return {series: len(window.sets.get(series, ())) for series in shown}

    def _fold_timestamped(self, window: Window) -> None:
        for point in window.timestamped:
            have = self.timestamped.get(point.series)
            if have is None:
                if self._full:
                    self.counters.series_dropped += 1
                else:
                    self.timestamped[point.series] = Timestamped(**msgspec.structs.asdict(point))
            elif point.kind == "c" == have.kind:
                have.value += point.value
                have.timestamp = max(have.timestamp, point.timestamp)
            elif point.timestamp >= have.timestamp:
                have.kind, have.timestamp, have.value = point.kind, point.timestamp, point.value

    @property
    def _full(self) -> bool:
        """Whether `max_series` are remembered, over all types."""
        known = len(self.series) + len(self._gauges) + len(self._timers_at) + len(self._sets_at)
        return known + len(self.timestamped) >= self.config.max_series

    def all_series(self) -> Iterable[str]:
        """Every series that is remembered from window to window."""
        return chain(self.series, self._gauges, self._timers_at, self._sets_at, self.timestamped)

    def _expire(self, now: float) -> None:
        config = self.config
        crowded = 2 * len(self.clients) > config.max_clients or 2 * self._keys > (
            KEYS_PER_SERIES * config.max_series
        )
        ttl = min(config.client_ttl_s, CROWDED_TTL_S) if crowded else config.client_ttl_s
        # A client that said goodbye stays for one more window, for what may still arrive late.
        gone = [
            name
            for name, ledger in self.clients.items()
            if now - ledger.active_at > ttl or (ledger.ended and ledger.active_at < now)
        ]
        for name in gone:
            self._forget_client(name)
        self.expired += gone
        limit = now - config.series_ttl_s
        dead = [s for s, entry in self.series.items() if entry.active_at < limit and not entry.clients]
        for series in dead:
            del self.series[series]
        for table in (self._timers_at, self._sets_at):
            for series in [s for s, at in table.items() if at < limit]:
                del table[series]
                self.timer_totals.pop(series, None)
                dead.append(series)
        if config.gauge_ttl_s:
            for series in [s for s, at in self._gauges_at.items() if now - at > config.gauge_ttl_s]:
                dead.append(series)
                self.delete("gauges", [series])
        self.counters.series_expired += len(dead)

    def _forget_client(self, name: str) -> None:
        ledger = self.clients.pop(name)
        self.gone[name] = ledger.newest, ledger.heartbeats, ledger.has_heartbeat and not ledger.unresolved
        if len(self.gone) > MAX_GONE:
            first = next(iter(self.gone))
            del self.gone[first]
            self.gone_more = True
            self._after_end_names -= len(self._after_end.pop(first, (False, ()))[1])
        self._keys -= len(ledger.counters)
        self._hidden.discard(name)
        self._silent.discard(name)
        # A number that nobody introduced by a heartbeat may be forged: it must not cost others their grades.
        self._leave_hidden(ledger.may_hide and self._is_known(ledger))
        self.counters.clients_expired += not ledger.ended
        for series in ledger.counters:
            entry = self.series.get(series)
            found = entry.clients.pop(name, None) if entry is not None else None
            if entry is None or found is None:
                continue
            total, variance, is_open = found
            entry.settled += total
            if ledger.silent:
                entry.worst = max(entry.worst, Grade.SOCKET_ONLY)
            if isinf(variance):
                entry.worst = Grade.UNKNOWN
            else:
                entry.settled_variance += variance
                entry.worst = max(entry.worst, Grade.LEDGER) if is_open else entry.worst

    def _leave_hidden(self, unresolved: bool) -> None:
        """A client is gone, and if `unresolved`, nobody will ever know what was in its missing datagrams."""
        self.hidden_for_good |= unresolved
        self.counters.clients_unresolved += unresolved

    def reports(self, now: float) -> list[ClientReport]:
        """Every client, those that lost most first."""
        found = [
            ClientReport(
                ledger.client,
                ledger.name,
                ledger.sent,
                ledger.received,
                ledger.lost,
                ledger.failed,
                ledger.duplicates,
                ledger.late,
                ledger.lines,
                ledger.lines_reported,
                len(ledger.counters),
                max(0.0, now - ledger.active_at),
            )
            for ledger in self.clients.values()
        ]
        return sorted(found, key=lambda report: (-report.lost, report.client))

    def names(self, what: str) -> list[str]:
        """All known `counters`, `gauges` or `timers`."""
        tables: dict[str, Iterable[str]] = {
            "counters": self.series,
            "gauges": self._gauges,
            "timers": self._timers_at,
        }
        return list(tables[what])

    def delete(self, what: str, names: list[str]) -> None:
        """Forget some of what `names` lists; what comes back counts from 0 again."""
        for name in names:
            if what == "counters":
                entry = self.series.pop(name, None)
                for client in entry.clients if entry is not None else ():
                    self.clients[client].restart(name)
            elif what == "gauges":
                self._gauges.pop(name, None)
                self._gauges_at.pop(name, None)
            else:
                self._timers_at.pop(name, None)
                self.timer_totals.pop(name, None)

    @property
    def gauges(self) -> dict[str, Number]:
        """Gauges as of the last flush."""
        return self._gauges


def _has_fractions(window: Window, series: str) -> bool:
    """Whether lines without a number may have counted in fractions."""
    return series in window.unnumbered_fractions or series in window.unnumbered.counters


def _by_name(things: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Things by their names, in their order."""
    found: dict[str, list[T]] = {}
    for thing in things:
        found.setdefault(name(thing), []).append(thing)
    return found


def _whole_timer(window: Window, series: list[str]) -> TimerWindow:
    timers = [window.timers[name] for name in series if name in window.timers]
    whole = TimerWindow(milliseconds=not timers or timers[0].milliseconds)
    for timer in timers:
        whole.merge(timer)
    return whole
