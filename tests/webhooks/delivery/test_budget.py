"""Who may begin an attempt, by the health of endpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks.delivery.budget import (
    FAILING_BESIDE_PER_S,
    FAILING_PER_S,
    AttemptBudget,
    Health,
)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.lists(st.tuples(st.sampled_from(Health), st.booleans(), st.integers(0, 3)), max_size=300),
)
def test_limits_hold_and_failing_endpoints_get_a_small_share(
    limit: int, park_limit: int, steps: list[tuple[Health, bool, int]]
) -> None:
    """However attempts begin, park and end: the limits hold, failing ones never have more than an eighth."""
    budget = AttemptBudget(limit, park_limit)
    active: list[Health] = []
    parked = 0
    for health, first, what in steps:
        if what <= 1 and budget.free(health, 0.0, first=first):
            budget.begin(health, 0.0)
            active.append(health)
        elif what == 2 and active and budget.park(active[0]):
            active.pop(0)
            parked += 1
        elif what == 3 and active:
            budget.end(active.pop(), parked=False)
        elif what == 3 and parked:
            budget.end(Health.FAILING, parked=True)
            parked -= 1
        assert budget.active == len(active) <= limit
        assert budget.parked == parked <= park_limit
        assert budget.failing == active.count(Health.FAILING) <= max(1, limit // 8)


def test_hung_endpoints_leave_room_for_working_ones() -> None:
    """When all slots that unknown endpoints may have are taken, a working one still begins."""
    budget = AttemptBudget(32, 8)
    while budget.free(Health.UNKNOWN, 0.0, first=True):
        budget.begin(Health.UNKNOWN, 0.0)
    assert budget.active == 24
    assert budget.free(Health.WORKING, 0.0, first=True)


@given(st.integers(1, 600), st.integers(1, 600), st.booleans())
def test_failing_endpoints_alone_get_a_small_share(limit: int, park_limit: int, parks: bool) -> None:
    """However many of them want to begin: an eighth of the slots, and three quarters of what may be parked."""
    budget = AttemptBudget(limit, park_limit)
    for step in range(2 * (limit + park_limit)):
        if budget.free(Health.FAILING, step / 100, first=True):
            budget.begin(Health.FAILING, step / 100)
            if parks:
                budget.park(Health.FAILING)
    assert budget.failing <= max(1, limit // 8)
    assert budget.parked <= park_limit * 3 // 4 + 1
    assert limit < 2 or budget.free(Health.WORKING, 0.0, first=True)


def test_failing_endpoints_get_less_beside_working_ones() -> None:
    """While a working endpoint has an attempt in flight, failing ones have a thirty-second of the slots; alone they
    have an eighth again.
    """
    budget = AttemptBudget(512, 512)
    times = (step / 10 for step in range(1000))  # one after the other, as slowly as they may

    def fill() -> int:
        while budget.free(Health.FAILING, now := next(times), first=True):
            budget.begin(Health.FAILING, now)
        return budget.failing

    budget.begin(Health.WORKING, 0.0)
    assert fill() == 16
    budget.end(Health.WORKING, parked=False)
    assert fill() == 64


@pytest.mark.parametrize(("beside", "rate"), [(False, FAILING_PER_S), (True, FAILING_BESIDE_PER_S)])
def test_failing_endpoints_begin_a_bounded_number_per_second(beside: bool, rate: float) -> None:
    """However quickly they answer; fewer while a working one has an attempt in flight, and only some at a time. Working
    ones are not counted.
    """
    budget = AttemptBudget(512, 512)
    if beside:
        budget.begin(Health.WORKING, 0.0)
    begun = [0] * 10_000
    for step in range(10_000):
        now = step / 1000
        assert budget.free(Health.WORKING, now, first=True)
        while budget.free(Health.FAILING, now, first=True):
            budget.begin(Health.FAILING, now)
            budget.end(Health.FAILING, parked=False)
            begun[step] += 1
    assert 10 * rate - 1 <= sum(begun) <= 10.2 * rate
    assert max(begun) <= 4
