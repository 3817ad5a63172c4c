"""An input that listens to a MoldUDP64 group."""

import os

from brokerless.core import Cursor, Lost, Position
from brokerless.multicast import Subscriber
from brokerless.spark_collector.collector import Collector, InputStatus
from brokerless.spark_collector.config import MulticastIn
from brokerless.spark_collector.frames import frames_of
from brokerless.spark_collector.inputs.runner import Runner

_TURN_S = 0.2


class MulticastInput:
    """One group (or lines A and B). What could not be repaired is noted in the spool, in its place."""

    def __init__(self, config: MulticastIn) -> None:
        self.config = config
        self.status = InputStatus(f"{config.session or 'any session'} at {config.groups[0]}", "multicast")
        self._runner = Runner(self.status, self._listen)

    def start(self, collector: Collector) -> None:
        """Join; a publisher need not be there yet."""
        self._runner.start(collector)

    def stop(self) -> None:
        """Leave after the batch in hand."""
        self._runner.stop()

    def _subscriber(self, collector: Collector) -> Subscriber:
        """One that begins where the spool ends."""
        name = "".join(c if c.isalnum() else "-" for c in self.config.groups[0])
        path = os.path.join(collector.spool.path, f"multicast-{name}.cursor")
        known = {s: Position(*p) for s in collector.books.sources() if (p := collector.books.highest(s))}
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

    def _listen(self, collector: Collector) -> None:
        stopping = self._runner.stopping
        with self._subscriber(collector) as subscriber:
            while not stopping.is_set():
                for item in subscriber.items(timeout=_TURN_S):
                    self.status.connected = True
                    if isinstance(item, Lost):
                        collector.lost("multicast", item)
                    else:
                        self.status.events += collector.accept("multicast", list(frames_of(item.events)))
                    if stopping.is_set():
                        break
                self._speak(collector, subscriber)

    def _speak(self, collector: Collector, subscriber: Subscriber) -> None:
        """When the stream was heard to the end, and nothing of it is lost, what was received is what was sent."""
        account = subscriber.ledger.account()
        self.status.behind = account.pending
        if account.pending or account.lost:
            return
        for source, position in list(subscriber.positions.items()):
            collector.repeat_words("multicast", source, position.epoch, position.offset)
