"""An input that subscribes to a publisher of `brokerless.direct`."""

import os
import time
from collections.abc import Iterator

from brokerless.core import Cursor, Frame
from brokerless.core.topics import TopicFilter
from brokerless.direct import Subscriber
from brokerless.spark_collector.collector.config import DirectIn
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus, InputThread

# How long to wait for events before looking at the clock: bounds how late sent counts and commits are.
_WAIT_S = 0.2
_COMMIT_EVERY_S = 1.0
# One append holds everything that has arrived: accepting a frame of ten events took 0.36 ms alone and 0.08 ms
# together with others.
_APPEND_BYTES = 512 * 1024
_ASK_TIMEOUT_S = 1.0


class DirectInput:
    """One publisher, or all of a `discover:PATTERN`, in a thread of its own: one that is away holds up no other."""

    def __init__(self, address: str, config: DirectIn) -> None:
        self.config = config
        self.address = address
        self.status = InputStatus(address, "direct")
        self._thread = InputThread(self.status, self._follow)

    def start(self, sink: CollectorInterface) -> None:
        """Start; the publisher need not be there yet."""
        self._thread.start(sink)

    def stop(self) -> None:
        """Stop after the batch that is being appended."""
        self._thread.stop()

    def _subscriber(self, sink: CollectorInterface) -> Subscriber:
        """A subscriber that begins where the spool ends.

        The positions are written from the spool, not remembered.
        """
        name = "".join(c if c.isalnum() else "-" for c in self.address)
        path = os.path.join(sink.path, f"direct-{name}.cursor")
        known = sink.positions()
        Cursor(path).save(known, mirrors=Cursor(path).load().mirrors)
        return Subscriber(
            self.address,
            topics=self.config.topics,
            start="cursor" if known or self.config.start == "oldest" else "live",
            cursor=path,
            durable=self.config.durable,
            on_loss=lambda lost: sink.lost("direct", lost),
            commit_every_s=1e9,  # never by itself: committed below, after the spool is synced
        )

    def _follow(self, sink: CollectorInterface) -> None:
        stopping = self._thread.stopping
        complete = self.config.start == "oldest"
        now = time.monotonic()
        commit_at, ask_at = now + _COMMIT_EVERY_S, now + self.config.sent_counts_every_s
        with self._subscriber(sink) as subscriber:
            while not stopping.is_set():
                frames = self._gather(subscriber)
                if frames:
                    self.status.events += sink.accept("direct", frames, complete=complete)
                self.status.connected = subscriber.connected > 0
                now = time.monotonic()
                if now >= commit_at:
                    sink.flush()
                    subscriber.commit()
                    commit_at = now + _COMMIT_EVERY_S
                if now >= ask_at and subscriber.connected:
                    self._ask(sink, subscriber)
                    ask_at = now + self.config.sent_counts_every_s
            sink.flush()
            if subscriber.connected:
                self._ask(sink, subscriber)

    def _gather(self, subscriber: Subscriber) -> list[Frame]:
        """Wait for a batch, and take what has arrived with it, for one append.

        The subscriber considers a batch processed when the next is taken, which is before it is in the spool.
        Nothing depends on that: positions are committed after the sync, and a failure goes back to the spool.
        """
        frames: list[Frame] = []
        size = 0
        wanted = TopicFilter(subscriber.topics)
        batch = next(subscriber.batches(timeout=_WAIT_S), None)
        while batch is not None:
            frames += _matching(batch.frame, wanted)
            size += len(batch.frame.raw)
            batch = next(subscriber.batches(timeout=0), None) if size < _APPEND_BYTES else None
        return frames

    def _ask(self, sink: CollectorInterface, subscriber: Subscriber) -> None:
        """Ask the publisher what it sent, and record the answer once everything that it covers was received."""
        if not subscriber.reconcile(timeout=_ASK_TIMEOUT_S):
            return
        ledger = subscriber.ledger
        counts: dict[tuple[str, int], dict[str, int]] = {}
        behind = 0
        for source, epoch, topic in ledger.streams():
            missing = ledger.missing(source, epoch, topic)
            behind += missing.total
            sent = max(ledger.next(source, epoch, topic) or 0, missing.last + 1 if missing else 0)
            counts.setdefault((source, epoch), {})[topic] = sent
        self.status.behind = behind
        for (source, epoch), seqs in counts.items():
            position = subscriber.positions.get(source)
            if position is not None and position.epoch == epoch:
                sink.sent_counts("direct", source, epoch, position.offset, seqs)


def _matching(frame: Frame, wanted: TopicFilter) -> Iterator[Frame]:
    """The frame, or the runs of consecutive events in it whose topic is wanted."""
    if wanted.everything or all(wanted(topic) for topic, _, _ in frame.topics):
        yield frame
        return
    first = -1
    for offset, topic in enumerate(frame.topic_column(), frame.first_offset):
        is_wanted = wanted(topic)
        if is_wanted and first < 0:
            first = offset
        elif not is_wanted and first >= 0:
            yield frame.slice(first, offset)
            first = -1
    if first >= 0:
        yield frame.slice(first, frame.next_offset)
