"""Statistics: intervals cover what they claim to cover."""

from random import Random

import pytest

from brokerless.losstest.analysis.stats import summarise, wilson, zero_bound
from brokerless.losstest.model import Row


def rows(*lost: int, independent: bool = False, accepted: int = 1000) -> list[Row]:
    return [
        Row(
            transport="t",
            scenario="s",
            seed=i,
            accepted=accepted,
            lost=n,
            lost_percent=100 * n / accepted,
            independent=independent,
        )
        for i, n in enumerate(lost)
    ]


def test_zero_bound_is_exact() -> None:
    """With exactly that loss rate, zero of n happens in exactly 5 % of the cases."""
    for n in (1, 10, 1000, 10**6):
        assert (1 - zero_bound(n)) ** n == pytest.approx(0.05)
    assert zero_bound(1000) == pytest.approx(0.00299, abs=1e-5)
    assert zero_bound(0) == 1.0


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 0.99])
def test_wilson_covers(p: float) -> None:
    """The true proportion lies in the interval about 95 % of the time."""
    random = Random(3)
    n, runs = 2000, 300
    covered = 0
    for _ in range(runs):
        low, high = wilson(
            random.binomialvariate(n, p)
            if hasattr(random, "binomialvariate")
            else sum(random.random() < p for _ in range(n)),
            n,
        )
        covered += low <= p <= high
    assert covered / runs > 0.9


def test_summary() -> None:
    """Median and range always; an interval only where losses are independent, never for one outage."""
    summary = summarise(rows(10, 30, 20))
    assert (summary.median, summary.low, summary.high, summary.interval) == (2.0, 1.0, 3.0, None)
    summary = summarise(rows(50, 50, independent=True))
    assert summary.interval is not None
    assert summary.interval[0] < 5 < summary.interval[1]
    assert summarise(rows(0)).interval is None
    summary = summarise(rows(0, 0, independent=True))
    assert summary.interval == (0.0, 100 * zero_bound(2000))
