"""Long gaps over TCP: the same requests and the same packets, each after its length.

    client: u32 length, request (20 bytes, signed if the stream is)      as often as it likes
    server: u32 length, packet; …; u32 length, heartbeat                 the heartbeat ends the answer

So everything that a datagram can carry can be sent here, with the same authentication, but in order,
without loss, and at the pace of the one that reads.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import Full, Queue

from brokerless.multicast.receive.gaps import RepairRequest
from brokerless.multicast.sockets import Address
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.moldudp64 import GONE_MARK, HEADER, HEADER_BYTES, HEARTBEAT, MAX_COUNT, request

LENGTH = struct.Struct(">I")
# Packets as large as a datagram could be: few of them, and the same limits as everywhere.
PACKET_BYTES = 60_000
MAX_PACKET_BYTES = 1 << 20
# What is read ahead of the application: 64 packets are 4 MB.
QUEUED_PACKETS = 64


def read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes | None:
    """So many bytes, or None if the connection ended before. Raises TimeoutError at the deadline."""
    parts = []
    while size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        part = sock.recv(min(size, 1 << 18))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Fetch(threading.Thread):
    """Fetches one range in the background into a bounded queue; owned and joined by the engine."""

    def __init__(
        self,
        address: Address,
        session: bytes,
        repair_request: RepairRequest,
        *,
        sign: Signer | None,
        idle_s: float,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(name="brokerless-fetch", daemon=True)
        self.repair_request = repair_request
        self.packets: Queue[bytes] = Queue(QUEUED_PACKETS)
        self.done = False
        self._address = address
        self._session = session
        self._sign = sign
        self._idle_s = idle_s
        self._wake = wake
        self._halt = threading.Event()

    def run(self) -> None:
        """Connect, ask, read; ends by itself, with `done` set."""
        try:
            with socket.create_connection(self._address, timeout=self._idle_s) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for packet in self._read(sock):
                    if not self._put(packet):
                        break
        except OSError:
            pass  # the receiver tries again, elsewhere, by its own schedule
        finally:
            self.done = True
            self._wake()

    def _read(self, sock: socket.socket) -> Iterator[bytes]:
        at, stop = self.repair_request.first, self.repair_request.first + self.repair_request.messages
        while at < stop:
            count = min(MAX_COUNT, stop - at)
            packet = request(self._session, at, count)
            if self._sign:
                packet += self._sign(packet)
            sock.sendall(LENGTH.pack(len(packet)) + packet)
            while True:
                # A whole packet in time: a server that drips is as good as one that is silent.
                deadline = time.monotonic() + self._idle_s
                head = read_exactly(sock, LENGTH.size, deadline)
                size = LENGTH.unpack(head)[0] if head else 0
                if not HEADER_BYTES <= size <= MAX_PACKET_BYTES:
                    return
                answer = read_exactly(sock, size, deadline)
                if answer is None:
                    return
                _, following, messages = HEADER.unpack_from(answer)
                is_gone = answer[HEADER_BYTES : HEADER_BYTES + len(GONE_MARK)] == GONE_MARK
                if messages == HEARTBEAT and not is_gone:
                    if following <= at:
                        return  # it has nothing (yet) from here on
                    at = following
                    break
                yield answer

    def _put(self, packet: bytes) -> bool:
        """Hand over one packet, waiting for room; False when told to stop."""
        while not self._halt.is_set():
            try:
                self.packets.put(packet, timeout=0.1)
            except Full:
                continue
            self._wake()
            return True
        return False

    def stop(self) -> None:
        """Tell it to end; join it afterwards."""
        self._halt.set()
