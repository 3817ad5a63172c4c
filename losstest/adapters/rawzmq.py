"""References: raw pyzmq PUB/SUB, as the guide's first example does it, and PUSH/PULL, which shares work."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    import zmq

# Small, so that the library's own queue (the high-water mark) is the buffer that the scenario sizes.
KERNEL_BUFFER = 4096
LINGER_MS = 500  # longer than the scenarios' link delay, and finite
BATCH = 100  # events between two looks at the supervisor's instructions


class RawProducer(Producer):
    """A PUB or PUSH socket that binds."""

    kind = "PUB"
    address = "tcp://{host}:{port}"

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._again = zmq.Again
        self._context = zmq.Context()
        self._socket = self._context.socket(getattr(zmq, self.kind))
        self._socket.setsockopt(zmq.SNDHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.SNDBUF, KERNEL_BUFFER)
        self.tune(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, int(setup.patience_s * 1000))
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        host, port = setup.listen()
        self._socket.bind(self.address.format(host=host, port=port))

    def tune(self, socket: "zmq.Socket[bytes]") -> None:
        """Options that another protocol needs."""

    def send(self, data: bytes) -> None:
        """PUB drops without a word when a subscriber's queue is full; PUSH waits while no consumer has room."""
        try:
            self._socket.send(data)
        except self._again as error:
            raise Rejected("no consumer takes it") from error

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class PushProducer(RawProducer):
    """A PUSH socket."""

    kind = "PUSH"


class RawConsumer(Consumer):
    """A SUB or PULL socket that connects."""

    kind = "SUB"
    address = "tcp://{host}:{port}"

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._context = zmq.Context()
        self._again, self._noblock = zmq.Again, zmq.NOBLOCK
        self._socket = self._context.socket(getattr(zmq, self.kind))
        self._socket.setsockopt(zmq.RCVHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.RCVBUF, KERNEL_BUFFER)
        self.tune(self._socket)
        if self.kind == "SUB":
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        host, port = setup.connect()
        self._socket.connect(self.address.format(host=host, port=port))

    def tune(self, socket: "zmq.Socket[bytes]") -> None:
        """Options that another protocol needs."""

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._socket.closed or not self._socket.poll(int(timeout_s * 1000)):
            return
        try:
            for _ in range(BATCH):
                yield Message(self._socket.recv(self._noblock))
        except self._again:
            return

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class PullConsumer(RawConsumer):
    """A PULL socket."""

    kind = "PULL"


_GONE = Promise(
    "must", ("offline", "in_flight"), "PUB forgets what a subscriber that is not connected missed"
)
_FULL = Promise("must", ("overflow_sender",), "PUB drops for a subscriber whose queue is full")
_OWN = Promise(
    "must",
    ("producer_crash", "offline"),
    "queues in its memory die with it; a new one waits for nobody to connect",
)
_QUEUED = Promise(
    "may", ("in_flight", "offline"), "what a consumer's queue held dies with it, and nobody sends it again"
)
_OWN_QUEUE = Promise("may", ("producer_crash",), "queues in the producer's memory die with it")
_RESET = Promise(
    "may",
    ("in_flight", "offline"),
    "what was under way on a connection that was reset is not sent again, nor what came before the next one",
)
_LIMITED = Promise("may", ("overflow_sender",), "PUB drops for a subscriber whose queue is full")
_ANY = Promise("may", ("offline", "in_flight", "overflow_sender"), "PUB/SUB repairs nothing")
TRANSPORTS = [
    Transport(
        "zmq-pubsub",
        RawProducer,
        RawConsumer,
        Traits(
            family="reference",
            enclosed=True,
            link="tcp",
            promises={
                **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late"), _GONE),
                **dict.fromkeys(("pause-long", "slow"), _FULL),
                "producer-kill": _OWN,
                "reset": _RESET,
                "bandwidth": _LIMITED,
                "random": _ANY,
            },
            summary="raw pyzmq PUB/SUB: drops for whoever is away or slow",
        ),
        preload=("zmq",),
    ),
    Transport(
        "zmq-pushpull",
        PushProducer,
        PullConsumer,
        Traits(
            family="reference",
            enclosed=True,
            link="tcp",
            group=True,
            promises={
                **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling"), _QUEUED),
                "producer-kill": _OWN_QUEUE,
                "reset": _RESET,
                "random": _QUEUED,
            },
            summary="raw pyzmq PUSH/PULL: shares work, holds the producer back, loses what queues held",
        ),
        preload=("zmq",),
    ),
]
