"""How many deliveries are pending, in all and per endpoint, as the writer thread counts them.

What a transaction changes counts only when it commits. With one process the numbers are exact; what other processes
add and finish is brought in by `correct`, about once a second.
"""

from collections.abc import Mapping

from brokerless.core.loss_log import LossLog
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.models import LOST

_LOSSES = frozenset(state.label for state in LOST)


class Backlog:
    """Numbers of pending deliveries, and counters that wait for a commit. Belongs to the writer thread."""

    def __init__(self, counters: DispatcherCounters, name: str) -> None:
        self.counters = counters
        self._name = name  # of the outbox, in the log
        self.total = 0
        self.by_endpoint: dict[str, int] = {}
        self._before: tuple[int, dict[str, int]] = (0, {})
        self._counted: dict[str, int] = {}
        self._since_read: dict[str, int] | None = None
        self.loss_log = LossLog("brokerless.webhooks.dispatcher", unit="deliveries")

    def replace(self, pending: Mapping[str, int]) -> None:
        """Start from what the rows say."""
        self.by_endpoint = dict(pending)
        self.total = sum(pending.values())
        self.commit()

    def begin_read(self) -> None:
        """A count over all rows begins on another connection: note what changes meanwhile."""
        self._since_read = {}

    def correct(self, pending: Mapping[str, int]) -> None:
        """The count is there: take it, with what was committed here since it began."""
        changes = self._since_read or {}
        self._since_read = None
        merged = dict(pending)
        for endpoint, amount in changes.items():
            merged[endpoint] = max(0, merged.get(endpoint, 0) + amount)
        self.replace(merged)

    @property
    def recounted(self) -> tuple[str, ...]:
        """Endpoints whose number the current transaction changed."""
        return tuple(self._before[1])

    def commit(self) -> None:
        """The transaction was committed: what it changed counts."""
        if self._since_read is not None:
            for endpoint, before in self._before[1].items():
                change = self.by_endpoint.get(endpoint, 0) - before
                self._since_read[endpoint] = self._since_read.get(endpoint, 0) + change
        self._before = (self.total, {})
        for name, amount in self._counted.items():
            setattr(self.counters, name, getattr(self.counters, name) + amount)
            if name in _LOSSES:
                self.loss_log.add(self._name, name, amount)
        self._counted = {}

    def roll_back(self) -> None:
        """The transaction was rolled back: forget what it changed."""
        self.total, before = self._before
        self.by_endpoint.update(before)
        self._before = (self.total, {})
        self._counted = {}

    def count(self, name: str, amount: int) -> None:
        """Add to a counter if the transaction commits."""
        if amount:
            self._counted[name] = self._counted.get(name, 0) + amount

    def add(self, endpoint: str, amount: int) -> None:
        """Change the number that is pending for an endpoint."""
        before = self.by_endpoint.get(endpoint, 0)
        self._before[1].setdefault(endpoint, before)
        self.by_endpoint[endpoint] = before + amount
        self.total += amount
