"""Time and rate, without a clock: the one token bucket and the one retry schedule. `now` is an argument."""

from collections.abc import Callable

import msgspec


class TokenBucket:
    """Allows `rate` per second on average and up to `burst` at once.

    Time is in seconds of any monotonic clock, given by the caller. A rate of 0 means no limit.
    """

    __slots__ = ("_at", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float = 0.0) -> None:
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = now

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now

    def change(self, rate: float, burst: float, now: float) -> None:
        """Another rate from now on; what was saved up stays, as far as the new burst has room for it."""
        self._refill(now)
        self.rate, self.burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` if it is there; otherwise take nothing and return False.

        More than `burst` is given when the bucket is full, and owed: it would never be there.
        """
        if not self.rate:
            return True
        self._refill(now)
        if self._tokens < min(amount, self.burst):
            return False
        self._tokens -= amount
        return True

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken (what exceeds `burst` is waited for as if it fitted)."""
        if not self.rate:
            return 0.0
        self._refill(now)
        lacking = min(amount, self.burst) - self._tokens
        return max(0.0, lacking / self.rate)


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential back-off with jitter: attempt 0 waits about `first_s`, and never more than `limit_s`.

    `jitter` is the share of the delay that is random (0.5: between 50 % and 100 % of it), so that many
    clients that failed together do not come back together.
    """

    first_s: float = 0.1
    factor: float = 2.0
    limit_s: float = 30.0
    jitter: float = 0.5

    def delay_s(self, attempt: int, random: Callable[[], float]) -> float:
        """The delay before retry number `attempt` (from 0); `random()` gives a number in [0, 1)."""
        # The exponent is capped so that a large attempt number cannot overflow a float.
        delay = min(self.limit_s, self.first_s * self.factor ** min(attempt, 64))
        return delay * (1 - self.jitter * random())
