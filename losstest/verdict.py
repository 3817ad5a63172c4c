"""The verdict: a pure function from the witnesses of a run to its row."""

from brokerless.core.intervals import IntervalSet
from brokerless.losstest import timing
from brokerless.losstest.attribute import FOREVER, Marks, attribute, map_declared
from brokerless.losstest.books import Got, Sent, open_books
from brokerless.losstest.evidence import Evidence
from brokerless.losstest.model import REASONS, Promise, Row, Verdict
from brokerless.losstest.sieve import sieve
from brokerless.losstest.world import fault_span, quiescent, world_of

NS = 1_000_000_000
MAX_RANGES = 400  # of lost events in a row: 5 % of 5,000 single losses are still shown one by one


def judge(evidence: Evidence) -> Row:
    """Compare the witnesses and give the row, with verdict and problems."""
    cell = evidence.cell
    books, subscriptions, swallowed = open_books(evidence)
    rested = quiescent(evidence)
    count = len(subscriptions)
    row = Row(
        transport=cell.label,
        scenario=cell.scenario,
        seed=cell.seed,
        family=cell.traits.family,
        journal=cell.traits.journal,
        control=cell.control,
        independent=cell.independent,
        network=cell.network,
        expected=cell.promise,
        subscriptions=count,
        offered=len(books.offered) * count,
        rejected=len(books.rejected) * count,
        unknown=len(books.unknown) * count,
        accepted=len(books.accepted) * count,
        due_s=round(cell.events / cell.rate, 6),
        withheld=max(0, cell.events - len(books.offered)) * count,
        problems=list(evidence.problems),
    )
    lost: dict[str, list[int]] = {}
    for got in subscriptions:
        _add_subscription(row, books, got)
        missing = sorted(books.accepted.keys() - got.committed.keys())
        if not rested:
            row.pending += len(missing)
            continue
        declared = [
            (d.epoch, d.first, d.last, d.reason)
            for d in evidence.declared
            if d.subscription in ("", got.name)
        ]
        marks = Marks(
            declared=map_declared(declared, books.positions),
            swallowed=swallowed,
            delivered=IntervalSet((n, n) for n in sorted(got.delivered)),
        )
        world = world_of(evidence, got, books)
        found = attribute(missing, books.accepted, marks, world, evidence.drops)
        for reason, numbers in found.items():
            lost.setdefault(reason, []).extend(numbers)
    row.lost_by_reason = {reason: len(lost[reason]) for reason in REASONS if lost.get(reason)}
    row.lost = sum(row.lost_by_reason.values())
    row.lost_percent = round(100 * row.lost / row.accepted, 4) if row.accepted else 0.0
    row.lost_ranges = _ranges(lost)
    row.balanced = balanced(row)
    _add_times(row, evidence, books, subscriptions)
    control = _control_problem(evidence, books, lost) if rested else None
    fault = fault_span(evidence)
    too_late = fault is not None and fault[0] > max(books.offered.values(), default=FOREVER)
    row.verdict = _verdict(row, rested, too_late, books, control)
    return row


def balanced(row: Row) -> bool:
    """The two sums of conservation."""
    return (
        row.offered == row.rejected + row.unknown + row.accepted
        and row.accepted == row.committed + row.lost + row.pending
    )


def _add_subscription(row: Row, books: Sent, got: Got) -> None:
    accepted = books.accepted.keys()
    row.delivered += len(accepted & got.delivered.keys())
    row.committed += len(accepted & got.committed.keys())
    row.acked += len(accepted & got.acked)
    row.duplicates += got.duplicates
    row.reordered += got.reordered
    row.unexpected += got.unexpected
    row.unknown_delivered += len(books.unknown & got.delivered.keys())


def _add_times(row: Row, evidence: Evidence, books: Sent, subscriptions: list[Got]) -> None:
    row.latency_ms = timing.latency(books, subscriptions)
    row.rate = round(sum(timing.rate(got) for got in subscriptions), 1)
    row.timeline = timing.timeline(books, subscriptions)
    stamps = [w["t"] for w in evidence.world]
    if stamps:
        row.duration_s = round((max(stamps) - min(stamps)) / NS, 3)
    fault = fault_span(evidence)
    if fault is None or not books.start:
        return
    end = max(stamps)
    row.fault = (
        round((fault[0] - books.start) / NS, 3),
        round((min(fault[1], end) - books.start) / NS, 3),
    )
    row.recovered = sum(timing.recovered(got, books, fault) for got in subscriptions)
    row.unavailable_s = max(timing.unavailable(got, fault, books.interval, end) for got in subscriptions)
    row.recovery_s = _worst([timing.recovery(got, fault) for got in subscriptions])
    row.backlog_clear_s = _worst([timing.backlog_clear(got, books, fault) for got in subscriptions])


def _worst(values: list[float | None]) -> float | None:
    """The longest; None if any of them never came."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) and known else None


def _ranges(lost: dict[str, list[int]]) -> list[tuple[int, int, str]]:
    ranges = []
    for reason, numbers in lost.items():
        runs = IntervalSet((n, n) for n in sorted(numbers))
        ranges += [(first, last, reason) for first, last in runs]
    return sorted(ranges)[:MAX_RANGES]


def _control_problem(evidence: Evidence, books: Sent, lost: dict[str, list[int]]) -> str | None:
    """For a run with the sieve: the lost events must be exactly those that the seed determines."""
    cell = evidence.cell
    if not cell.sieve:
        return None
    expected = sorted(n for n in books.accepted if sieve(cell.seed, n, cell.sieve))
    for reason, numbers in lost.items():
        if reason != "in_flight":
            return f"control: {len(numbers)} events lost as {reason}, which the sieve did not take"
    reported = sorted(set(lost.get("in_flight", [])))
    if reported != expected:
        wrong = sorted(set(reported) ^ set(expected))
        return f"control: the sieve took {len(expected)} events, {len(reported)} are reported; differs: {wrong[:5]}"
    if not expected:
        return "control: the sieve took nothing; more events or another seed are needed"
    return None


def _verdict(row: Row, rested: bool, too_late: bool, books: Sent, control: str | None) -> Verdict:
    if not row.balanced:
        row.problems.append("the books do not balance")
    if row.unexpected:
        row.problems.append(f"{row.unexpected} deliveries of what was never offered")
    if row.lost_by_reason.get("unattributed"):
        row.problems.append(f"{row.lost_by_reason['unattributed']} lost for no known reason")
    if control:
        row.problems.append(control)
    if not row.accepted:
        row.problems.append("nothing was accepted")
    if not too_late and (not row.control or not control):
        row.problems += _broken_promise(row, row.expected)
    failed = bool(row.problems)
    if not rested:
        row.problems.append("did not come to rest within the drain time")
        return "unknown"
    if too_late:
        row.problems.append("the fault came after the last event: the run shows nothing")
        return "unknown" if not failed else "fail"
    if not books.done:
        row.problems.append("the producer did not finish")
        return "unknown" if not failed else "fail"
    return "fail" if failed else "pass"


def _broken_promise(row: Row, promise: Promise) -> list[str]:
    if promise.loss == "none" and row.lost:
        return [f"promised to lose nothing, lost {row.lost}"]
    if promise.loss == "must" and not row.lost:
        return ["should have lost something, and did not: is the fault effective?"]
    strangers = sorted(set(row.lost_by_reason) - set(promise.reasons) - {"unattributed"})
    if row.lost and promise.reasons and strangers:
        return [f"lost for reasons not promised: {', '.join(strangers)}"]
    return []


__all__ = ["FOREVER", "balanced", "judge"]
