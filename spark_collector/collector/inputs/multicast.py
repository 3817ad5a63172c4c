"""An input that listens to a MoldUDP64 group."""

import os

from brokerless.core import Cursor, Lost
from brokerless.multicast import Subscriber
from brokerless.spark_collector.collector.config import MulticastIn
from brokerless.spark_collector.collector.frames import frames_of
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus, InputThread

_WAIT_S = 0.2


class MulticastInput:
    """One group (or lines A and B). What could not be repaired is noted in the spool, where they are missing."""

    def __init__(self, config: MulticastIn) -> None:
        self.config = config
        self.status = InputStatus(f"{config.session or 'any session'} at {config.groups[0]}", "multicast")
        self._thread = InputThread(self.status, self._listen)

    def start(self, sink: CollectorInterface) -> None:
        """Join; a publisher need not be there yet."""
        self._thread.start(sink)

    def stop(self) -> None:
        """Leave after the batch that is being appended."""
        self._thread.stop()

    def _subscriber(self, sink: CollectorInterface) -> Subscriber:
        """One that begins where the spool ends."""
        name = "".join(c if c.isalnum() else "-" for c in self.config.groups[0])
        path = os.path.join(sink.path, f"multicast-{name}.cursor")
        known = sink.positions()
        Cursor(path).save(known)
        return Subscriber(
            self.config.groups,
            self.config.session or None,
            interface=self.config.interface,
            request_servers=self.config.request_servers or None,
            start="cursor" if known or self.config.start == "oldest" else "live",
            cursor=path,
            commit_every_s=1e9,  # never by itself: the spool is the memory
        )

    def _listen(self, sink: CollectorInterface) -> None:
        stopping = self._thread.stopping
        complete = self.config.start == "oldest"
        with self._subscriber(sink) as subscriber:
            while not stopping.is_set():
                for item in subscriber.items(timeout=_WAIT_S):
                    self.status.connected = True
                    if isinstance(item, Lost):
                        sink.lost("multicast", item)
                    else:
                        self.status.events += sink.accept(
                            "multicast", list(frames_of(item.events)), complete=complete
                        )
                    if stopping.is_set():
                        break
                self._report_complete(sink, subscriber)

    def _report_complete(self, sink: CollectorInterface, subscriber: Subscriber) -> None:
        """When the stream was heard to the end, and nothing of it is lost, what was received is what was sent."""
        account = subscriber.ledger.account()
        self.status.behind = account.pending
        if account.pending or account.lost:
            return
        for source, position in list(subscriber.positions.items()):
            sink.all_received("multicast", source, position.epoch, position.offset)
