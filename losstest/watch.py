"""What the supervisor sees of a run while it goes on: it follows the witnesses that the workers write."""

import time
from collections.abc import Iterable
from pathlib import Path

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.model import Cell
from brokerless.losstest.witness import Kind, Record, Tail

NS = 1_000_000_000


class Watch:
    """Follows all witnesses of one run."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        self._directory, self._cell = directory, cell
        self._tails: dict[str, Tail] = {}
        self.offered = 0
        self.next = 0  # the first event number that was never offered
        self.accepted = IntervalSet()
        self.swallowed = IntervalSet()
        self.committed: dict[str, IntervalSet] = {}
        self.counted = 0
        self.delivered = 0
        self.done = False
        self.pending = 0
        self.ready: set[str] = set()
        self.probed: set[str] = set()
        self.idle: dict[str, int] = {}  # consumer → when it last said that there was nothing
        self.moved = time.monotonic_ns()  # when anything was last offered or delivered

    def follow(self, name: str) -> None:
        """Follow the witness of a new process."""
        self._tails[name] = Tail(self._directory / f"{name}.wit")
        if name.startswith("producer"):
            self.done, self.pending = False, 0

    def poll(self) -> None:
        """Read what is new."""
        for name, tail in self._tails.items():
            for r in tail.poll():
                self._take(name, r)

    def _take(self, name: str, r: Record) -> None:
        if r.kind == Kind.DELIVERED:
            self.delivered += r.count
            self.moved = r.t
        elif r.kind == Kind.COMMITTED:
            index = int(name.partition("-")[2].partition(".")[0])
            subscription = self._cell.subscription(index)
            self.committed.setdefault(subscription, IntervalSet()).add(r.n, r.n + r.count - 1)
        elif r.kind == Kind.COUNTED:
            self.counted += r.count
            self.delivered += r.count
            self.moved = r.t
        elif r.kind == Kind.ACCEPTED:
            self.accepted.add(r.n, r.n)
        elif r.kind == Kind.OFFERED:
            self.offered += 1
            self.next = max(self.next, r.n + 1)
            self.moved = r.t
        elif r.kind == Kind.READY:
            self.ready.add(name)
            self.moved = r.t
        elif r.kind == Kind.PROBE:
            self.probed.add(name)
        elif r.kind == Kind.IDLE:
            self.idle[name] = r.t
        elif r.kind == Kind.SWALLOWED:
            self.swallowed.add(r.n, r.n)
        elif r.kind == Kind.DONE:
            self.done = True
        elif r.kind == Kind.PENDING:
            self.pending = r.n

    def close(self) -> None:
        """Stop following."""
        for tail in self._tails.values():
            tail.close()

    @property
    def quiet_s(self) -> float:
        """How long nothing has moved."""
        return (time.monotonic_ns() - self.moved) / NS

    def at_rest(self, quiet_s: float, consumers: Iterable[str]) -> bool:
        """True if nothing has moved for so long, and every consumer has looked and found nothing near the end."""
        looked = self.moved + 0.7 * quiet_s * NS
        return self.quiet_s > quiet_s and all(self.idle.get(name, 0) > looked for name in consumers)

    def owed(self) -> int:
        """Accepted events that have not been committed, over all subscriptions.

        What relay or sieve swallowed counts as well: a transport that repairs will still bring it.
        """
        accepted = self.accepted.total
        if self._cell.traits.counts:
            return max(0, accepted - self.counted)
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
