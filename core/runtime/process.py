"""Processes on Linux: when one was started, which boot this is, how many files may be open, ending with a parent."""

import ctypes
import gc
import os
import resource
import signal

# As many descriptors as common services ask for, if the system allows them.
WANTED_FILES = 65_536
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def process_start(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is none, or if it has ended.

    Together with the pid this names a process for good: a pid that was given out again has another start.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def stat_fields(pid: int) -> list[bytes]:
    """The fields of a process in proc_pid_stat(5) from its state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may contain anything, also ')': the fields after the last one are fixed.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def boot_id() -> str:
    """Changes when the machine restarts; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Names the boot of this machine and the namespace of its processes: a pid says something only within one.

    Empty where the system does not tell.
    """
    try:
        return f"{boot_id()}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def raise_file_limit(wanted: int = WANTED_FILES) -> int:
    """Let this process open so many files, as far as the system allows it; returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft


def collect_seldom() -> None:
    """For a process that only serves: the garbage collector leaves alone what exists now and seldom visits the rest.

    A full collection stops all threads for 0.7 µs per object. By Python's defaults a dispatcher with 10,000 endpoints
    made one every second, of 0.1 to 0.2 s: those were its slowest deliveries. With these thresholds it is one in
    minutes; what is in no cycle, which is nearly everything, is freed at once as before.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)


def end_with_parent(signum: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, also by SIGKILL.

    For `preexec_fn` of a child that must not be left behind; the child's own children are its own affair.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
