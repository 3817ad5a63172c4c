"""Timers of one window: their values, and the figures the classic daemon derives from them. Pure."""

from array import array
from math import inf, sqrt
from operator import mul

import msgspec

from brokerless.metrics.numbers import show
from brokerless.metrics.sketch import Sketch

# Exact percentiles need all values; 20,000 are 160 KB, a busy timer at 2,000/s for ten seconds. Beyond that
# the window is a sketch with 1 % relative error: count, sum, min and max stay exact.
MAX_VALUES = 20_000


class TimerWindow(msgspec.Struct):
    """All values of one timer, histogram (`h`) or distribution (`d`) in one window.

    Values are kept as they are up to MAX_VALUES, then in `sketch`; never both. `count` is weighted by
    sampling.
    """

    count: float = 0
    values: list[float] = msgspec.field(default_factory=list)
    sketch: Sketch | None = None

    def add_many(self, values: list[float], weight: float = 1, *, exact: bool = True) -> None:
        """Add values; `exact=False` (distributions) goes to the sketch at once."""
        self.count += len(values) * weight
        if self.sketch is None and exact and len(self.values) + len(values) <= MAX_VALUES:
            self.values += values
            return
        self._to_sketch().add_many(values, weight)

    def _to_sketch(self) -> Sketch:
        if self.sketch is None:
            self.sketch = Sketch()
            self.sketch.add_many(self.values)
            self.values = []
        return self.sketch

    @property
    def sum(self) -> float:
        """Sum of all values, as far as they arrived."""
        return self.sketch.sum if self.sketch is not None else sum(self.values)

    def merge(self, other: "TimerWindow") -> None:
        """Take in another daemon's or worker's values of the same timer and window."""
        self.count += other.count
        if (
            other.sketch is None
            and self.sketch is None
            and len(self.values) + len(other.values) <= MAX_VALUES
        ):
            self.values += other.values
            return
        mine = self._to_sketch()
        if other.sketch is not None:
            mine.merge(other.sketch)
        else:
            mine.add_many(other.values)


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
    return show(percent).replace(".", "_", 1).replace("-", "top", 1)


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


def _histogram(ascending: list[tuple[float, float]], bins: list[float]) -> dict[str, float]:
    """How many values lie in each bin; those above the last limit are ignored, as the classic daemon does."""
    out: dict[str, float] = {}
    at = 0
    for limit in bins:
        inside = 0.0
        while at < len(ascending) and ascending[at][0] < limit:
            inside += ascending[at][1]
            at += 1
        out["bin_" + ("inf" if limit == inf else show(limit)).replace(".", "_", 1)] = inside
    return out
