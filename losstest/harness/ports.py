"""Ports that nobody else takes: outside the range the kernel hands out, leased through abstract Unix sockets.

Several loss tests (and their tests) may run at once on one machine. The name of an abstract socket belongs to
one process and vanishes with it, however it ends.
"""

import random
import socket

from brokerless.core.errors import Fault

# Linux hands out 32768 and up by default; below 20000 well-known services live.
FIRST, LAST = 20_000, 32_000


class Ports:
    """Leases ports on 127.0.0.1 until closed."""

    def __init__(self) -> None:
        self._leases: dict[int, socket.socket] = {}
        self._random = random.Random()

    def take(self) -> int:
        """A port that is free for TCP and UDP. Raises Fault if none can be found."""
        for _ in range(2000):
            port = self._random.randrange(FIRST, LAST)
            if port in self._leases:
                continue
            lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lease.bind(f"\0brokerless-losstest-{port}")
                if _free(port):
                    self._leases[port] = lease
                    return port
            except OSError:
                pass
            lease.close()
        raise Fault("no free port between 20000 and 32000")

    def give_back(self, port: int) -> None:
        """End a lease."""
        lease = self._leases.pop(port, None)
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """End all leases."""
        for port in list(self._leases):
            self.give_back(port)


def _free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket(socket.AF_INET, kind) as probe:
                try:
                    probe.bind((host, port))
                except OSError:
                    return False
    return True
