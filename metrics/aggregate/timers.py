"""Timers of one window: their values, and the figures the classic daemon derives from them. Pure."""

from array import array
from math import inf, sqrt
from operator import mul

import msgspec

from brokerless.metrics.aggregate.sketch import MAX_BINS, Sketch
from brokerless.metrics.numbers import format_number

# Exact percentiles need all values; 20,000 are 160 KB, a busy timer at 2,000/s for ten seconds. Beyond that
# the window is a sketch with 1 % relative error: count, sum, min and max stay exact.
MAX_VALUES = 20_000


class TimerWindow(msgspec.Struct):
    """All values of one timer, histogram (`h`) or distribution (`d`) in one window.

    Values are kept as they are up to MAX_VALUES, then in `sketch`; never both. A value sampled at `@0.1` stands
    for ten: `count` and `sum` include that. `weights` has one entry per value once any of them is not 1.
    """

    count: float = 0
    sum: float = 0
    values: list[float] = msgspec.field(default_factory=list)
    weights: list[float] = msgspec.field(default_factory=list)
    sketch: Sketch | None = None
    # A timer (`ms`); histograms and distributions have whatever unit they have.
    milliseconds: bool = True

    def add_many(
        self, values: list[float], weight: float = 1, *, exact: bool = True, max_bins: int = MAX_BINS
    ) -> None:
        """Add values; `exact=False` (distributions) goes to the sketch at once."""
        self.count += len(values) * weight
        self.sum += sum(values) * weight
        if self.sketch is None and exact and len(self.values) + len(values) <= MAX_VALUES:
            if weight != 1 or self.weights:
                self.weights += [1.0] * (len(self.values) - len(self.weights)) + [weight] * len(values)
            self.values += values
            return
        self._to_sketch(max_bins).add_many(values, weight)

    def _to_sketch(self, max_bins: int = MAX_BINS) -> Sketch:
        if self.sketch is None:
            self.sketch = Sketch(max_bins=max_bins)
            for weight, values in self._by_weight().items():
                self.sketch.add_many(values, weight)
            self.values, self.weights = [], []
        return self.sketch

    def _by_weight(self) -> dict[float, list[float]]:
        if not self.weights:
            return {1.0: self.values}
        found: dict[float, list[float]] = {}
        for value, weight in zip(self.values, self.weights, strict=True):
            found.setdefault(weight, []).append(value)
        return found

    def merge(self, other: "TimerWindow") -> None:
        """Take in another daemon's or worker's values of the same timer and window."""
        self.count += other.count
        self.sum += other.sum
        fits = len(self.values) + len(other.values) <= MAX_VALUES
        if other.sketch is None and self.sketch is None and fits:
            if self.weights or other.weights:
                self.weights += [1.0] * (len(self.values) - len(self.weights))
                self.weights += other.weights or [1.0] * len(other.values)
            self.values += other.values
            return
        mine = self._to_sketch()
        if other.sketch is not None:
            mine.merge(other.sketch)
            return
        for weight, values in other._by_weight().items():
            mine.add_many(values, weight)


class TimerTotal(msgspec.Struct):
    """A timer since the daemon began, as Prometheus wants it; `buckets` has the values up to each limit."""

    count: float = 0
    sum: float = 0.0
    milliseconds: bool = True
    buckets: dict[float, float] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, totals: "list[TimerTotal]") -> "TimerTotal":
        """Several as one; of buckets those that all have."""
        limits = [limit for limit in totals[0].buckets if all(limit in t.buckets for t in totals)]
        return cls(
            sum(t.count for t in totals),
            sum(t.sum for t in totals),
            any(t.milliseconds for t in totals),
            {limit: sum(t.buckets[limit] for t in totals) for limit in limits},
        )

    def add(self, window: TimerWindow, limits: list[float]) -> "TimerTotal":
        """Itself and a window, as a new object: pages are rendered in other threads.

        With other limits than before it starts over: nobody knows how many of the old values were below the new ones.
        """
        if limits and self.count and list(self.buckets) != limits:
            return TimerTotal().add(window, limits)
        scale = 1000.0 if window.milliseconds else 1.0
        buckets = {}
        if limits:
            if window.sketch is not None:
                values = list(window.sketch.ascending())
            else:
                values = list(zip(window.values, window.weights or [1.0] * len(window.values), strict=True))
            for limit in limits:
                below = sum(weight for value, weight in values if value <= limit * scale)
                buckets[limit] = self.buckets.get(limit, 0) + below
        total = self.sum + window.sum
        return TimerTotal(self.count + window.count, total, window.milliseconds, buckets)


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram for all timers whose name contains `metric`: upper limits, exclusive, `inf` allowed."""

    metric: str = ""
    bins: list[float] = msgspec.field(default_factory=list)


Figures = dict[str, float | dict[str, float]]


def figures(
    window: TimerWindow, *, window_s: float, percentiles: list[float], bins: list[float] | None = None
) -> Figures:
    """Count, sum, mean, min, max, std, median, percentiles and bins, with the classic daemon's names."""
    if window.sketch is not None:
        return _from_sketch(window, window.sketch, window_s, percentiles, bins)
    if not window.values:
        return {"count": 0, "count_ps": 0}
    if window.weights:
        # Sampled: every figure weighs a value by what it stands for, which a sketch with a bin per value does.
        return _from_weighted(window, window_s, percentiles, bins)
    values = sorted(window.values)
    out: Figures = {}
    sums, squares = _running(values)
    for percent in percentiles:
        _percentile(out, percent, values, sums, squares)
    count = len(values)
    mean = sums[-1] / count
    middle = count // 2
    out["std"] = sqrt(sum((v - mean) * (v - mean) for v in values) / count)
    out["upper"] = values[-1]
    out["lower"] = values[0]
    out["count"] = window.count
    out["count_ps"] = window.count / window_s
    out["sum"] = sums[-1]
    out["sum_squares"] = squares[-1]
    out["mean"] = mean
    out["median"] = values[middle] if count % 2 else (values[middle - 1] + values[middle]) / 2
    if bins:
        out["histogram"] = _histogram([(v, 1.0) for v in values], bins)
    return out


def _running(values: list[float]) -> "tuple[array[float], array[float]]":
    sums, squares = array("d"), array("d")
    total = total_squares = 0.0
    for value, square in zip(values, map(mul, values, values), strict=True):
        total += value
        total_squares += square
        sums.append(total)
        squares.append(total_squares)
    return sums, squares


def _label(percent: float) -> str:
    return format_number(percent).replace(".", "_", 1).replace("-", "top", 1)


def _percentile(
    out: Figures, percent: float, values: list[float], sums: "array[float]", squares: "array[float]"
) -> None:
    count = len(values)
    # Half up, like JavaScript's Math.round: the classic daemon's figures to the last digit.
    inside = int(abs(percent) / 100 * count + 0.5) if count > 1 else count
    if inside == 0:
        return
    label = _label(percent)
    if percent > 0:
        edge, total, square = values[inside - 1], sums[inside - 1], squares[inside - 1]
    else:
        before = count - inside - 1
        edge = values[count - inside]
        total = sums[-1] - (sums[before] if before >= 0 else 0.0)
        square = squares[-1] - (squares[before] if before >= 0 else 0.0)
    out[f"count_{label}"] = inside
    out[f"mean_{label}"] = total / inside
    out[f"{'upper' if percent > 0 else 'lower'}_{label}"] = edge
    out[f"sum_{label}"] = total
    out[f"sum_squares_{label}"] = square


def _from_sketch(
    window: TimerWindow, sketch: Sketch, window_s: float, percentiles: list[float], bins: list[float] | None
) -> Figures:
    mean = sketch.sum / sketch.count
    out: Figures = {}
    for percent in percentiles:
        label = _label(percent)
        share = abs(percent) / 100
        edge = sketch.quantile(share if percent > 0 else 1 - share)
        out[f"count_{label}"] = share * sketch.count
        out[f"{'upper' if percent > 0 else 'lower'}_{label}"] = edge
    out["std"] = sqrt(max(0.0, sketch.sum_squares / sketch.count - mean * mean))
    out["upper"] = sketch.max
    out["lower"] = sketch.min
    out["count"] = window.count
    out["count_ps"] = window.count / window_s
    out["sum"] = sketch.sum
    out["sum_squares"] = sketch.sum_squares
    out["mean"] = mean
    out["median"] = sketch.quantile(0.5)
    if bins:
        out["histogram"] = _histogram(list(sketch.ascending()), bins)
    return out


def _from_weighted(
    window: TimerWindow, window_s: float, percentiles: list[float], bins: list[float] | None
) -> Figures:
    ascending = sorted(zip(window.values, window.weights, strict=True))
    squares = sum(value * value * weight for value, weight in ascending)
    mean = window.sum / window.count
    out: Figures = {}
    for percent in percentiles:
        _weighted_percentile(out, percent, ascending if percent > 0 else ascending[::-1], window.count)
    out["std"] = sqrt(max(0.0, squares / window.count - mean * mean))
    out["upper"], out["lower"] = ascending[-1][0], ascending[0][0]
    out["count"] = window.count
    out["count_ps"] = window.count / window_s
    out["sum"], out["sum_squares"], out["mean"] = window.sum, squares, mean
    out["median"] = _weighted_quantile(ascending, window.count, 0.5)
    if bins:
        out["histogram"] = _histogram(ascending, bins)
    return out


def _weighted_percentile(
    out: Figures, percent: float, values: list[tuple[float, float]], count: float
) -> None:
    """Figures of the first `percent` of the weight, from the lowest value up or from the highest down."""
    label, inside = _label(percent), abs(percent) / 100 * count
    left, edge, total, squares = inside, values[0][0], 0.0, 0.0
    for value, weight in values:
        if left <= 0:
            break
        part = min(weight, left)
        left, edge = left - part, value
        total += value * part
        squares += value * value * part
    out[f"count_{label}"] = inside
    out[f"mean_{label}"] = total / inside
    out[f"{'upper' if percent > 0 else 'lower'}_{label}"] = edge
    out[f"sum_{label}"] = total
    out[f"sum_squares_{label}"] = squares


def _weighted_quantile(ascending: list[tuple[float, float]], count: float, share: float) -> float:
    seen = 0.0
    for value, weight in ascending:
        seen += weight
        if seen >= share * count:
            return value
    return ascending[-1][0]


def _histogram(ascending: list[tuple[float, float]], bins: list[float]) -> dict[str, float]:
    """How many values lie in each bin; those above the last limit are ignored, as the classic daemon does."""
    out: dict[str, float] = {}
    at = 0
    for limit in bins:
        inside = 0.0
        while at < len(ascending) and ascending[at][0] < limit:
            inside += ascending[at][1]
            at += 1
        out["bin_" + ("inf" if limit == inf else format_number(limit)).replace(".", "_", 1)] = inside
    return out
