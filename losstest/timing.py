"""Times of a run: how long nothing came, when it came again, when the backlog was gone, latency. Pure."""

from brokerless.losstest.attribute import FOREVER
from brokerless.losstest.books import Got, Sent
from brokerless.losstest.model import Latency, Timeline

NS = 1_000_000_000
STEPS = 72  # of a timeline: enough to see a fault of a tenth of the run, few enough for a phone


def percentile(ordered: list[float], q: float) -> float:
    """The value at proportion `q` of an ordered, non-empty list (nearest rank)."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def latency(books: Sent, subscriptions: list[Got]) -> Latency | None:
    """From the intended send time to the first delivery, over all subscriptions."""
    values = sorted(
        (t - books.intended(n)) / 1e6
        for got in subscriptions
        for n, t in got.delivered.items()
        if n in books.accepted
    )
    if not values:
        return None
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    return Latency(round(p50, 3), round(p99, 3), round(values[-1], 3))


def unavailable(got: Got, fault: tuple[int, int], interval: int, end: int) -> float:
    """Longest silence between two deliveries that touches the fault, less one normal interval, in s."""
    begin, until = fault[0], min(fault[1], end)
    longest = 0
    before = [t for t in got.times if t <= begin]
    previous = before[-1] if before else begin
    for t in [*(t for t in got.times if t > begin), end]:
        if previous < until:
            longest = max(longest, t - previous)
        previous = t
    return round(max(0, longest - interval) / NS, 3)


def recovery(got: Got, fault: tuple[int, int]) -> float | None:
    """End of the fault to the first delivery after it, in s; None if there was none."""
    if fault[1] == FOREVER:
        return None
    after = min((t for t in got.times if t >= fault[1]), default=None)
    return None if after is None else round((after - fault[1]) / NS, 3)


def backlog_clear(got: Got, books: Sent, fault: tuple[int, int]) -> float | None:
    """End of the fault until the last event accepted before it was committed, in s; 0 if none was left."""
    if fault[1] == FOREVER:
        return None
    owed = [t for n, t in got.committed.items() if books.accepted.get(n, FOREVER) <= fault[1]]
    return round(max(0, max(owed, default=fault[1]) - fault[1]) / NS, 3)


def recovered(got: Got, books: Sent, fault: tuple[int, int]) -> int:
    """Accepted before the fault ended, committed after it."""
    return sum(1 for n, t in got.committed.items() if books.accepted.get(n, FOREVER) <= fault[1] < t)


def rate(got: Got) -> float:
    """Committed events per second between the first and the last commit."""
    if len(got.committed) < 2:
        return 0.0
    first, last = min(got.committed.values()), max(got.committed.values())
    return round((len(got.committed) - 1) * NS / max(1, last - first), 1)


def timeline(books: Sent, subscriptions: list[Got]) -> Timeline | None:
    """Accepted and committed per step over the run; accepted counts once per subscription."""
    times = list(books.accepted.values())
    for got in subscriptions:
        times += got.committed.values()
    if not times:
        return None
    end = max(times)
    step = max(1, (end - books.start) // STEPS + 1)
    accepted, committed = [0] * STEPS, [0] * STEPS
    for t in books.accepted.values():
        accepted[_slot(t, books.start, step)] += len(subscriptions)
    for got in subscriptions:
        for n, t in got.committed.items():
            if n in books.accepted:
                committed[_slot(t, books.start, step)] += 1
    return Timeline(round(step / NS, 6), accepted, committed)


def _slot(t: int, start: int, step: int) -> int:
    return min(STEPS - 1, max(0, (t - start) // step))
