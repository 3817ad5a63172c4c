"""Reference: the PyPI `statsd` client and a plain counting daemon over UDP.

Increments have no identity. The events of a tenth of a second share one counter, so that loss can still be
placed in time: event n increments the counter of the bucket n // BUCKET.
"""

import select
import socket
import time
from collections import Counter
from collections.abc import Iterable

from brokerless.losstest import payload
from brokerless.losstest.adapters.base import Consumer, Counted, Producer, Setup, Transport
from brokerless.losstest.adapters.udp import CHARGE, PROMISES, read_drops
from brokerless.losstest.model import Promise, Traits

BUCKET = 50
FLUSH_S = 0.1  # a real daemon flushes every 10 s; what a crash between two flushes loses is in proportion


def counter_name(data: bytes) -> str:
    """The counter that an event increments; probes have one of their own."""
    tag = payload.decode(data)
    if tag is None or tag.probe:
        return "losstest.probe"
    return f"losstest.b{tag.n // BUCKET}"


def bucket_of(name: str) -> int | None:
    """The first event of a counter's bucket, -1 for probes, None for a foreign counter."""
    word = name.rpartition(".")[2]
    if word == "probe":
        return -1
    return int(word[1:]) * BUCKET if word[:1] == "b" and word[1:].isdigit() else None


class StatsdProducer(Producer):
    """The unmodified `statsd` client: one datagram per increment."""

    def __init__(self, setup: Setup) -> None:
        from statsd import StatsClient

        self._clients = [StatsClient(*setup.connect(i)) for i in range(setup.consumers)]

    def send(self, data: bytes) -> None:
        """Increment and forget."""
        name = counter_name(data)
        for client in self._clients:
            client.incr(name)


class StatsdConsumer(Consumer):
    """A plain daemon: adds up, and hands over at every flush."""

    def __init__(self, setup: Setup) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        wanted = max(2048, setup.buffer_events * CHARGE // 2)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
        self._socket.bind(setup.listen(setup.index))
        self._counts: Counter[str] = Counter()
        self._flushed = time.monotonic()
        self._dropped = 0

    def receive(self, timeout_s: float) -> Iterable[Counted]:
        if self._socket.fileno() >= 0 and select.select([self._socket], [], [], timeout_s)[0]:
            try:
                while True:
                    self._add(self._socket.recv(65536, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
        now = time.monotonic()
        if now - self._flushed < FLUSH_S and self._socket.fileno() >= 0:
            return []
        self._flushed = now
        counts, self._counts = self._counts, Counter()
        flushed = []
        for name, count in counts.items():
            first = bucket_of(name)
            if first is not None:
                flushed.append(Counted(first, count))
        return flushed

    def _add(self, datagram: bytes) -> None:
        for line in datagram.decode("ascii", "replace").split("\n"):
            name, _, rest = line.partition(":")
            value, _, kind = rest.partition("|")
            if kind == "c" and value.isdigit():
                self._counts[name] += int(value)

    def drops(self) -> dict[str, int]:
        if self._socket.fileno() >= 0:
            self._dropped = read_drops(self._socket)
        return {"overflow_receiver": self._dropped}

    def close(self) -> None:
        self.drops()
        self._socket.close()


_GONE = Promise(
    "must",
    ("offline", "in_flight"),
    "datagrams to a closed port are gone, and so is what a killed daemon had not flushed",
)
TRANSPORTS = [
    Transport(
        "statsd",
        StatsdProducer,
        StatsdConsumer,
        Traits(
            family="reference",
            link="udp",
            connects="producer",
            counts=BUCKET,
            overflow_at="receiver",
            without=("slow", "all-down", "rolling", "burst", "reorder", "duplicate"),
            promises={**PROMISES, **dict.fromkeys(("kill", "kill-fresh", "flap", "stop", "late"), _GONE)},
            summary="PyPI statsd client, plain daemon: counters silently too low",
        ),
        preload=("statsd",),
    )
]
