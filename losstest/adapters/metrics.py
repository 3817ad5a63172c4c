"""`brokerless.metrics`: loss-aware counters. Lost datagrams are known, and counters are healed by totals."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Setup, Transport
from brokerless.losstest.adapters.statsd_plain import increment, messages
from brokerless.losstest.adapters.udp import CHARGE
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    from brokerless.metrics import CounterPoint

FLUSH_S = 0.1  # a real daemon flushes every 10 s, and a client tells its totals every 5: the same proportion
HEARTBEAT_S = 0.25
CLIENT_FLUSH_S = 0.02


class AwareProducer(Producer):
    """Our StatsClient: numbers its datagrams and tells its counters' totals."""

    def __init__(self, setup: Setup) -> None:
        from brokerless.metrics import StatsClient

        self._clients = [
            StatsClient(*setup.connect(i), flush_s=CLIENT_FLUSH_S, heartbeat_s=HEARTBEAT_S)
            for i in range(setup.consumers)
        ]

    def send(self, data: bytes) -> None:
        """Increment; sent with others within CLIENT_FLUSH_S."""
        name, amount = increment(data)
        for client in self._clients:
            client.incr(name, amount)

    def close(self) -> None:
        for client in self._clients:
            client.close()


class AwareConsumer(Consumer):
    """A MetricsServer; what it publishes as `total` is what counts."""

    def __init__(self, setup: Setup) -> None:
        from brokerless.metrics import MetricsServer

        host, port = setup.listen(setup.index)
        self._server = MetricsServer(
            udp=[f"{host}:{port}"],
            flush_s=FLUSH_S,
            receive_buffer=max(2048, setup.buffer_events * CHARGE // 2),
        )
        self._server.start()
        self._counted: dict[int, int] = {}
        self._seen = 0.0

    def receive(self, timeout_s: float) -> Iterable[Message]:
        deadline = time.monotonic() + timeout_s
        while True:
            flush = self._server.last
            if flush is not None and flush.end != self._seen:
                self._seen = flush.end
                return self._news(flush.counters)
            if time.monotonic() >= deadline:
                return []
            time.sleep(0.005)

    def _news(self, points: "Iterable[CounterPoint]") -> list[Message]:
        news: list[Message] = []
        for point in points:
            # An estimate may be revised downwards; what arrived and what is exact are not.
            exact = point.total_grade.label == "exact"
            news += messages(point.series, point.total if exact else point.total_raw, self._counted)
        return news

    def close(self) -> None:
        self._server.stop()


_AWAY = Promise(
    "may",
    ("offline", "in_flight"),
    "a daemon that restarts knows a client from then on; what it had not flushed died with it",
)
TRANSPORTS = [
    Transport(
        "statsd-aware",
        AwareProducer,
        AwareConsumer,
        Traits(
            family="metrics",
            enclosed=True,
            link="udp",
            connects="producer",
            overflow_at="receiver",
            quiet_s=1.2,
            without=("slow", "all-down", "rolling"),
            promises={
                **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "late"), _AWAY),
                "producer-kill": Promise(
                    "may", ("producer_crash",), "what was not sent dies with the client"
                ),
            },
            summary="loss-aware StatsD: counters healed by the client's cumulative totals",
        ),
        preload=("brokerless.metrics",),
    )
]
