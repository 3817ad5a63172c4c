"""Times of a run: how long nothing came, when it came again, when the backlog was gone, latency. Pure."""

import numpy as np

from brokerless.losstest.analysis.loss_reasons import CODE, Attribution
from brokerless.losstest.analysis.observations import (
    ACCEPTED,
    BLOCK,
    FOREVER,
    ReceivedEvents,
    SentEvents,
    Times,
)
from brokerless.losstest.model import Latency, Timeline

NS = 1_000_000_000
STEPS = 240  # of a timeline: enough to zoom into a fault of a tenth of the run
_PRECISION_BITS = 10  # relative error below 1/1024


class Histogram:
    """Counts of latencies in buckets of equal relative width, as HdrHistogram has them. Mergeable, of fixed size."""

    def __init__(self) -> None:
        self._counts = np.zeros((65 - _PRECISION_BITS) << _PRECISION_BITS, np.int64)
        self._max = 0

    def add(self, latencies: Times) -> None:
        """Add latencies in ns; one below 0 counts as 0."""
        if not len(latencies):
            return
        values = np.maximum(latencies, 0)
        self._max = max(self._max, int(values.max()))
        shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 1 - _PRECISION_BITS, 0).astype(np.int64)
        bucket = (shift << _PRECISION_BITS) + (values >> shift)
        self._counts += np.bincount(bucket, minlength=len(self._counts))

    def _value(self, bucket: int) -> int:
        """The lowest value of a bucket."""
        octave = (bucket >> _PRECISION_BITS) - 1
        if octave <= 0:
            return bucket
        return (bucket - (octave << _PRECISION_BITS)) << octave

    def summary(self) -> Latency | None:
        """Percentiles in ms by nearest rank, or None if there is nothing."""
        total = int(self._counts.sum())
        if not total:
            return None
        running = np.cumsum(self._counts)

        def at(q: float) -> float:
            bucket = int(np.searchsorted(running, min(total - 1, int(q * total)), "right"))
            return round(min(self._value(bucket), self._max) / 1e6, 3)

        return Latency(at(0.5), at(0.99), round(self._max / 1e6, 3), at(0.999))


class Latencies:
    """Latencies of all subscriptions of a run: of the whole run, and before, during and after its fault."""

    def __init__(self, fault: tuple[int, int] | None) -> None:
        self._fault = fault
        self.whole, self.before, self.during, self.after = Histogram(), Histogram(), Histogram(), Histogram()

    def add(self, sent: SentEvents, received: ReceivedEvents) -> None:
        """Add one subscription. An event belongs to the part in which it was meant to be sent."""
        for begin in range(0, len(sent), BLOCK):
            part = slice(begin, begin + BLOCK)
            there = (sent.outcome[part] == ACCEPTED) & (received.delivered[part] > 0)
            numbers = np.flatnonzero(there) + begin
            due = sent.intended(numbers)
            latencies = received.delivered[numbers] - due
            self.whole.add(latencies)
            if self._fault is not None:
                self.before.add(latencies[due < self._fault[0]])
                self.during.add(latencies[(due >= self._fault[0]) & (due < self._fault[1])])
                self.after.add(latencies[due >= self._fault[1]])


def unavailable(received: ReceivedEvents, fault: tuple[int, int], interval: int, end: int) -> float:
    """Longest silence between two deliveries that touches the fault, less one normal interval, in s."""
    begin, until = fault[0], min(fault[1], end)
    times = received.delivered
    there = times > 0
    before = int(times.max(initial=0, where=times <= begin)) or begin
    after = min(int(times.min(initial=FOREVER, where=there & (times >= until))), end)
    marks = np.concatenate([[before], times[there & (times > begin) & (times < until)], [max(before, after)]])
    marks.sort()
    return round(max(0, int(np.diff(marks).max()) - interval) / NS, 3)


def recovery(received: ReceivedEvents, fault: tuple[int, int]) -> float | None:
    """End of the fault to the first delivery after it, in s; None if there was none."""
    times = received.delivered
    after = int(times.min(initial=FOREVER, where=times >= fault[1]))
    return None if FOREVER in (after, fault[1]) else round((after - fault[1]) / NS, 3)


def backlog_clear(received: ReceivedEvents, sent: SentEvents, fault: tuple[int, int]) -> float | None:
    """End of the fault until the last event accepted before it was committed, in s; 0 if none was left."""
    if fault[1] == FOREVER:
        return None
    owed = (sent.accepted > 0) & (sent.accepted <= fault[1])
    return round(max(0, int(received.committed.max(initial=fault[1], where=owed)) - fault[1]) / NS, 3)


def recovered(received: ReceivedEvents, sent: SentEvents, fault: tuple[int, int]) -> int:
    """Accepted before the fault ended, committed after it."""
    return int(((sent.accepted > 0) & (sent.accepted <= fault[1]) & (received.committed > fault[1])).sum())


def rate(received: ReceivedEvents) -> float:
    """Committed events per second between the first and the last commit."""
    times = received.committed
    there = times > 0
    events = int(np.count_nonzero(there))
    if events < 2:
        return 0.0
    span = int(times.max()) - int(times.min(initial=FOREVER, where=there))
    return round((events - 1) * NS / max(1, span), 1)


class TimelineBuilder:
    """Adds up the timeline of a run over its subscriptions; `end` is the time of its last record."""

    def __init__(self, start: int, end: int) -> None:
        self._start = start
        self._step = max(1, (end - start) // STEPS + 1)
        self._accepted, self._committed = np.zeros(STEPS, np.int64), np.zeros(STEPS, np.int64)
        self._latency = np.zeros(STEPS, np.int64)
        self._lost: dict[str, Times] = {}

    def _step_numbers(self, times: Times) -> Times:
        return np.clip((times - self._start) // self._step, 0, STEPS - 1)

    def _count(self, times: Times) -> Times:
        return np.bincount(self._step_numbers(times), minlength=STEPS)

    def add(self, sent: SentEvents, received: ReceivedEvents, lost: Attribution | None) -> None:
        """Add one subscription, for each of which every accepted event counts once."""
        for begin in range(0, len(sent), BLOCK):
            part = slice(begin, begin + BLOCK)
            accepted = sent.outcome[part] == ACCEPTED
            self._accepted += self._count(sent.accepted[part][accepted])
            committed = accepted & (received.committed[part] > 0)
            self._committed += self._count(received.committed[part][committed])
            numbers = np.flatnonzero(accepted & (received.delivered[part] > 0)) + begin
            delivered = received.delivered[numbers]
            np.maximum.at(self._latency, self._step_numbers(delivered), delivered - sent.intended(numbers))
        for reason in CODE if lost is not None else ():
            numbers = lost.of(reason)  # type: ignore[union-attr]
            if len(numbers):
                so_far = self._lost.get(reason, np.zeros(STEPS, np.int64))
                self._lost[reason] = so_far + self._count(sent.accepted[numbers])

    def timeline(self) -> Timeline | None:
        """What was added, or None if nothing was accepted."""
        if not self._accepted.any():
            return None
        return Timeline(
            round(self._step / NS, 6),
            self._accepted.tolist(),
            self._committed.tolist(),
            {reason: counts.tolist() for reason, counts in self._lost.items()},
            [round(value / 1e6, 1) for value in self._latency.tolist()],
        )
