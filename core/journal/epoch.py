"""Epochs: numbers that rise with every fresh start of a source, without anything to remember them by."""

import threading
import time

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
