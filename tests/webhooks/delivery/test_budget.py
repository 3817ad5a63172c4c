"""Who may begin an attempt, by the health of endpoints."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks.delivery.budget import AttemptBudget, Health


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
        if what <= 1 and budget.free(health, first=first):
            budget.begin(health)
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
    while budget.free(Health.UNKNOWN, first=True):
        budget.begin(Health.UNKNOWN)
    assert budget.active == 24
    assert budget.free(Health.WORKING, first=True)


@given(st.integers(1, 600), st.integers(1, 600), st.booleans())
def test_failing_endpoints_alone_get_a_small_share(limit: int, park_limit: int, parks: bool) -> None:
    """However many of them want to begin: an eighth of the slots, and three quarters of what may be parked."""
    budget = AttemptBudget(limit, park_limit)
    for _ in range(2 * (limit + park_limit)):
        if budget.free(Health.FAILING, first=True):
            budget.begin(Health.FAILING)
            if parks:
                budget.park(Health.FAILING)
    assert budget.failing <= max(1, limit // 8)
    assert budget.parked <= park_limit * 3 // 4 + 1
    assert limit < 2 or budget.free(Health.WORKING, first=True)
