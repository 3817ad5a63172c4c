"""Reference: the PyPI `statsd` client and a plain counting daemon over UDP.

Events are told apart by what they add to their counter; see `losstest/evidence/counter_digits.py`.
"""

import select
import socket
import time
from collections import Counter
from collections.abc import Iterable

from brokerless.losstest.adapters.base import Message, Producer, Setup, Transport
from brokerless.losstest.adapters.udp import CHARGE, PROMISES, DatagramConsumer
from brokerless.losstest.evidence import counter_digits, payload
from brokerless.losstest.model import Promise, Traits

FLUSH_S = 0.1  # a real daemon flushes every 10 s; what a crash between two flushes loses is in proportion


def increment(data: bytes) -> tuple[str, int]:
    """The counter that an event increments, and by how much."""
    tag = payload.decode(data)
    assert tag is not None  # the harness made it
    return counter_digits.probe(tag.run) if tag.probe else counter_digits.counter(tag.run, tag.n)


def messages(name: str, total: float, seen: dict[int, int]) -> Iterable[Message]:
    """The events that a counter's sum tells of, less those `seen`, to which they are added.

    What no events can have made is a message that nobody can read; a counter that is not ours is none.
    """
    run = counter_digits.run_of(name)
    if run is None:
        return
    if name == counter_digits.probe(run)[0]:
        yield Message(payload.encode(run, payload.PROBE, 0, 0))
        return
    try:
        found = counter_digits.arrivals(name, total)
    except ValueError:
        yield Message(b"")
        return
    for n, times in found.items():
        for _ in range(seen.get(n, 0), times):
            yield Message(payload.encode(run, 0, n, 0))
        seen[n] = max(times, seen.get(n, 0))


class StatsdProducer(Producer):
    """The unmodified `statsd` client: one datagram per increment."""

    def __init__(self, setup: Setup) -> None:
        from statsd import StatsClient

        self._clients = [StatsClient(*setup.connect(i)) for i in range(setup.consumers)]

    def send(self, data: bytes) -> None:
        """Increment and forget."""
        name, amount = increment(data)
        for client in self._clients:
            client.incr(name, amount)


class StatsdConsumer(DatagramConsumer):
    """A plain daemon: adds up, and hands over at every flush."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, CHARGE)
        self._counts: Counter[str] = Counter()
        self._flushed = time.monotonic()

    def receive(self, timeout_s: float) -> Iterable[Message]:
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
        return [message for name, total in counts.items() for message in messages(name, total, {})]

    def _add(self, datagram: bytes) -> None:
        for line in datagram.decode("ascii", "replace").split("\n"):
            name, _, rest = line.partition(":")
            value, _, kind = rest.partition("|")
            if kind == "c" and value.isdigit():
                self._counts[name] += int(value)


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
            enclosed=True,
            link="udp",
            connects="producer",
            overflow_at="receiver",
            without=("slow", "all-down", "rolling"),
            promises={**PROMISES, **dict.fromkeys(("kill", "kill-fresh", "flap", "stop", "late"), _GONE)},
            summary="PyPI statsd client, plain daemon: counters silently too low",
        ),
        preload=("statsd",),
    )
]
