"""One window's figures of one process, as they are merged and sent between processes. Pure data."""

from copy import deepcopy

import msgspec

from brokerless.metrics.aggregate.timers import TimerWindow
from brokerless.metrics.numbers import fit_64_bits
from brokerless.metrics.parser import Number
from brokerless.metrics.sequence_lines import Heartbeat


class CounterSums(msgspec.Struct, array_like=True, gc=False):
    """Of one counter: what arrived, Σ w² of its lines, and over sampled datagrams Σ T, Σ T², Σ Σ w², Σ T⁴, and how many
    hold it."""

    amount: Number = 0
    squares: float = 0
    sum: float = 0
    sum_squares: float = 0
    diagonal: float = 0
    sum_fourth: float = 0
    holding: float = 0

    def fit_64_bits(self) -> None:
        """Make sums beyond 64 bits, which cannot be written down, floats."""
        for field in self.__struct_fields__:
            setattr(self, field, fit_64_bits(getattr(self, field)))

    def add(self, other: "CounterSums", share: float = 1) -> None:
        """Add `other`, or a share of it; -1 takes it away."""
        self.amount += other.amount if share == 1 else other.amount * share
        self.squares += other.squares * share
        self.sum += other.sum * share
        self.sum_squares += other.sum_squares * share
        self.diagonal += other.diagonal * share
        self.sum_fourth += other.sum_fourth * share
        self.holding += other.holding * share


class DatagramSums(msgspec.Struct):
    """Counters that arrived in a number of datagrams of which `sampled` were looked at whole."""

    datagrams: int = 0
    sampled: int = 0
    counters: dict[str, CounterSums] = msgspec.field(default_factory=dict)

    def merge(self, other: "DatagramSums") -> None:
        self.datagrams += other.datagrams
        self.sampled += other.sampled
        for series, sums in other.counters.items():
            mine = self.counters.get(series)
            if mine is None:
                self.counters[series] = sums
            else:
                mine.add(sums)


class SegmentSums(msgspec.Struct):
    """A client's datagrams with numbers within `first` to `last`; `refused`: some of their lines were not counted."""

    first: int
    last: int
    sums: DatagramSums
    refused: bool = False


class ClientWindow(msgspec.Struct):
    """One client's window: numbers that arrived, what was in them, and what the client said of itself."""

    first: int
    newest: int
    # What the client said of its heartbeats: how many there were before `first`, and up to `newest`.
    heartbeats_before: int = 0
    heartbeats: int = 0
    seen: list[tuple[int, int]] = msgspec.field(default_factory=list)
    duplicates: int = 0
    late: int = 0
    lines: int = 0
    segments: list[SegmentSums] = msgspec.field(default_factory=list)
    beats: list[Heartbeat] = msgspec.field(default_factory=list)
    # What is in the newest datagram, where numbers were missing lately; None if it is a heartbeat.
    newest_sums: DatagramSums | None = None

    def merge(self, other: "ClientWindow") -> None:
        self.first, self.heartbeats_before = min(
            (self.first, self.heartbeats_before), (other.first, other.heartbeats_before)
        )
        if other.newest > self.newest:
            self.newest, self.heartbeats, self.newest_sums = other.newest, other.heartbeats, other.newest_sums
        self.seen += other.seen
        self.duplicates += other.duplicates
        self.late += other.late
        self.lines += other.lines
        self.segments += other.segments
        self.beats += other.beats


class GaugeWindow(msgspec.Struct):
    """What a window did to a gauge: set it (`value`), or moved it by `delta` from wherever it was."""

    value: Number | None = None
    delta: Number = 0
    at: float = 0.0

    def apply(self, value: Number, relative: bool, at: float) -> None:
        self.at = at
        if not relative:
            self.value = value
        elif self.value is None:
            self.delta += value
        else:
            self.value += value

    def merge(self, other: "GaugeWindow") -> None:
        """The later absolute value wins; moves without one add up."""
        if other.value is None:
            if self.value is None:
                self.delta += other.delta
            else:
                self.value += other.delta
        elif self.value is None:
            self.value = other.value + self.delta
        elif other.at >= self.at:
            self.value = other.value
        self.at = max(self.at, other.at)


class Timestamped(msgspec.Struct):
    """A counter or gauge that came with a time of its own (DogStatsD 1.3): not aggregated into the window."""

    kind: str
    series: str
    timestamp: int
    value: Number


# Enough to see what is wrong, too few to fill memory.
MAX_REFUSED_SAMPLES = 20
# Events and points with their own time come one by one, not thousands per second; more are counted and dropped.
MAX_PASSED = 10_000
MAX_TIMESTAMPED = 10_000
# Names of series that were refused for a limit.
MAX_LIMITED = 10_000
# Ids of clients that were counted as unnumbered.
MAX_UNNUMBERED = 10_000


class Window(msgspec.Struct):
    """Everything one process received in one window. Counters here are raw: what arrived, sampling undone."""

    counters: dict[str, Number] = msgspec.field(default_factory=dict)
    # What came by ways that do not lose (streams, Unix sockets), as far as it is in `counters`.
    lossless: dict[str, Number] = msgspec.field(default_factory=dict)
    # They lost something for once: a Unix datagram was too long to be read as a whole.
    lossless_cut: bool = False
    # What came in datagrams without numbers.
    unnumbered: DatagramSums = msgspec.field(default_factory=DatagramSums)
    # Counters of which some came there that is no whole number, as far as they are not in `unnumbered`.
    unnumbered_fractions: set[str] = msgspec.field(default_factory=set)
    clients: dict[str, ClientWindow] = msgspec.field(default_factory=dict)
    # Clients that were refused because there are too many; if more than MAX_UNNUMBERED, these are not all.
    unnumbered_clients: set[str] = msgspec.field(default_factory=set)
    # Counters with an increment beyond LARGEST_WHOLE: what was added to it may have been rounded away.
    rounded: set[str] = msgspec.field(default_factory=set)
    # Series of which lines were refused for a limit; `limited_more`: and of others, in one of several processes.
    limited: set[str] = msgspec.field(default_factory=set)
    limited_more: bool = False
    gauges: dict[str, GaugeWindow] = msgspec.field(default_factory=dict)
    timers: dict[str, TimerWindow] = msgspec.field(default_factory=dict)
    sets: dict[str, set[str]] = msgspec.field(default_factory=dict)
    timestamped: list[Timestamped] = msgspec.field(default_factory=list)
    passed: list[bytes] = msgspec.field(default_factory=list)
    lines: int = 0
    misplaced: int = 0
    passed_dropped: int = 0
    timestamped_lines: int = 0
    timestamped_dropped: int = 0
    ignored_fields: int = 0
    # Exceptions that were contained.
    faults: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    refused_samples: list[tuple[str, bytes]] = msgspec.field(default_factory=list)
    kernel_drops: int = 0
    # The longest time for which nothing was read although datagrams waited: by the clock, and in CPU time.
    pause_s: float = 0.0
    pause_cpu_s: float = 0.0

    def part(self, table: str) -> "Window":
        """A copy of the counts and of one table (`counters`, `gauges`, `timers`, or none), for looking at."""
        copy = Window(lines=self.lines, refused=dict(self.refused))
        if table:
            setattr(
                copy, table, deepcopy(getattr(self, table)) if table != "counters" else dict(self.counters)
            )
        return copy

    def fit_64_bits(self) -> None:
        """Make sums beyond 64 bits, which cannot be sent between processes, floats."""
        for table in (self.counters, self.lossless):
            table.update({series: fit_64_bits(amount) for series, amount in table.items()})
        every = [self.unnumbered, *(s.sums for client in self.clients.values() for s in client.segments)]
        for sums in every:
            for counter in sums.counters.values():
                counter.fit_64_bits()
        for gauge in self.gauges.values():
            gauge.value = gauge.value if gauge.value is None else fit_64_bits(gauge.value)
            gauge.delta = fit_64_bits(gauge.delta)
        for point in self.timestamped:
            point.value = fit_64_bits(point.value)

    def merge(self, other: "Window") -> None:
        """Take in another process's figures of the same window."""
        for mine, theirs in ((self.counters, other.counters), (self.lossless, other.lossless)):
            for series, amount in theirs.items():
                mine[series] = mine.get(series, 0) + amount
        self.lossless_cut |= other.lossless_cut
        self.unnumbered.merge(other.unnumbered)
        self.unnumbered_fractions |= other.unnumbered_fractions
        self.unnumbered_clients |= other.unnumbered_clients
        self.rounded |= other.rounded
        self.limited |= other.limited
        self.limited_more |= max(len(self.limited), len(other.limited)) >= MAX_LIMITED
        for reason, n in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + n
        for name, client in other.clients.items():
            if name in self.clients:
                self.clients[name].merge(client)
            else:
                self.clients[name] = client
        for series, gauge in other.gauges.items():
            if series in self.gauges:
                self.gauges[series].merge(gauge)
            else:
                self.gauges[series] = gauge
        for series, timer in other.timers.items():
            if series in self.timers:
                self.timers[series].merge(timer)
            else:
                self.timers[series] = timer
        for series, members in other.sets.items():
            self.sets.setdefault(series, set()).update(members)
        self._merge_lists(other)

    def _merge_lists(self, other: "Window") -> None:
        room = MAX_TIMESTAMPED - len(self.timestamped)
        self.timestamped += other.timestamped[:room]
        self.timestamped_dropped += other.timestamped_dropped + max(0, len(other.timestamped) - room)
        room = MAX_PASSED - len(self.passed)
        self.passed += other.passed[:room]
        self.passed_dropped += other.passed_dropped + max(0, len(other.passed) - room)
        self.refused_samples = (self.refused_samples + other.refused_samples)[:MAX_REFUSED_SAMPLES]
        self.lines += other.lines
        self.misplaced += other.misplaced
        self.timestamped_lines += other.timestamped_lines
        self.ignored_fields += other.ignored_fields
        self.faults += other.faults
        self.kernel_drops += other.kernel_drops
        self.pause_s = max(self.pause_s, other.pause_s)
        self.pause_cpu_s = max(self.pause_cpu_s, other.pause_cpu_s)
