"""Why an accepted event is missing: the first stage that it did not reach, from evidence. Pure.

Evidence is what the harness saw itself: what relay and seeded drop took, what both ends recorded, what the supervisor
did and when, counters of the kernel. What the product says of its losses is compared with that. It decides only between
reasons that the evidence allows (that a journal had evicted an event, or that repair gave up, only the product knows);
where it contradicts the evidence, the evidence stands and the difference is a finding about the product.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from brokerless.losstest.analysis.fault_windows import FaultWindows, Span
from brokerless.losstest.analysis.observations import (
    ACCEPTED,
    BLOCK,
    FOREVER,
    Numbers,
    ReceivedEvents,
    SentEvents,
    Times,
)
from brokerless.losstest.evidence.evidence import DropCount
from brokerless.losstest.model import REASONS

NS = 1_000_000_000
# A process reads its drop counter ten times a second, and may be late on a busy machine.
COUNTER_DELAY_NS = NS
# With fewer on their way at an overflow, what was dropped was not the newest: it says nothing about room.
MEANINGFUL = 16
CODE = {reason: code for code, reason in enumerate(REASONS)}
NONE = CODE["unattributed"]
Codes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


class Attribution(msgspec.Struct):
    """The reason of each missing event, as an index into REASONS; findings about the product, in words."""

    numbers: Numbers
    codes: Codes
    findings: list[str]

    def of(self, reason: str) -> Numbers:
        """The numbers of the events lost for this reason."""
        chosen: Numbers = self.numbers[self.codes == CODE[reason]]
        return chosen


class _Missing:
    """The missing events of one subscription, and the questions that the stages ask about them."""

    def __init__(self, numbers: Numbers, sent: SentEvents, received: ReceivedEvents) -> None:
        self.numbers = numbers
        self.times: Times = sent.accepted[numbers]
        self._offered: Times = sent.offered[numbers]
        self._sent, self._received = sent, received

    def within(self, spans: Iterable[Span]) -> Mask:
        """Their send() was under way in one of the spans."""
        result = np.zeros(len(self.times), np.bool_)
        for begin, end in spans:
            result |= (self.times >= begin) & (self._offered < end)
        return result

    def under_way(self, time: int) -> Mask:
        """Accepted before `time`, and after everything that had been delivered by then."""
        before = (self._received.delivered > 0) & (self._received.delivered <= time)
        return (self.times < time) & (self.numbers > _last(before))

    def after_the_last_delivered(self, time: int) -> Mask:
        """Accepted up to `time`, and after every event accepted up to `time` that was delivered at all."""
        delivered = (self._received.delivered > 0) & (self._sent.accepted > 0) & (self._sent.accepted <= time)
        return (self.times <= time) & (self.numbers > _last(delivered))

    def on_the_way(self, which: Numbers) -> Numbers:
        """How many events were on their way to the consumer, by both witnesses, when those at `which` were accepted."""
        times = self.times[which]
        both = (self._received.delivered > 0) & (self._sent.outcome == ACCEPTED)
        return _count_until(times, self._sent.accepted, both) - _count_until(
            times, self._received.delivered, both
        )

    def delivered_of_those_accepted_until(self, time: int) -> Numbers:
        """How many of the events that were accepted after each of these, until `time`, were delivered at all."""
        accepted = self._sent.accepted
        return self._later(accepted, (self._received.delivered > 0) & (accepted > 0) & (accepted <= time))

    def accepted_until(self, time: int) -> Numbers:
        """How many events were accepted after each of these, until `time`."""
        accepted = self._sent.accepted
        return self._later(accepted, (self._sent.outcome == ACCEPTED) & (accepted <= time))

    def _later(self, column: Times, chosen: Mask) -> Numbers:
        return np.count_nonzero(chosen) - _count_until(self.times, column, chosen)


def _count_until(marks: Times, column: Times, chosen: Mask) -> Numbers:
    """For each mark, how many of the chosen times of the column are not after it.

    In portions: a sorted copy of a column is what an hour of events has no room for.
    """
    order = np.argsort(marks, kind="stable")
    ordered = marks[order]
    counts = np.zeros(len(marks) + 1, np.int64)
    for begin in range(0, len(column), BLOCK):
        part = slice(begin, begin + BLOCK)
        found = np.searchsorted(ordered, column[part][chosen[part]], "left")
        if len(found):
            first = int(found.min())
            steps = np.bincount(found - first)
            counts[first : first + len(steps)] += steps
    np.cumsum(counts, out=counts)
    result = np.empty(len(marks), np.int64)
    result[order] = counts[:-1]
    return result


def _last(mask: Mask) -> int:
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else -1


def attribute(
    numbers: Numbers,
    sent: SentEvents,
    received: ReceivedEvents,
    windows: FaultWindows,
    *,
    dropped: Mask,
    delayed: Mask,
    drops: list[DropCount],
    declared: Codes,
    buffer_events: int,
    retention_events: int,
) -> Attribution:
    """The reason of each of the missing events `numbers`.

    `declared` is what the product says, per event of the run; NONE where it says nothing.
    """
    missing = _Missing(numbers, sent, received)
    codes = _evidence(missing, windows, dropped[numbers], received.delivered[numbers] > 0, buffer_events)
    # The relay held its datagram back, and the receiver did not wait for it.
    codes[(codes == NONE) & delayed[numbers]] = CODE["in_flight"]
    _use_counters(codes, missing, [count for count in drops if count.subscription in ("", received.name)])
    said = declared[numbers]
    for reason in ("evicted", "gave_up"):
        claimed = said == CODE[reason]
        if claimed.any():
            retention = retention_events if reason == "evicted" else 0
            codes[claimed & _hindered(missing, windows, retention)] = CODE[reason]
    return Attribution(numbers, codes, _findings(said, codes))


def _evidence(
    missing: _Missing, windows: FaultWindows, dropped: Mask, delivered: Mask, buffer_events: int
) -> Codes:
    """What the harness itself saw. The first stage that holds is the reason."""
    codes = np.full(len(missing.numbers), NONE, np.uint8)

    def assign(holds: Mask, reason: str) -> None:
        codes[(codes == NONE) & holds] = CODE[reason]

    # Dropped on the way by ourselves; or a consumer had it, and died before the effect was recorded.
    assign(dropped | delivered, "in_flight")
    for death in windows.producer_deaths:
        assign(missing.after_the_last_delivered(death), "producer_crash")
        for begin, end in (*windows.stalled, *windows.absent) if windows.journal_in_memory else ():
            # What it kept for a consumer that could not take it, in whatever order it was taken until then.
            if begin <= death <= end:
                kept = missing.within([(begin, death)]) | missing.under_way(begin)
                assign(kept & (missing.times <= death), "producer_crash")
    for cut in windows.power_cuts:
        assign(missing.after_the_last_delivered(cut), "in_flight")  # the broker had not synced it
    assign(missing.within(windows.cut), windows.cut_reason)
    assign(missing.within(windows.dropping), "in_flight")
    for begin, end in windows.absent if windows.broker_keeps else ():
        # As many as the broker was told to keep came after it and were delivered: it dropped its oldest, as configured.
        full = missing.delivered_of_those_accepted_until(end) >= windows.broker_keeps * 3 // 4
        # Also what a consumer had and did not acknowledge when it left: it went back to the others, as the oldest.
        assign((missing.within([(begin, end)]) | missing.under_way(begin)) & full, "evicted")
    assign(missing.within(windows.absent), "offline")
    assign(missing.within(windows.stalled), windows.overflow)
    # The receiver refused it or did not answer, and it was not sent again.
    assign(missing.within(windows.refusing), "gave_up")
    # Under way when it happened: nothing later had arrived (at that process, if it was one that died).
    for gone, last in windows.deaths:
        assign((missing.times <= gone) & (missing.numbers > last), "in_flight")
    assign(missing.within(windows.unnoticed), "in_flight")
    for begin in (*windows.broken, *(begin for begin, _ in windows.cut)):
        assign(missing.under_way(begin), "in_flight")
    for begin, _ in windows.stalled:
        assign(missing.under_way(begin), windows.overflow)
    for death in windows.broker_deaths:
        # The broker had taken it, and did not have it any more when it came back.
        assign(missing.after_the_last_delivered(death), "in_flight")
    left = np.flatnonzero(codes == NONE)
    if len(left):
        room = buffer_events
        # Kernels count memory and not events: as full as it was when it overflowed in a fault.
        over = np.flatnonzero(codes == CODE[windows.overflow])
        seen = int(np.median(missing.on_the_way(over))) if len(over) else 0
        if seen >= MEANINGFUL:
            room = min(room, seen)
        waiting = missing.on_the_way(left)
        codes[left[waiting >= max(2, room * 3 // 4)]] = CODE[windows.overflow]
        # A queue that was full takes nothing until it is half empty: what follows an overflow without a gap.
        half_full = np.zeros(len(codes), np.bool_)
        half_full[left[waiting >= max(2, room // 2)]] = True
        over_or_half = (codes == CODE[windows.overflow]) | half_full
        index = np.arange(len(codes))
        follows = np.zeros(len(codes), np.bool_)
        follows[1:] = (np.diff(missing.numbers) == 1) & over_or_half[1:] & over_or_half[:-1]
        began = np.maximum.accumulate(np.where(follows, 0, index))
        overflowed = np.maximum.accumulate(np.where(codes == CODE[windows.overflow], index, -1))
        assign(half_full & (overflowed >= began), windows.overflow)
    return codes


def _use_counters(codes: Codes, missing: _Missing, drops: list[DropCount]) -> None:
    """Give what is left to drop counters that rose at that time by at least as much."""
    for count in drops:
        if count.reason not in ("overflow_sender", "overflow_receiver"):
            continue
        at_that_time = (missing.times > count.t - COUNTER_DELAY_NS) & (missing.times <= count.t)
        explained = int((at_that_time & (codes == CODE[count.reason])).sum())
        left = at_that_time & (codes == NONE)
        if 0 < left.sum() <= count.increase - explained:
            codes[left] = CODE[count.reason]


def _hindered(missing: _Missing, windows: FaultWindows, retention_events: int) -> Mask:
    """Accepted before something that kept events from the subscription was over.

    With a retention, also: so much was accepted meanwhile that the journal had to drop. Half of it is enough, because
    retention drops whole segments.
    """
    result = np.zeros(len(missing.numbers), np.bool_)
    for begin, end in windows.hindrances:
        if retention_events:
            result |= (missing.times < end) & (missing.accepted_until(end) >= retention_events // 2)
        else:
            result |= missing.within([(begin, end)]) | missing.under_way(begin)
    return result


# At the edge of an absence the two ends see different halves of one moment: this is no contradiction.
_SAME_MOMENT = {("in_flight", "offline"), ("offline", "in_flight")}


def _findings(said: Codes, codes: Codes) -> list[str]:
    found = []
    for claim in np.unique(said[(said != NONE) & (said != codes)]):
        for actual in np.unique(codes[(said == claim) & (codes != claim)]):
            words, truth = REASONS[claim], REASONS[actual]
            count = int(((said == claim) & (codes == actual)).sum())
            if actual == NONE:
                found.append(f"says {words} of {count} events, and nothing that was observed supports it")
            elif (words, truth) not in _SAME_MOMENT:
                found.append(f"says {words} of {count} events, was {truth}")
    return found


def map_declared(
    spans: Iterable[tuple[int, int, int, str]], sent: SentEvents
) -> tuple[Codes, dict[str, int]]:
    """Declared losses (epoch, first, last, reason) from positions of the transport to a reason per event.

    An event that is declared twice has its first reason. Also returns how many declarations used a word that is no
    reason, by word.
    """
    codes = np.full(len(sent), NONE, np.uint8)
    strange: dict[str, int] = {}
    by_epoch: dict[int, tuple[Times, Numbers]] = {}
    for epoch, first, last, reason in spans:
        code = CODE.get(reason)
        if code is None:
            strange[reason] = strange.get(reason, 0) + 1
            continue
        if code == NONE or not len(sent.positions):
            continue
        stored = epoch & 0xFFFF_FFFF
        if stored not in by_epoch:
            numbers = np.flatnonzero((sent.positions >= 0) & (sent.epochs == stored))
            order = np.argsort(sent.positions[numbers], kind="stable")
            by_epoch[stored] = sent.positions[numbers][order], numbers[order]
        positions, numbers = by_epoch[stored]
        begin = np.searchsorted(positions, min(first, FOREVER), "left")
        meant = numbers[begin : np.searchsorted(positions, min(last, FOREVER), "right")]
        fresh = meant[codes[meant] == NONE]
        codes[fresh] = code
    return codes, strange
