"""An input that follows a journal which another process writes."""

import os
import time
from collections.abc import Callable

from brokerless.core import JournalReader, Lost, Reason
from brokerless.core.errors import Evicted
from brokerless.spark_collector.collector import Collector, InputStatus
from brokerless.spark_collector.config import JournalIn
from brokerless.spark_collector.inputs.runner import Runner

# Long enough that an idle input costs nothing, short enough that stopping is prompt.
_WAIT_S = 0.2
_READ_BYTES = 4 * 1024 * 1024


class JournalInput:
    """Reads from where the spool ends; needs no cursor of its own, because the spool knows what it has."""

    def __init__(self, config: JournalIn, on_durable: Callable[[int], None] | None = None) -> None:
        """`on_durable(offset)` is called when everything before that offset is safe in the spool."""
        self.config = config
        self._on_durable = on_durable
        self._at = -1
        self._end = -1
        self.status = InputStatus(config.path, config.transport)
        self._runner = Runner(self.status, self._follow)

    def start(self, collector: Collector) -> None:
        """Start following; a journal that is not there yet is waited for."""
        self._runner.start(collector)

    def stop(self) -> None:
        """Stop following."""
        self._runner.stop()

    def finish(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything that is in the journal now is in the spool; False if that took too long."""
        with JournalReader(self.config.path) as reader:
            self._end = reader.next
        deadline = time.monotonic() + timeout_s
        while self._at < self._end and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._at >= self._end

    def _follow(self, collector: Collector) -> None:
        stopping = self._runner.stopping
        while not os.path.exists(os.path.join(self.config.path, "meta.json")):
            self.status.error = "there is no journal yet"
            if stopping.wait(_WAIT_S):
                return
        with JournalReader(self.config.path) as reader:
            self.status.error = ""
            self.status.connected = True
            at = collector.books.resume(reader.source, list(reader.meta.epochs), reader.next)
            said = -1
            while not stopping.is_set():
                self._at = at
                self.status.behind = max(0, reader.next - at)
                if reader.next <= at:
                    if said != at:
                        self._say(collector, reader, at)
                        said = at
                    reader.wait(at, _WAIT_S)
                    continue
                at = self._read(collector, reader, at)

    def _read(self, collector: Collector, reader: JournalReader, at: int) -> int:
        transport = self.config.transport
        try:
            chunk = reader.read(at, max_bytes=_READ_BYTES)
        except Evicted as gone:
            self._lose(collector, reader, at, gone.oldest - 1, Reason.EVICTED)
            return gone.oldest
        for first, last in chunk.gone:
            self._lose(collector, reader, first, last, Reason.UNATTRIBUTED)
        if chunk.frames:
            done = max(at, chunk.next)
            ack = (lambda: self._durable(done)) if self._on_durable is not None else None
            self.status.events += collector.accept(transport, chunk.frames, ack)
        return max(at, chunk.next)

    def _durable(self, offset: int) -> None:
        assert self._on_durable is not None
        self._on_durable(offset)

    def _lose(
        self, collector: Collector, reader: JournalReader, first: int, last: int, reason: Reason
    ) -> None:
        epochs = [(e, begin) for e, begin in reader.meta.epochs if begin <= last] or [(reader.epoch, 0)]
        for n, (epoch, begin) in enumerate(epochs):
            stop = epochs[n + 1][1] - 1 if n + 1 < len(epochs) else last
            a, b = max(first, begin), min(last, stop)
            if b >= a:
                collector.lost(self.config.transport, Lost(reader.source, epoch, None, a, b, reason))

    def _say(self, collector: Collector, reader: JournalReader, at: int) -> None:
        """Everything was read: what the writer says it sent is now comparable."""
        seqs = reader.sent()
        if reader.next == at:
            collector.word(self.config.transport, reader.source, reader.epoch, at, seqs)
