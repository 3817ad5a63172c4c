"""The books: windows in, published figures out; what lasts from one window to the next is here. Pure.

Every counter of a flush is the sum of what arrived by ways that do not lose, what arrived in unnumbered
datagrams (scaled up for what the socket dropped), and the ledgers of numbered clients.
"""

from collections.abc import Iterable
from math import inf, isinf

import msgspec

from brokerless.metrics.counters import BooksCounters
from brokerless.metrics.estimate import Sampled, bound, estimate
from brokerless.metrics.flush import ClientReport, CounterPoint, Flush, Grade
from brokerless.metrics.ledger import Change, ClientLedger
from brokerless.metrics.numbers import small
from brokerless.metrics.parser import Number
from brokerless.metrics.timers import Bins, Figures, TimerWindow, figures
from brokerless.metrics.window import ClientWindow, Part, Window

# Counters remembered over all clients, as a multiple of max_series: many clients count the same things. A
# million take some 300 MB.
KEYS_PER_SERIES = 5
# When half of the clients or counters that may be remembered are, a client that is silent for longer than this
# goes at once: it has missed 60 heartbeats.
CROWDED_TTL_S = 300.0
# Clients that were forgotten, by their last number (100 bytes each): one that comes back must not count twice.
MAX_GONE = 100_000


class BooksConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What the books need to know; the daemon's configuration has the same fields."""

    percentiles: list[float] = msgspec.field(default_factory=lambda: [90.0])
    histogram: list[Bins] = msgspec.field(default_factory=list)
    delete_idle: bool = False
    gauge_ttl_s: float = 0.0
    series_ttl_s: float = 3600.0
    client_ttl_s: float = 3600.0
    max_series: int = 200_000
    max_clients: int = 10_000


class Series(msgspec.Struct):
    """A counter since the daemon began. `clients` holds (total, variance, open) of each numbered client."""

    active_at: float
    raw: Number = 0
    # From unnumbered datagrams and streams, and from clients that are gone.
    settled: Number = 0
    settled_variance: float = 0.0
    worst: Grade = Grade.EXACT
    clients: dict[str, tuple[Number, float, bool]] = msgspec.field(default_factory=dict)

    def tame(self) -> None:
        """Make sums beyond 64 bits, which cannot be written down, floats."""
        self.raw, self.settled = small(self.raw), small(self.settled)
        self.clients = {name: (small(total), v, o) for name, (total, v, o) in self.clients.items()}

    def total(self) -> tuple[Number, float, Grade]:
        total, variance, grade = self.settled, self.settled_variance, self.worst
        for amount, v, is_open in self.clients.values():
            total += amount
            variance += v
            if is_open:
                grade = max(grade, Grade.LEDGER)
        return total, variance, Grade.UNKNOWN if isinf(variance) else grade


class _Moved(msgspec.Struct):
    """What one window did to one counter."""

    corrected: Number = 0
    variance: float = 0.0
    grade: Grade = Grade.EXACT


class Books:
    """Owned by one thread. `fold` takes one window (of all processes, merged) and returns what to publish."""

    def __init__(self, config: BooksConfig, *, start: float) -> None:
        self.config = config
        self.counters = BooksCounters()
        self.refused: dict[str, int] = {}
        self.clients: dict[str, ClientLedger] = {}
        self.expired: list[str] = []
        self.start_ms = int(start * 1000)
        self._at = start
        self.series: dict[str, Series] = {}
        self._gauges: dict[str, Number] = {}
        self._gauges_at: dict[str, float] = {}
        self._timers_at: dict[str, float] = {}
        self._sets_at: dict[str, float] = {}
        # Count and sum of every timer since the daemon began, as Prometheus wants them.
        self.timer_totals: dict[str, tuple[float, float]] = {}
        self._last_refused: list[tuple[str, bytes]] = []
        # What the window that is being folded changes, by series.
        self._moved: dict[str, _Moved] = {}
        # Counters remembered over all ledgers.
        self._keys = 0
        # Last numbers of clients that were forgotten, and heartbeats up to them; the longest gone first.
        self.gone: dict[str, tuple[int, int]] = {}
        # Clients whose missing datagrams may hold any counter; and whether one was forgotten like that.
        self._hidden: set[str] = set()
        self.hidden_for_good = False

    def take_over(
        self,
        start_ms: int,
        series: dict[str, Series],
        ledgers: list[ClientLedger],
        gauges: dict[str, Number],
        gone: dict[str, tuple[int, int]],
        hidden_for_good: bool,
    ) -> None:
        """Go on where another daemon ended: everything sent since it began is ours."""
        self.start_ms = start_ms
        self.series = series
        for entry in series.values():
            entry.active_at = self._at
        for ledger in ledgers:
            ledger.active_at = self._at  # nobody could be heard meanwhile
            self.clients[ledger.client] = ledger
            self._keys += len(ledger.keys)
            if ledger.hidden:
                self._hidden.add(ledger.client)
        self._gauges = dict(gauges)
        self._gauges_at = dict.fromkeys(gauges, self._at)
        self.gone = gone
        self.hidden_for_good = hidden_for_good

    def fold(self, window: Window, now: float) -> Flush:
        """Close the window that ends at `now`."""
        flush = Flush(self._at, now, max(now - self._at, 1e-3))
        self._at = now
        self._take_counts(window, flush)
        flush.counters = self._counters(window, now)
        flush.gauges = self._fold_gauges(window, now)
        flush.timers = self._fold_timers(window, now, flush.window_s)
        flush.sketches = {s: t.sketch for s, t in window.timers.items() if t.sketch is not None}
        flush.sets = self._fold_sets(window, now)
        flush.stamped = window.stamped
        flush.passed = window.passed
        flush.kernel_drops = window.kernel_drops
        flush.pause_s, flush.pause_cpu_s = window.pause_s, window.pause_cpu_s
        flush.datagrams = window.foreign.datagrams + sum(
            last - first + 1 for client in window.clients.values() for first, last in client.seen
        )
        self._expire(now)
        flush.clients = self.reports(now)
        flush.refused = dict(self.refused)
        flush.refused_samples = self._last_refused
        flush.books = self.counters.snapshot()
        return flush

    def _take_counts(self, window: Window, flush: Flush) -> None:
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
        counters.stamped_dropped += window.stamped_dropped
        checks = sum(line.startswith(b"_sc") for line in window.passed)
        counters.checks += checks
        counters.events += len(window.passed) - checks
        before = counters.lost_datagrams
        self._fold_clients(window)
        flush.lost_datagrams = counters.lost_datagrams - before

    def _fold_clients(self, window: Window) -> None:
        self._moved = {}
        for name, client in window.clients.items():
            ledger = self.clients.get(name) or self._new_client(name, client)
            if ledger is None:
                continue
            before, healed, keys = ledger.lost, ledger.healed, len(ledger.keys)
            ledger.room = KEYS_PER_SERIES * self.config.max_series - self._keys
            for series, change in ledger.fold(client, self._at, self.start_ms).items():
                self._client_changed(name, series, change)
            for series, amount in ledger.unkept.items():
                self.counters.keys_refused += 1
                self._not_remembered(series, amount)
            self.counters.lost_datagrams += ledger.lost - before
            self.counters.healed += ledger.healed - healed
            self._keys += len(ledger.keys) - keys
            (self._hidden.add if ledger.hidden else self._hidden.discard)(name)

    def _new_client(self, name: str, client: ClientWindow) -> ClientLedger | None:
        """The ledger of a client that is new, or was forgotten and is back; None for a late word of one."""
        newest, heartbeats = self.gone.get(name, (0, 0))
        if not newest:
            ledger = ClientLedger(name, client.first, client.heartbeats_before, self._at)
        elif client.newest <= newest:
            self.counters.after_end += sum(last - first + 1 for first, last in client.seen)
            return None
        else:
            del self.gone[name]
            ledger = ClientLedger(name, newest + 1, heartbeats, self._at, resumed=True)
        self.clients[name] = ledger
        return ledger

    def _client_changed(self, client: str, series: str, change: Change) -> None:
        entry = self._entry(series)
        if entry is None:
            return
        before = entry.clients[client][0] if client in entry.clients else 0
        entry.clients[client] = (change.total, change.variance, change.open)
        moved = self._moved.setdefault(series, _Moved())
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
            moved = self._moved.setdefault(series, _Moved())
            moved.corrected += amount
            moved.grade = Grade.UNKNOWN

    def _entry(self, series: str) -> Series | None:
        entry = self.series.get(series)
        if entry is None:
            if len(self.series) >= self.config.max_series:
                self.refused["series_limit"] = self.refused.get("series_limit", 0) + 1
                self.counters.refused += 1
                return None
            entry = self.series[series] = Series(self._at)
        entry.active_at = self._at
        return entry

    def _counters(self, window: Window, now: float) -> list[CounterPoint]:
        moved = self._moved
        self._foreign(window)
        for series, amount in window.exact.items():
            entry = self._entry(series)
            if entry is not None:
                entry.settled += amount
                moved.setdefault(series, _Moved()).corrected += amount
        for series, amount in window.counters.items():
            entry = self._entry(series)
            if entry is not None:
                entry.raw += amount
        points = []
        for series, entry in self.series.items():
            if entry.active_at < now and self.config.delete_idle:
                continue
            points.append(self._point(series, entry, window.counters.get(series, 0), moved.get(series)))
        return points

    def _foreign(self, window: Window) -> None:
        """Unnumbered datagrams: of what the socket dropped, their share among all that arrived."""
        pool = window.foreign
        known = dict(window.exact)
        numbered = 0
        for client in window.clients.values():
            numbered += sum(last - first + 1 for first, last in client.seen)
            for segment in client.segments:
                for series, part in segment.pool.parts.items():
                    known[series] = known.get(series, 0) + part.amount
        drops = window.kernel_drops
        missing = drops * pool.datagrams / (pool.datagrams + numbered) if pool.datagrams else 0.0
        for series, raw in window.counters.items():
            amount = raw - known[series] if series in known else raw
            if not amount and series in known:
                continue
            entry = self._entry(series)
            if entry is None:
                continue
            total, variance = (amount, 0.0) if not missing else self._scaled(window, series, amount, missing)
            entry.settled += total
            grade = Grade.UNKNOWN if isinf(variance) else Grade.SOCKET_ONLY
            entry.worst = max(entry.worst, grade)
            entry.settled_variance += variance if variance < inf else 0.0
            moved = self._moved.setdefault(series, _Moved())
            moved.corrected += total
            moved.variance += variance
            moved.grade = max(moved.grade, grade)

    def _scaled(self, window: Window, series: str, amount: Number, missing: float) -> tuple[Number, float]:
        """What arrived of a counter, scaled up for `missing` datagrams, and the variance of that."""
        pool = window.foreign
        part = pool.parts.get(series) or Part()
        # Squares were only kept from when the socket began to drop; before it was the same traffic.
        squares = part.squares * (amount / part.amount) if part.amount else part.squares
        sample = Sampled(part.sum, part.sum_squares, part.diagonal)
        found = estimate(amount, squares, pool.datagrams, missing, sample, pool.sampled)
        return found.total, found.variance

    def _point(self, series: str, entry: Series, raw: Number, moved: _Moved | None) -> CounterPoint:
        moved = moved or _Moved()
        total, variance, grade = entry.total()
        if grade is Grade.EXACT or moved.grade is Grade.EXACT:
            hidden = self._may_be_hidden(entry)
            moved.grade = max(moved.grade, Grade.LEDGER) if hidden else moved.grade
            grade = max(grade, Grade.LEDGER) if hidden or self.hidden_for_good else grade
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
        )

    def _may_be_hidden(self, entry: Series) -> bool:
        """Whether a client of which nothing is known about this counter may have lost some of it."""
        hidden = self._hidden
        return len(hidden) > len(entry.clients) or not hidden <= entry.clients.keys()

    def _fold_gauges(self, window: Window, now: float) -> dict[str, Number]:
        gauges = self._gauges
        for series, change in window.gauges.items():
            if series not in gauges and len(gauges) >= self.config.max_series:
                self.refused["series_limit"] = self.refused.get("series_limit", 0) + 1
                self.counters.refused += 1
                continue
            gauges[series] = (
                change.value if change.value is not None else gauges.get(series, 0) + change.delta
            )
            self._gauges_at[series] = now
        return dict(gauges)

    def _fold_timers(self, window: Window, now: float, window_s: float) -> dict[str, Figures]:
        totals = dict(self.timer_totals)
        for series, timer in window.timers.items():
            self._timers_at[series] = now
            count, total = totals.get(series, (0, 0.0))
            totals[series] = (count + timer.count, total + timer.sum)
        self.timer_totals = totals
        out: dict[str, Figures] = {}
        for series in window.timers if self.config.delete_idle else self._timers_at:
            timer = window.timers.get(series) or TimerWindow()
            out[series] = figures(
                timer, window_s=window_s, percentiles=self.config.percentiles, bins=self._bins(series)
            )
        return out

    def _bins(self, series: str) -> list[float] | None:
        """The first histogram whose text is in the name, as the classic daemon chooses it."""
        return next((h.bins for h in self.config.histogram if h.metric in series), None)

    def _fold_sets(self, window: Window, now: float) -> dict[str, int]:
        for series in window.sets:
            self._sets_at[series] = now
        shown = window.sets if self.config.delete_idle else self._sets_at
        return {series: len(window.sets.get(series, ())) for series in shown}

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
        self.gone[name] = ledger.newest, ledger.heartbeats
        if len(self.gone) > MAX_GONE:
            del self.gone[next(iter(self.gone))]
        self._keys -= len(ledger.keys)
        self._hidden.discard(name)
        self.hidden_for_good |= ledger.hidden
        self.counters.clients_unresolved += ledger.hidden
        self.counters.clients_expired += not ledger.ended
        for series in ledger.keys:
            entry = self.series.get(series)
            found = entry.clients.pop(name, None) if entry is not None else None
            if entry is None or found is None:
                continue
            total, variance, is_open = found
            entry.settled += total
            if isinf(variance):
                entry.worst = Grade.UNKNOWN
            else:
                entry.settled_variance += variance
                entry.worst = max(entry.worst, Grade.LEDGER) if is_open else entry.worst

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
                ledger.lines_told,
                len(ledger.keys),
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
