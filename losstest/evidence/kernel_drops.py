"""What the kernel dropped of a process's own datagrams: evidence that does not go through the adapter."""

import contextlib
import os
import socket
import stat
import struct

SO_MEMINFO = 55  # Linux: nine words about a socket's memory; the last is the number of drops


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
                words = struct.unpack("9I", borrowed.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36))
                self._by_inode[found.st_ino] = words[8]
        finally:
            borrowed.detach()  # it stays the adapter's
