"""What one flush publishes: the same figures for every backend. Pure data."""

import msgspec

from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.sketch import Sketch
from brokerless.metrics.aggregate.timers import Figures, TimerTotal
from brokerless.metrics.aggregate.window import Timestamped
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
