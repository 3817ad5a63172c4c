"""What the supervisor sees of a run while it goes on: it follows the witnesses that the workers write."""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.evidence.reader import Columns, Tail
from brokerless.losstest.evidence.witness import Kind
from brokerless.losstest.model import Cell

NS = 1_000_000_000
# What shows that something is going on; a process says what is pending when that changes.
_MOVING = np.isin(np.arange(256), (Kind.OFFERED, Kind.DELIVERED, Kind.READY, Kind.PENDING))
# Kinds of which there are few: they are looked at one by one.
_RARE = np.isin(np.arange(256), (Kind.READY, Kind.PROBE, Kind.IDLE, Kind.DONE, Kind.PENDING))


class Watch:
    """Follows all witnesses of one run, in columns: to look at each record costs more than to write it."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        self._directory, self._cell = directory, cell
        self._tails: dict[str, Tail] = {}
        self.offered = 0
        self.next = 0  # the first event number that was never offered
        self.committed: dict[str, IntervalSet] = {}
        self.delivered = 0
        self._sending: set[str] = set()  # producers that have not offered everything
        self.pending: dict[str, int] = {}  # process → what it says is still to come
        self.ready: set[str] = set()
        self.probed: set[str] = set()
        self.idle: dict[str, int] = {}  # consumer → when it last said that there was nothing
        self.moved = time.monotonic_ns()  # when anything last happened
        self._accepted = 0

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
            if len(records):
                self._take(name, records)

    def _take(self, name: str, records: Columns) -> None:
        kind = records["kind"]
        offered = kind == Kind.OFFERED
        if offered.any():
            self.offered += int(np.count_nonzero(offered))
            self.next = max(self.next, int(records["n"][offered].max()) + 1)
        self._accepted += int(np.count_nonzero(kind == Kind.ACCEPTED))
        self.delivered += int(records["count"][kind == Kind.DELIVERED].sum())
        moved = records["t"][_MOVING[kind]]
        if len(moved):
            self.moved = max(self.moved, int(moved[-1]))
        committed = kind == Kind.COMMITTED
        if committed.any():
            self._commit(name, records[committed])
        for record in records[_RARE[kind]]:
            self._take_rare(name, int(record["kind"]), int(record["n"]), int(record["t"]))

    def _commit(self, name: str, records: Columns) -> None:
        subscription = self._cell.subscription(int(name.partition("-")[2].partition(".")[0]))
        known = self.committed.setdefault(subscription, IntervalSet())
        firsts = records["n"].astype(np.int64)
        lasts = firsts + records["count"] - 1
        breaks = np.flatnonzero(firsts[1:] != lasts[:-1] + 1)  # what is in a row is added at once
        begins, ends = firsts[np.append(0, breaks + 1)], lasts[np.append(breaks, len(lasts) - 1)]
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            known.add(first, last)

    def _take_rare(self, name: str, kind: int, n: int, t: int) -> None:
        if kind == Kind.READY:
            self.ready.add(name)
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

    @property
    def owed(self) -> bool:
        """True if fewer events were committed than accepted, over all subscriptions."""
        return self.committed_total < self._accepted * self._cell.subscriptions

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
