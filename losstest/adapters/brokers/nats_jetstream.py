"""Optional reference: NATS JetStream with a durable pull consumer, on a server of its own for each run."""

import json
import shutil
import socket
import time
from collections.abc import Iterable

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import Command, Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.adapters.brokers.reconnect import PAUSE_S, Reconnecting, Unreachable
from brokerless.losstest.adapters.brokers.version import version_of
from brokerless.losstest.model import Promise, Traits

STREAM, SUBJECT, DURABLE = "LOSSTEST", "losstest.events", "worker"
ACK_WAIT_S = 1.0
BATCH = 64
TIMEOUT_S = 10.0


class NatsError(Fault):
    """The server answered with an error, or not at all."""


def services(setup: Setup) -> list[Command]:
    """NATS for this run, with streams in files."""
    host, port = setup.listen(setup.consumers)
    words = ["nats-server", "-a", host, "-p", str(port), "-js", "-sd", str(setup.shared / "nats")]
    return [Command(words, port)]


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


def _link(setup: Setup, *, producer: bool) -> Reconnecting[Nats]:
    def connect() -> Nats:
        nats = Nats(*setup.broker(producer=producer))
        prepare(nats, setup)
        return nats

    return Reconnecting(connect, Nats.close, (NatsError, OSError), setup.patience_s)


class JetProducer(Producer):
    """Publishes and waits until the server confirms that it has stored the event."""

    def __init__(self, setup: Setup) -> None:
        self._link = _link(setup, producer=True)

    def send(self, data: bytes) -> None:
        """Stored when this returns."""
        answer = json.loads(self._link.until_done(lambda nats: nats.request(SUBJECT, data)))
        if "error" in answer:
            raise Rejected(str(answer["error"]))

    def close(self) -> None:
        self._link.drop()


class JetConsumer(Consumer):
    """Pulls batches and acknowledges each event after its effect."""

    def __init__(self, setup: Setup) -> None:
        self._link = _link(setup, producer=False)
        self._link.until_done(lambda nats: None)
        self._wanted_until = 0.0
        self._wanted = 0  # of what was asked for, how many are still to come
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        wait_s = timeout_s
        while self._open:
            try:
                self._want()
                found = self._link.once(lambda nats, wait_s=wait_s: nats.next(wait_s))  # type: ignore[misc]
            except Unreachable:
                self._wanted_until = 0.0
                time.sleep(PAUSE_S)
                return
            if found is None:
                return
            _, reply, data = found
            if reply.startswith("$JS.ACK."):
                self._wanted -= 1
                delivered = int(reply.split(".")[4])
                yield Message(data, ack=lambda r=reply: self._ack(r), attempt=delivered)  # type: ignore[misc]
            wait_s = 0.001

    def _want(self) -> None:
        """Ask for a batch before the last one is used up: the stream is never waiting for the consumer."""
        now = time.monotonic()
        expired = now > self._wanted_until
        if expired or self._wanted <= BATCH // 2:
            ask = json.dumps({"batch": BATCH, "expires": int(0.5e9)}).encode()
            self._link.once(lambda nats: nats.ask(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", ask))
            self._wanted = BATCH + (0 if expired else self._wanted)
            self._wanted_until = now + 0.25

    def _ack(self, reply: str) -> None:
        self._link.once(lambda nats: nats.publish(reply, b"+ACK"))

    def close(self) -> None:
        self._open = False
        self._link.drop()


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
_DISCARDED = Promise(
    "must", ("evicted", "overflow_sender"), "max_msgs discards the oldest, read or not, and tells nobody"
)
TRANSPORTS = [
    Transport(
        "nats-jetstream",
        JetProducer,
        JetConsumer,
        Traits(
            family="broker",
            enclosed=True,
            journal="broker",
            many_producers=True,
            link="tcp",
            connects="consumer",
            ports=1,
            group=True,
            acks=True,
            quiet_s=ACK_WAIT_S + 1.0,
            without=("power-cut", "disk-slow"),  # its syncs cannot be seen: Go calls the kernel itself
            promises={"ack-then-die": _BUG, "beyond-retention": _DISCARDED},
            settings="file storage, discard old; sync_interval 2m (the default: a crash of the server loses nothing, a "
            "power cut up to that); publish acknowledged before send() returns, explicit acks after the effect",
            summary="NATS JetStream, durable pull consumer: what a broker would have done",
        ),
        lambda: "" if shutil.which("nats-server") else "nats-server",
        services=services,
        version=lambda: version_of(["nats-server", "--version"], "NATS"),
    )
]
