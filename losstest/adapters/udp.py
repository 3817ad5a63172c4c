"""Reference: plain UDP. What is not received at once is gone, and nobody is told."""

import select
import socket
from collections.abc import Iterable

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Setup, Transport
from brokerless.losstest.model import Promise, Traits

MIN_BUFFER = 2048
# The kernel charges about 768 bytes for a small datagram, whatever its size.
CHARGE = 768


class UdpProducer(Producer):
    """Sends each event as one datagram to every consumer."""

    def __init__(self, setup: Setup) -> None:
        self._targets = [setup.connect(i) for i in range(setup.consumers)]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def send(self, data: bytes) -> None:
        """Send and forget."""
        for target in self._targets:
            self._socket.sendto(data, target)

    def close(self) -> None:
        self._socket.close()


class DatagramConsumer(Consumer):
    """A UDP socket with room for so many events of `charge` bytes as the run wants."""

    def __init__(self, setup: Setup, charge: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        wanted = max(MIN_BUFFER, setup.buffer_events * charge // 2)  # the kernel doubles it
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
        self._socket.bind(setup.listen(setup.index))

    def close(self) -> None:
        self._socket.close()


class UdpConsumer(DatagramConsumer):
    """Receives datagrams."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, CHARGE + setup.size)

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._socket.fileno() < 0:
            return
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return
        try:
            while True:
                yield Message(self._socket.recv(65536, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return


_GONE = Promise("must", ("offline", "in_flight"), "datagrams to a closed port are gone")
_LINK = Promise("must", ("in_flight",), "nothing repairs a lost datagram")
_FULL = Promise("must", ("overflow_receiver",), "the kernel drops what the socket buffer cannot hold")
_ANY = Promise("may", ("offline", "in_flight", "overflow_receiver"), "nothing is repaired")
PROMISES = {
    **dict.fromkeys(
        ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late", "many-producers"), _GONE
    ),
    **dict.fromkeys(("loss", "burst", "partition", "partition-to"), _LINK),
    **dict.fromkeys(("pause-long", "slow"), _FULL),
    "random": _ANY,
}
TRANSPORTS = [
    Transport(
        "udp",
        UdpProducer,
        UdpConsumer,
        Traits(
            family="reference",
            enclosed=True,
            link="udp",
            connects="producer",
            many_producers=True,
            overflow_at="receiver",
            promises=PROMISES,
            summary="plain UDP: nothing is repaired, nobody is told",
        ),
    )
]
