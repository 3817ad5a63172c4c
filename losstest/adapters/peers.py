"""References of our own kind: zenoh with its advanced publisher, raw NNG, ZeroMQ's epgm where libzmq has it."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Setup, Transport
from brokerless.losstest.adapters.rawzmq import RawConsumer, RawProducer
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    import zmq

KEY = "losstest"
HEARTBEAT_S = 0.2
# How long a zenoh subscriber waits for its peer before it is declared: it asks for history at that moment. What it asks
# for later it throws away if a live event came first, so without the wait one restart in ten missed all it had missed.
CONNECT_S = 1.0
BATCH = 100  # events between two looks at the supervisor's instructions
NNG_QUEUE_MAX = 8192  # what the library takes
EPGM_BUFFER = 1 << 20
EPGM_RATE_KBIT, EPGM_WINDOW_MS = 100_000, 1000  # the sender keeps 12 MB for repairs


class ZenohEnd:
    """A session of a peer that finds nobody by itself."""

    def __init__(self, endpoint: str, *, listens: bool) -> None:
        import zenoh

        config = zenoh.Config()
        for key, value in {
            "mode": "peer",
            "scouting/multicast/enabled": False,
            "listen/endpoints": [endpoint] if listens else [],
            "connect/endpoints": [] if listens else [endpoint],
            "connect/timeout_ms": -1,
            "connect/exit_on_failure": False,
            "timestamping/enabled": True,  # the advanced publisher's cache needs it
        }.items():
            config.insert_json5(key, json.dumps(value))
        self.session: Any = zenoh.open(config)


class ZenohProducer(Producer):
    """An advanced publisher: a cache as large as the scenario's retention, and heartbeats that show misses."""

    def __init__(self, setup: Setup) -> None:
        import zenoh
        from zenoh import ext

        host, port = setup.listen(0)
        self._end = ZenohEnd(f"tcp/{host}:{port}", listens=True)
        self._publisher = ext.declare_advanced_publisher(
            self._end.session,
            KEY,
            congestion_control=zenoh.CongestionControl.DROP,
            cache=ext.CacheConfig(max_samples=setup.retention_events),
            sample_miss_detection=ext.MissDetectionConfig(heartbeat=HEARTBEAT_S, sporadic_heartbeat=None),
            publisher_detection=True,
        )

    def send(self, data: bytes) -> None:
        """In the cache when it returns."""
        self._publisher.put(data)

    def close(self) -> None:
        self._end.session.close()


class ZenohConsumer(Consumer):
    """An advanced subscriber: asks for history when it joins, and for what it missed."""

    def __init__(self, setup: Setup) -> None:
        from zenoh import ext

        self._arrived: deque[bytes] = deque()
        host, port = setup.connect(0)
        self._end = ZenohEnd(f"tcp/{host}:{port}", listens=False)
        deadline = time.monotonic() + CONNECT_S
        while not self._end.session.info.peers_zid() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._subscriber = ext.declare_advanced_subscriber(
            self._end.session,
            KEY,
            lambda sample: self._arrived.append(bytes(sample.payload)),
            history=ext.HistoryConfig(detect_late_publishers=True),
            recovery=ext.RecoveryConfig(heartbeat=True, periodic_queries=None),
            subscriber_detection=True,
        )

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._arrived:
            time.sleep(min(timeout_s, 0.005))
        for _ in range(min(BATCH, len(self._arrived))):
            yield Message(self._arrived.popleft())

    def close(self) -> None:
        self._end.session.close()


class NngProducer(Producer):
    """A Pub0 or Push0 socket that listens."""

    def __init__(self, setup: Setup, *, kind: str) -> None:
        import pynng

        self._socket = getattr(pynng, kind)(
            send_timeout=int(setup.patience_s * 1000),
            send_buffer_size=min(NNG_QUEUE_MAX, max(1, setup.buffer_events)),
        )
        self._socket.listen("tcp://{}:{}".format(*setup.listen()))

    def send(self, data: bytes) -> None:
        """Pub0 drops without a word for whoever is slow; Push0 waits while no consumer has room."""
        self._socket.send(data)

    def close(self) -> None:
        self._socket.close()


class NngConsumer(Consumer):
    """A Sub0 or Pull0 socket that dials, again and again if need be."""

    def __init__(self, setup: Setup, *, kind: str) -> None:
        import pynng

        self._errors = (pynng.Timeout, pynng.TryAgain)
        self._closed = False
        self._socket = getattr(pynng, kind)(
            recv_buffer_size=min(NNG_QUEUE_MAX, max(1, setup.buffer_events)),
            reconnect_time_min=50,
            reconnect_time_max=200,
        )
        if kind == "Sub0":
            self._socket.subscribe(b"")
        self._socket.dial("tcp://{}:{}".format(*setup.connect()), block=False)

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._closed:
            return
        with contextlib.suppress(*self._errors):
            self._socket.recv_timeout = max(1, int(timeout_s * 1000))
            yield Message(self._socket.recv())
            for _ in range(BATCH):
                yield Message(self._socket.recv(block=False))

    def close(self) -> None:
        self._closed = True
        self._socket.close()


def _tune_epgm(socket: "zmq.Socket[bytes]") -> None:
    """Room for datagrams, and a rate that no scenario comes near: the default is 100 kbit/s."""
    import zmq

    for option in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(option, EPGM_BUFFER)
    socket.setsockopt(zmq.RATE, EPGM_RATE_KBIT)
    socket.setsockopt(zmq.RECOVERY_IVL, EPGM_WINDOW_MS)


class EpgmProducer(RawProducer):
    """PUB over PGM in UDP, on loopback."""

    address = "epgm://127.0.0.1;239.192.77.7:{port}"

    def tune(self, socket: "zmq.Socket[bytes]") -> None:
        _tune_epgm(socket)


class EpgmConsumer(RawConsumer):
    """SUB over PGM in UDP."""

    address = EpgmProducer.address

    def tune(self, socket: "zmq.Socket[bytes]") -> None:
        _tune_epgm(socket)


def _missing_epgm() -> str:
    import zmq

    return "" if zmq.has("pgm") else "a libzmq that was built with PGM (PyPI's is not)"


def _missing(package: str, extra: str) -> str:
    return "" if find_spec(package) else f"the package {extra}"


_CACHE = Promise(
    "may",
    ("producer_crash", "offline", "in_flight"),
    "the cache is in memory and dies with the producer",
)
_HISTORY = Promise(
    "may",
    ("offline", "in_flight"),
    "a subscriber asks for history when it is declared; what comes after a first live event is thrown away, so "
    "one that did not know the publisher's cache by then has none",
)
_OLD = Promise("may", ("evicted", "offline", "in_flight"), "older than the cache")
_GONE = Promise("must", ("offline", "in_flight"), "Pub0 forgets what a subscriber that is away missed")
_FULL = Promise("may", ("overflow_sender", "offline"), "Pub0 drops for a subscriber whose queue is full")
_LINE = Promise(
    "may", ("in_flight", "offline", "overflow_sender"), "what was under way on a broken connection is gone"
)
_QUEUED = Promise(
    "may", ("in_flight", "offline"), "what queues held dies with them, and nobody sends it again"
)
_OWN = Promise("may", ("producer_crash", "offline"), "queues in the producer's memory die with it")
_OUTAGES = ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling")
_LINES = ("partition", "partition-to", "partition-from", "reset", "random")
TRANSPORTS = [
    Transport(
        "zenoh",
        ZenohProducer,
        ZenohConsumer,
        Traits(
            family="peer",
            enclosed=True,
            journal="memory",
            link="tcp",
            quiet_s=2.5,  # connects again after a second, then asks
            promises={
                **dict.fromkeys((*_OUTAGES, "late", "random"), _HISTORY),
                "producer-kill": _CACHE,
                "beyond-retention": _OLD,
            },
            summary="zenoh, advanced publisher (cache, miss detection) and subscriber (history, recovery)",
        ),
        partial(_missing, "zenoh", "eclipse-zenoh"),
        # Not preloaded: its threads would not survive the fork.
    ),
    Transport(
        "nng-pubsub",
        partial(NngProducer, kind="Pub0"),
        partial(NngConsumer, kind="Sub0"),
        Traits(
            family="peer",
            enclosed=True,
            link="tcp",
            promises={
                **dict.fromkeys((*_OUTAGES, "late"), _GONE),
                **dict.fromkeys(("pause-short", "pause-long", "slow", "bandwidth", "latency"), _FULL),
                **dict.fromkeys(_LINES, _LINE),
                "producer-kill": _OWN,
            },
            summary="raw NNG Pub0/Sub0: drops for whoever is away or slow",
        ),
        partial(_missing, "pynng", "pynng"),
    ),
    Transport(
        "nng-pushpull",
        partial(NngProducer, kind="Push0"),
        partial(NngConsumer, kind="Pull0"),
        Traits(
            family="peer",
            enclosed=True,
            link="tcp",
            group=True,
            promises={**dict.fromkeys((*_OUTAGES, *_LINES), _QUEUED), "producer-kill": _OWN},
            summary="raw NNG Push0/Pull0: shares work, holds the producer back, loses what queues held",
        ),
        partial(_missing, "pynng", "pynng"),
    ),
    Transport(
        "zmq-epgm",
        EpgmProducer,
        EpgmConsumer,
        Traits(
            family="peer",
            enclosed=True,
            only=("stop", "kill", "kill-fresh", "pause-long", "slow", "late", "producer-kill"),
            promises=dict.fromkeys(
                ("stop", "kill", "kill-fresh", "pause-long", "slow", "late", "producer-kill"),
                Promise(
                    "may",
                    ("offline", "in_flight", "overflow_receiver", "overflow_sender", "producer_crash"),
                    "PGM repairs within its window, and never for who was away",
                ),
            ),
            summary="raw pyzmq PUB/SUB over epgm: multicast with repair from the sender's window",
        ),
        _missing_epgm,
    ),
]
