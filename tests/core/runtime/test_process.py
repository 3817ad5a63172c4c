"""What the system tells of processes."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable

from brokerless.core.runtime.process import boot_id, pid_namespace, process_start, raise_file_limit


def test_a_process_has_one_start_until_it_ends() -> None:
    """The start of a living process stays; one that ended has none, also before its parent has asked for it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = process_start(child.pid)
        assert start is not None
        assert start == process_start(child.pid)
        assert start >= (process_start(os.getpid()) or 0)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None
    assert process_start(child.pid) is None


def test_the_boot_and_the_namespace_have_names() -> None:
    """Both are told on Linux, and the namespace's begins with the boot's."""
    assert len(boot_id()) == 36
    assert pid_namespace().startswith(f"{boot_id()}:pid:")


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    """Up to what is wanted, never beyond the hard limit, never down."""
    code = (
        "import resource; from brokerless.core.runtime.process import raise_file_limit as r;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300));"
        "print(r(100), r(80), r(1000), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "100 100 300 (300, 300)"
    assert raise_file_limit(1) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_server_is_not_stopped_by_full_collections() -> None:
    """What exists is left alone, and many objects that live on do not start a full collection; cycles still go."""
    code = """
import gc
from brokerless.core.runtime.process import collect_seldom
collect_seldom()
full = gc.get_stats()[2]["collections"]
kept = [[n] for n in range(300_000)]
for _ in range(20_000):
    each = []
    each.append(each)
kept += [[n] for n in range(600_000)]
young, old = gc.get_stats()[:2]
print(gc.get_freeze_count() > 1000, gc.get_stats()[2]["collections"] - full)
print(young["collected"] + old["collected"] >= 10_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "True"]


def test_a_child_ends_with_its_parent(until: Callable[..., None]) -> None:
    """Also when the parent is killed and can do nothing about it."""
    sleeper = "import time; print('up', flush=True); time.sleep(300)"
    program = (
        "import subprocess, sys, time\n"
        "from brokerless.core.runtime.process import end_with_parent\n"
        f"child = subprocess.Popen([sys.executable, '-c', {sleeper!r}], stdout=subprocess.PIPE,\n"
        "    preexec_fn=end_with_parent)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert process_start(child) is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: process_start(child) is None, timeout=30)
