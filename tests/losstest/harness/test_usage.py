"""What processes cost, read from /proc."""

import subprocess
import sys

from brokerless.losstest.harness.usage import own_usage, since, tree_usage
from brokerless.losstest.model import Usage

BUSY = """
import subprocess, sys, time
def work():
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
work()
large = "import sys; x = bytearray(60_000_000); print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", large], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
child.communicate()
"""


def test_a_tree_has_the_cpu_and_the_memory_of_its_children() -> None:
    """A parent that worked 0.2 s and a child of 60 MB are both in the sum; a process that is gone costs nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        found = tree_usage(parent.pid)
        parent.communicate(timeout=30)
    assert found.cpu_s >= 0.2
    assert found.peak_memory > 60_000_000
    assert tree_usage(parent.pid) == Usage()


def test_usage_since_an_earlier_reading() -> None:
    """What a server needed to start is no part of what a run cost; its peak memory is."""
    assert since(Usage(3.5, 100, 50), Usage(2.0, 80, 20)) == Usage(1.5, 100, 30)
    assert own_usage().cpu_s > 0
