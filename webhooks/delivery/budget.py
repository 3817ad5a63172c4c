"""Which endpoints may begin an attempt: slots by their health. No clock, no I/O.

An attempt that has no answer after a quarter of a second is parked: it keeps its connection and its deadline, but no
longer counts against `limit`. So hung endpoints hold memory, not the right to send. Parked attempts have a limit of
their own. Failing endpoints get a small share of both; endpoints that have not answered yet get one attempt at a time;
working endpoints get the rest.

What is in flight at the same time also shares the processor, and so the time until the last of a burst is sent; an
attempt that fails costs two to six times the processor time of one that works (its delivery is read again, a connection
that hung is made again). So all failing endpoints together begin a bounded number of attempts per second, a few at a
time, and most of them while no other endpoint has an attempt in flight.
"""

from enum import IntEnum

from brokerless.core.rate_limit import TokenBucket

# Healthy endpoints answer within this; ten times the usual.
PARK_AFTER_S = 0.25
# Those that fail leave their few slots sooner, so that hung ones among them do not hold up the others.
PARK_FAILING_AFTER_S = 0.05
# For all failing endpoints of a process together: costs a tenth of a core, and tries 10,000 of them in a minute.
FAILING_PER_S = 200.0
# The same while other endpoints have attempts in flight: a process that is never idle tries them, too.
FAILING_BESIDE_PER_S = 50.0
# How often the caller looks whether failing ones may begin, and so how many do at once: some milliseconds' work.
FAILING_EVERY_S = 0.02


class Health(IntEnum):
    """An endpoint's health by its last answers, in the order in which free slots are given."""

    WORKING = 0
    UNKNOWN = 1
    FAILING = 2


class AttemptBudget:
    """Counts attempts. `limit` are active at a time, `park_limit` more may be parked. `now` is in seconds of any
    monotonic clock.
    """

    def __init__(self, limit: int, park_limit: int) -> None:
        self.limit = limit
        self.park_limit = park_limit
        self.active = 0
        self.parked = 0
        self.failing = 0
        self._failing_rate = TokenBucket(FAILING_PER_S, FAILING_PER_S * FAILING_EVERY_S)
        self._beside_rate = TokenBucket(FAILING_BESIDE_PER_S, 2.0)

    def free(self, health: Health, now: float, *, first: bool) -> bool:
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
        if self._failing_rate.wait_s(1, now) > 0 or self.parked > self.park_limit * 3 // 4:
            return False
        if self.active == self.failing:
            return self.failing < max(1, self.limit // 8)
        return self.failing < max(1, self.limit // 32) and self._beside_rate.wait_s(1, now) == 0

    def begin(self, health: Health, now: float) -> None:
        """An attempt begins."""
        if health is Health.FAILING:
            self._failing_rate.take(1, now)
            if self.active > self.failing:
                self._beside_rate.take(1, now)
            self.failing += 1
        self.active += 1

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
