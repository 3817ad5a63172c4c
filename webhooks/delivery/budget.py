"""Who may begin an attempt: slots by the health of endpoints. No clock, no I/O.

An attempt that has no answer after a quarter of a second is parked: it keeps its connection and its deadline, but no
longer counts against `limit`. So hung endpoints hold memory, not the right to send. Parked attempts have a limit of
their own. Of both, endpoints that fail get a small share, endpoints that have not answered yet one attempt at a time,
and endpoints that work the rest.
"""

from enum import IntEnum

# Healthy endpoints answer within this; ten times the usual.
PARK_AFTER_S = 0.25


class Health(IntEnum):
    """Of an endpoint, by its last answers; in the order in which free slots are given."""

    WORKING = 0
    UNKNOWN = 1
    FAILING = 2


class AttemptBudget:
    """Counts attempts. `limit` are active at a time, `park_limit` more may be parked."""

    def __init__(self, limit: int, park_limit: int) -> None:
        self.limit = limit
        self.park_limit = park_limit
        self.active = 0
        self.parked = 0
        self.failing = 0

    def free(self, health: Health, *, first: bool) -> bool:
        """Whether an endpoint of this health may begin its first, or one more, attempt."""
        if self.active >= self.limit:
            return False
        if health is Health.WORKING:
            # Three quarters for endpoints that already have one: the rest is for those that have none.
            return first or (
                self.active < max(1, self.limit * 3 // 4) and self.parked <= self.park_limit // 2
            )
        if not first:
            return False
        if health is Health.UNKNOWN:
            return self.active < max(1, self.limit * 3 // 4) and self.parked <= self.park_limit
        return self.failing < max(1, self.limit // 8) and self.parked <= self.park_limit * 3 // 4

    def begin(self, health: Health) -> None:
        """An attempt begins."""
        self.active += 1
        if health is Health.FAILING:
            self.failing += 1

    def park(self, health: Health) -> bool:
        """An attempt has waited long; True if it no longer counts as active."""
        if self.parked >= self.park_limit:
            return False
        self.end(health, parked=False)
        self.parked += 1
        return True

    def end(self, health: Health, *, parked: bool) -> None:
        """An attempt ended; `health` is the one it began with."""
        if parked:
            self.parked -= 1
            return
        self.active -= 1
        if health is Health.FAILING:
            self.failing -= 1
