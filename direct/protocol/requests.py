"""The headers that make an event a request, and what a worker does with one that is over."""

from brokerless.core import Event

ID = "requestid"
BY = "requestby"  # the deadline, in µs since 1970 by the publisher's clock
ONCE = "requestonce"  # at most once: not again after it may have been begun


def is_over(event: Event, attempt: int, now_us: int) -> bool:
    """Whether a worker must pass over this event: a request that nobody waits for, or that may have been done."""
    headers = event.headers
    if ID not in headers:
        return False
    if ONCE in headers and attempt > 1:
        return True
    by = headers.get(BY, "")
    # 19 digits are the largest time; `int` refuses thousands of them.
    return by.isascii() and by.isdigit() and len(by) <= 19 and int(by) < now_us
