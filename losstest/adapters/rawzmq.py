"""Reference: raw pyzmq PUB/SUB, as the guide's first example does it."""

from collections.abc import Iterable

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Setup, Transport
from brokerless.losstest.model import Promise, Traits

# Small, so that the library's own queue (the high-water mark) is the buffer that the scenario sizes.
KERNEL_BUFFER = 4096


class PubProducer(Producer):
    """A PUB socket that binds."""

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.SNDBUF, KERNEL_BUFFER)
        self._socket.setsockopt(zmq.LINGER, 500)  # longer than the scenarios' link delay, and finite
        self._socket.bind("tcp://{}:{}".format(*setup.listen()))

    def send(self, data: bytes) -> None:
        """Publish; the socket drops without a word when a subscriber's queue is full."""
        self._socket.send(data)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class SubConsumer(Consumer):
    """A SUB socket that connects."""

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._context = zmq.Context()
        self._again = zmq.Again
        self._noblock = zmq.NOBLOCK
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.RCVBUF, KERNEL_BUFFER)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect("tcp://{}:{}".format(*setup.connect()))

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._socket.closed or not self._socket.poll(int(timeout_s * 1000)):
            return
        try:
            for _ in range(100):
                yield Message(self._socket.recv(self._noblock))
        except self._again:
            return

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


_GONE = Promise(
    "must", ("offline", "in_flight"), "PUB forgets what a subscriber that is not connected missed"
)
_FULL = Promise("must", ("overflow_sender",), "PUB drops for a subscriber whose queue is full")
_HELD = Promise("may", ("overflow_sender", "in_flight"), "PUB drops when the link stands still for long")
_OWN = Promise(
    "must",
    ("producer_crash", "offline"),
    "queues in its memory die with it; a new one waits for nobody to connect",
)
TRANSPORTS = [
    Transport(
        "zmq-pubsub",
        PubProducer,
        SubConsumer,
        Traits(
            family="reference",
            link="tcp",
            promises={
                **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late"), _GONE),
                **dict.fromkeys(("pause-long", "slow"), _FULL),
                **dict.fromkeys(("partition", "partition-to", "partition-from"), _HELD),
                "producer-kill": _OWN,
            },
            summary="raw pyzmq PUB/SUB: drops for whoever is away or slow",
        ),
    )
]
