"""Who may begin an attempt, by the health of endpoints."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks.delivery.budget import FAILING_BURST, FAILING_PER_S, AttemptBudget, Health


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
    for now, (health, first, what) in enumerate(steps):
        if what <= 1 and budget.free(health, now, first=first):
            budget.begin(health, now)
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


def test_attempts_at_failing_endpoints_are_paced() -> None:
    """Endpoints that refuse quickly get so many attempts per second together, however many of them there are."""
    budget = AttemptBudget(512, 4096)
    made = 0
    for millisecond in range(10_000):
        now = millisecond / 1000
        while budget.free(Health.FAILING, now, first=True):
            budget.begin(Health.FAILING, now)
            budget.end(Health.FAILING, parked=False)
            made += 1
        assert budget.free(Health.WORKING, now, first=True)
    assert 9.9 * FAILING_PER_S <= made <= 10 * FAILING_PER_S + FAILING_BURST
