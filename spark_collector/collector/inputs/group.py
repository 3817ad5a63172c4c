"""An input that is one worker of a group: several collectors share the load of the same publishers."""

import threading
import time
from functools import partial

from brokerless.direct import Delivery, Worker
from brokerless.spark_collector.collector.config import DirectIn
from brokerless.spark_collector.collector.frames import frames_of
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus, InputThread

# Deliveries come one by one; so many, or so long, are put into the spool together.
_BATCH = 2_000
_LINGER_S = 0.02
_WAIT_S = 0.2
# What this worker may hold: two batches, so that the next is there when one has been appended.
_PREFETCH = 2 * _BATCH


class GroupInput:
    """Acknowledges a delivery when it is as durable in the spool as configured."""

    def __init__(self, config: DirectIn) -> None:
        self.config = config
        self.status = InputStatus(f"group {config.group}", "direct")
        self._thread = InputThread(self.status, self._work)

    def start(self, sink: CollectorInterface) -> None:
        """Start; publishers need not be there yet."""
        self._thread.start(sink)

    def stop(self) -> None:
        """Stop after the batch that is being appended; what was not acknowledged goes to another worker."""
        self._thread.stop()

    def _work(self, sink: CollectorInterface) -> None:
        with Worker(
            self.config.addresses,
            group=self.config.group,
            topics=self.config.topics,
            start=self.config.start,
            prefetch=_PREFETCH,
            # A full disk is no fault of the event: it comes again until the spool takes it.
            max_deliver=10_000,
            on_loss=lambda lost: sink.lost("direct", lost),
        ) as worker:
            acknowledged = threading.Event()
            acknowledged.set()
            while not self._thread.stopping.is_set():
                batch = self._gather(worker)
                if batch:
                    events = sorted((d.event for d in batch), key=lambda e: (e.source, e.epoch, e.offset))
                    acknowledged.clear()
                    self.status.events += sink.accept(
                        "direct", list(frames_of(events)), partial(_ack, batch, acknowledged)
                    )
                    self.status.connected = True
            # Give the last acknowledgements the time of one sync; without them the events come again.
            sink.flush()
            acknowledged.wait(_WAIT_S)

    def _gather(self, worker: Worker) -> list[Delivery]:
        batch: list[Delivery] = []
        until = 0.0
        while len(batch) < _BATCH:
            timeout = _WAIT_S if not batch else max(0.0, until - time.monotonic())
            delivery = worker.receive(timeout)
            if delivery is None:
                break
            if not batch:
                until = time.monotonic() + _LINGER_S
            batch.append(delivery)
        return batch


def _ack(batch: list[Delivery], acknowledged: threading.Event) -> None:
    for delivery in batch:
        delivery.ack()
    acknowledged.set()
