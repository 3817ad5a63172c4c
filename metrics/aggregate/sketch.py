"""A mergeable quantile sketch with a guaranteed relative error (the DDSketch scheme, logarithmic bins).

Each quantile is within `accuracy` of a true one (1 %: a true 200 ms is shown as 198 to 202), however many
values there are. Two sketches of the same accuracy merge into exactly the sketch of all their values, so
several daemons combine. Written here and not taken from a package because values come thousands at a time:
`add_many` does the logarithms and the counting in C.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import repeat
from math import ceil, exp, log
from operator import mul

import msgspec

from brokerless.metrics.speed import speed

# 1 % is what DDSketch's own implementations use.
ACCURACY = 0.01
# 2048 bins of 1 % span a factor of 10^17; below that the lowest bins are joined, as DDSketch does.
MAX_BINS = 2048
_TINY = 1e-9


class Sketch(msgspec.Struct):
    """Bins of positive values, of negative values, and zeros. `count` is weighted, the rest is exact."""

    accuracy: float = ACCURACY
    positive: dict[int, float] = msgspec.field(default_factory=dict)
    negative: dict[int, float] = msgspec.field(default_factory=dict)
    zeros: float = 0
    count: float = 0
    sum: float = 0
    sum_squares: float = 0
    min: float = float("inf")
    max: float = float("-inf")
    max_bins: int = MAX_BINS

    @property
    def _factor(self) -> float:
        return 1 / log((1 + self.accuracy) / (1 - self.accuracy))

    def add_many(self, values: list[float], weight: float = 1) -> None:
        """Add values that each stand for `weight`."""
        if not values:
            return
        low, high = min(values), max(values)
        self.min, self.max = min(self.min, low), max(self.max, high)
        self.count += len(values) * weight
        self.sum += sum(values) * weight
        self.sum_squares += sum(map(mul, values, values)) * weight
        if low <= _TINY:
            self._fill(self.negative, [-v for v in values if v < -_TINY], weight)
            self.zeros += weight * sum(1 for v in values if -_TINY <= v <= _TINY)
            values = [v for v in values if v > _TINY]
        self._fill(self.positive, values, weight)

    def _fill(self, bins: dict[int, float], values: list[float], weight: float) -> None:
        counted = count_bins(values, self._factor)
        for index, n in counted.items():
            bins[index] = bins.get(index, 0) + n * weight
        _collapse(bins, self.max_bins)

    def merge(self, other: "Sketch") -> None:
        """Take in all that `other` has seen. Both must have the same accuracy (ValueError)."""
        if other.accuracy != self.accuracy:
            raise ValueError(f"accuracies differ: {self.accuracy} and {other.accuracy}")
        for mine, theirs in ((self.positive, other.positive), (self.negative, other.negative)):
            for index, n in theirs.items():
                mine[index] = mine.get(index, 0) + n
            _collapse(mine, self.max_bins)
        self.zeros += other.zeros
        self.count += other.count
        self.sum += other.sum
        self.sum_squares += other.sum_squares
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def quantile(self, q: float) -> float:
        """The value below which a share `q` (0 to 1) of the values lies; 0.0 when empty."""
        if not self.count:
            return 0.0
        return self._at(q * max(self.count - 1, 0))

    def _at(self, rank: float) -> float:
        seen = 0.0
        for value, n in self.ascending():
            seen += n
            if seen > rank:
                return min(max(value, self.min), self.max)
        return self.max

    def ascending(self) -> Iterable[tuple[float, float]]:
        """(value, weight) of every bin, from the lowest value to the highest."""
        # The middle of a bin in the sense that the relative error to both its ends is the same.
        middle = 2 / (1 + (1 + self.accuracy) / (1 - self.accuracy))
        for index in sorted(self.negative, reverse=True):
            yield -exp(index / self._factor) * middle, self.negative[index]
        if self.zeros:
            yield 0.0, self.zeros
        for index in sorted(self.positive):
            yield exp(index / self._factor) * middle, self.positive[index]


def _count_bins(values: list[float], factor: float) -> dict[int, int]:
    return Counter(map(ceil, map(mul, map(log, values), repeat(factor))))


count_bins: Callable[[list[float], float], dict[int, int]]
count_bins = _count_bins if speed is None else speed.count_bins


def _collapse(bins: dict[int, float], max_bins: int) -> None:
    """Join the lowest bins when there are too many: the high quantiles, which matter, stay exact."""
    excess = len(bins) - max_bins
    if excess > 0:
        order = sorted(bins)
        keep = order[excess]
        for index in order[:excess]:
            bins[keep] += bins.pop(index)
