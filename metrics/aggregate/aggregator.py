"""Raw lines into a window's figures: each distinct line is parsed once, its count applied at once. Pure.

A line, a timer or a client that raises an exception here costs itself and nothing else: it is counted as a fault,
and the first of its kind is logged.
"""

import hashlib
import logging
from collections.abc import Iterable

from brokerless.metrics.aggregate.collect import TELEMETRY, ClientSnapshot, Snapshot
from brokerless.metrics.aggregate.filters import SeriesFilter
from brokerless.metrics.aggregate.line_counts import LineCounts
from brokerless.metrics.aggregate.sketch import MAX_BINS
from brokerless.metrics.aggregate.timers import TimerWindow
from brokerless.metrics.aggregate.window import (
    MAX_LIMITED,
    MAX_PASSED,
    MAX_REFUSED_SAMPLES,
    MAX_TIMESTAMPED,
    ClientWindow,
    CounterSums,
    DatagramSums,
    GaugeWindow,
    SegmentSums,
    Timestamped,
    Window,
)
from brokerless.metrics.limits import (
    MAX_BINNED,
    MAX_EXACT,
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_PASSED_BYTES,
    MAX_REMEMBERED,
    MAX_REMEMBERED_BYTES,
    MEAN_SERIES_BYTES,
    SMALL_SKETCH,
)
from brokerless.metrics.numbers import LARGEST_WHOLE
from brokerless.metrics.parser import (
    DEFAULT_OPTIONS,
    Number,
    ParserOptions,
    Passed,
    Refused,
    Sample,
    parse_line,
)
from brokerless.metrics.sequence_lines import PREFIX

AUDIT = PREFIX.decode()

_log = logging.getLogger("brokerless.metrics")


class Aggregator:
    """Turns snapshots into the figures of the open window; owned by one thread."""

    def __init__(
        self,
        *,
        max_series: int = 200_000,
        options: ParserOptions = DEFAULT_OPTIONS,
        series_filter: SeriesFilter | None = None,
    ) -> None:
        self.max_series = max_series
        self.window = Window()
        self.options = options
        self.filter = series_filter or SeriesFilter()
        self._known: set[str] = set()
        self._known_bytes = 0
        self._members = 0
        self._exact = 0
        self._binned = 0
        self._passed_bytes = 0
        self._logged = False
        # Whether a Datadog client has been heard, on whichever listener.
        self.telemetry = False
        # Plain counter lines: (series, amount of one line).
        self._counters: dict[bytes, tuple[str, Number]] = {}
        # Names of plain timers, as they are on the wire, and their series.
        self._timer_names: dict[bytes, str] = {}

    def close(self) -> Window:
        """End the window and begin a new one."""
        window, self.window = self.window, Window()
        self._members = self._exact = self._binned = self._passed_bytes = 0
        if len(self._counters) >= MAX_REMEMBERED:
            self._counters = {}
        if len(self._timer_names) >= MAX_REMEMBERED:
            self._timer_names = {}
        return window

    def retain(self, series: Iterable[str]) -> None:
        """These series are alive; forget all others, so that new ones may take their place."""
        self._known = set(series)
        self._known_bytes = sum(map(len, self._known))

    @property
    def crowded(self) -> bool:
        """Whether so many series are known that `retain` is worth its time."""
        return 4 * len(self._known) > 3 * self.max_series or 4 * self._known_bytes > 3 * self._max_bytes

    @property
    def _max_bytes(self) -> int:
        return self.max_series * MEAN_SERIES_BYTES

    def set_filter(self, options: ParserOptions, series_filter: SeriesFilter) -> None:
        """Use other rules from now on."""
        self.options, self.filter = options, series_filter
        self._counters, self._timer_names, self._known, self._known_bytes = {}, {}, set(), 0

    def take(self, snapshot: Snapshot, *, unnumbered_lossy: bool) -> None:
        """Add a snapshot to the open window. `unnumbered_lossy`: the socket drops, so sample whole datagrams."""
        window = self.window
        self._ordered(snapshot.ordered, snapshot.marks)
        lossless: dict[str, CounterSums] = {}
        self._lines(snapshot.lossless, lossless)
        for series, sums in lossless.items():
            window.lossless[series] = window.lossless.get(series, 0) + sums.amount
        unnumbered = window.unnumbered
        unnumbered.datagrams += snapshot.unnumbered.datagrams
        self._lines(snapshot.unnumbered, unnumbered.counters if unnumbered_lossy else None)
        if unnumbered_lossy:
            self._sample(snapshot.unnumbered.sample, unnumbered)
        window.unnumbered_clients.update(map(bytes.decode, snapshot.unnumbered_clients))
        for client in snapshot.clients:
            try:
                self._client(client)
            except Exception:
                self._fault("client %s", client.client)

    def _fault(self, what: str, *arguments: object) -> None:
        """An exception that must not cost anybody else anything; called where it is handled."""
        self.window.faults += 1
        if not self._logged:
            self._logged = True
            _log.exception("cannot aggregate " + what + "; further faults are only counted", *arguments)

    def _client(self, snapshot: ClientSnapshot) -> None:
        for beat in snapshot.beats:
            beat.read_totals(self.options)
        window = ClientWindow(
            snapshot.first,
            snapshot.newest,
            snapshot.heartbeats_before,
            snapshot.heartbeats,
            snapshot.seen,
            snapshot.duplicates,
            snapshot.late,
            beats=snapshot.beats,
        )
        for segment in snapshot.segments:
            sums = DatagramSums(segment.counts.datagrams)
            before, refused = self.window.lines, sum(self.window.refused.values())
            self._lines(segment.counts, sums.counters)
            window.lines += self.window.lines - before + segment.counts.moved
            if snapshot.lossy:
                self._sample(segment.counts.sample, sums)
            window.segments.append(
                SegmentSums(segment.first, segment.last, sums, refused < sum(self.window.refused.values()))
            )
        if snapshot.lossy and not snapshot.newest_payload.startswith(PREFIX):
            window.newest_sums = self._newest(snapshot)
        mine = self.window.clients.get(snapshot.client)
        if mine is None:
            self.window.clients[snapshot.client] = window
        else:
            mine.merge(window)

    def _lines(self, counts: LineCounts, sums: dict[str, CounterSums] | None) -> None:
        window = self.window
        counters = window.counters
        remembered = self._counters
        lines = 0
        for line, times in counts.lines():
            lines += times
            known = remembered.get(line)
            if known is None:
                self._line(line, times, sums)
                continue
            series, amount = known
            if series in counters:
                counters[series] += amount * times
            elif self._admit(series, line, times):
                counters[series] = amount * times
            else:
                continue
            if sums is not None:
                _add(sums, series, amount, times)
            elif amount.__class__ is float:
                window.unnumbered_fractions.add(series)
        window.lines += lines
        for kind, name, values in counts.timed():
            window.lines += len(values)
            try:
                self._plain_timer(name, kind, values)
            except Exception:
                self._fault("timer %r", name)

    def _ordered(self, lines: list[bytes], marks: list[tuple[int, float, str]]) -> None:
        at = 0
        for end, now, dialect in marks:
            options = self.options
            if dialect != options.dialect:
                options = ParserOptions(
                    dialect=dialect,  # type: ignore[arg-type]  # one of the three, by the collector
                    influx_tags=options.influx_tags,
                    librato_tags=options.librato_tags,
                    signalfx_tags=options.signalfx_tags,
                )
            for line in lines[at:end]:
                self._line(line, 1, None, now, options)
            at = end
        self.window.lines += len(lines)

    def _line(
        self,
        line: bytes,
        times: int,
        sums: dict[str, CounterSums] | None,
        now: float = 0.0,
        options: ParserOptions | None = None,
    ) -> None:
        """One distinct line that came `times` times."""
        if line.startswith(TELEMETRY):
            self.telemetry = True
        try:
            self._parse(line, times, sums, now, options or self.options)
        except Exception:
            self._fault("line %r", line[:200])

    def _parse(
        self,
        line: bytes,
        times: int,
        sums: dict[str, CounterSums] | None,
        now: float,
        options: ParserOptions,
    ) -> None:
        if not line:
            return
        parsed = parse_line(line, options)
        if isinstance(parsed, Refused):
            self._refuse(parsed.reason, line, times)
            return
        if isinstance(parsed, Passed):
            self._pass(line, times)
            return
        sample = parsed[0]
        self.window.ignored_fields += sample.ignored * times
        if len(parsed) == 1 and sample.kind == "c" and sample.timestamp is None:
            amount = sum(sample.values) * sample.weight  # type: ignore[arg-type]  # numbers, by kind
            if self._admit(sample.series, line, times):
                if abs(amount) > LARGEST_WHOLE:
                    self._count(sample.series, amount, times, sums)
                    return  # not remembered, to be seen in every window
                short = len(line) <= MAX_REMEMBERED_BYTES and not sample.ignored
                if short and len(self._counters) < MAX_REMEMBERED:
                    self._counters[line] = (sample.series, amount)
                self._count(sample.series, amount, times, sums)
            return
        refused = False
        for sample in parsed:
            if sample.series.startswith(AUDIT):
                self.window.misplaced += times
            elif self._admit(sample.series, line, 0 if refused else times):
                self._apply(sample, times, sums, now)
            else:
                refused = True

    def _admit(self, series: str, line: bytes, times: int) -> bool:
        """Whether the series may be counted; if not, `times` lines are refused with the reason."""
        known = self._known
        if series in known:
            return True
        reason = self.filter.refusal(series)
        if reason is None and (len(known) >= self.max_series or self._known_bytes >= self._max_bytes):
            reason = "series_limit"
        if reason is not None:
            self._refuse(reason, line, times)
            if reason != "filtered" and len(self.window.limited) < MAX_LIMITED:
                self.window.limited.add(series)
            return False
        known.add(series)
        self._known_bytes += len(series)
        return True

    def _refuse(self, reason: str, line: bytes, times: int) -> None:
        if not times:
            return
        window = self.window
        window.refused[reason] = window.refused.get(reason, 0) + times
        if len(window.refused_samples) < MAX_REFUSED_SAMPLES:
            window.refused_samples.append((reason, line[:200]))

    def _pass(self, line: bytes, times: int) -> None:
        room = max(0, MAX_PASSED - len(self.window.passed))
        kept = min(times, room, max(0, (MAX_PASSED_BYTES - self._passed_bytes) // len(line)))
        self.window.passed += [line] * kept
        self._passed_bytes += kept * len(line)
        self.window.passed_dropped += times - kept

    def _count(self, series: str, amount: Number, times: int, sums: dict[str, CounterSums] | None) -> None:
        counters = self.window.counters
        counters[series] = counters.get(series, 0) + amount * times
        if abs(amount) > LARGEST_WHOLE:
            self.window.rounded.add(series)
        if sums is not None:
            _add(sums, series, amount, times)
        elif amount.__class__ is float:
            self.window.unnumbered_fractions.add(series)

    def _apply(self, sample: Sample, times: int, sums: dict[str, CounterSums] | None, now: float) -> None:
        window = self.window
        series = sample.series
        values: tuple[Number, ...] = sample.values  # type: ignore[assignment]  # strings only for sets
        if sample.kind == "s":
            self._set_member(sample, times)
        elif sample.timestamp is not None and sample.kind in ("c", "g"):
            value = sum(values) * sample.weight * times if sample.kind == "c" else values[-1]
            self._timestamp(Timestamped(sample.kind, series, sample.timestamp, value), times)
        elif sample.kind == "c":
            self._count(series, sum(values) * sample.weight, times, sums)
        elif sample.kind == "g":
            gauge = window.gauges.get(series)
            if gauge is None:
                gauge = window.gauges[series] = GaugeWindow()
            for _ in range(times):
                for value, relative in zip(values, sample.deltas, strict=True):
                    gauge.apply(value, relative, now)
        else:
            self._timer(series, [float(v) for v in values] * times, sample.weight, sample.kind)

    def _timer(self, series: str, values: list[float], weight: float, kind: str) -> None:
        timer = self.window.timers.get(series)
        if timer is None:
            timer = self.window.timers[series] = TimerWindow(milliseconds=kind == "ms")
        self._exact += len(values)
        exact = kind != "d" and self._exact <= MAX_EXACT
        # A timer that never had a sketch begins a small one when there are too many bins already.
        max_bins = SMALL_SKETCH if self._binned >= MAX_BINNED else MAX_BINS
        timer.add_many(values, weight, exact=exact, max_bins=max_bins)
        if timer.sketch is not None:
            self._binned += min(len(values), timer.sketch.max_bins)

    def _set_member(self, sample: Sample, times: int) -> None:
        members = self.window.sets.setdefault(sample.series, set())
        member = str(sample.values[0])
        if len(member) > MAX_MEMBER_BYTES:
            member = hashlib.blake2b(member.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if member in members:
            return
        if self._members >= MAX_MEMBERS:
            self._refuse("set_limit", sample.series.encode(), times)
            return
        members.add(member)
        self._members += 1

    def _timestamp(self, point: Timestamped, times: int) -> None:
        if len(self.window.timestamped) < MAX_TIMESTAMPED:
            self.window.timestamped.append(point)
            self.window.timestamped_lines += times
        else:
            self.window.timestamped_dropped += times

    def _plain_timer(self, name: bytes, kind: bytes, values: list[float]) -> None:
        """Values of `name:…|kind` lines that LineCounts has already turned into numbers."""
        series = self._timer_names.get(name)
        line = name + b":0|" + kind
        if series is None:
            parsed = parse_line(line, self.options)
            if not isinstance(parsed, list):
                reason = parsed.reason if isinstance(parsed, Refused) else "no_type"
                self._refuse(reason, line, len(values))
                return
            series = parsed[0].series
            if len(name) <= MAX_REMEMBERED_BYTES and len(self._timer_names) < MAX_REMEMBERED:
                self._timer_names[name] = series
        if self._admit(series, line, len(values)):
            self._timer(series, values, 1, kind.decode())

    def _sample(self, datagrams: list[bytes], into: DatagramSums) -> None:
        """Look at whole datagrams: how much of each counter one datagram holds."""
        into.sampled += len(datagrams)
        counters, remembered = into.counters, self._counters
        for datagram in datagrams:
            totals: dict[str, list[float]] = {}
            for line in datagram.split(b"\n"):
                known = remembered.get(line) or self._counter_line(line)
                if known is not None:
                    series, amount = known
                    cell = totals.get(series)
                    if cell is None:
                        totals[series] = [amount, amount * amount]
                    else:
                        cell[0] += amount
                        cell[1] += amount * amount
            for series, (total, diagonal) in totals.items():
                sums = counters.get(series)
                if sums is not None:
                    sums.sum += total
                    square = total * total
                    sums.sum_squares += square
                    sums.diagonal += diagonal
                    sums.sum_fourth += float(square) * square
                    sums.holding += 1

    def _newest(self, snapshot: ClientSnapshot) -> DatagramSums:
        """What is in the newest datagram of a client, and in the sample because of it."""
        newest = snapshot.newest_payload
        sums = DatagramSums(1)
        for line in newest.split(b"\n"):
            known = self._counters.get(line) or self._counter_line(line)
            if known is not None:
                _add(sums.counters, *known, 1)
        if any(newest is datagram for segment in snapshot.segments for datagram in segment.counts.sample):
            self._sample([newest], sums)
        return sums

    def _counter_line(self, line: bytes) -> tuple[str, Number] | None:
        if b"|c" not in line:
            return None
        parsed = parse_line(line, self.options)
        if not isinstance(parsed, list) or len(parsed) != 1 or parsed[0].kind != "c":
            return None
        return parsed[0].series, sum(parsed[0].values) * parsed[0].weight  # type: ignore[arg-type]


def _add(sums: dict[str, CounterSums], series: str, amount: Number, times: int) -> None:
    found = sums.get(series)
    if found is None:
        found = sums[series] = CounterSums()
    found.amount += amount * times
    found.squares += float(amount) * amount * times
