"""Optional reference: NATS JetStream with a durable pull consumer, on a server of its own for each run."""

import json
import shutil
import socket
import time
from collections.abc import Iterable

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.model import Promise, Traits

STREAM, SUBJECT, DURABLE = "LOSSTEST", "losstest.events", "worker"
ACK_WAIT_S = 1.0
TIMEOUT_S = 10.0


class NatsError(Fault):
    """The server answered with an error, or not at all."""


def server(setup: Setup) -> list[str]:
    """The command that runs NATS for this run."""
    host, port = setup.listen(setup.consumers)
    return ["nats-server", "-a", host, "-p", str(port), "-js", "-sd", str(setup.shared / "nats")]


class Nats:
    """One connection with the text protocol: publish, subscribe, request."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._buffer = b""
        self._line(TIMEOUT_S)  # INFO
        self._socket.sendall(b'CONNECT {"verbose":false,"headers":false}\r\n')
        self._inbox = f"_INBOX.{id(self)}.{time.monotonic_ns()}"
        self._serial = 0
        self._socket.sendall(f"SUB {self._inbox}.* 1\r\n".encode())

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send one message."""
        self._socket.sendall(f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n")

    def ask(self, subject: str, data: bytes) -> str:
        """Send a request; the answer comes by `next()` with the returned reply subject."""
        self._serial += 1
        reply = f"{self._inbox}.{self._serial}"
        self.publish(subject, data, reply)
        return reply

    def next(self, timeout_s: float) -> tuple[str, str, bytes] | None:
        """The next message as (subject, reply, data), or None when the time is up."""
        while True:
            line = self._line(timeout_s)
            if line is None:
                return None
            words = line.split()
            if words[0] == b"PING":
                self._socket.sendall(b"PONG\r\n")
            elif words[0] == b"-ERR":
                raise NatsError(line.decode())
            elif words[0] == b"MSG":
                size = int(words[-1])
                self._fill(size + 2, TIMEOUT_S)
                data, self._buffer = self._buffer[:size], self._buffer[size + 2 :]
                reply = words[3].decode() if len(words) == 5 else ""
                return words[1].decode(), reply, data

    def _fill(self, wanted: int, timeout_s: float) -> bool:
        """Until `wanted` bytes are in the buffer; False when the time is up, and nothing is lost."""
        deadline = time.monotonic() + timeout_s
        while len(self._buffer) < wanted:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                return False
            if not data:
                raise NatsError("nats: the connection was closed")
            self._buffer += data
        return True

    def _line(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while b"\r\n" not in self._buffer:
            if not self._fill(len(self._buffer) + 1, max(0.0, deadline - time.monotonic())):
                return None
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def request(self, subject: str, data: bytes) -> bytes:
        """Ask and wait for the answer."""
        reply = self.ask(subject, data)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            found = self.next(deadline - time.monotonic())
            if found is not None and found[0] == reply:
                return found[2]
        raise NatsError(f"nats: no answer to {subject}")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def prepare(nats: Nats, setup: Setup) -> None:
    """Make stream and durable consumer; doing it again changes nothing."""
    stream = {"name": STREAM, "subjects": [SUBJECT], "max_msgs": setup.retention_events, "storage": "file"}
    consumer = {"durable_name": DURABLE, "ack_policy": "explicit", "ack_wait": int(ACK_WAIT_S * 1e9)}
    nats.request(f"$JS.API.STREAM.CREATE.{STREAM}", json.dumps(stream).encode())
    body = {"stream_name": STREAM, "config": consumer}
    nats.request(f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.{DURABLE}", json.dumps(body).encode())


class JetProducer(Producer):
    """Publishes and waits for the server's word that it has stored the event."""

    def __init__(self, setup: Setup) -> None:
        self._nats = Nats(*setup.connect(setup.consumers))
        prepare(self._nats, setup)

    def send(self, data: bytes) -> None:
        """Stored when this returns."""
        try:
            answer = json.loads(self._nats.request(SUBJECT, data))
        except NatsError as error:
            raise Rejected(str(error)) from error
        if "error" in answer:
            raise Rejected(str(answer["error"]))

    def close(self) -> None:
        self._nats.close()


class JetConsumer(Consumer):
    """Pulls batches and acknowledges each event after its effect."""

    def __init__(self, setup: Setup) -> None:
        self._nats = Nats(*setup.connect(setup.consumers))
        prepare(self._nats, setup)
        self._wanted_until = 0.0
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        now = time.monotonic()
        if now > self._wanted_until:
            ask = {"batch": 64, "expires": int(0.5e9)}
            self._nats.ask(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", json.dumps(ask).encode())
            self._wanted_until = now + 0.25
        found = self._nats.next(timeout_s)
        while found is not None:
            _, reply, data = found
            if reply.startswith("$JS.ACK."):
                delivered = int(reply.split(".")[4])
                yield Message(data, ack=lambda r=reply: self._nats.publish(r, b"+ACK"), attempt=delivered)  # type: ignore[misc]
            found = self._nats.next(0.001)

    def close(self) -> None:
        self._open = False
        self._nats.close()


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
TRANSPORTS = [
    Transport(
        "nats-jetstream",
        JetProducer,
        JetConsumer,
        Traits(
            family="broker",
            journal="broker",
            ports=1,
            group=True,
            acks=True,
            quiet_s=ACK_WAIT_S + 1.0,
            promises={"ack-then-die": _BUG},
            summary="NATS JetStream, durable pull consumer: what a broker would have done",
        ),
        lambda: "" if shutil.which("nats-server") else "nats-server",
        server,
    )
]
