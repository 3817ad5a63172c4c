"""The fast path: datagrams become counts of identical raw lines, and each distinct line is parsed once.

Most StatsD traffic repeats the same few thousand lines (`requests:1|c`), so splitting and counting happen in
C: with our own module a line costs some 20 nanoseconds, with Python's dict about 100. What cannot be counted
is taken out as soon as it is new to the counts: timers (values differ each time) are kept as numbers per timer;
gauges, events and checks, where order matters, go line by line into a list in the order of arrival. Pure: no
sockets, no clock.
"""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import count, islice

import msgspec

from brokerless.metrics.limits import PORTION
from brokerless.metrics.speed import speed

# How many whole datagrams are kept for the variance between datagrams: 256 give a bound that is right to
# about 4 % of its width, and are 360 KB.
MAX_SAMPLE = 256
_DIGITS = b"0123456789."
_PLAIN = re.compile(rb"[^:\n]*:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?\|[a-z]+")
_NUMBERS = msgspec.json.Decoder(list[float])
TYPICAL_LINE = 40
# As in the C module: longer numbers are left to the parser, which refuses what is too large.
MAX_DIGITS = 40
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

    __slots__ = ("_main_timer", "counts", "timers")

    def __init__(self, ordered: list[bytes]) -> None:
        super().__init__(ordered)
        self.counts: Counter[bytes] = Counter()
        self.timers: dict[bytes, defaultdict[bytes, array[float]]] = {}
        # The kind of timer of which there were many in the last batch: taken out before counting.
        self._main_timer = b""

    @property
    def distinct(self) -> int:
        return len(self.counts) + sum(map(len, self.timers.values()))

    def lines(self) -> Iterable[tuple[bytes, int]]:
        return ((line, times) for line, times in self.counts.items() if line)

    def timed(self) -> Iterable[tuple[bytes, bytes, list[float]]]:
        for kind, cells in self.timers.items():
            for name, values in cells.items():
                yield kind, name[1:], values.tolist()

    def _take(self, payloads: list[bytes]) -> None:
        text = b"\n".join(payloads)
        if self._main_timer:
            text = self._split_off(text, self._main_timer)
        counts = self.counts
        before = len(counts)
        lines = text.split(b"\n")
        counts.update(lines)
        grown = len(counts) - before
        if grown:
            # A dict keeps insertion order, so what is new since a moment ago is at its end.
            new = list(islice(reversed(counts), grown))
            new.reverse()
            self._take_out(new, lines)

    def _split_off(self, text: bytes, kind: bytes) -> bytes:
        """Take the plain timers of one kind out of a batch and return the rest of it.

        Split at `|ms` and a newline, every piece but the last ends in a timer, after any other lines.
        """
        *pieces, rest = (text + b"\n").split(b"|" + kind + b"\n")
        if not pieces or len(text) // len(pieces) > 8 * TYPICAL_LINE:
            self._main_timer = b""
            if not pieces:
                return text
        parted = [piece.rpartition(b"\n") for piece in pieces]
        if not self._take_timers([timer for _, _, timer in parted], kind):
            self._main_timer = b""
            return text
        others = [other for other, newline, _ in parted if newline]
        # The newline after the last line was added above.
        others.append(rest[:-1])
        return b"\n".join(others)

    def _take_out(self, new: list[bytes], lines: list[bytes]) -> None:
        """Of the lines that are new, timers and ordered ones leave the counts again."""
        counts = self.counts
        for kind in TIMER_KINDS:
            end = b"|" + kind
            plain = [line for line in new if line.endswith(end)]
            if not plain:
                continue
            taken = self._take_timers([line[: -len(end)] for line in plain], kind)
            if not taken:
                # One odd line must not make the others slow.
                plain = [line for line in plain if _PLAIN.fullmatch(line)]
                taken = bool(plain) and self._take_timers([line[: -len(end)] for line in plain], kind)
            if taken:
                again = sum(map(counts.pop, plain)) - len(plain)
                if again:
                    self._repeat(plain, lines, kind)
                if len(plain) * 8 > len(lines):
                    self._main_timer = kind
                if len(plain) == len(new):
                    return
        moved = {line for line in new if line in counts and _is_ordered(line)}
        if moved:
            # Duplicates within the batch keep their places: the list of lines is walked, not the counts.
            self.ordered += [line for line in lines if line in moved]
            for line in moved:
                del counts[line]

    def _repeat(self, plain: list[bytes], lines: list[bytes], kind: bytes) -> None:
        """Timer lines that came more than once in the batch: once was taken, here are the others."""
        wanted = set(plain)
        times = Counter(line for line in lines if line in wanted)
        for line, n in times.items():
            if n > 1:
                self._take_timers([line[: -len(kind) - 1]] * (n - 1), kind)

    def _take_timers(self, timers: list[bytes], kind: bytes) -> bool:
        """Take `name:digits` of all timers at once; False, with nothing taken, if one is anything else.

        Each name keeps a newline before it: it is what tells names from values, and stripping it would cost.
        """
        cells = (b"\n" + b"\n".join(timers)).replace(b"\n", b":\n").split(b":")
        names, values = cells[1::2], cells[2::2]
        # A newline begins every name and is nowhere else. So if no value has one, names and values alternate.
        if len(cells) != 2 * len(timers) + 1 or b"".join(values).translate(None, _DIGITS):
            return False
        if any(name.startswith((b"\n_e{", b"\n_sc|")) for name in set(names)):
            return False  # events and checks
        if max(map(len, values)) > MAX_DIGITS:
            return False
        try:
            # Nine times as fast as float(), and as exact.
            numbers = _NUMBERS.decode(b"[" + b",".join(values) + b"]")
        except msgspec.DecodeError:  # "1.2.3" or nothing, which are wrong, but also "5.", ".5" and "007"
            return False
        if len(numbers) != len(timers):  # one timer without a value
            return False
        by_name = self.timers.get(kind)
        if by_name is None:
            by_name = self.timers[kind] = defaultdict(_floats)
        for name, value in zip(names, numbers, strict=True):
            by_name[name].append(value)
        return True


def _floats() -> "array[float]":
    return array("d")


def _is_ordered(line: bytes) -> bool:
    """Gauges, events and checks; also a counter with such a tag, which then merely takes the slower way."""
    return b"|g" in line or line.startswith((b"_e{", b"_sc|"))
