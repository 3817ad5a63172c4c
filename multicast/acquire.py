"""Receiving many datagrams with few calls: receive offload, `recvmmsg`, or one by one."""

import socket
import struct
from collections.abc import Sequence

from brokerless.core.errors import ConfigError
from brokerless.multicast.mmsg import MmsgReceiver
from brokerless.multicast.protocol import MAX_DATAGRAM
from brokerless.multicast.transmit import SOL_UDP, Io, check_io

UDP_GRO = 104
_SEGMENT = struct.Struct("=i")
_CONTROL_BYTES = socket.CMSG_SPACE(_SEGMENT.size)
# A train is at most as long as a datagram can be.
_READ_BYTES = MAX_DATAGRAM + 1

Arrival = tuple[bytes | memoryview, int]


class Acquirer:
    """Reads one non-blocking socket."""

    def __init__(self, sock: socket.socket, io: Io) -> None:
        check_io(io)
        self._sock = sock
        self.sender: tuple[str, int] = ("", 0)  # of the last datagram that was read the plain way
        self._gro = io in ("auto", "gso") and _enable_gro(sock)
        if io == "gso" and not self._gro:
            raise ConfigError("io", "this kernel has no UDP receive offload")
        self._mmsg: MmsgReceiver | None = None
        if io in ("auto", "mmsg"):
            try:
                # With trains of 64 kB in a slot, 4 slots are 256 kB per call: what stays in a core's own
                # cache until it is taken apart. 1 MB per call was slower by a third.
                self._mmsg = MmsgReceiver(sock, 4 if self._gro else 64)
            except (AttributeError, OSError):
                self._mmsg = None

    @property
    def way(self) -> str:
        """How packets are received."""
        return "gso" if self._gro else "mmsg" if self._mmsg else "plain"

    def receive(self) -> Sequence[Arrival]:
        """What is there now, up to some: (bytes, size of one datagram in them).

        Empty when there is nothing. Memory is valid until the next call.
        """
        if self._mmsg is not None:
            return self._mmsg.receive()
        try:
            if not self._gro:
                packet, self.sender = self._sock.recvfrom(_READ_BYTES)
                return [(packet, len(packet) or 1)]
            data, control, _, _ = self._sock.recvmsg(_READ_BYTES, _CONTROL_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return []  # an ICMP error of an earlier packet; the next call reads on
        size = len(data) or 1
        for level, kind, raw in control:
            if level == SOL_UDP and kind == UDP_GRO:
                size = min(size, max(1, _SEGMENT.unpack_from(raw)[0]))
        return [(data, size)]


def _enable_gro(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True
