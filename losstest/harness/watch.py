"""What the supervisor sees of a run while it goes on: it follows the witnesses that the workers write."""

import time
from collections.abc import Iterable
from pathlib import Path

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.evidence.witness import Kind, Tail
from brokerless.losstest.model import Cell

NS = 1_000_000_000


class Watch:
    """Follows all witnesses of one run."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        self._directory, self._cell = directory, cell
        self._tails: dict[str, Tail] = {}
        self.offered = 0
        self.next = 0  # the first event number that was never offered
        self.accepted = IntervalSet()
        self.committed: dict[str, IntervalSet] = {}
        self.delivered = 0
        self._sending: set[str] = set()  # producers that have not offered everything
        self.pending: dict[str, int] = {}  # process → what it says is still to come
        self.ready: set[str] = set()
        self.probed: set[str] = set()
        self.idle: dict[str, int] = {}  # consumer → when it last said that there was nothing
        self.moved = time.monotonic_ns()  # when anything was last offered or delivered

    def follow(self, name: str) -> None:
        """Follow the witness of a new process."""
        self._tails[name] = Tail(self._directory / f"{name}.wit")
        if name.startswith("producer"):
            earlier = name.partition(".")[0] + "."
            self._sending = {one for one in self._sending if not one.startswith(earlier)} | {name}

    @property
    def done(self) -> bool:
        """True if every producer has offered everything."""
        return not self._sending

    def poll(self) -> None:
        """Read what is new."""
        for name, tail in self._tails.items():
            records = tail.poll()
            if records:
                self._take(name, records)

    def _take(self, name: str, records: list[tuple[int, ...]]) -> None:
        offered, delivered, moved = 0, 0, self.moved
        committed = None
        if name.startswith("consumer"):
            subscription = self._cell.subscription(int(name.partition("-")[2].partition(".")[0]))
            committed = self.committed.setdefault(subscription, IntervalSet())
        for kind, _, _, count, n, t, _, _, _ in records:
            if kind == Kind.OFFERED:
                offered += 1
                moved, self.next = t, max(self.next, n + 1)
            elif kind == Kind.ACCEPTED:
                self.accepted.add(n, n)
            elif kind == Kind.DELIVERED:
                delivered += count
                moved = t
            elif kind == Kind.COMMITTED and committed is not None:
                committed.add(n, n + count - 1)
            elif kind not in (Kind.ACKED, Kind.REJECTED):
                self._take_rare(name, kind, count, n, t)
                moved = max(moved, self.moved)
        self.offered += offered
        self.delivered += delivered
        self.moved = moved

    def _take_rare(self, name: str, kind: int, count: int, n: int, t: int) -> None:
        if kind == Kind.READY:
            self.ready.add(name)
            self.moved = t
        elif kind == Kind.PROBE:
            self.probed.add(name)
        elif kind == Kind.IDLE:
            self.idle[name] = t
        elif kind == Kind.DONE:
            self._sending.discard(name)
        elif kind == Kind.PENDING:
            self.pending[name] = n

    @property
    def committed_total(self) -> int:
        """Events that were committed, each once for each subscription."""
        return sum(committed.total for committed in self.committed.values())

    def close(self) -> None:
        """Stop following."""
        for tail in self._tails.values():
            tail.close()

    @property
    def quiet_s(self) -> float:
        """How long nothing has moved."""
        return (time.monotonic_ns() - self.moved) / NS

    def at_rest(self, quiet_s: float, present: Iterable[str]) -> bool:
        """True if nothing has moved for so long, none of these processes says that more will come, and every
        consumer has looked and found nothing near the end."""
        looked = self.moved + 0.7 * quiet_s * NS
        present = list(present)
        consumers = [name for name in present if name.startswith("consumer")]
        return (
            self.quiet_s > quiet_s
            and not any(self.pending.get(name) for name in present)
            and all(self.idle.get(name, 0) > looked for name in consumers)
        )

    def owed(self) -> int:
        """Accepted events that have not been committed, over all subscriptions.

        What relay or seeded drop dropped counts as well: a transport that repairs will still bring it.
        """
        accepted = self.accepted.total
        names = {self._cell.subscription(i) for i in range(self._cell.consumers)}
        missing = 0
        for name in names:
            have = self.committed.get(name, IntervalSet())
            both = sum(
                last - first + 1 - sum(b - a + 1 for a, b in have.missing(first, last))
                for first, last in self.accepted
            )
            missing += accepted - both
        return missing
