"""An input that follows a journal which another process writes."""

import os
import time
from collections.abc import Callable

from brokerless.core import JournalReader, Lost, Reason
from brokerless.core.errors import Evicted
from brokerless.spark_collector.collector.config import JournalIn
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus, InputThread

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
        self._thread = InputThread(self.status, self._follow)

    def start(self, sink: CollectorInterface) -> None:
        """Start following; a journal that is not there yet is waited for."""
        self._thread.start(sink)

    def stop(self) -> None:
        """Stop following."""
        self._thread.stop()

    def finish(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything that is in the journal now is in the spool; False if that took too long."""
        with JournalReader(self.config.path) as reader:
            self._end = reader.next
        deadline = time.monotonic() + timeout_s
        while self._at < self._end and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._at >= self._end

    def _follow(self, sink: CollectorInterface) -> None:
        stopping = self._thread.stopping
        while not os.path.exists(os.path.join(self.config.path, "meta.json")):
            self.status.error = "there is no journal yet"
            if stopping.wait(_WAIT_S):
                return
        with JournalReader(self.config.path) as reader:
            self.status.error = ""
            self.status.connected = True
            at = sink.resume(reader.source, list(reader.meta.epochs), reader.next)
            reported = -1
            while not stopping.is_set():
                self._at = at
                self.status.behind = max(0, reader.next - at)
                if reader.next <= at:
                    if reported != at:
                        self._report(sink, reader, at)
                        reported = at
                    reader.wait(at, _WAIT_S)
                    continue
                at = self._read(sink, reader, at)

    def _read(self, sink: CollectorInterface, reader: JournalReader, at: int) -> int:
        transport = self.config.transport
        try:
            chunk = reader.read(at, max_bytes=_READ_BYTES)
        except Evicted as gone:
            self._lose(sink, reader, at, gone.oldest - 1, Reason.EVICTED)
            return gone.oldest
        for first, last in chunk.gone:
            self._lose(sink, reader, first, last, Reason.UNATTRIBUTED)
        if chunk.frames:
            done = max(at, chunk.next)
            ack = (lambda: self._durable(done)) if self._on_durable is not None else None
            self.status.events += sink.accept(transport, chunk.frames, ack, complete=True)
        return max(at, chunk.next)

    def _durable(self, offset: int) -> None:
        assert self._on_durable is not None
        self._on_durable(offset)

    def _lose(
        self, sink: CollectorInterface, reader: JournalReader, first: int, last: int, reason: Reason
    ) -> None:
        epochs = [(e, begin) for e, begin in reader.meta.epochs if begin <= last] or [(reader.epoch, 0)]
        for n, (epoch, begin) in enumerate(epochs):
            stop = epochs[n + 1][1] - 1 if n + 1 < len(epochs) else last
            a, b = max(first, begin), min(last, stop)
            if b >= a:
                sink.lost(self.config.transport, Lost(reader.source, epoch, None, a, b, reason))

    def _report(self, sink: CollectorInterface, reader: JournalReader, at: int) -> None:
        """Record what the writer says it sent: everything of it was read."""
        seqs = reader.sent()
        if reader.next == at:
            sink.sent_counts(self.config.transport, reader.source, reader.epoch, at, seqs)
