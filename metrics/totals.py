"""What a client remembers of its counters, to be told in heartbeats. Pure: no sockets, no clock."""

from brokerless.metrics.audit import total_line
from brokerless.metrics.counting import count_into
from brokerless.metrics.parser import Number
from brokerless.metrics.parser import number as parse_number

# How often a total is told after its last change: with a loss of 20 % all three are lost once in 125 times.
TELL = 3
# Distinct lines collected before they are added up; bounds what values that never repeat can cost.
MAX_LINES = 10_000


class Totals:
    """Cumulative totals per counter (name and tags as they are on the wire)."""

    def __init__(self, max_counters: int) -> None:
        self._max_counters = max_counters
        self._lines: dict[str, int] = {}
        self._totals: dict[str, Number] = {}
        # Counters to tell, longest waiting first, with how often still.
        self._due: dict[str, int] = {}
        self.untold = 0

    def add(self, lines: list[str]) -> None:
        """Counter lines that are going into a datagram now."""
        count_into(self._lines, lines)
        if len(self._lines) > MAX_LINES:
            self.settle()

    def settle(self) -> None:
        """Add up the lines collected so far."""
        lines, self._lines = self._lines, {}
        totals = self._totals
        for line, times in lines.items():
            found = counter_line(line)
            if found is None:
                continue
            key, amount = found
            if key in totals:
                totals[key] += amount * times
            elif len(totals) < self._max_counters:
                totals[key] = amount * times
            else:
                self.untold += 1
                continue
            # To the end of the queue, unless it waits already: then it keeps its place.
            self._due[key] = TELL

    def tell(self, client: str, room: int, datagrams: int) -> list[list[str]]:
        """Lines for up to `datagrams` datagrams of `room` bytes; what was told often enough drops out."""
        self.settle()
        chunks: list[list[str]] = []
        used = room
        for key in list(self._due):
            name, _, tags = key.partition("|#")
            line = total_line(client, name, tags, self._totals[key])
            size = len(line) + 1
            if used + size > room:
                if len(chunks) == datagrams:
                    break
                chunks.append([])
                used = 0
            chunks[-1].append(line)
            used += size
            left = self._due.pop(key) - 1
            if left:
                self._due[key] = left
        return chunks

    def tell_all(self) -> None:
        """Make every total due, for the last words of a client."""
        self.settle()
        for key in self._totals:
            self._due.setdefault(key, 1)

    @property
    def waiting(self) -> int:
        """Totals that are due."""
        return len(self._due) + bool(self._lines)


def counter_line(line: str) -> tuple[str, Number] | None:
    """(name with tags, amount) of `name:value|c[|@rate][|#tags]`; None if a daemon would not take it."""
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
    return (f"{name}|#{tags}" if tags else name), number
