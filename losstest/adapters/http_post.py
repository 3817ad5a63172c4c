"""Reference: a plain fire-and-forget POST per event, as it is often found in applications."""

import http.client

from brokerless.losstest.adapters.base import Loss, Position, Producer, Setup, Transport
from brokerless.losstest.adapters.http_server import HttpConsumer
from brokerless.losstest.model import Promise, Traits

TIMEOUT_S = 0.3  # an application thread is not kept longer; a receiver that hangs costs this per event


class PostProducer(Producer):
    """Posts each event once to each consumer. Failure is dropped: that is what is measured here."""

    def __init__(self, setup: Setup) -> None:
        self._targets = [setup.connect(i) for i in range(setup.consumers)]
        self._connections: dict[tuple[str, int], http.client.HTTPConnection] = {}
        self._offset = -1
        self._losses: list[Loss] = []

    def send(self, data: bytes) -> Position:
        """Post it and look away."""
        self._offset += 1
        for target in self._targets:
            self._post(target, data)
        return Position(0, self._offset)

    def _post(self, target: tuple[str, int], data: bytes) -> None:
        reason = ""
        for fresh in (False, True):  # a kept connection may have been closed by the server meanwhile
            kept = None if fresh else self._connections.get(target)
            connection = kept or http.client.HTTPConnection(*target, timeout=TIMEOUT_S)
            try:
                connection.request("POST", "/", data)
                answer = connection.getresponse()
                answer.read()
                self._connections[target] = connection
                reason = "" if answer.status == 200 else "gave_up"
                break
            except ConnectionRefusedError:
                reason = "offline"
            except TimeoutError:
                reason = "gave_up"
                connection.close()
                self._connections.pop(target, None)
                break
            except (OSError, http.client.HTTPException):
                reason = "in_flight"
            connection.close()
            self._connections.pop(target, None)
            if kept is None:
                break
        if reason:
            # Only the sent learn of it; the application does not.
            self._losses.append(Loss(0, self._offset, self._offset, reason))

    def losses(self) -> list[Loss]:
        told, self._losses = self._losses, []
        return told

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


_GONE = Promise("must", ("offline", "in_flight", "gave_up"), "one attempt, and the failure is ignored")
_REFUSED = Promise("must", ("gave_up", "in_flight"), "a 500 or a timeout is ignored like any other failure")
_BUG = Promise("must", ("in_flight", "offline"), "the receiver said 200 and died: no sender can repair that")
_LONG = Promise("may", ("gave_up", "in_flight"), "a receiver that does not answer in time loses the event")
_LUCK = Promise("may", ("offline", "in_flight", "gave_up"), "one attempt, and the failure is ignored")
TRANSPORTS = [
    Transport(
        "http-post",
        PostProducer,
        HttpConsumer,
        Traits(
            family="reference",
            enclosed=True,
            link="tcp",
            connects="producer",
            many_producers=True,
            acks=True,
            http=True,
            overflow_at="receiver",
            quiet_s=0.5,
            max_rate=200.0,  # a request per event, and a timeout per event while the receiver hangs
            promises={
                **dict.fromkeys(
                    ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late", "many-producers"),
                    _GONE,
                ),
                **dict.fromkeys(("answer-500", "hang"), _REFUSED),
                **dict.fromkeys(
                    ("pause-short", "pause-long", "slow", "bandwidth", "latency"),
                    _LONG,
                ),
                "producer-kill": Promise("may", ("gave_up", "producer_crash", "offline"), "as for a pause"),
                "ack-then-die": _BUG,
                **dict.fromkeys(("partition", "partition-to", "partition-from", "reset", "random"), _LUCK),
            },
            summary="fire-and-forget HTTP POST: one attempt, failure ignored",
        ),
    )
]
