"""Measure your own transport: here a Unix datagram socket. Run it with

    brokerless losstest run --quick --transport examples/plain_socket.py:transport

or, from an installed package, declare an entry point of the group `brokerless.losstest.transports`.
"""

import socket
from collections.abc import Iterable

from brokerless.losstest import Consumer, Message, Producer, Promise, Rejected, Setup, Traits, Transport


def address(setup: Setup) -> str:
    """An abstract address: it vanishes with its process. The port is this run's alone, so it is a good name."""
    return f"\0losstest-example-{setup.ports[0]}"


class Sender(Producer):
    """Returning from send() means accepted; raising Rejected means refused."""

    def __init__(self, setup: Setup) -> None:
        self._path = address(setup)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(10)  # a full queue holds the producer back

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:  # nobody is there: this transport says so, instead of losing silently
            raise Rejected(str(error)) from error


class Receiver(Consumer):
    """receive() gives what has arrived, waiting at most `timeout_s` for the first of it."""

    def __init__(self, setup: Setup) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address(setup))

    def receive(self, timeout_s: float) -> Iterable[Message]:
        self._socket.settimeout(timeout_s or 0.001)
        try:
            return [Message(self._socket.recv(65536))]
        except TimeoutError:
            return []


QUEUED = Promise("may", ("in_flight", "offline"), "what was in the dead receiver's queue")
transport = Transport(
    "plain-socket",
    Sender,
    Receiver,
    Traits(
        family="example",
        promises=dict.fromkeys(("stop", "kill", "kill-fresh", "flap"), QUEUED),
        without=("all-down", "rolling"),  # one path, one receiver
        summary="Unix datagram socket: refuses when nobody is there",
    ),
)
