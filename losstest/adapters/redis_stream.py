"""Optional reference: Redis Streams with a consumer group, on a server of its own for each run."""

import shutil
from collections.abc import Iterable

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.adapters.resp import Redis, RedisError
from brokerless.losstest.model import Promise, Traits

STREAM, GROUP = "losstest", "losstest"


def server(setup: Setup) -> list[str]:
    """The command that runs Redis for this run."""
    host, port = setup.listen(setup.consumers)
    words = ["redis-server", "--bind", host, "--port", str(port), "--dir", str(setup.shared)]
    return [*words, "--appendonly", "yes", "--save", "", "--daemonize", "no"]


class StreamProducer(Producer):
    """XADD, bounded as the scenario says."""

    def __init__(self, setup: Setup) -> None:
        self._redis = Redis(*setup.connect(setup.consumers))
        self._bound = str(setup.retention_events)

    def send(self, data: bytes) -> None:
        """Add to the stream; the server has it when this returns."""
        try:
            self._redis.call("XADD", STREAM, "MAXLEN", "~", self._bound, "*", "d", data)
        except RedisError as error:
            raise Rejected(str(error)) from error

    def close(self) -> None:
        self._redis.close()


class StreamConsumer(Consumer):
    """XREADGROUP: first what this consumer had and did not acknowledge, then what is new."""

    def __init__(self, setup: Setup) -> None:
        self._redis = Redis(*setup.connect(setup.consumers))
        self._name = f"consumer-{setup.index}"
        self._from = b"0"  # own pending entries
        try:
            self._redis.call("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
        except RedisError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        words = ["XREADGROUP", "GROUP", GROUP, self._name, "COUNT", "64"]
        if self._from == b">":
            words += ["BLOCK", str(max(1, int(timeout_s * 1000)))]
        found = self._redis.call(*words, "STREAMS", STREAM, self._from)
        entries = found[0][1] if isinstance(found, list) else []  # type: ignore[index]
        assert isinstance(entries, list)
        if not entries:
            self._from = b">"
        for entry_id, fields in entries:  # type: ignore[misc]
            if self._from != b">":
                self._from = entry_id  # type: ignore[assignment]
            if fields:
                yield Message(fields[1], ack=lambda i=entry_id: self._ack(i))  # type: ignore[index,arg-type,misc]

    def _ack(self, entry_id: bytes) -> None:
        self._redis.call("XACK", STREAM, GROUP, entry_id)

    def close(self) -> None:
        self._open = False
        self._redis.close()


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
TRANSPORTS = [
    Transport(
        "redis-stream",
        StreamProducer,
        StreamConsumer,
        Traits(
            family="broker",
            journal="broker",
            ports=1,
            group=True,
            acks=True,
            promises={"ack-then-die": _BUG},
            summary="Redis Streams, consumer group: what a broker would have done",
        ),
        lambda: "" if shutil.which("redis-server") else "redis-server",
        server,
    )
]
