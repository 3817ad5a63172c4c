"""The verdict: a pure function from the witnesses of a run to its row."""

import numpy as np

from brokerless.losstest.analysis import timing
from brokerless.losstest.analysis.fault_windows import fault_span, find_fault_windows, quiescent_since
from brokerless.losstest.analysis.loss_reasons import CODE, Attribution, Codes, Mask, attribute, map_declared
from brokerless.losstest.analysis.observations import (
    ACCEPTED,
    INDETERMINATE,
    NOT_OFFERED,
    OPEN,
    REJECTED,
    Numbers,
    ReceivedEvents,
    SentEvents,
    link_events,
    received_events,
    sent_events,
)
from brokerless.losstest.evidence.evidence import Evidence
from brokerless.losstest.evidence.witness import Kind
from brokerless.losstest.faults.seeded_drop import is_seeded_drop
from brokerless.losstest.model import REASONS, Price, Promise, Row, Usage, Verdict

NS = 1_000_000_000
LEAST_PERCENT = 0.0001
# On a machine so busy that the supervisor got no time: says nothing about the transport.
SHOWS_NOTHING = "the run shows nothing"
MAX_RANGES = 10_000  # of lost events in a row; how many more there were is in `lost_ranges_omitted`


def judge(evidence: Evidence) -> Row:
    """Compare the witnesses and give the row, with verdict and problems."""
    cell = evidence.cell
    sent = sent_events(evidence.producers, cell.events)
    count = cell.subscriptions
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
        at_once=cell.at_once,
        compress=cell.compress,
        subscriptions=count,
        offered=(len(sent) - sent.count(NOT_OFFERED)) * count,
        rejected=sent.count(REJECTED) * count,
        unknown=sent.count(OPEN, INDETERMINATE) * count,
        indeterminate=sent.count(INDETERMINATE) * count,
        accepted=sent.count(ACCEPTED) * count,
        due_s=round(cell.events / cell.rate, 6),
        withheld=max(0, cell.events - (len(sent) - sent.count(NOT_OFFERED))) * count,
        problems=list(evidence.problems),
        findings=[
            f"does not end {entry['process']} when told to, so that it was killed"
            for entry in evidence.supervisor
            if entry["what"] == "hung"
        ],
    )
    run = _Run(evidence, sent, row)
    for received in received_events(evidence, sent):
        run.add(received)
        del received  # before the next one is read
    return run.finish()


class _Run:
    """Adds up the subscriptions of one run into its row."""

    def __init__(self, evidence: Evidence, sent: SentEvents, row: Row) -> None:
        self._evidence, self._sent, self._row = evidence, sent, row
        self._rested_at = quiescent_since(evidence)
        self._rested = self._rested_at is not None
        self._fault = fault_span(evidence)
        self._dropped = link_events(evidence.links, sent, Kind.DROPPED)
        self._delayed = link_events(evidence.links, sent, Kind.DELAYED)
        self._lost: list[Attribution] = []
        self._latencies = timing.Latencies(self._fault)
        stamps = [entry["t"] for entry in evidence.supervisor]
        self._end = max(stamps, default=0)
        row.duration_s = round((self._end - min(stamps, default=0)) / NS, 3)
        # The timeline ends where the run came to rest: the wait for late events after it is no part of the picture.
        quiet = int(evidence.cell.traits.quiet_s * NS)
        ended = self._end if self._rested_at is None else self._rested_at - quiet
        shown = max(ended, self._fault[1] if self._fault else 0)
        self._timeline = timing.TimelineBuilder(sent.start, max(shown, int(sent.accepted.max(initial=0))))
        self._accepted: Mask = sent.outcome == ACCEPTED

    def add(self, received: ReceivedEvents) -> None:
        """One subscription: its counts, its losses, its times."""
        row, sent = self._row, self._sent
        there = received.delivered > 0
        row.delivered += int((self._accepted & there).sum())
        row.committed += int((self._accepted & (received.committed > 0)).sum())
        row.acked += int((self._accepted & received.acked).sum())
        row.duplicates += received.duplicates
        row.reordered += received.reordered
        row.unexpected += received.unexpected
        row.unknown_delivered += int(
            (((sent.outcome == OPEN) | (sent.outcome == INDETERMINATE)) & there).sum()
        )
        row.rejected_delivered += int(((sent.outcome == REJECTED) & there).sum())
        row.premature += int((there & (received.delivered < sent.offered)).sum())
        _describe_unexpected(row, received)
        missing = np.flatnonzero(self._accepted & (received.committed == 0))
        if self._rested_at is not None and received.last_delivery > self._rested_at:
            self._rested = False  # something still came when all was thought to be quiet
        lost = self._attribute(missing, received) if self._rested else None
        if lost is None:
            row.pending += len(missing)
        else:
            self._lost.append(lost)
        self._latencies.add(sent, received)
        self._timeline.add(sent, received, lost)
        row.rate = round(row.rate + timing.rate(received), 1)
        if self._fault is not None and sent.start:
            self._add_fault_times(received, self._fault)

    def _attribute(self, missing: Numbers, received: ReceivedEvents) -> Attribution:
        cell = self._evidence.cell
        found = attribute(
            missing,
            self._sent,
            received,
            find_fault_windows(self._evidence, received, self._sent),
            dropped=self._dropped,
            delayed=self._delayed,
            drops=self._evidence.drops,
            declared=self._declared(received.name),
            # What a broker keeps for a consumer is the buffer in front of it.
            buffer_events=min(cell.buffer_events, cell.retention_events)
            if cell.traits.journal == "broker"
            else cell.buffer_events,
            retention_events=cell.retention_events,
        )
        self._row.findings += [text for text in found.findings if text not in self._row.findings]
        return found

    def _declared(self, subscription: str) -> Codes:
        said = [
            (d.epoch, d.first, d.last, d.reason)
            for d in self._evidence.declared
            if d.subscription in ("", subscription)
        ]
        codes, strange = map_declared(said, self._sent)
        for word, count in strange.items():
            text = f"declares losses {count} times as {word!r}, which is not one of the reasons"
            if text not in self._row.findings:
                self._row.findings.append(text)
        return codes

    def _add_fault_times(self, received: ReceivedEvents, fault: tuple[int, int]) -> None:
        row, sent = self._row, self._sent
        first = row.fault is None
        row.fault = (
            round((fault[0] - sent.start) / NS, 3),
            round((min(fault[1], self._end) - sent.start) / NS, 3),
        )
        row.recovered += timing.recovered(received, sent, fault)
        silence = timing.unavailable(received, fault, sent.interval, self._end)
        row.unavailable_s = max(row.unavailable_s or 0.0, silence)
        again = timing.recovery(received, fault)
        clear = timing.backlog_clear(received, sent, fault)
        row.recovery_s = again if first else _worst(row.recovery_s, again)
        row.backlog_clear_s = clear if first else _worst(row.backlog_clear_s, clear)

    def finish(self) -> Row:
        """The row, with its verdict."""
        row, sent = self._row, self._sent
        if not self._rested:
            # One subscription that did not come to rest makes the run unknown: nothing of it is called lost.
            row.pending += sum(len(lost.numbers) for lost in self._lost)
            self._lost = []
        for reason in REASONS:
            count = sum(len(lost.of(reason)) for lost in self._lost)
            if count:
                row.lost_by_reason[reason] = count
        row.lost = sum(row.lost_by_reason.values())
        row.lost_percent = _percent(row.lost, row.accepted)
        self._add_lost_during_fault()
        ranges = [found for lost in self._lost for found in _ranges(lost)]
        row.lost_ranges, row.lost_ranges_omitted = (
            sorted(ranges)[:MAX_RANGES],
            max(0, len(ranges) - MAX_RANGES),
        )
        row.balanced = balanced(row)
        row.timeline = self._timeline.timeline()
        row.latency_ms = self._latencies.whole.summary()
        row.latency_before_ms = self._latencies.before.summary()
        row.latency_during_ms = self._latencies.during.summary()
        row.latency_after_ms = self._latencies.after.summary()
        row.price = _price(self._evidence, row.accepted)
        row.problems += self._evidence.damage()
        control = self._control_problem() if self._rested else None
        last_offered = int(sent.offered.max(initial=0))
        too_late = self._fault is not None and bool(last_offered) and self._fault[0] > last_offered
        empty = "the fault came after the last event" if too_late else self._too_little()
        row.verdict = _verdict(row, self._rested, empty, sent.done, control)
        return row

    def _too_little(self) -> str:
        """Why nothing had to be lost: a starved producer sends less than what the scenario makes too small."""
        cell, during = self._evidence.cell, self._row.accepted_during_fault
        kept = {"beyond-retention": cell.retention_events, "pause-long": cell.buffer_events}
        room = kept.get(cell.scenario, -1)
        must = self._row.expected.loss == "must" and not self._row.lost and not cell.control
        if not must or during is None or during // self._row.subscriptions > room:
            return ""
        return f"not more than the {room} events that are kept were accepted during the fault"

    def _add_lost_during_fault(self) -> None:
        if self._fault is None:
            return
        accepted = self._sent.accepted
        during = (accepted >= self._fault[0]) & (accepted < self._fault[1])
        owed = int(during.sum()) * self._row.subscriptions
        lost = sum(int(during[lost.numbers].sum()) for lost in self._lost)
        self._row.accepted_during_fault = owed
        self._row.lost_during_fault_percent = _percent(lost, owed) if owed else None

    def _control_problem(self) -> str | None:
        """For a run with the seeded drop: the lost events must be exactly those that the seed determines."""
        cell = self._evidence.cell
        if not cell.seeded_drop:
            return None
        numbers = map(int, self._sent.accepted_numbers)
        expected = [n for n in numbers if is_seeded_drop(cell.seed, n, cell.seeded_drop)]
        for reason, count in self._row.lost_by_reason.items():
            if reason != "in_flight":
                return f"control: {count} events lost as {reason}, which were not dropped on purpose"
        reported = sorted({n for lost in self._lost for n in lost.of("in_flight").tolist()})
        if reported != expected:
            wrong = sorted(set(reported) ^ set(expected))
            return (
                f"control: {len(expected)} events were dropped on purpose, {len(reported)} are reported; "
                f"differs: {wrong[:5]}"
            )
        if not expected:
            return "control: nothing was dropped on purpose; more events or another seed are needed"
        return None


def _percent(lost: int, accepted: int) -> float:
    """Rounded, but never to zero what is not zero."""
    return max(round(100 * lost / accepted, 4), LEAST_PERCENT) if lost else 0.0


def balanced(row: Row) -> bool:
    """The two sums of conservation."""
    return (
        row.offered == row.rejected + row.unknown + row.accepted
        and row.accepted == row.committed + row.lost + row.pending
    )


def _describe_unexpected(row: Row, received: ReceivedEvents) -> None:
    for count, text in ((received.damaged, "damaged or mixed up"), (received.other_run, "of another run")):
        if count:
            row.problems.append(f"{received.name}: {count} deliveries were {text}")


def _worst(*values: float | None) -> float | None:
    """The longest; None if any of them never came."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _ranges(lost: Attribution) -> list[tuple[int, int, str]]:
    found = []
    for reason in CODE:
        numbers = lost.of(reason)
        if len(numbers):
            breaks = np.flatnonzero(np.diff(numbers) != 1)
            firsts = numbers[np.concatenate([[0], breaks + 1])].tolist()
            lasts = numbers[np.concatenate([breaks, [len(numbers) - 1]])].tolist()
            found += [(first, last, reason) for first, last in zip(firsts, lasts, strict=True)]
    return found


def _price(evidence: Evidence, accepted: int) -> Price | None:
    """What the processes of each role cost together; None if none of them reported it."""

    def role(name: str) -> list[Usage]:
        return [usage for process, usage in evidence.usage.items() if process.startswith(f"{name}-")]

    producers, consumers, brokers, relays = map(role, ("producer", "consumer", "service", "relay"))
    if not accepted or not (producers and consumers):
        return None
    million = accepted / max(1, evidence.cell.subscriptions) / 1e6

    def cpu(usages: list[Usage]) -> float:
        return round(sum(usage.cpu_s for usage in usages) / million, 3)

    def memory(usages: list[Usage]) -> int:
        return max((usage.peak_memory for usage in usages), default=0)

    return Price(
        cpu(producers),
        cpu(consumers),
        cpu(brokers),
        memory(producers),
        memory(consumers),
        memory(brokers),
        sum(usage.disk_bytes for usage in (*producers, *consumers, *brokers)),
        sum(usage.relayed_bytes for usage in relays) if relays else None,
        evidence.wire_bytes,
    )


def _verdict(row: Row, rested: bool, empty: str, done: bool, control: str | None) -> Verdict:
    if not row.balanced:
        row.problems.append("the accounting does not balance")
    if row.unexpected:
        row.problems.append(f"{row.unexpected} deliveries of what was never offered")
    if row.rejected_delivered:
        row.problems.append(f"{row.rejected_delivered} events were refused and delivered all the same")
    if row.premature:
        row.problems.append(f"{row.premature} events were delivered before they were sent")
    if row.lost_by_reason.get("unattributed"):
        row.problems.append(f"{row.lost_by_reason['unattributed']} lost for no known reason")
    if control:
        row.problems.append(control)
    if not row.accepted:
        row.problems.append("nothing was accepted")
    if not empty and (not row.control or not control):
        row.problems += _broken_promise(row, row.expected)
    failed = bool(row.problems)
    if not rested:
        row.problems.append("did not come to rest within the drain time")
        return "unknown"
    if empty:
        row.problems.append(f"{empty}: {SHOWS_NOTHING}")
        return "unknown" if not failed else "fail"
    if not done:
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
