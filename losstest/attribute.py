"""Why an accepted event is missing: the first stage that it did not reach. Pure.

The order of the checks is the order of `docs/losstest.md`: what the transport or the relay says of a single
event comes before what the supervisor knows of the time at which the event was accepted.
"""

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from brokerless.core.intervals import IntervalSet

NS = 1_000_000_000
# How long before a consumer's death an event may have been accepted and still be under way to it: longer
# than any buffer here is deep at the rates used, shorter than the time between two faults.
IN_FLIGHT_NS = 2 * NS
FOREVER = (1 << 63) - 1
Span = tuple[int, int]


class World(msgspec.Struct, kw_only=True):
    """What the supervisor did to one subscription, as spans of time [begin, end) in ns."""

    absent: list[Span] = []  # no consumer of the subscription was there
    deaths: list[Span] = []  # a consumer was told to end, and had ended
    backlog: list[Span] = []  # so much was under way to the consumer that buffers were filling
    stalled: list[Span] = []  # consumer stopped or slow, until it had caught up
    cut: list[Span] = []  # the network was cut
    dropping: list[Span] = []  # the kernel's filter dropped packets
    producer_deaths: list[int] = []
    broker_deaths: list[int] = []
    overflow: str = "overflow_sender"
    cut_reason: str = "in_flight"


class Marks(msgspec.Struct, kw_only=True):
    """What is known of single events."""

    declared: dict[str, IntervalSet] = {}  # reason → event numbers
    swallowed: IntervalSet = msgspec.field(default_factory=IntervalSet)
    delivered: IntervalSet = msgspec.field(default_factory=IntervalSet)


def within(spans: Iterable[Span], t: int) -> bool:
    """True if `t` lies in one of the spans."""
    return any(begin <= t < end for begin, end in spans)


def reason_for(n: int, accepted: int, marks: Marks, world: World) -> str:
    """The reason for one missing event, accepted at time `accepted`."""
    for reason, numbers in marks.declared.items():
        if n in numbers and reason != "unattributed":
            return reason
    # Dropped on the way by our own hand; or a consumer had it, and died before the effect was recorded.
    if n in marks.swallowed or n in marks.delivered:
        return "in_flight"
    stages = (
        (any(accepted <= death for death in world.producer_deaths), "producer_crash"),
        (within(world.cut, accepted), world.cut_reason),
        (within(world.dropping, accepted), "in_flight"),
        (within(world.absent, accepted), "offline"),
        (within(world.stalled, accepted), world.overflow),
        (any(told - IN_FLIGHT_NS <= accepted <= gone for told, gone in world.deaths), "in_flight"),
        # The broker had taken it, and did not have it any more when it came back.
        (any(accepted <= death for death in world.broker_deaths), "in_flight"),
        (within(world.backlog, accepted), world.overflow),
    )
    return next((reason for holds, reason in stages if holds), "unattributed")


def attribute(
    missing: Iterable[int],
    accepted: dict[int, int],
    marks: Marks,
    world: World,
    drops: dict[str, int],
) -> dict[str, list[int]]:
    """Missing event numbers by reason; the lists are disjoint and together are `missing`.

    What nothing explains is given to a counter of the transport that tells of at least as many drops.
    """
    result: dict[str, list[int]] = {}
    for n in missing:
        reason = reason_for(n, accepted[n], marks, world)
        result.setdefault(reason, []).append(n)
    rest = result.get("unattributed", [])
    for reason in ("overflow_receiver", "overflow_sender"):
        explained = len(result.get(reason, ()))
        if rest and drops.get(reason, 0) >= explained + len(rest):
            result[reason] = sorted(result.get(reason, []) + rest)
            del result["unattributed"]
            break
    return result


def map_declared(
    spans: Iterable[tuple[int, int, int, str]], positions: dict[tuple[int, int], int]
) -> dict[str, IntervalSet]:
    """Declared losses (epoch, first, last, reason) from positions of the transport to event numbers."""
    by_epoch: dict[int, list[tuple[int, int]]] = {}
    for (epoch, position), n in positions.items():
        by_epoch.setdefault(epoch, []).append((position, n))
    for pairs in by_epoch.values():
        pairs.sort()
    result: dict[str, IntervalSet] = {}
    for epoch, first, last, reason in spans:
        pairs = by_epoch.get(epoch & 0xFFFF_FFFF, [])
        at = bisect_right(pairs, (first, -1))
        while at < len(pairs) and pairs[at][0] <= last:
            n = pairs[at][1]
            result.setdefault(reason, IntervalSet()).add(n, n)
            at += 1
    return result
