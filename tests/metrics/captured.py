"""The real client, its datagrams caught on a socket before any channel: what it sent, and the truth at each number."""

import socket
from math import inf

from brokerless.metrics import StatsClient


class CapturedClient:
    """A StatsClient that sends nothing by itself; `take` returns the datagrams that it has sent since."""

    def __init__(
        self, *, maxudpsize: int = 1432, max_counters: int = 10_000, auth_key: bytes | None = None
    ) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.settimeout(10)
        self._taken = 0
        self.stats = StatsClient(
            *self._sock.getsockname(),
            maxudpsize=maxudpsize,
            flush_s=3600,
            heartbeat_s=inf,
            max_counters=max_counters,
            auth_key=auth_key,
        )
        self.id = self.stats.id
        self.truth: dict[str, int] = {}
        # What had been counted in all datagrams up to this number.
        self.truth_at: dict[int, dict[str, int]] = {0: {}}

    def incr(self, key: str, amount: int = 1) -> None:
        """Count; in which datagram it goes is the client's affair, so nothing may be sent in between."""
        self.stats.incr(key, amount)
        self.truth[key] = self.truth.get(key, 0) + amount

    def take(self) -> list[bytes]:
        """Everything sent since the last time."""
        out = []
        while self._taken < self.stats.counters.datagrams:
            out.append(self._sock.recv(65536))
            self._taken += 1
            self.truth_at[self._taken] = dict(self.truth)
        return out

    def flush(self) -> list[bytes]:
        """Send what is buffered (it must fit in one datagram, for the truth to be known at each number)."""
        self.stats.flush()
        return self.take()

    def heartbeat(self) -> list[bytes]:
        """Tell totals."""
        assert not self.stats._buffer, "flush first"
        self.stats.heartbeat()
        return self.take()

    def close(self) -> list[bytes]:
        """End; returns the last messages."""
        self.stats.close()
        out = self.take()
        self._sock.close()
        return out
