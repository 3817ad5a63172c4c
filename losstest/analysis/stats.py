"""What repeats say: median, range, and an interval where losses are independent. Pure."""

import math
from statistics import median

import msgspec

from brokerless.losstest.model import Row

Z95 = 1.959964  # two-sided 95 % of the normal distribution


class Summary(msgspec.Struct, frozen=True):
    """Lost percent over the repeats of one transport and scenario."""

    runs: int
    median: float
    low: float
    high: float
    lost: int
    accepted: int
    interval: tuple[float, float] | None  # percent, 95 %
    method: str


def wilson(lost: int, accepted: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion. Better than the normal one near 0 and 1."""
    if not accepted:
        return 0.0, 1.0
    p = lost / accepted
    z2 = Z95 * Z95
    middle = (p + z2 / (2 * accepted)) / (1 + z2 / accepted)
    half = Z95 / (1 + z2 / accepted) * math.sqrt(p * (1 - p) / accepted + z2 / (4 * accepted**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def zero_bound(accepted: int) -> float:
    """Upper 95 % bound of the proportion when none of `accepted` was lost: 1 − 0.05^(1/n)."""
    return 1.0 if accepted <= 0 else -math.expm1(math.log(0.05) / accepted)


def summarise(rows: list[Row]) -> Summary:
    """The repeats of one cell, of which there must be at least one."""
    percents = [row.lost_percent for row in rows]
    lost, accepted = sum(row.lost for row in rows), sum(row.accepted for row in rows)
    interval, method = None, "range over repeats; losses in an outage are not independent"
    if not all(row.independent for row in rows):
        pass  # an outage is one event of its kind, however many messages were sent in it
    elif not lost:
        interval, method = (0.0, 100 * zero_bound(accepted)), "0 of n: exact upper bound at 95 %"
    else:
        low, high = wilson(lost, accepted)
        interval, method = (100 * low, 100 * high), "Wilson, 95 %"
    return Summary(
        len(rows), median(percents), min(percents), max(percents), lost, accepted, interval, method
    )
