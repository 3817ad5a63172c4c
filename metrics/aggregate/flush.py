"""What one flush publishes: the same figures for every backend. Pure data."""

from math import sqrt

import msgspec

from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.sketch import Sketch
from brokerless.metrics.aggregate.timers import Figures, TimerTotal
from brokerless.metrics.aggregate.window import Timestamped
from brokerless.metrics.numbers import LARGEST_WHOLE
from brokerless.metrics.parser import Number


class CounterPoint(msgspec.Struct, gc=False):
    """A counter in one window, and since the daemon began (`total…`).

    `raw` is what arrived, `corrected` what was sent as far as known, give or take `bound` (95 %; None: not
    known). A window in which a client's totals arrive also contains what earlier windows had wrong, so that
    the windows always add up to `total`.
    """

    series: str
    raw: Number
    corrected: Number
    bound: float | None
    grade: Grade
    total_raw: Number
    total: Number
    total_bound: float | None
    total_grade: Grade
    # Tells apart counters of one name: one that was deleted, or forgotten, and is back.
    life: float = 0.0


def add_up(points: list[CounterPoint]) -> CounterPoint:
    """Several counters as one, with the name of the first."""
    if len(points) == 1:
        return points[0]
    total, grade = sum(point.total for point in points), max(point.total_grade for point in points)
    if not -LARGEST_WHOLE <= total <= LARGEST_WHOLE:
        grade = Grade.UNKNOWN
    return CounterPoint(
        points[0].series,
        sum(point.raw for point in points),
        sum(point.corrected for point in points),
        _bound_of_sum([point.bound for point in points]),
        max(point.grade for point in points),
        sum(point.total_raw for point in points),
        total,
        None if grade is Grade.UNKNOWN else _bound_of_sum([point.total_bound for point in points]),
        grade,
        sum(point.life for point in points),
    )


def _bound_of_sum(bounds: list[float | None]) -> float | None:
    squares = [bound * bound for bound in bounds if bound is not None]
    return sqrt(sum(squares)) if len(squares) == len(bounds) else None


class ClientReport(msgspec.Struct):
    """One numbered client: `sent = received + lost`. `lines_reported` is what it said with its last heartbeat."""

    client: str
    name: str
    sent: int
    received: int
    lost: int
    failed: int
    duplicates: int
    late: int
    lines: int
    lines_reported: int | None
    counters: int
    idle_s: float


class Flush(msgspec.Struct):
    """One window, published. Times are seconds since 1970."""

    start: float
    end: float
    window_s: float
    # When the accounts began: of this daemon, or of one before it whose state it took over.
    since: float = 0.0
    counters: list[CounterPoint] = msgspec.field(default_factory=list)
    gauges: dict[str, Number] = msgspec.field(default_factory=dict)
    timers: dict[str, Figures] = msgspec.field(default_factory=dict)
    # Of distributions, and of timers with too many values to keep: to be merged with other daemons'.
    sketches: dict[str, Sketch] = msgspec.field(default_factory=dict)
    sets: dict[str, int] = msgspec.field(default_factory=dict)
    timer_totals: dict[str, TimerTotal] = msgspec.field(default_factory=dict)
    timestamped: list[Timestamped] = msgspec.field(default_factory=list)
    # The same since the daemon began: counters summed up, gauges the latest.
    timestamped_totals: list[Timestamped] = msgspec.field(default_factory=list)
    passed: list[bytes] = msgspec.field(default_factory=list)
    clients: list[ClientReport] = msgspec.field(default_factory=list)
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    refused_samples: list[tuple[str, bytes]] = msgspec.field(default_factory=list)
    rollup: dict[str, int] = msgspec.field(default_factory=dict)
    receive: dict[str, int] = msgspec.field(default_factory=dict)
    lines: int = 0
    datagrams: int = 0
    kernel_drops: int = 0
    lost_datagrams: int = 0
    processing_s: float = 0.0
    # The longest time for which nothing was read although datagrams waited: by the clock, and in CPU time.
    pause_s: float = 0.0
    pause_cpu_s: float = 0.0

    @property
    def stamped_counters(self) -> list[CounterPoint]:
        """Counters that came with times of their own, since the accounts began, for backends without such times.

        Our own clients send none: nobody knows how many were lost.
        """
        grade = Grade.SOCKET_ONLY
        stamped = [point for point in self.timestamped_totals if point.kind == "c"]
        return [CounterPoint(p.series, 0, 0, 0.0, grade, p.value, p.value, 0.0, grade) for p in stamped]

    @property
    def all_gauges(self) -> dict[str, Number]:
        """Gauges, and the latest of those that came with times of their own, for backends without such times."""
        return {p.series: p.value for p in self.timestamped_totals if p.kind == "g"} | self.gauges
