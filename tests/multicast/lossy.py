"""Networks and kernels that lose, repeat and reorder datagrams by a seed."""

import ctypes
import random
import select
import socket
import struct
import threading
import time

from brokerless.core.runtime.datagrams import DatagramReceiver
from brokerless.multicast import Subscriber
from brokerless.multicast.sockets import parse_address, receiving_socket, sending_socket
from brokerless.multicast.wire.moldudp64 import END_OF_SESSION
from tests.multicast.groups import new_group


def messages_in(packet: bytes) -> int:
    """How many there are; none in a heartbeat or an end of session."""
    return int.from_bytes(packet[18:20], "big") % END_OF_SESSION


class Relay:
    """Forwards one group to another, and loses, repeats and reorders datagrams by a seed."""

    def __init__(
        self, seed: int, *, loss: float, burst: int = 1, repeat: float = 0.0, reorder: float = 0.0
    ) -> None:
        self.before, self.after = new_group(), new_group()
        self.dropped = self.forwarded_messages = 0
        self.dropped_sequences: set[int] = set()
        self._random = random.Random(seed)
        self._loss, self._burst, self._repeat, self._reorder = loss, burst, repeat, reorder
        self._in = receiving_socket(parse_address(self.before, "group", multicast=True), "127.0.0.1")
        self._out = sending_socket(parse_address(self.after, "group", multicast=True), "127.0.0.1", 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        reader = DatagramReceiver(self._in, "plain")
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        losing = 0
        late: list[bytes] = []
        while not self._stop.is_set():
            poll.poll(20)
            while arrivals := reader.receive():
                packet = bytes(arrivals[0][0])
                if not losing and self._random.random() < self._loss / self._burst:
                    losing = self._burst
                if losing:
                    losing -= 1
                    self.dropped += 1
                    first, messages = int.from_bytes(packet[10:18], "big"), messages_in(packet)
                    self.dropped_sequences.update(range(first, first + messages))
                    continue
                if self._random.random() < self._reorder:
                    late.append(packet)
                    continue
                for _ in range(2 if self._random.random() < self._repeat else 1):
                    self._send(packet)
                while late:
                    self._send(late.pop())

    def _send(self, packet: bytes) -> None:
        self._out.send(packet)
        self.forwarded_messages += messages_in(packet)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._in.close()
        self._out.close()


def follow(sub: Subscriber, count: int, seconds: float = 60.0) -> list[int]:
    """The offsets of the next `count` events."""
    offsets: list[int] = []
    deadline = time.monotonic() + seconds
    for batch in sub.batches(5):
        offsets += range(batch.first_offset, batch.next_offset)
        if len(offsets) >= count or time.monotonic() > deadline:
            break
    return offsets


def attach_loss(sock: socket.socket, seed: int, share: float, *, source_port: int = 0) -> object:
    """Let the kernel drop that share of the data packets of one socket, chosen by a hash of their sequence.

    Heartbeats pass, and with `source_port` what other sockets sent. Keep what is returned for as long as the socket.
    """
    program = [
        (0x28, 0, 0, 8 + 18),  # load the count (after 8 bytes of UDP header)
        (0x15, 6, 0, 0),  # none: keep
        (0x28, 0, 0, 0),  # load the source port
        (0x15, 0, 4 if source_port else 0, source_port),  # another one: keep
        (0x20, 0, 0, 8 + 14),  # load the low word of the sequence number
        (0xA4, 0, 0, seed & 0xFFFFFFFF),  # xor
        (0x24, 0, 0, 2_654_435_761),  # multiply
        (0x35, 0, 1, min(int(share * 2**32), 0xFFFFFFFF)),  # jump if above or equal
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
        (0x06, 0, 0, 0),  # drop
    ]
    raw = b"".join(struct.pack("HBBI", *line) for line in program)
    keep = ctypes.create_string_buffer(raw)
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", len(program), ctypes.addressof(keep)))
    return keep
