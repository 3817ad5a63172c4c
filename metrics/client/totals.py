"""What a client remembers of its counters, to be reported in heartbeats. Pure: no sockets, no clock."""

from collections import Counter
from collections.abc import Iterable

from brokerless.metrics.parser import Number, series_key
from brokerless.metrics.parser import number as parse_number
from brokerless.metrics.sequence_lines import total_line

# How often a total is reported after its last change: with a loss of 20 % all three are lost once in 125 times.
REPORTS = 3
# Distinct lines collected before they are added up; bounds what values that never repeat can cost.
MAX_LINES = 10_000


class Totals:
    """Cumulative totals per counter, by the name that the daemon will give it.

    What has changed is reported first, and some of the others in turn, because a counter that is quiet may have
    been counted in datagrams that were lost, and so may all that reported it.
    """

    def __init__(self, max_counters: int) -> None:
        self._max_counters = max_counters
        self._lines: Counter[str] = Counter()
        self._totals: dict[str, Number] = {}
        # Name and tags as they are on the wire.
        self._wire: dict[str, tuple[str, str]] = {}
        # Counters to report, longest waiting first, with how often still.
        self._due: dict[str, int] = {}
        # All of them, and whose turn it is.
        self._order: list[str] = []
        self._turn = 0
        self.unreported = 0

    @property
    def known(self) -> int:
        """How many counters there are; one more than can be reported where some cannot, so that nobody has all."""
        self.settle()
        return len(self._totals) + bool(self.unreported)

    def add(self, lines: list[str]) -> None:
        """Counter lines that are going into a datagram now."""
        self._lines.update(lines)
        if len(self._lines) > MAX_LINES:
            self.settle()

    def settle(self) -> None:
        """Add up the lines collected so far."""
        lines, self._lines = self._lines, Counter()
        totals = self._totals
        for line, times in lines.items():
            for part in line.split("\n"):
                found = counter_line(part)
                if found is None:
                    continue
                name, tags, amount = found
                # Tags in another order, or names that are cleaned to the same, are the same counter.
                series = series_key(name, tags)
                if series in totals:
                    totals[series] += amount * times
                elif series and len(totals) < self._max_counters:
                    totals[series] = amount * times
                    self._wire[series] = (name, tags)
                    self._order.append(series)
                else:
                    self.unreported += bool(series)
                    continue
                # To the end of the queue, unless it waits already: then it keeps its place.
                self._due[series] = REPORTS

    def report(self, client: str, room: int, *, changed: int, in_turn: int) -> list[list[str]]:
        """Lines for datagrams of `room` bytes: up to `changed` of what is due, up to `in_turn` of the others."""
        self.settle()
        page = _Pages(room)
        reported: set[str] = set()
        for series in list(self._due):
            if not page.add(self._line(client, series), changed):
                break
            reported.add(series)
            left = self._due.pop(series) - 1
            if left:
                self._due[series] = left
        limit = len(page.chunks) + in_turn
        for series in self._next_in_turn():
            if series not in reported and not page.add(self._line(client, series), limit):
                break
            self._turn += 1
        return page.chunks

    def _next_in_turn(self) -> Iterable[str]:
        order = self._order
        for _ in range(len(order)):
            self._turn %= len(order)
            yield order[self._turn]

    def _line(self, client: str, series: str) -> str:
        return total_line(client, *self._wire[series], self._totals[series])

    def report_all(self, client: str, room: int) -> list[list[str]]:
        """Lines for datagrams of `room` bytes with every total, for a client that is closing."""
        self.settle()
        page = _Pages(room)
        for series in self._totals:
            page.add(self._line(client, series), len(self._totals))
        return page.chunks


class _Pages:
    """Lines, divided into datagrams of `room` bytes."""

    def __init__(self, room: int) -> None:
        self.chunks: list[list[str]] = []
        self._room = room
        self._used = room

    def add(self, line: str, limit: int) -> bool:
        """Put a line on; False if it would need more than `limit` datagrams."""
        size = 1 + (len(line) if line.isascii() else len(line.encode("utf-8", "replace")))
        if self._used + size > self._room:
            if len(self.chunks) >= limit:
                return False
            self.chunks.append([])
            self._used = 0
        self.chunks[-1].append(line)
        self._used += size
        return True


def counter_line(line: str) -> tuple[str, str, Number] | None:
    """(name, tags, amount) of `name:value|c[|@rate][|#tags]`; None if a daemon would not take it."""
    name, _, rest = line.partition(":")
    value, _, fields = rest.partition("|c")
    rate, _, tags = fields.partition("|#")
    number = parse_number(value)
    if number is None:
        return None
    if rate:
        share = parse_number(rate[2:])
        if not share:
            return None
        number *= 1 / share
    return name, tags, number
