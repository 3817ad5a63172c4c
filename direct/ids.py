"""Publishing with an id: an event of an id that was accepted before is not accepted again, also after a restart.

The id travels in the event's headers. So it is stored by the same write as the event, and neither can be there without
the other: what a publisher knows after a restart is read from its journal.
"""

import threading
from collections.abc import Mapping

from brokerless.core import Journal, Receipt
from brokerless.core.errors import BrokerlessError, InvalidEvent
from brokerless.core.journal.reader import chunks_from
from brokerless.core.journal.types import check_label
from brokerless.direct.counters import PublisherCounters

# The name can also be one of a CloudEvents attribute.
ID_HEADER = "publishid"
# Events among which an id is known again. With an id each they cost some 20 MB, and reading them a second at the start.
ID_WINDOW = 100_000


class PublishedIds:
    """The ids of the last `window` events of a journal."""

    def __init__(self, journal: Journal, window: int, counters: PublisherCounters) -> None:
        self._journal = journal
        self._window = window
        self._counters = counters
        self._known: dict[str, Receipt] = {}  # in the order of offsets
        self._read_until = -1  # every id before this offset is known; -1: nothing was read yet
        # Reentrant, because a signal handler may publish while its own thread does.
        self._lock = threading.RLock()
        self._staging = False

    def stage(
        self,
        id: str,
        topic: str,
        data: bytes,
        content_type: str,
        key: str,
        time: int,
        headers: Mapping[str, str] | None,
    ) -> Receipt:
        """`Journal.stage`, unless the id is known: then the receipt of the event that has it."""
        if not check_label("id", id):
            raise InvalidEvent("id", "is empty")
        with self._lock:
            if self._read_until < 0 or self._staging:
                self._read()  # the first time, or a signal handler raised before the last one was noted
            known = self._known.get(id)
            if known is not None and known.offset >= self._journal.next + self._journal.staged - self._window:
                self._counters.repeated_ids += 1
                return known
            self._staging = True
            named = {**(headers or {}), ID_HEADER: id}
            try:
                receipt = self._journal.stage(topic, data, content_type, key, time, named)
            except BrokerlessError:  # it was not accepted
                self._staging = False
                raise
            self._note(id, receipt)
            self._staging = False
            return receipt

    def _note(self, id: str, receipt: Receipt) -> None:
        self._known.pop(id, None)
        self._known[id] = receipt
        self._read_until = receipt.offset + 1
        while next(iter(self._known.values())).offset < receipt.offset - self._window:
            del self._known[next(iter(self._known))]

    def _read(self) -> None:
        """Find the ids in the journal that are not known yet."""
        journal = self._journal
        journal.flush()
        at = max(self._read_until, journal.next - self._window, journal.oldest)
        for start, chunk in chunks_from(journal, at):
            for frame in chunk.frames:
                if frame.columns().headers:
                    for event in frame.events():
                        if event.offset >= start and ID_HEADER in event.headers:
                            receipt = Receipt(event.epoch, event.offset, event.seq)
                            self._note(event.headers[ID_HEADER], receipt)
            at = chunk.next
        self._read_until = max(self._read_until, at, 0)
        self._staging = False
