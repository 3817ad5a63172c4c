"""Raw lines into a window's figures: each distinct line is parsed once, its count applied at once. Pure."""

from brokerless.metrics.bag import LineBag
from brokerless.metrics.ingest import ClientCut, Cut
from brokerless.metrics.parser import Number, Passed, Refused, Sample, parse_line
from brokerless.metrics.timers import TimerWindow
from brokerless.metrics.window import (
    MAX_PASSED,
    MAX_REFUSED_SAMPLES,
    MAX_STAMPED,
    ClientWindow,
    GaugeWindow,
    Part,
    Pool,
    SegmentPool,
    Stamped,
    Window,
)

# Lines whose meaning is remembered, some 200 bytes each. Twice the default of max_series, since a counter
# often has a second line (another rate, another increment).
MAX_REMEMBERED = 400_000
# Members of all sets in one window, some 100 bytes each; more are refused as `set_limit`.
MAX_MEMBERS = 1_000_000
# Timer values kept exactly in one window over all series (64 MB); further ones go to sketches at once.
MAX_EXACT = 2_000_000
AUDIT = "_bl."


class Digest:
    """Turns cuts into the figures of the open window; owned by one thread."""

    def __init__(self, *, max_series: int = 200_000) -> None:
        self.max_series = max_series
        self.window = Window()
        self._known: set[str] = set()
        self._members = 0
        self._exact = 0
        # Plain counter lines: (series, amount of one line).
        self._counters: dict[bytes, tuple[str, Number]] = {}
        # Names of plain timers, as they are on the wire, and their series.
        self._timer_names: dict[bytes, str] = {}

    def close(self) -> Window:
        """End the window and begin a new one."""
        window, self.window = self.window, Window()
        self._known = set()
        self._members = self._exact = 0
        if len(self._counters) >= MAX_REMEMBERED:
            self._counters = {}
        if len(self._timer_names) >= MAX_REMEMBERED:
            self._timer_names = {}
        return window

    def take(self, cut: Cut, *, foreign_lossy: bool) -> None:
        """Add a cut to the open window. `foreign_lossy`: the socket drops, so look at whole datagrams."""
        window = self.window
        self._ordered(cut.ordered, cut.marks)
        exact: dict[str, Part] = {}
        self._bag(cut.exact_bag, exact)
        for series, part in exact.items():
            window.exact[series] = window.exact.get(series, 0) + part.amount
        pool = window.foreign
        pool.datagrams += cut.lossy_bag.datagrams
        self._bag(cut.lossy_bag, pool.parts if foreign_lossy else None)
        if foreign_lossy:
            self._sample(cut.lossy_bag.sample, pool)
        for client in cut.clients:
            self._client(client)

    def _client(self, cut: ClientCut) -> None:
        window = ClientWindow(
            cut.first,
            cut.newest,
            cut.heartbeats_before,
            cut.heartbeats,
            cut.seen,
            cut.duplicates,
            cut.late,
            beats=cut.beats,
        )
        for segment in cut.segments:
            pool = Pool(segment.bag.datagrams)
            before = self.window.lines
            self._bag(segment.bag, pool.parts)
            window.lines += self.window.lines - before + segment.bag.moved
            if cut.lossy:
                self._sample(segment.bag.sample, pool)
            window.segments.append(SegmentPool(segment.first, segment.last, pool))
        mine = self.window.clients.get(cut.client)
        if mine is None:
            self.window.clients[cut.client] = window
        else:
            mine.merge(window)

    def _bag(self, bag: LineBag, parts: dict[str, Part] | None) -> None:
        window = self.window
        counters = window.counters
        remembered = self._counters
        lines = 0
        for line, times in bag.lines():
            lines += times
            known = remembered.get(line)
            if known is None:
                self._line(line, times, parts)
                continue
            series, amount = known
            if series in counters:
                counters[series] += amount * times
            elif self._admit(series, line, times):
                counters[series] = amount * times
            else:
                continue
            if parts is not None:
                _add(parts, series, amount, times)
        window.lines += lines
        for kind, name, values in bag.timed():
            window.lines += len(values)
            self._plain_timer(name, kind, values)

    def _ordered(self, lines: list[bytes], marks: list[tuple[int, float]]) -> None:
        at = 0
        for end, now in marks:
            for line in lines[at:end]:
                self._line(line, 1, None, now)
            at = end
        self.window.lines += len(lines)

    def _line(self, line: bytes, times: int, parts: dict[str, Part] | None, now: float = 0.0) -> None:
        """One distinct line that came `times` times."""
        if not line:
            return
        parsed = parse_line(line)
        if isinstance(parsed, Refused):
            self._refuse(parsed.reason, line, times)
            return
        if isinstance(parsed, Passed):
            self._pass(line, times)
            return
        if len(parsed) == 1 and parsed[0].kind == "c" and parsed[0].timestamp is None:
            sample = parsed[0]
            amount = sum(sample.values) * sample.weight  # type: ignore[arg-type]  # numbers, by kind
            if self._admit(sample.series, line, times):
                if len(self._counters) < MAX_REMEMBERED:
                    self._counters[line] = (sample.series, amount)
                self._count(sample.series, amount, times, parts)
            return
        for sample in parsed:
            if sample.series.startswith(AUDIT):
                self.window.misplaced += times
            elif self._admit(sample.series, line, times):
                self._apply(sample, times, parts, now)

    def _admit(self, series: str, line: bytes, times: int) -> bool:
        known = self._known
        if series in known:
            return True
        if len(known) >= self.max_series:
            self._refuse("series_limit", line, times)
            return False
        known.add(series)
        return True

    def _refuse(self, reason: str, line: bytes, times: int) -> None:
        window = self.window
        window.refused[reason] = window.refused.get(reason, 0) + times
        if len(window.refused_samples) < MAX_REFUSED_SAMPLES:
            window.refused_samples.append((reason, line[:200]))

    def _pass(self, line: bytes, times: int) -> None:
        room = max(0, MAX_PASSED - len(self.window.passed))
        self.window.passed += [line] * min(times, room)
        self.window.passed_dropped += max(0, times - room)

    def _count(self, series: str, amount: Number, times: int, parts: dict[str, Part] | None) -> None:
        counters = self.window.counters
        counters[series] = counters.get(series, 0) + amount * times
        if parts is not None:
            _add(parts, series, amount, times)

    def _apply(self, sample: Sample, times: int, parts: dict[str, Part] | None, now: float) -> None:
        window = self.window
        series = sample.series
        values: tuple[Number, ...] = sample.values  # type: ignore[assignment]  # strings only for sets
        if sample.kind == "s":
            self._set_member(sample, times)
        elif sample.timestamp is not None and sample.kind in ("c", "g"):
            value = sum(values) * sample.weight * times if sample.kind == "c" else values[-1]
            self._stamp(Stamped(sample.kind, series, sample.timestamp, value))
        elif sample.kind == "c":
            self._count(series, sum(values) * sample.weight, times, parts)
        elif sample.kind == "g":
            gauge = window.gauges.get(series)
            if gauge is None:
                gauge = window.gauges[series] = GaugeWindow()
            for _ in range(times):
                for value, relative in zip(values, sample.deltas, strict=True):
                    gauge.apply(value, relative, now)
        else:
            timer = window.timers.get(series)
            if timer is None:
                timer = window.timers[series] = TimerWindow()
            floats = [float(v) for v in values] * times
            self._exact += len(floats)
            exact = sample.kind != "d" and self._exact <= MAX_EXACT
            timer.add_many(floats, sample.weight, exact=exact)

    def _set_member(self, sample: Sample, times: int) -> None:
        members = self.window.sets.setdefault(sample.series, set())
        before = len(members)
        if self._members >= MAX_MEMBERS and sample.values[0] not in members:
            self._refuse("set_limit", sample.series.encode(), times)
            return
        members.update(map(str, sample.values))
        self._members += len(members) - before

    def _stamp(self, point: Stamped) -> None:
        if len(self.window.stamped) < MAX_STAMPED:
            self.window.stamped.append(point)
        else:
            self.window.stamped_dropped += 1

    def _plain_timer(self, name: bytes, kind: bytes, values: list[float]) -> None:
        """Values of `name:…|kind` lines that the bag has already turned into numbers."""
        series = self._timer_names.get(name)
        line = name + b":0|" + kind
        if series is None:
            parsed = parse_line(line)
            if not isinstance(parsed, list):
                reason = parsed.reason if isinstance(parsed, Refused) else "no_type"
                self._refuse(reason, line, len(values))
                return
            series = parsed[0].series
            if len(self._timer_names) < MAX_REMEMBERED:
                self._timer_names[name] = series
        if not self._admit(series, line, len(values)):
            return
        timer = self.window.timers.get(series)
        if timer is None:
            timer = self.window.timers[series] = TimerWindow()
        self._exact += len(values)
        timer.add_many(values, exact=kind != b"d" and self._exact <= MAX_EXACT)

    def _sample(self, datagrams: list[bytes], pool: Pool) -> None:
        """Look at whole datagrams: how much of each counter one datagram holds."""
        pool.sampled += len(datagrams)
        parts, remembered = pool.parts, self._counters
        for datagram in datagrams:
            totals: dict[str, list[float]] = {}
            for line in datagram.split(b"\n"):
                known = remembered.get(line) or _counter_line(line)
                if known is not None:
                    series, amount = known
                    cell = totals.get(series)
                    if cell is None:
                        totals[series] = [amount, amount * amount]
                    else:
                        cell[0] += amount
                        cell[1] += amount * amount
            for series, (total, diagonal) in totals.items():
                part = parts.get(series)
                if part is not None:
                    part.sum += total
                    part.sum_squares += total * total
                    part.diagonal += diagonal


def _counter_line(line: bytes) -> tuple[str, Number] | None:
    if b"|c" not in line:
        return None
    parsed = parse_line(line)
    if not isinstance(parsed, list) or len(parsed) != 1 or parsed[0].kind != "c":
        return None
    return parsed[0].series, sum(parsed[0].values) * parsed[0].weight  # type: ignore[arg-type]


def _add(parts: dict[str, Part], series: str, amount: Number, times: int) -> None:
    part = parts.get(series)
    if part is None:
        part = parts[series] = Part()
    part.amount += amount * times
    part.squares += amount * amount * times
