"""The fast path: datagrams become counts of identical raw lines, and each distinct line is parsed once.

Most StatsD traffic repeats the same few thousand lines (`requests:1|c`), so splitting and counting happen in
C and a line costs about a tenth of a microsecond. What cannot be counted is taken out as soon as it is new to
the bag: timers (values differ each time) are kept as numbers per timer; gauges, events and checks, where
order matters, go line by line into a list in the order of arrival. Pure: no sockets, no clock.
"""

from array import array
from itertools import islice

from brokerless.metrics.counting import count_into

# How many whole datagrams a bag keeps for the variance between datagrams: 256 give a bound that is right to
# about 4 % of its width, and are 360 KB.
MAX_SAMPLE = 256
_DIGITS = b"0123456789."
_TIMER_ENDS = (b"|ms", b"|h", b"|d")


class LineBag:
    """Lines of one origin (one client, or all that do not number their datagrams) in one window.

    `counts` maps each line to how often it came; `timers` maps (name, kind) of plain timers to their values;
    `ordered` is a list shared by all bags, because gauges of different clients are ordered among each other
    too.
    """

    __slots__ = ("_stride", "counts", "datagrams", "moved", "ordered", "sample", "timers")

    def __init__(self, ordered: list[bytes]) -> None:
        self.counts: dict[bytes, int] = {}
        self.timers: dict[tuple[bytes, bytes], array[float]] = {}
        self.ordered = ordered
        self.datagrams = 0
        # How many of this bag's lines went to `ordered`.
        self.moved = 0
        self.sample: list[bytes] = []
        self._stride = 1

    def __bool__(self) -> bool:
        return bool(self.datagrams or self.counts or self.timers)

    def add(self, payloads: list[bytes]) -> None:
        """Take in the payloads of some datagrams, in order."""
        first = self.datagrams
        self.datagrams += len(payloads)
        self._keep_sample(payloads, first)
        counts = self.counts
        before = len(counts)
        lines = b"\n".join(payloads).split(b"\n")
        count_into(counts, lines)
        grown = len(counts) - before
        if grown:
            # A dict keeps insertion order, so what is new since a moment ago is at its end.
            self._take_out(list(islice(reversed(counts), grown)), lines)

    def _keep_sample(self, payloads: list[bytes], first: int) -> None:
        """Keep every `stride`th datagram; when there are too many, every second one and half as often."""
        sample = self.sample
        skip = -first % self._stride
        if skip < len(payloads):
            sample += payloads[skip :: self._stride]
            while len(sample) > MAX_SAMPLE:
                del sample[1::2]
                self._stride *= 2

    def _take_out(self, new: list[bytes], lines: list[bytes]) -> None:
        counts = self.counts
        for end in _TIMER_ENDS:
            plain = [line for line in new if line.endswith(end)]
            if plain:
                self._plain_timers(plain, end[1:])
                if len(plain) == len(new):
                    return
        moved = {line for line in new if line in counts and _is_ordered(line)}
        if moved:
            # Duplicates within the batch keep their places: the list of lines is walked, not the counts.
            in_order = [line for line in lines if line in moved]
            self.ordered += in_order
            self.moved += len(in_order)
            for line in moved:
                del counts[line]

    def _plain_timers(self, plain: list[bytes], kind: bytes) -> None:
        """Lines `name:digits|kind`, split all at once; others stay in the counts, to be parsed one by one."""
        size = len(plain)
        cells = b"\n".join(plain).replace(b"\n", b"|").replace(b":", b"|").split(b"|")
        values = cells[1::3]
        uniform = len(cells) == 3 * size and cells[2::3].count(kind) == size
        if not uniform or b"".join(values).translate(None, _DIGITS):
            return
        try:
            numbers = list(map(float, values))
        except ValueError:  # "1.2.3", or no digit at all
            return
        times = list(map(self.counts.pop, plain))
        timers = self.timers
        repeated = sum(times) != size
        for at, (name, value) in enumerate(zip(cells[0::3], numbers, strict=True)):
            cell = timers.get((name, kind))
            if cell is None:
                timers[name, kind] = cell = array("d")
            cell.append(value)
            if repeated:
                cell.extend([value] * (times[at] - 1))


def _is_ordered(line: bytes) -> bool:
    """Gauges, events and checks; also a counter with such a tag, which then merely takes the slower way."""
    return b"|g" in line or line.startswith((b"_e{", b"_sc|"))
