"""What is known of a counter, and its grade: how far what is published can be trusted. Pure.

`Rollup` (`rollup.py`) makes `worst` and the grade of a window worse (a larger number) when something may be missing;
`judge` decides.
"""

from enum import IntEnum
from math import isinf

import msgspec

from brokerless.metrics.numbers import LARGEST_WHOLE, fit_64_bits
from brokerless.metrics.parser import Number


class Grade(IntEnum):
    """How well a counter is known, from best to worst."""

    EXACT = 0
    LEDGER = 1
    SOCKET_ONLY = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        """`exact`, `ledger`, `socket-only` or `unknown`."""
        return self.name.lower().replace("_", "-")


class CounterTotals(msgspec.Struct, gc=False):
    """A counter since the daemon began. `clients` holds (total, variance, open) of each numbered client."""

    active_at: float
    raw: Number = 0
    # From unnumbered datagrams and streams, and from clients that are gone.
    settled: Number = 0
    settled_variance: float = 0.0
    worst: Grade = Grade.EXACT
    # Some of it came by ways that do not lose.
    streamed: bool = False
    # Some of it came in unnumbered datagrams; and the size of a usual line there.
    unnumbered: bool = False
    # Lines of it may have been refused for a limit.
    limited: bool = False
    usual: float = 0.0
    # When it was first seen; one that was deleted or forgotten starts over.
    began: float = 0.0
    clients: dict[str, tuple[Number, float, bool]] = msgspec.field(default_factory=dict)

    def fit_64_bits(self) -> None:
        """Make sums beyond 64 bits, which cannot be written down, floats."""
        self.raw, self.settled = fit_64_bits(self.raw), fit_64_bits(self.settled)
        self.clients = {name: (fit_64_bits(total), v, o) for name, (total, v, o) in self.clients.items()}

    def total(self) -> tuple[Number, float, Grade]:
        total, variance, grade = self.settled, self.settled_variance, self.worst
        for amount, v, is_open in self.clients.values():
            total += amount
            variance += v
            if is_open:
                grade = max(grade, Grade.LEDGER)
        return total, variance, Grade.UNKNOWN if isinf(variance) else grade


class WindowChange(msgspec.Struct, gc=False):
    """What one window did to one counter."""

    corrected: Number = 0
    variance: float = 0.0
    grade: Grade = Grade.EXACT


def judge(
    entry: CounterTotals,
    moved: WindowChange,
    *,
    silent: bool,
    hidden: bool,
    hidden_for_good: bool,
    streams_cut: bool,
) -> tuple[Number, float, Grade]:
    """The total of a counter, its variance, and its grade; `moved.grade` becomes that of what the window did to it.

    `silent`: one of its clients fell silent. `hidden`: some of it may be in datagrams that nothing is known of;
    `hidden_for_good`: in those of a client that is gone. `streams_cut`: some of what came by
    ways that do not lose was lost.
    """
    total, variance, grade = entry.total()
    if entry.unnumbered:
        moved.grade = max(moved.grade, Grade.SOCKET_ONLY)
    if silent:
        moved.grade, grade = max(moved.grade, Grade.SOCKET_ONLY), max(grade, Grade.SOCKET_ONLY)
    if hidden or entry.limited:
        moved.grade = grade = Grade.UNKNOWN
    elif hidden_for_good and not entry.unnumbered:
        grade = Grade.UNKNOWN
    elif streams_cut and entry.streamed:
        grade = max(grade, Grade.SOCKET_ONLY)
    if not -LARGEST_WHOLE <= total <= LARGEST_WHOLE:
        # For good: what is added to a rounded sum, or taken from it, is rounded, too.
        moved.grade = grade = entry.worst = Grade.UNKNOWN
    return total, variance, grade
