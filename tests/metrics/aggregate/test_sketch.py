"""metrics/aggregate/sketch.py: its error is bounded, it merges exactly, and it agrees with the ddsketch package."""

import math

import msgspec
import pytest
from ddsketch import DDSketch
from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics import Sketch
from brokerless.metrics.aggregate.sketch import MAX_BINS, _count_bins, count_bins

VALUES = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=300)
QUANTILES = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]


def true_quantile(values: list[float], q: float) -> float:
    return sorted(values)[math.floor(q * (len(values) - 1))]


@given(VALUES)
def test_every_quantile_is_within_one_percent(values: list[float]) -> None:
    """For any values, negative and zero included, against the sorted list."""
    sketch = Sketch()
    sketch.add_many(values)
    for q in QUANTILES:
        true = true_quantile(values, q)
        assert abs(sketch.quantile(q) - true) <= 0.010001 * abs(true) + 1e-9
    assert sketch.count == len(values)
    assert (sketch.min, sketch.max) == (min(values), max(values))


@given(VALUES, VALUES, st.sampled_from([1, 2, 10]))
def test_merging_is_the_same_as_adding_everything_to_one(
    a: list[float], b: list[float], weight: float
) -> None:
    """Two daemons' sketches combine into the sketch of all values, also after a trip over the wire."""
    one, two, both = Sketch(), Sketch(), Sketch()
    one.add_many(a, weight)
    two.add_many(b)
    both.add_many(a, weight)
    both.add_many(b)
    one.merge(msgspec.msgpack.decode(msgspec.msgpack.encode(two), type=Sketch))
    assert (one.positive, one.negative, one.zeros) == (both.positive, both.negative, both.zeros)
    assert (one.count, one.min, one.max) == (both.count, both.min, both.max)
    assert one.sum == pytest.approx(both.sum, abs=1e-6)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200))
def test_it_agrees_with_the_ddsketch_package(values: list[float]) -> None:
    """Both are within their error of the truth, so within twice that of each other."""
    theirs, mine = DDSketch(0.01), Sketch()
    for value in values:
        theirs.add(value)
    mine.add_many(values)
    for q in QUANTILES:
        other = theirs.get_quantile_value(q)
        assert mine.quantile(q) == pytest.approx(other, rel=0.0203)


def test_bins_are_bounded_and_the_high_quantiles_stay_right() -> None:
    """Values over 400 orders of magnitude: the lowest bins are joined, the count stays, the top is exact."""
    values = [10.0**e for e in range(-8, 90)] * 3 + [1.01**i for i in range(1, 4000)]
    sketch = Sketch()
    sketch.add_many(values)
    assert len(sketch.positive) <= MAX_BINS
    assert sketch.count == len(values) == sum(sketch.positive.values())
    assert sketch.quantile(0.999) == pytest.approx(true_quantile(values, 0.999), rel=0.011)


def test_an_empty_sketch_and_other_accuracies() -> None:
    """Nothing in it is 0.0; sketches of different accuracy refuse to merge."""
    assert Sketch().quantile(0.5) == 0.0
    with pytest.raises(ValueError, match="accuracies differ"):
        Sketch().merge(Sketch(accuracy=0.02))


@given(st.lists(st.floats(1e-9, 1e100, exclude_min=True), min_size=1, max_size=200))
def test_bins_are_the_same_with_and_without_the_c_module(values: list[float]) -> None:
    """Sketches of daemons built with and without it can be merged."""
    assert count_bins(values, 49.9) == _count_bins(values, 49.9)
