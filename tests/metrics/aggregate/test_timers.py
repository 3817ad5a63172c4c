"""Timers and numbers: figures by definition, exact or from a sketch, and how numbers are written."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics.aggregate.timers import MAX_VALUES, TimerWindow, figures
from brokerless.metrics.numbers import format_number


def window_of(values: list[float], *, exact: bool = True) -> TimerWindow:
    window = TimerWindow()
    window.add_many(values, exact=exact)
    return window


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.sampled_from([90.0, 50.0, 99.9, -10.0, 100.0])
)
def test_figures_are_what_their_names_say(values: list[float], percent: float) -> None:
    """Against the standard library and slices of the sorted list."""
    found = figures(window_of(values), window_s=2.0, percentiles=[percent])
    ordered = sorted(values)
    assert (found["count"], found["count_ps"]) == (len(values), len(values) / 2)
    assert (found["lower"], found["upper"]) == (ordered[0], ordered[-1])
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["median"] == pytest.approx(statistics.median(values))
    assert found["std"] == pytest.approx(statistics.pstdev(values), abs=1e-6)
    inside = int(abs(percent) / 100 * len(values) + 0.5) if len(values) > 1 else 1
    label = {90.0: "90", 50.0: "50", 99.9: "99_9", -10.0: "top10", 100.0: "100"}[percent]
    if inside:
        part = ordered[:inside] if percent > 0 else ordered[-inside:]
        assert found[f"count_{label}"] == inside
        assert found[f"mean_{label}"] == pytest.approx(statistics.fmean(part), rel=1e-6, abs=1e-6)
        edge = f"upper_{label}" if percent > 0 else f"lower_{label}"
        assert found[edge] == (part[-1] if percent > 0 else part[0])


def test_histogram_bins_count_values_below_their_limits() -> None:
    """Upper limits are exclusive; `inf` takes the rest; without it the rest is left out."""
    window = window_of([1, 5, 10, 10.5, 99, 1000])
    found = figures(window, window_s=1, percentiles=[], bins=[5, 10.5, float("inf")])
    assert found["histogram"] == {"bin_5": 1, "bin_10_5": 2, "bin_inf": 3}
    assert figures(window, window_s=1, percentiles=[], bins=[5])["histogram"] == {"bin_5": 1}


def test_many_values_become_a_sketch_and_the_exact_figures_stay() -> None:
    """Beyond MAX_VALUES memory stays small; count, sum, min and max are exact, percentiles within 1 %."""
    values = [float(i % 5000 + 1) for i in range(MAX_VALUES + 5000)]
    window = window_of(values[:MAX_VALUES])
    assert window.sketch is None
    window.add_many(values[MAX_VALUES:])
    assert window.sketch is not None
    assert window.values == []
    found = figures(window, window_s=10, percentiles=[90, -10], bins=[2500.0])
    assert (found["count"], found["sum"], found["upper"], found["lower"]) == (
        len(values),
        sum(values),
        5000,
        1,
    )
    assert found["upper_90"] == pytest.approx(4500, rel=0.011)
    assert found["lower_top10"] == pytest.approx(4500, rel=0.011)
    assert found["std"] == pytest.approx(statistics.pstdev(values), rel=1e-6)
    histogram = found["histogram"]
    assert isinstance(histogram, dict)
    assert histogram["bin_2500"] == pytest.approx(len(values) / 2, rel=0.03)


@given(
    st.lists(st.floats(0, 1e4), max_size=50),
    st.lists(st.floats(0, 1e4), max_size=50),
    st.booleans(),
    st.booleans(),
)
def test_windows_of_workers_merge(a: list[float], b: list[float], exact_a: bool, exact_b: bool) -> None:
    """Exact with exact stays exact; with a sketch on either side the result is the sketch of all."""
    one, two = window_of(a, exact=exact_a), window_of(b, exact=exact_b)
    one.merge(two)
    assert one.count == len(a) + len(b)
    assert one.sum == pytest.approx(sum(a) + sum(b))
    if exact_a and exact_b:
        assert sorted(one.values) == sorted(a + b)


def test_an_idle_timer_says_only_that() -> None:
    """No values: count 0 and nothing invented."""
    assert figures(TimerWindow(), window_s=1, percentiles=[90]) == {"count": 0, "count_ps": 0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (5.0, "5"),
        (-0.5, "-0.5"),
        (0.1, "0.1"),
        (1e16, "10000000000000000"),
        (1.5e21, "1.5e+21"),
        (1e21, "1e+21"),
        (1e-6, "0.000001"),
        (1.5e-7, "1.5e-7"),
        (-1.25e-5, "-0.0000125"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
    ],
)
def test_numbers_are_written_as_javascript_does(value: float, text: str) -> None:
    """The classic daemon's number format, so that output can be compared byte by byte."""
    assert format_number(value) == text
