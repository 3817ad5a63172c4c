"""A clock for promises between machines."""

import time


def elapsed_s() -> float:
    """Seconds that have passed since some moment, also while this machine slept.

    `time.monotonic` stands still then, and a machine that wakes up would take a lease that ended long ago for valid.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
