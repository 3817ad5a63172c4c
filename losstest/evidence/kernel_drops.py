"""What the kernel dropped of a process's own datagrams: evidence that does not go through the adapter."""

import contextlib
import os
import socket
import stat

from brokerless.core.runtime.datagrams import kernel_drops


class KernelDrops:
    """Adds up the drop counters of all UDP sockets of this process, closed ones as they were last seen."""

    def __init__(self) -> None:
        self._by_inode: dict[int, int] = {}

    def read(self) -> int:
        """How many datagrams the kernel dropped because a socket's buffer was full."""
        for name in os.listdir("/proc/self/fd"):
            # Another thread of the adapter may close it at any time.
            with contextlib.suppress(OSError):
                self._look_at(int(name))
        return sum(self._by_inode.values())

    def _look_at(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode):
            return
        borrowed = socket.socket(fileno=fd)
        try:
            if borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_DGRAM:
                # 0 where the kernel does not say: what was read before stays.
                self._by_inode[found.st_ino] = kernel_drops(borrowed) or self._by_inode.get(found.st_ino, 0)
        finally:
            borrowed.detach()  # it stays the adapter's
