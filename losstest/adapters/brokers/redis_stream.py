"""Optional reference: Redis Streams with a consumer group, on a server of its own for each run."""

import shutil
import time
from collections.abc import Iterable

from brokerless.losstest.adapters.base import Command, Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.adapters.brokers.reconnect import PAUSE_S, Reconnecting, Unreachable
from brokerless.losstest.adapters.brokers.resp import Redis, RedisError, RedisGone
from brokerless.losstest.adapters.brokers.version import version_of
from brokerless.losstest.model import Promise, Traits

STREAM, GROUP = "losstest", "losstest"


def services(setup: Setup) -> list[Command]:
    """Redis for this run, writing down every command."""
    host, port = setup.listen(setup.consumers)
    words = ["redis-server", "--bind", host, "--port", str(port), "--dir", str(setup.shared)]
    sync = "always" if setup.sync else "everysec"
    words += ["--appendonly", "yes", "--appendfsync", sync, "--save", "", "--daemonize", "no"]
    return [Command(words, port)]


def _connect(setup: Setup, *, producer: bool) -> Redis:
    redis = Redis(*setup.broker(producer=producer))
    try:
        redis.call("PING")  # a server that is still reading its file says so
    except RedisError as error:
        redis.close()
        raise RedisGone(str(error)) from error
    return redis


class StreamProducer(Producer):
    """XADD, bounded as the scenario says."""

    def __init__(self, setup: Setup) -> None:
        self._link = Reconnecting(
            lambda: _connect(setup, producer=True), Redis.close, (RedisGone, OSError), setup.patience_s
        )
        self._bound = str(setup.retention_events)

    def send(self, data: bytes) -> None:
        """Add to the stream; the server has it when this returns."""
        words = ("XADD", STREAM, "MAXLEN", "=", self._bound, "*", "d", data)
        try:
            self._link.until_done(lambda redis: redis.call(*words))
        except RedisError as error:
            raise Rejected(str(error)) from error

    def close(self) -> None:
        self._link.drop()


class StreamConsumer(Consumer):
    """XREADGROUP: first what this consumer had and did not acknowledge, then what is new."""

    def __init__(self, setup: Setup) -> None:
        self._name = f"consumer-{setup.index}"
        self._from = b"0"
        self._link = Reconnecting(
            lambda: self._join(setup), Redis.close, (RedisGone, OSError), setup.patience_s
        )
        self._link.until_done(lambda redis: None)
        self._open = True

    def _join(self, setup: Setup) -> Redis:
        redis = _connect(setup, producer=False)
        self._from = b"0"  # own pending entries
        try:
            redis.call("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
        except RedisError as error:
            if "BUSYGROUP" not in str(error):
                raise
        return redis

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        try:
            entries = self._link.once(lambda redis: self._read(redis, timeout_s))
        except Unreachable:
            time.sleep(PAUSE_S)
            return
        except RedisError as error:
            if not str(error).startswith("MISCONF"):  # its disk is full: to read for a group is to write
                raise
            time.sleep(PAUSE_S)
            return
        if not entries:
            self._from = b">"
        for entry_id, fields in entries:
            if self._from != b">":
                self._from = entry_id
            if fields:
                yield Message(fields[1], ack=lambda i=entry_id: self._ack(i))  # type: ignore[misc]

    def _read(self, redis: Redis, timeout_s: float) -> list[tuple[bytes, list[bytes]]]:
        words = ["XREADGROUP", "GROUP", GROUP, self._name, "COUNT", "64"]
        if self._from == b">":
            words += ["BLOCK", str(max(1, int(timeout_s * 1000)))]
        found = redis.call(*words, "STREAMS", STREAM, self._from)
        return found[0][1] if isinstance(found, list) else []  # type: ignore[index,return-value]

    def _ack(self, entry_id: bytes) -> None:
        self._link.once(lambda redis: redis.call("XACK", STREAM, GROUP, entry_id))

    def close(self) -> None:
        self._open = False
        self._link.drop()


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
_LATE_WRITE = Promise(
    "may",
    ("in_flight",),
    "appendfsync everysec: while a sync is under way, Redis answers up to 2 s before it writes",
)
_TRIMMED = Promise(
    "must", ("evicted", "overflow_sender"), "MAXLEN trims the oldest, read or not, and tells nobody"
)
TRANSPORTS = [
    Transport(
        "redis-stream",
        StreamProducer,
        StreamConsumer,
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
            promises={
                "ack-then-die": _BUG,
                "broker-kill": _LATE_WRITE,
                "disk-full": _LATE_WRITE,  # what it answered and could not write is gone when it is restarted
                "beyond-retention": _TRIMMED,
            },
            settings="stream with a consumer group, MAXLEN exact; appendonly yes, appendfsync everysec (the default), "
            "with `power-cut` always; XADD answered before send() returns, XACK after the effect",
            summary="Redis Streams, consumer group: what a broker would have done",
        ),
        lambda: "" if shutil.which("redis-server") else "redis-server",
        services=services,
        version=lambda: version_of(["redis-server", "--version"], "Redis"),
    )
]
