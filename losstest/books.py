"""From witnesses to books: what the producer did, and what one subscription got. Pure."""

from collections.abc import Iterable

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.evidence import ConsumerLog, Evidence
from brokerless.losstest.witness import NO_POSITION, Kind, Record


class Sent(msgspec.Struct, kw_only=True):
    """The producer's side: event number → time."""

    offered: dict[int, int] = {}
    accepted: dict[int, int] = {}
    rejected: set[int] = set()
    positions: dict[tuple[int, int], int] = {}  # (epoch, position) of the transport → event number
    planned: int = 0
    start: int = 0  # intended time of event 0
    interval: int = 1  # ns between two intended times
    done: bool = False

    @property
    def unknown(self) -> set[int]:
        """Offered, neither accepted nor rejected."""
        return self.offered.keys() - self.accepted.keys() - self.rejected

    def intended(self, n: int) -> int:
        """When event `n` was meant to be sent."""
        return self.start + n * self.interval


def sent(producers: list[list[Record]]) -> Sent:
    """Merge the incarnations of the producer."""
    books = Sent()
    for records in producers:
        books.done = False
        for r in records:
            if r.kind == Kind.OFFERED:
                books.offered[r.n] = r.t
            elif r.kind == Kind.ACCEPTED:
                books.accepted[r.n] = r.t
                if r.position != NO_POSITION:
                    books.positions[r.epoch, r.position] = r.n
            elif r.kind == Kind.REJECTED:
                books.rejected.add(r.n)
            elif r.kind == Kind.START:
                books.planned, books.start, books.interval = r.n, r.t, max(1, r.position)
            elif r.kind == Kind.DONE:
                books.done = True
    return books


class Got(msgspec.Struct, kw_only=True):
    """One subscription's side. Times are those of the first occurrence."""

    name: str
    delivered: dict[int, int] = {}
    committed: dict[int, int] = {}
    acked: set[int] = set()
    times: list[int] = []  # every delivery, sorted
    duplicates: int = 0
    reordered: int = 0
    unexpected: int = 0


def got(name: str, logs: list[ConsumerLog], books: Sent) -> Got:
    """Merge the consumers of one subscription; deliveries are taken in the order of their time."""
    result = Got(name=name)
    seen_max: dict[tuple[int, int], int] = {}
    merged = sorted(((r.t, log, r) for log in logs for r in log.records), key=lambda item: item[0])
    for _, log, r in merged:
        if r.kind == Kind.UNEXPECTED:
            result.unexpected += r.count
            continue
        for n in range(r.n, r.n + r.count):
            if r.kind == Kind.DELIVERED:
                _deliver(result, books, n, r.t, seen_max, (log.index, log.incarnation))
            elif r.kind == Kind.COMMITTED:
                result.committed.setdefault(n, r.t)
            elif r.kind == Kind.ACKED:
                result.acked.add(n)
    return result


def _deliver(
    result: Got, books: Sent, n: int, t: int, seen_max: dict[tuple[int, int], int], who: tuple[int, int]
) -> None:
    result.times.append(t)
    if n not in books.offered:
        result.unexpected += 1
    elif n in result.delivered:
        result.duplicates += 1
    else:
        result.delivered[n] = t
        if n < seen_max.get(who, -1):
            result.reordered += 1
        else:
            seen_max[who] = n


def swallowed_numbers(links: Iterable[Record]) -> IntervalSet:
    """Every event that relay or sieve dropped."""
    numbers = IntervalSet()
    for r in links:
        if r.kind == Kind.SWALLOWED:
            numbers.add(r.n, r.n + r.count - 1)
    return numbers


def open_books(evidence: Evidence) -> tuple[Sent, list[Got], IntervalSet]:
    """The producer's books, one set of books per subscription, and what was swallowed on the way."""
    books = sent(evidence.producers)
    swallowed = swallowed_numbers(evidence.links)
    cell = evidence.cell
    names = dict.fromkeys(cell.subscription(i) for i in range(cell.consumers))
    subscriptions = []
    for name in names:
        logs = [log for log in evidence.consumers if log.subscription == name]
        subscriptions.append(got(name, logs, books))
    return books, subscriptions, swallowed
