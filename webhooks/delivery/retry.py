"""What an answer means and when to try again: no clock, no randomness of its own. `deliverer.py` asks (`_next`)."""

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from enum import StrEnum

import msgspec

from brokerless.core.errors import ConfigError

# What Standard Webhooks recommends after the immediate attempt: 5 s … 24 h, in total 3 days and 3 hours, so
# that a consumer that breaks on Friday evening and is mended on Monday loses nothing.
DEFAULT_DELAYS_S: tuple[float, ...] = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
# `Retry-After` is honoured in full up to here; a server that asks for years is treated as one that asks for this.
MAX_RETRY_AFTER_S = 7 * 86400.0
# Answers by which a server (or what stands before it) says that it has too much to do.
SLOW_DOWN = frozenset({429, 502, 503, 504})


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Delays in seconds after the first, second, … failed attempt; after the last one follows none.

    `jitter` lengthens each delay by up to that share, so that deliveries that failed together do not
    come back together and none comes earlier than promised.
    """

    delays_s: tuple[float, ...] = DEFAULT_DELAYS_S
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if any(not 0 <= delay < 366 * 86400 for delay in self.delays_s):
            raise ConfigError("schedule", "delays must be between 0 and a year")
        if not 0 <= self.jitter <= 1:
            raise ConfigError("jitter", "must be between 0 and 1")

    def delay_s(self, failed: int, random: Callable[[], float]) -> float | None:
        """The delay after `failed` failed attempts (1 or more), or None: give up."""
        if failed > len(self.delays_s):
            return None
        return self.delays_s[failed - 1] * (1 + self.jitter * random())

    @property
    def span_s(self) -> float:
        """From the first attempt to the last, without jitter."""
        return sum(self.delays_s)


class Outcome(StrEnum):
    """What one attempt came to."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REFUSED = "refused"  # this delivery will never be accepted
    GONE = "gone"  # the endpoint will never accept anything


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The outcome, and what it means for the lane: `slow` narrows and pauses it, `pause_s` is what
    the server asked for.
    """

    outcome: Outcome
    slow: bool = False
    pause_s: float | None = None


_DELIVERED = Verdict(Outcome.DELIVERED)
_RETRY = Verdict(Outcome.RETRY)


def judge(status: int | None, retry_after: str | None, now: float) -> Verdict:
    """The verdict on an answer; `status` is None when none came. `now` is in seconds since 1970."""
    if status is None:
        return Verdict(Outcome.RETRY, slow=True)
    if 200 <= status < 300:
        return _DELIVERED
    if status == 410:
        return Verdict(Outcome.GONE)
    if status == 415:
        return Verdict(Outcome.REFUSED)
    pause_s = parse_retry_after(retry_after, now) if retry_after else None
    if status in SLOW_DOWN:
        return Verdict(Outcome.RETRY, slow=True, pause_s=pause_s)
    return Verdict(Outcome.RETRY, pause_s=pause_s) if pause_s is not None else _RETRY


def parse_retry_after(value: str, now: float) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date; None if it is neither."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        # More digits than this would be thousands of years: no need to convert them.
        return min(float(text), MAX_RETRY_AFTER_S) if len(text) < 12 else MAX_RETRY_AFTER_S
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    try:
        return min(max(0.0, at.timestamp() - now), MAX_RETRY_AFTER_S)
    except (ValueError, OverflowError):
        return None
