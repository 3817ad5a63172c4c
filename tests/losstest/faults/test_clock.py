"""The wall clock of a process jumps; the monotonic clock does not."""

import datetime
import subprocess
import sys
import time


def test_the_wall_clock_jumps_and_the_monotonic_does_not() -> None:
    """All ways of asking for the time of day jump together, also those imported before; and back again."""
    code = (
        "import time, datetime\nfrom time import time as early\nfrom datetime import datetime as d\n"
        "from brokerless.losstest.faults.clock import shift_wall_clock\n"
        "real, mono = time.time(), time.monotonic()\nshift_wall_clock(3600)\n"
        "assert 3599 < time.time() - real < 3700 and 3599 < early() - real < 3700\n"
        "assert 3599 < time.time_ns() / 1e9 - real < 3700\n"
        "assert 3599 < d.now().timestamp() - real < 3700\n"
        "assert 3599 < datetime.datetime.now(datetime.UTC).timestamp() - real < 3700\n"
        "assert time.monotonic() - mono < 100\nshift_wall_clock(0)\nassert abs(time.time() - real) < 100\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert abs(time.time() - datetime.datetime.now(datetime.UTC).timestamp()) < 10
