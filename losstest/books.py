"""From witnesses to books: what the producer did, and what one subscription got. Pure."""

from collections.abc import Iterable, Iterator

import msgspec

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.evidence import ConsumerLog, Evidence
from brokerless.losstest.witness import NO_POSITION, Kind, Record

SUSPECT_NS = 150_000_000  # what a client or daemon here may hold back: a little more than a flush interval


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


def got(
    name: str,
    logs: list[ConsumerLog],
    books: Sent,
    swallowed: IntervalSet,
    bucket: int = 0,
    suspects: frozenset[int] = frozenset(),
) -> Got:
    """Merge the consumers of one subscription; deliveries are taken in the order of their time."""
    result = Got(name=name)
    seen_max: dict[tuple[int, int], int] = {}
    counter = _Counter(books, swallowed, suspects, bucket) if bucket else None
    merged = sorted(((r.t, log, r) for log in logs for r in log.records), key=lambda item: item[0])
    for _, log, r in merged:
        if r.kind == Kind.COUNTED and counter is not None:
            _count(result, counter, r)
            continue
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


class _Counter:
    """Gives counted events their numbers back.

    Increments have no identity: of a bucket only the number that arrived is known. Those that the relay is
    known to have swallowed are taken to be the missing ones, then those of which nobody knows whether they were sent,
    then those accepted just before a process died, then the last of the bucket.
    """

    def __init__(self, books: Sent, swallowed: IntervalSet, suspects: frozenset[int], bucket: int) -> None:
        self._books, self._swallowed, self._bucket = books, swallowed, bucket
        self._suspects = suspects
        self._left: dict[int, Iterator[int]] = {}

    def take(self, first: int, count: int) -> tuple[list[int], int]:
        """The next `count` numbers of the bucket, and how many are more than it ever had."""
        numbers = range(first, first + self._bucket)
        if first not in self._left:
            accepted = [n for n in numbers if n in self._books.accepted]
            unsure = [n for n in numbers if n in self._books.offered and n not in self._books.accepted]
            passed = [n for n in accepted if n not in self._swallowed]
            dropped = [n for n in accepted if n in self._swallowed]
            passed.sort(key=lambda n: n in self._suspects)
            self._left[first] = iter(passed + unsure + dropped)
        taken = [n for _, n in zip(range(count), self._left[first], strict=False)]
        return taken, count - len(taken)

    def known(self, first: int) -> bool:
        """True if anything of the bucket was ever offered."""
        return any(n in self._books.offered for n in range(first, first + self._bucket))


def _count(result: Got, counter: _Counter, r: Record) -> None:
    taken, surplus = counter.take(r.n, r.count)
    for n in taken:
        result.delivered[n] = r.t
        result.committed[n] = r.t
    if taken:
        result.times.append(r.t)
    if counter.known(r.n):
        result.duplicates += surplus
    else:
        result.unexpected += surplus


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
    deaths = [note["t"] for note in evidence.world if note["what"] in ("down", "producer-down")]
    suspects = frozenset(
        n for n, t in books.accepted.items() if any(death - SUSPECT_NS < t <= death for death in deaths)
    )
    names = dict.fromkeys(cell.subscription(i) for i in range(cell.consumers))
    subscriptions = []
    for name in names:
        logs = [log for log in evidence.consumers if log.subscription == name]
        subscriptions.append(got(name, logs, books, swallowed, cell.traits.counts, suspects))
    return books, subscriptions, swallowed
