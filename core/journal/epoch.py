"""Epochs: numbers that rise with every fresh start of a source, without anything to remember them by."""

import threading
import time

# A promotion begins a new term: epochs of a later term are above all epochs of earlier ones, whatever the clocks of
# the hosts say. Milliseconds stay below this until 2109, and 2,000 terms stay below what a double can count.
TERM = 1 << 42
_lock = threading.Lock()
_last = 0


def new_epoch() -> int:
    """Milliseconds since 1970, but never the same number twice in one process.

    A clock that jumps back can give a smaller number than before a restart; consumers ask only whether the
    epoch is another one, so nothing is lost by that.
    """
    global _last  # noqa: PLW0603 - one counter per process is the point
    with _lock:
        _last = max(_last + 1, time.time_ns() // 1_000_000)
        return _last


def next_epoch(last: int) -> int:
    """The epoch after `last`, in the same term."""
    return max(new_epoch() + last // TERM * TERM, last + 1)


def next_term(last: int) -> int:
    """The first epoch of the term after that of `last`: for the mirror that becomes the publisher."""
    return (last // TERM + 1) * TERM + new_epoch()


def is_superseded(epoch: int, by: int) -> bool:
    """Whether the writer of `epoch` was replaced by a promotion, of which `by` tells.

    Before the first promotion epochs are not compared: a clock that was set back makes a smaller one.
    """
    return by >= TERM and epoch < by
