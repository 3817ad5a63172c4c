"""The repeater: every datagram is sent on as it came, to another daemon."""

import socket

from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError
from brokerless.metrics.counters import BackendCounters

# Stream lines are repacked into datagrams of this size: Ethernet's 1500 less IPv6 and UDP headers.
DATAGRAM = 1432


class Repeater:
    """Sends on by UDP. What the socket refuses is dropped and counted; receiving never waits for it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.counters = BackendCounters()
        self.last_error = ""
        host, port = split_host_port(address, "repeater")
        try:
            family, kind, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise ConfigError("backends", f"repeater {address}: {error.strerror or error}") from None
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        self._target = sockaddr

    def __call__(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            for datagram in (payload,) if len(payload) <= 65000 else repack(payload):
                try:
                    self.counters.bytes += self._socket.sendto(datagram, self._target)
                    self.counters.flushes += 1
                except OSError as error:
                    self.counters.dropped += 1
                    self.last_error = str(error)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def repack(payload: bytes, size: int = DATAGRAM) -> list[bytes]:
    """Lines of a stream as datagrams of at most `size` bytes (a longer line gets one of its own)."""
    out: list[bytes] = []
    lines: list[bytes] = []
    used = 0
    for line in payload.split(b"\n"):
        if lines and used + 1 + len(line) > size:
            out.append(b"\n".join(lines))
            lines, used = [], 0
        used += len(line) + (1 if lines else 0)
        lines.append(line)
    out.append(b"\n".join(lines))
    return out
