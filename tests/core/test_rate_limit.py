"""Token bucket and back-off, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Backoff, TokenBucket


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5)), max_size=60))
def test_a_bucket_never_gives_more_than_rate_and_burst(steps: list[tuple[float, int]]) -> None:
    """Over any time the amount taken is at most burst + rate × time."""
    bucket = TokenBucket(rate=10, burst=5)
    now, taken = 0.0, 0
    for pause, amount in steps:
        now += pause
        if bucket.take(amount, now):
            taken += amount
        assert taken <= 5 + 10 * now + 1e-6


def test_wait_tells_when_the_amount_is_there() -> None:
    """After waiting as long as wait_s says, take succeeds."""
    bucket = TokenBucket(rate=4, burst=4)
    assert bucket.take(4, 0)
    assert not bucket.take(2, 0)
    assert bucket.wait_s(2, 0) == 0.5
    assert bucket.take(2, 0.5)


def test_rate_zero_means_no_limit() -> None:
    """An unlimited bucket always gives."""
    bucket = TokenBucket(rate=0, burst=0)
    assert bucket.take(1e9, 0)
    assert bucket.wait_s(1e9, 0) == 0


def test_a_clock_that_goes_back_gives_nothing_extra() -> None:
    """Time running backwards neither fills the bucket nor breaks it."""
    bucket = TokenBucket(rate=1, burst=1)
    assert bucket.take(1, 100)
    assert not bucket.take(1, 50)
    assert bucket.take(1, 101)


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_stays_within_its_bounds(attempt: int, draw: float) -> None:
    """Every delay is between (1 - jitter) of the ideal one and the limit, however large the attempt."""
    backoff = Backoff(first_s=0.5, factor=2, limit_s=60, jitter=0.25)
    ideal = min(60, 0.5 * 2 ** min(attempt, 20))
    assert ideal * 0.75 <= backoff.delay_s(attempt, lambda: draw) <= ideal


def test_more_than_the_burst_is_given_in_the_end_and_paid_for() -> None:
    """A caller that waits as wait_s says is not refused for ever, and the next one waits the longer."""
    bucket = TokenBucket(rate=10, burst=5)
    assert bucket.wait_s(7, 100) == 0
    assert bucket.take(7, 100)
    assert not bucket.take(1, 100.2)
    assert bucket.wait_s(5, 100.2) == pytest.approx(0.5)
