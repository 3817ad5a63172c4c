"""Reference: a plain TCP socket per consumer. Full buffers hold the producer back; a dead peer loses them."""

import contextlib
import select
import socket
import time
from collections.abc import Iterable

from brokerless.losstest.adapters.base import (
    Consumer,
    Indeterminate,
    Message,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.adapters.framing import Deframer, frame
from brokerless.losstest.model import Promise, Traits

MIN_BUFFER = 4096


class TcpProducer(Producer):
    """Connects to every consumer and writes frames; waits and connects again when one is gone."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._sockets: list[socket.socket | None] = [None] * setup.consumers

    def send(self, data: bytes) -> None:
        """Write one frame to each consumer."""
        for index in range(len(self._sockets)):
            self._send_to(index, frame(data))

    def _send_to(self, index: int, out: bytes) -> None:
        deadline = time.monotonic() + self._setup.patience_s
        while time.monotonic() < deadline:
            sock = self._sockets[index]
            try:
                if sock is None:
                    sock = self._connect(index)
                sock.sendall(out)
                return
            except TimeoutError:
                # Part of the frame may be out: the connection cannot be used again.
                self._close(index)
                raise Indeterminate(f"consumer {index} did not take all of it") from None
            except OSError:
                self._close(index)
                time.sleep(0.01)
        self._close(index)
        raise Rejected(f"consumer {index} does not take it")

    def _connect(self, index: int) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(MIN_BUFFER, self._setup.buffer_bytes))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect(self._setup.connect(index))
        except OSError:
            sock.close()
            raise
        sock.settimeout(self._setup.patience_s)
        self._sockets[index] = sock
        return sock

    def _close(self, index: int) -> None:
        sock, self._sockets[index] = self._sockets[index], None
        if sock is not None:
            sock.close()

    def close(self) -> None:
        for index in range(len(self._sockets)):
            self._close(index)


class TcpConsumer(Consumer):
    """Listens; reads frames of whoever connects."""

    def __init__(self, setup: Setup) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(MIN_BUFFER, setup.buffer_bytes))
        self._listener.bind(setup.listen(setup.index))
        self._listener.listen()
        self._peers: dict[socket.socket, Deframer] = {}

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._listener.fileno() < 0:
            return []
        messages: list[Message] = []
        readable, _, _ = select.select([self._listener, *self._peers], [], [], timeout_s)
        for sock in readable:
            if sock is self._listener:
                peer, _ = sock.accept()
                self._peers[peer] = Deframer()
                continue
            data = b""
            with contextlib.suppress(ConnectionError):
                data = sock.recv(4096)
            if not data:
                del self._peers[sock]
                sock.close()
                continue
            messages += [Message(body) for body in self._peers[sock].feed(data)]
        return messages

    def close(self) -> None:
        for sock in (self._listener, *self._peers):
            sock.close()


_HAD = Promise(
    "may",
    ("in_flight", "offline"),
    "what the kernel had taken and the consumer not read dies with the socket",
)
TRANSPORTS = [
    Transport(
        "tcp",
        TcpProducer,
        TcpConsumer,
        Traits(
            family="reference",
            enclosed=True,
            link="tcp",
            connects="producer",
            many_producers=True,
            promises=dict.fromkeys(
                (
                    "kill",
                    "kill-fresh",
                    "flap",
                    "stop",
                    "all-down",
                    "rolling",
                    "reset",
                    "random",
                    "many-producers",
                ),
                _HAD,
            ),
            summary="plain TCP socket: holds the producer back",
        ),
    )
]
