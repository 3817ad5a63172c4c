"""The fast path: datagrams become counts of identical raw lines, and each distinct line is parsed once.

Most StatsD traffic repeats the same few thousand lines (`requests:1|c`), so splitting and counting happen in
C: with our own module a line costs some 10 nanoseconds, with Python's dict about 100. What cannot be counted
is taken out as soon as it is new to the counts: timers (values differ each time) are kept as numbers per timer;
gauges, events and checks, where order matters, go line by line into a list in the order of arrival. Pure: no
sockets, no clock.
"""

import re
from array import array
from collections.abc import Iterable
from itertools import count

from brokerless.metrics.limits import PORTION
from brokerless.metrics.speed import speed

# How many whole datagrams are kept for the variance between datagrams: 256 give a bound that is right to
# about 4 % of its width, and are 360 KB.
MAX_SAMPLE = 256
# A plain timer, as the C module takes it: no event, no number of more than 40 digits or with signs or exponents.
_TIMER = re.compile(
    rb"(?!_e\{|_sc\|)(?=.{,1024}\Z)([^:\n]*):(?=[0-9.]{,40}\|)((?:0|[1-9][0-9]*)(?:\.[0-9]+)?)\|(ms|h|d)",
    re.DOTALL,
)
TIMER_KINDS = (b"ms", b"h", b"d")


class LineCounts:
    """Lines of one origin (one client, or all that do not number their datagrams) in one window.

    `ordered` is a list shared by all counts, because gauges of different clients are ordered among each other too.
    """

    __slots__ = ("_stride", "datagrams", "moved", "ordered", "sample")

    def __init__(self, ordered: list[bytes]) -> None:
        self.ordered = ordered
        self.datagrams = 0
        # How many of these lines went to `ordered`.
        self.moved = 0
        self.sample: list[bytes] = []
        self._stride = 1

    def add(self, payloads: list[bytes]) -> None:
        """Take in the payloads of some datagrams, in order."""
        first = self.datagrams
        self.datagrams += len(payloads)
        self._keep_sample(payloads, first)
        before = len(self.ordered)
        self._take(payloads)
        self.moved += len(self.ordered) - before

    def _keep_sample(self, payloads: list[bytes], first: int) -> None:
        """Keep every `stride`th datagram; when there are too many, every second one and half as often."""
        sample = self.sample
        skip = -first % self._stride
        if skip < len(payloads):
            sample += payloads[skip :: self._stride]
            while len(sample) > MAX_SAMPLE:
                del sample[1::2]
                self._stride *= 2

    def _take(self, payloads: list[bytes]) -> None:
        raise NotImplementedError

    @property
    def distinct(self) -> int:
        """How many different lines and timers' names are held."""
        raise NotImplementedError

    def lines(self) -> Iterable[tuple[bytes, int]]:
        """Each line that is not empty, and how often it came."""
        raise NotImplementedError

    def timed(self) -> Iterable[tuple[bytes, bytes, list[float]]]:
        """Kind, name and values of each plain timer."""
        raise NotImplementedError


def new_line_counts(ordered: list[bytes]) -> LineCounts:
    """An empty LineCounts, by the C module if it is there."""
    return PureLineCounts(ordered) if speed is None else FastLineCounts(ordered)


class FastLineCounts(LineCounts):
    """By the C module."""

    __slots__ = ("_tally",)

    def __init__(self, ordered: list[bytes]) -> None:
        super().__init__(ordered)
        assert speed is not None
        self._tally = speed.Tally()

    def _take(self, payloads: list[bytes]) -> None:
        self._tally.add(payloads, self.ordered)

    @property
    def distinct(self) -> int:
        return len(self._tally)

    def lines(self) -> Iterable[tuple[bytes, int]]:
        # In portions, because the thread that receives waits for the interpreter meanwhile.
        for at in count(0, PORTION):
            some = self._tally.lines(at, PORTION)
            if not some:
                return
            yield from some

    def timed(self) -> Iterable[tuple[bytes, bytes, list[float]]]:
        for index, kind in enumerate(TIMER_KINDS):
            for at in count():
                found = self._tally.timer(index, at)
                if found is None:
                    break
                yield kind, *found


class PureLineCounts(LineCounts):
    """With what Python has: `counts` maps each line to how often it came, `timers` each kind of plain timer to its
    names and their values."""

    __slots__ = ("counts", "timers")

    def __init__(self, ordered: list[bytes]) -> None:
        super().__init__(ordered)
        self.counts: dict[bytes, int] = {}
        self.timers: dict[bytes, dict[bytes, array[float]]] = {}

    @property
    def distinct(self) -> int:
        return len(self.counts) + sum(map(len, self.timers.values()))

    def lines(self) -> Iterable[tuple[bytes, int]]:
        return self.counts.items()

    def timed(self) -> Iterable[tuple[bytes, bytes, list[float]]]:
        for kind, by_name in self.timers.items():
            for name, values in by_name.items():
                yield kind, name, values.tolist()

    def _take(self, payloads: list[bytes]) -> None:
        counts = self.counts
        for line in b"\n".join(payloads).split(b"\n"):
            if line in counts:
                counts[line] += 1
            elif timer := _TIMER.fullmatch(line):
                name, value, kind = timer.groups()
                self.timers.setdefault(kind, {}).setdefault(name, array("d")).append(float(value))
            elif _is_ordered(line):
                self.ordered.append(line)
            elif line:
                counts[line] = 1


def _is_ordered(line: bytes) -> bool:
    """Gauges, events and checks; also a counter with such a tag, which then merely takes the slower way."""
    return b"|g" in line or line.startswith((b"_e{", b"_sc|"))
