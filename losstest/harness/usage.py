"""What processes cost: CPU, peak memory, bytes written to storage."""

import contextlib
import os
import resource
from pathlib import Path

from brokerless.core.runtime.process import stat_fields
from brokerless.losstest.model import Usage

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name in parentheses: parent, then CPU of itself and of children that it waited for.
_PARENT, _CPU = 1, slice(11, 15)


def own_usage(before_s: float = 0.0) -> Usage:
    """What this process has cost since it had used `before_s` of CPU. Bytes are those written to storage."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        cpu_s=round(used.ru_utime + used.ru_stime - before_s, 3),
        peak_memory=used.ru_maxrss * 1024,
        disk_bytes=used.ru_oublock * 512,
    )


def tree_usage(pid: int) -> Usage:
    """What a process and all its living descendants have cost so far; zeros if it is gone.

    Memory is the sum of the peaks. CPU has the kernel's resolution of 10 ms.
    """
    stats = {one: stat_fields(one) for one in map(int, filter(str.isdecimal, os.listdir("/proc")))}
    tree, more = set[int](), {pid} & stats.keys()
    while more:
        tree |= more
        more = {one for one, fields in stats.items() if fields and int(fields[_PARENT]) in more} - tree
    cpu_ticks = sum(int(ticks) for one in tree for ticks in stats[one][_CPU])
    return Usage(
        cpu_s=round(cpu_ticks / _TICKS_PER_S, 3),
        peak_memory=1024 * sum(_field(one, "status", "VmHWM") for one in tree),
        disk_bytes=sum(_field(one, "io", "write_bytes") for one in tree),
    )


def since(now: Usage, before: Usage) -> Usage:
    """The difference of two readings of one process; peak memory stays what it is."""
    return Usage(
        cpu_s=round(max(0.0, now.cpu_s - before.cpu_s), 3),
        peak_memory=now.peak_memory,
        disk_bytes=max(0, now.disk_bytes - before.disk_bytes),
    )


def _field(pid: int, file: str, name: str) -> int:
    """One number of a file of /proc with `name: number` lines; 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0])
    return 0
