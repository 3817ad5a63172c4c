"""Reference: raw pyzmq PUSH/PULL: work shared between consumers, without acknowledgements or a journal."""

from collections.abc import Iterable

from brokerless.losstest.adapters.base import Consumer, Message, Producer, Rejected, Setup, Transport
from brokerless.losstest.adapters.rawzmq import KERNEL_BUFFER
from brokerless.losstest.model import Promise, Traits

SEND_TIMEOUT_MS = 30_000  # longer than any outage of a scenario: a full PUSH socket holds the producer back


class PushProducer(Producer):
    """A PUSH socket that binds."""

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._again = zmq.Again
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.SNDBUF, KERNEL_BUFFER)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind("tcp://{}:{}".format(*setup.listen()))

    def send(self, data: bytes) -> None:
        """Push; waits while no consumer has room."""
        try:
            self._socket.send(data)
        except self._again as error:
            raise Rejected("no consumer takes it") from error

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class PullConsumer(Consumer):
    """A PULL socket that connects."""

    def __init__(self, setup: Setup) -> None:
        import zmq

        self._context = zmq.Context()
        self._again, self._noblock = zmq.Again, zmq.NOBLOCK
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, max(1, setup.buffer_events))
        self._socket.setsockopt(zmq.RCVBUF, KERNEL_BUFFER)
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


_HELD = Promise(
    "may", ("in_flight", "offline"), "what a consumer's queue held dies with it, and nobody sends it again"
)
_OWN = Promise("may", ("producer_crash", "offline"), "queues in the producer's memory die with it")
TRANSPORTS = [
    Transport(
        "zmq-pushpull",
        PushProducer,
        PullConsumer,
        Traits(
            family="reference",
            link="tcp",
            group=True,
            promises={
                **dict.fromkeys(("stop", "kill", "kill-fresh", "flap", "all-down", "rolling"), _HELD),
                "producer-kill": _OWN,
            },
            summary="raw pyzmq PUSH/PULL: shares work, holds the producer back, loses what queues held",
        ),
    )
]
