"""The simple way: every line parsed and applied at once, in order. What the fast path must agree with."""

from brokerless.metrics.parser import Passed, Refused, Sample, parse_line


class Reference:
    """Counters, gauges, timers and sets of one window, by a loop over lines."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.timers: dict[str, list[float]] = {}
        self.timer_counts: dict[str, float] = {}
        self.sets: dict[str, set[str]] = {}
        self.timestamped: list[tuple[str, str, int, float]] = []
        self.passed: list[bytes] = []
        self.refused: dict[str, int] = {}
        self.lines = 0

    def datagram(self, payload: bytes) -> None:
        for line in payload.split(b"\n"):
            if line:
                self.lines += 1
                self._line(line)

    def _line(self, line: bytes) -> None:
        parsed = parse_line(line)
        if isinstance(parsed, Refused):
            self.refused[parsed.reason] = self.refused.get(parsed.reason, 0) + 1
        elif isinstance(parsed, Passed):
            self.passed.append(line)
        else:
            for sample in parsed:
                self._sample(sample)

    def _sample(self, sample: Sample) -> None:
        series = sample.series
        if sample.kind == "s":
            self.sets.setdefault(series, set()).update(map(str, sample.values))
            return
        for at, value in enumerate(sample.values):
            assert not isinstance(value, str)
            if sample.timestamp is not None and sample.kind in "cg":
                if at == len(sample.values) - 1:
                    total = sum(sample.values) * sample.weight if sample.kind == "c" else value  # type: ignore[arg-type]
                    self.timestamped.append((sample.kind, series, sample.timestamp, total))
            elif sample.kind == "c":
                self.counters[series] = self.counters.get(series, 0) + value * sample.weight
            elif sample.kind == "g":
                if sample.deltas[at]:
                    self.gauges[series] = self.gauges.get(series, 0) + value
                else:
                    self.gauges[series] = value
            else:
                self.timers.setdefault(series, []).append(float(value))
                self.timer_counts[series] = self.timer_counts.get(series, 0) + sample.weight
