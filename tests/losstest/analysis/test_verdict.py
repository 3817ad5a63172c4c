"""The verdict against a plain model: whatever happened to each event, the row says exactly that."""

import tracemalloc
from collections import Counter
from pathlib import Path

from evidence_builder import ANY, MS, START, Declared, Evidence, cell, consumer, due, producer, record, rested
from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.analysis.verdict import MAX_RANGES, _percent, judge
from brokerless.losstest.evidence import counter_digits
from brokerless.losstest.evidence.evidence import ConsumerLog, DropCount
from brokerless.losstest.evidence.reader import WitnessFile
from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.faults.seeded_drop import is_seeded_drop
from brokerless.losstest.model import REASONS, Promise, Row, Traits
from brokerless.losstest.report.formatting import cell_text
from brokerless.losstest.report.html import heat

FATES = ("committed", "rejected", "unknown", "unknown_delivered", "dropped", "held", "silent", *REASONS[:7])
fates = st.lists(st.sampled_from(FATES), min_size=1, max_size=120)


@given(fates=fates, doubles=st.lists(st.integers(0, 119), max_size=20), inventions=st.integers(0, 5))
def test_every_fate_is_counted(fates: list[str], doubles: list[int], inventions: int) -> None:
    """Any mixture of fates gives the same counts as counting them, and the sent balance."""
    by = {fate: [n for n, f in enumerate(fates) if f == fate] for fate in FATES}
    refused = set(by["rejected"]) | set(by["unknown"]) | set(by["unknown_delivered"])
    accepted = [n for n in range(len(fates)) if n not in refused]
    twice = [n for n in doubles if n in by["committed"]]
    log = consumer(sorted([*by["committed"], *by["unknown_delivered"]]))
    for n in twice:
        log.records.append(record(Kind.DELIVERED, n, due(len(fates)) + 1))
    for n in by["held"]:
        log.records.append(record(Kind.DELIVERED, n, due(n) + 1))
    for i in range(inventions):
        log.records.append(record(Kind.DELIVERED, 10_000 + i, due(len(fates)) + 2))
    declared = [Declared("", 9, 2 * n, 2 * n, reason) for reason in REASONS[:7] for n in by[reason]]
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer(accepted, by["rejected"], [*by["unknown"], *by["unknown_delivered"]])],
            consumers=[log],
            links=[[record(Kind.DROPPED, n) for n in by["dropped"]]],
            supervisor=rested(len(fates)),
            declared=declared,
        )
    )
    assert row.offered == len(fates)
    assert row.rejected == len(by["rejected"])
    assert row.unknown == len(by["unknown"]) + len(by["unknown_delivered"])
    assert row.unknown_delivered == len(by["unknown_delivered"])
    assert row.accepted == len(accepted)
    assert row.committed == len(by["committed"])
    assert row.delivered == len(by["committed"]) + len(by["held"])
    assert row.duplicates == len(twice)
    assert row.unexpected == inventions
    claimed = sum(len(by[reason]) for reason in REASONS[:7])
    expected = Counter({"in_flight": len(by["dropped"]) + len(by["held"])})
    # Nothing happened that could explain a loss: what the product claims is a finding, and no reason.
    expected["unattributed"] = len(by["silent"]) + claimed
    assert bool(row.findings) == bool(claimed)
    assert row.lost_by_reason == {reason: n for reason, n in expected.items() if n}
    assert row.lost == sum(expected.values())
    assert row.balanced
    assert (row.verdict == "pass") == (not inventions and not by["silent"] and not claimed and bool(accepted))


@given(order=st.permutations(range(30)))
def test_reordering_against_a_model(order: list[int]) -> None:
    """An event counts as reordered when a later one came before it, and at no other time."""
    log = consumer([])
    for i, n in enumerate(order):
        t = due(100) + i
        log.records += [record(Kind.DELIVERED, n, t), record(Kind.COMMITTED, n, t)]
    row = judge(
        Evidence(cell=cell(), producers=[producer(range(30))], consumers=[log], supervisor=rested(200))
    )
    expected = sum(n < max(order[:i], default=-1) for i, n in enumerate(order))
    assert row.reordered == expected


COUNTED_FATES = ("committed", "unknown", "unknown_delivered", "dropped", "silent", "twice")


@given(fates=st.lists(st.sampled_from(COUNTED_FATES), min_size=1, max_size=80))
def test_counted_events_are_judged_one_by_one(fates: list[str]) -> None:
    """In counters that only add up, a loss is never taken for an event that may not have been sent, nor the reverse."""
    by = {fate: [n for n, f in enumerate(fates) if f == fate] for fate in COUNTED_FATES}
    unknown = [*by["unknown"], *by["unknown_delivered"]]
    totals: Counter[str] = Counter()
    for n in (*by["committed"], *by["unknown_delivered"], *by["twice"], *by["twice"]):
        name, amount = counter_digits.counter(5, n)
        totals[name] += amount
    arrived = [
        n for name, total in totals.items() for n in Counter(counter_digits.arrivals(name, total)).elements()
    ]
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer([n for n in range(len(fates)) if n not in unknown], unknown=unknown)],
            consumers=[consumer(arrived)],
            links=[[record(Kind.DROPPED, n) for n in by["dropped"]]],
            supervisor=rested(len(fates)),
        )
    )
    assert (row.unknown, row.unknown_delivered) == (len(unknown), len(by["unknown_delivered"]))
    assert (row.lost, row.duplicates) == (len(by["dropped"]) + len(by["silent"]), len(by["twice"]))
    lost = {reason: [] for _, _, reason in row.lost_ranges}
    for first, last, reason in row.lost_ranges:
        lost[reason] += range(first, last + 1)
    assert lost.get("in_flight", []) == by["dropped"]
    assert lost.get("unattributed", []) == by["silent"]
    assert row.balanced


def test_two_subscriptions_are_counted_each() -> None:
    """Every event is owed to each fan-out subscription; the loss of one does not hide in the other."""
    logs = [consumer(range(10)), consumer(range(7), index=1, subscription="sub-1")]
    row = judge(
        Evidence(
            cell=cell(consumers=2), producers=[producer(range(10))], consumers=logs, supervisor=rested(10)
        )
    )
    assert (row.accepted, row.committed, row.lost, row.subscriptions) == (20, 17, 3, 2)
    assert row.balanced


def test_workers_of_a_group_share_one_subscription() -> None:
    """What either worker committed is committed; an event that both had is a duplicate."""
    traits = Traits(family="f", group=True)
    logs = [
        consumer(range(0, 10, 2), subscription="group"),
        consumer([1, 3, 5, 7, 9, 0], index=1, subscription="group"),
    ]
    row = judge(
        Evidence(
            cell=cell(consumers=2, traits=traits),
            producers=[producer(range(10))],
            consumers=logs,
            supervisor=rested(10),
        )
    )
    assert (row.accepted, row.committed, row.lost, row.duplicates) == (10, 10, 0, 1)


def test_not_rested_means_pending_and_unknown() -> None:
    """Without a complete drain nothing is called lost."""
    supervisor = [note for note in rested(10) if note["what"] != "quiescent"]
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer(range(10))],
            consumers=[consumer(range(4))],
            supervisor=supervisor,
        )
    )
    assert (row.verdict, row.lost, row.pending) == ("unknown", 0, 6)
    assert row.balanced


def test_a_delivery_after_the_rest_means_unknown() -> None:
    """If something still came after the supervisor thought that all was quiet, the verdict is withdrawn."""
    log = consumer(range(4))
    log.records.append(record(Kind.DELIVERED, 4, due(10) + 2000 * MS))
    row = judge(
        Evidence(cell=cell(), producers=[producer(range(10))], consumers=[log], supervisor=rested(10))
    )
    assert row.verdict == "unknown"


def outage(
    accepted: int, have: list[int], supervisor: list[dict[str, object]], **changes: object
) -> dict[str, int]:
    """Reasons of a run with one consumer that had `have`, was down from 40 to 60 ms, and came back."""
    before = consumer([n for n in have if n < 40])
    after = consumer([n for n in have if n >= 60], incarnation=2, ready=due(60))
    notes = [{"t": due(40), "what": "down", "consumer": 0, "incarnation": 1}, *supervisor, *rested(accepted)]
    return judge(
        Evidence(
            cell=cell(**changes),
            producers=[producer(range(accepted))],
            consumers=[before, after] if supervisor == [] else [consumer(have)],
            supervisor=sorted(notes if supervisor == [] else notes[1:], key=lambda note: int(str(note["t"]))),
        )
    ).lost_by_reason


def test_reasons_from_the_supervisors_notes() -> None:
    """Down is offline, shortly before is in flight, stopped is overflow, cut is in flight or overflow."""
    have = [*range(35), *range(60, 100)]
    assert outage(100, have, []) == {"offline": 20, "in_flight": 5}
    stopped = [
        {"t": due(40), "what": "pause", "consumer": 0},
        {"t": due(60), "what": "resume", "consumer": 0},
    ]
    have = [*range(45), *range(60, 100)]
    assert outage(100, have, stopped) == {"overflow_sender": 15}
    receiver = Traits(family="f", overflow_at="receiver", link="udp")
    assert outage(100, have, stopped, traits=receiver) == {"overflow_receiver": 15}
    cut = [{"t": due(40), "what": "cut"}, {"t": due(60), "what": "uncut"}]
    have = [*range(40), *range(60, 100)]
    assert outage(100, have, cut, traits=receiver) == {"in_flight": 20}
    assert outage(100, have, cut) == {"overflow_sender": 20}
    crash = [{"t": due(40), "what": "producer-down"}, {"t": due(50), "what": "producer-up"}]
    have = [*range(30), *range(55, 100)]
    assert outage(100, have, crash) == {"producer_crash": 11, "unattributed": 9, "offline": 5}


def test_drop_counters_explain_the_rest() -> None:
    """What nothing else explains goes to a counter that tells of at least as many drops, and to no smaller one."""
    evidence = Evidence(
        cell=cell(),
        producers=[producer(range(10))],
        consumers=[consumer(range(6))],
        supervisor=rested(10),
        drops=[DropCount("sub-0", due(10), "overflow_receiver", 4)],
    )
    assert judge(evidence).lost_by_reason == {"overflow_receiver": 4}
    evidence.drops = [DropCount("sub-0", due(10), "overflow_receiver", 3)]
    assert judge(evidence).lost_by_reason == {"unattributed": 4}


def test_promises_decide_between_pass_and_fail() -> None:
    """The same loss passes if it was promised with that reason, and fails if not."""

    def verdict(promise: Promise) -> str:
        evidence = Evidence(
            cell=cell(promise=promise),
            producers=[producer(range(10))],
            consumers=[consumer(range(9))],
            links=[[record(Kind.DROPPED, 9)]],
            supervisor=rested(10),
        )
        return judge(evidence).verdict

    assert verdict(Promise("may", ("in_flight",))) == "pass"
    assert verdict(Promise("must", ("in_flight",))) == "pass"
    assert verdict(Promise("may", ("offline",))) == "fail"
    assert verdict(Promise()) == "fail"
    assert verdict(ANY) == "pass"


def test_a_fault_that_must_lose_and_does_not_fails() -> None:
    """A promised loss that does not appear means that the fault had no effect: not a pass."""
    evidence = Evidence(
        cell=cell(promise=Promise("must")),
        producers=[producer(range(10))],
        consumers=[consumer(range(10))],
        supervisor=rested(10),
    )
    assert judge(evidence).verdict == "fail"


def test_a_fault_after_the_last_event_shows_nothing() -> None:
    """Nothing lost because nothing was sent meanwhile is neither a kept promise nor a broken one."""
    for promise in (Promise(), Promise("must")):
        for begin, verdict in ((50, "fail" if promise.loss == "must" else "pass"), (150, "unknown")):
            notes = [
                {"t": due(begin), "what": "fault-begin"},
                {"t": due(begin + 10), "what": "fault-end", "healed": due(begin + 10)},
            ]
            evidence = Evidence(
                cell=cell(promise=promise),
                producers=[producer(range(100))],
                consumers=[consumer(range(100))],
                supervisor=sorted([*notes, *rested(200)], key=lambda note: int(str(note["t"]))),
            )
            assert judge(evidence).verdict == verdict


def test_a_producer_that_sent_less_than_is_kept_has_shown_nothing() -> None:
    """Nothing was lost beyond the retention, because it was not reached; one more event, and a loss was due."""
    for retention, verdict in ((11, "unknown"), (9, "fail")):
        notes = [
            {"t": due(50), "what": "fault-begin"},
            {"t": due(60), "what": "fault-end", "healed": due(60)},
        ]
        evidence = Evidence(
            cell=cell(
                scenario="beyond-retention", promise=Promise("must", ("evicted",)), retention_events=retention
            ),
            producers=[producer(range(100))],
            consumers=[consumer(range(100))],
            supervisor=sorted([*notes, *rested(200)], key=lambda note: int(str(note["t"]))),
        )
        assert judge(evidence).verdict == verdict


def test_times() -> None:
    """Unavailable, recovery, backlog and recovered are what the definitions say, on a run done by hand."""
    before = consumer(range(40))
    after = consumer([], incarnation=2, ready=due(65))
    for i, n in enumerate(range(40, 100)):
        t = max(due(70) + i * MS // 10, due(n))
        after.records += [record(Kind.DELIVERED, n, t), record(Kind.COMMITTED, n, t)]
    notes = [
        {"t": due(40), "what": "fault-begin"},
        {"t": due(40), "what": "down", "consumer": 0, "incarnation": 1},
        {"t": due(64), "what": "fault-end", "healed": due(60)},
    ]
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer(range(100))],
            consumers=[before, after],
            supervisor=sorted([*notes, *rested(100)], key=lambda note: int(str(note["t"]))),
        )
    )
    assert row.fault == (0.04, 0.06)
    assert row.recovered == 21
    assert row.recovery_s == 0.01
    assert row.backlog_clear_s == 0.012
    assert row.unavailable_s is not None
    assert abs(row.unavailable_s - (0.07 - 0.0395 - 0.001)) <= 0.001
    assert row.latency_ms is not None
    assert row.latency_ms.p50 == 0.5
    assert row.latency_ms.max == 30.0
    assert row.timeline is not None
    assert sum(row.timeline.accepted) == sum(row.timeline.committed) == 100


def test_a_control_with_the_wrong_set_fails() -> None:
    """Losing as many events as the seeded drop took is not enough: it must be the same ones."""
    took = [n for n in range(100) if is_seeded_drop(1, n, 0.1)]
    other = [n + 1 for n in took if n + 1 not in took]
    seeded = cell(scenario="seeded", seeded_drop=0.1, control=True, promise=Promise("must", ("in_flight",)))

    def verdict(missing: list[int]) -> str:
        evidence = Evidence(
            cell=seeded,
            producers=[producer(range(100))],
            consumers=[consumer(n for n in range(100) if n not in missing)],
            links=[[record(Kind.DROPPED, n) for n in missing]],
            supervisor=rested(100),
        )
        return judge(evidence).verdict

    assert verdict(took) == "pass"
    assert verdict(other) == "fail"
    assert verdict(took[1:]) == "fail"


def test_an_empty_run_is_no_pass() -> None:
    """Nothing accepted, nothing lost: that is not a result."""
    row = judge(Evidence(cell=cell(), consumers=[ConsumerLog(0, 1, "sub-0", [])], supervisor=rested(0)))
    assert row.verdict != "pass"
    assert START > 0


def test_the_filter_is_believed_from_its_order_until_it_is_gone() -> None:
    """Missing events accepted between the filter's own times are in flight, one outside them is unattributed."""
    lost = {30, 31, 49, 80}
    filters = [
        {"t": due(32), "begun": due(30), "what": "filter", "instruction": "loss 0.05"},
        {"t": due(50), "begun": due(45), "what": "filter", "instruction": "pass"},
    ]
    evidence = Evidence(
        cell=cell(network="nft"),
        producers=[producer(range(100))],
        consumers=[consumer(n for n in range(100) if n not in lost)],
        supervisor=rested(99),
        filters=filters,
    )
    row = judge(evidence)
    assert row.lost_by_reason == {"in_flight": 3, "unattributed": 1}
    assert (row.network, row.verdict, row.balanced) == ("nft", "fail", True)


def test_a_consumer_that_never_received_may_still_have_been_connecting() -> None:
    """Ready just before the last event it is not to blame; ready long before, and nothing came: nobody knows why."""
    for ready, reason in ((95, "offline"), (20, "unattributed")):
        first = consumer(range(10))
        second = consumer((), incarnation=2, ready=due(ready))
        second.records[:] = [r for r in second.records if r.kind == Kind.READY]
        supervisor = [
            {"t": due(10), "what": "down", "consumer": 0, "incarnation": 1, "how": "kill"},
            *rested(99),
        ]
        evidence = Evidence(
            cell=cell(traits=Traits(family="f", quiet_s=0.05)),
            producers=[producer(range(100))],
            consumers=[first, second],
            supervisor=supervisor,
        )
        found = judge(evidence).lost_by_reason
        assert found.pop(reason, 0) >= 99 - ready
        assert set(found) <= {"offline", "in_flight"}


def absent_run(declared: list[Declared], **changes: object) -> Row:
    """A consumer that was away from event 40 to 60; 35 to 59 are missing."""
    before, after = consumer(range(35)), consumer(range(60, 100), incarnation=2, ready=due(60))
    notes = [{"t": due(40), "what": "down", "consumer": 0, "incarnation": 1}, *rested(100)]
    return judge(
        Evidence(
            cell=cell(**changes),
            producers=[producer(range(100))],
            consumers=[before, after],
            supervisor=sorted(notes, key=lambda entry: int(str(entry["t"]))),
            declared=declared,
        )
    )


def test_evidence_outranks_what_the_product_says() -> None:
    """Overflow is claimed for events that nobody was there to receive: they are offline, and the claim is a finding."""
    row = absent_run([Declared("sub-0", 9, 2 * 40, 2 * 59, "overflow_sender")])
    assert row.lost_by_reason == {"offline": 20, "in_flight": 5}
    assert row.findings == ["says overflow_sender of 20 events, was offline"]


def test_only_the_product_knows_of_eviction_and_is_believed_where_it_can_be_true() -> None:
    """Evicted while away with more sent than retention holds: believed; with a retention that held all: not."""
    said = [Declared("", 9, 2 * 35, 2 * 59, "evicted")]
    journal = Traits(family="f", journal="disk")
    row = absent_run(said, traits=journal, retention_events=10)
    assert (
        row.lost_by_reason == {"offline": 4, "in_flight": 0, "evicted": 21}
        or row.lost_by_reason["evicted"] >= 20
    )
    assert row.lost_by_reason.get("evicted", 0) + row.lost_by_reason.get("offline", 0) == 25
    row = absent_run(said, traits=journal, retention_events=10_000)
    assert "evicted" not in row.lost_by_reason
    assert "says evicted of 20 events, was offline" in row.findings


def test_a_word_that_is_no_reason_is_a_finding_and_the_event_still_lost() -> None:
    """A declared reason outside the list neither vanishes from `lost` nor becomes a reason."""
    row = absent_run([Declared("", 9, 2 * 40, 2 * 59, "gremlins")])
    assert row.lost == 25
    assert row.balanced
    assert any("gremlins" in text for text in row.findings)


def test_a_loss_long_before_the_fault_is_not_the_faults() -> None:
    """Delivered past a hole and then killed: the hole was not under way, whoever dies a moment later."""
    before = consumer([n for n in range(40) if n != 20])
    after = consumer(range(40, 100), incarnation=2, ready=due(40))
    for entry in (
        {"t": due(40), "what": "down", "consumer": 0, "incarnation": 1},
        {"t": due(40), "what": "producer-down"},
        {"t": due(40), "what": "broker-down"},
        {"t": due(40), "what": "cut"},
        {"t": due(40), "what": "pause", "consumer": 0},
    ):
        evidence = Evidence(
            cell=cell(),
            producers=[producer(range(100))],
            consumers=[before, after],
            supervisor=sorted([entry, *rested(100)], key=lambda e: int(str(e["t"]))),
        )
        assert judge(evidence).lost_by_reason == {"unattributed": 1}, entry


def test_refused_and_delivered_is_an_error() -> None:
    """A refusal that was not true is counted and fails the run."""
    log = consumer([*range(9), 9])
    row = judge(
        Evidence(cell=cell(), producers=[producer(range(9), [9])], consumers=[log], supervisor=rested(10))
    )
    assert (row.rejected, row.rejected_delivered, row.verdict) == (1, 1, "fail")
    assert row.balanced


def test_delivered_before_it_was_sent_is_an_error() -> None:
    """Nobody can deliver what was not sent yet: something is invented, and the run fails."""
    log = consumer(range(9))
    log.records.insert(3, record(Kind.DELIVERED, 9, due(2)))
    log.records.append(record(Kind.COMMITTED, 9, due(10)))
    row = judge(
        Evidence(cell=cell(), producers=[producer(range(10))], consumers=[log], supervisor=rested(10))
    )
    assert (row.premature, row.verdict) == (1, "fail")


def test_an_indeterminate_send_is_neither_lost_nor_invented() -> None:
    """send() said that it does not know: delivered or not, nothing is wrong."""
    records = producer(range(8), unknown=[8, 9])
    records += [record(Kind.INDETERMINATE, 8, due(8)), record(Kind.INDETERMINATE, 9, due(9))]
    row = judge(
        Evidence(cell=cell(), producers=[records], consumers=[consumer(range(9))], supervisor=rested(10))
    )
    assert (row.unknown, row.indeterminate, row.unknown_delivered, row.lost) == (2, 2, 1, 0)
    assert (row.verdict, row.balanced) == ("pass", True)


def test_no_lost_range_disappears_without_a_word() -> None:
    """More ranges than are kept are counted."""
    events = 2 * MAX_RANGES + 20
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer(range(events))],
            consumers=[consumer(range(0, events, 2))],
            supervisor=rested(events),
        )
    )
    assert (len(row.lost_ranges), row.lost_ranges_omitted) == (MAX_RANGES, 10)
    assert row.lost == events // 2


def test_lost_events_are_on_the_timeline_when_they_were_accepted() -> None:
    """A producer that was held back sends late: its losses are shown then, and not when they were due."""
    records = [record(Kind.START, 100, START, position=MS)]
    for n in range(100):
        t = due(n) if n < 50 else due(n) + 100 * MS
        records += [record(Kind.OFFERED, n, t), record(Kind.ACCEPTED, n, t)]
    records.append(record(Kind.DONE, t=due(200)))
    log = consumer(range(50))
    row = judge(Evidence(cell=cell(), producers=[records], consumers=[log], supervisor=rested(200)))
    assert row.timeline is not None
    [lost] = row.timeline.lost.values()
    accepted = row.timeline.accepted
    assert sum(lost) == 50
    assert all(a >= b for a, b in zip(accepted, lost, strict=True))


def test_one_subscription_is_in_memory(tmp_path: Path) -> None:
    """Judging three subscriptions takes no more memory than one: the columns of each go before the next."""
    events = 150_000
    path = tmp_path / "producer-0.1.wit"
    witness = Witness(path)
    witness.write(Kind.START, events, t=START, position=MS)
    for n in range(events):
        witness.write(Kind.OFFERED, n, t=due(n))
        witness.write(Kind.ACCEPTED, n, t=due(n))
    witness.write(Kind.DONE, t=due(events))
    witness.close()

    def peak(subscriptions: int) -> int:
        seen = [record(kind, 0, due(events), events) for kind in (Kind.DELIVERED, Kind.COMMITTED)]
        logs = [
            ConsumerLog(i, 1, f"sub-{i}", [record(Kind.READY, t=START), *seen]) for i in range(subscriptions)
        ]
        evidence = Evidence(
            cell=cell(consumers=subscriptions, scenario="none"),
            producers=[WitnessFile(path)],
            consumers=logs,
            supervisor=rested(events),
        )
        tracemalloc.start()
        try:
            assert judge(evidence).committed == events * subscriptions
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    columns = events * (8 + 8 + 1)  # delivered, committed, acked
    assert peak(3) < peak(1) + columns // 2


def test_one_lost_of_millions_is_not_shown_as_zero() -> None:
    """Rounding never makes a loss vanish from a percentage, a table or the colour of a cell."""
    row = Row(transport="t", scenario="kill", seed=1, accepted=18_000_000, lost=1, verdict="pass")
    row.lost_by_reason = {"offline": 1}
    row.lost_percent = _percent(row.lost, row.accepted)
    assert cell_text([row]) == "<0.1 % offline"
    assert heat([row]) == "h1"
    assert _percent(0, 5) == 0


def test_what_a_journal_in_memory_kept_for_a_stopped_consumer_dies_with_its_producer() -> None:
    """Also what lay before something that the consumer still got: a group gives work back, and not in order."""
    notes = [
        {"t": due(40), "what": "pause", "consumer": 0},
        {"t": due(70), "what": "producer-down"},
        {"t": due(70) + 1, "what": "resume", "consumer": 0},
    ]
    have = [*range(30), *range(60, 65), *range(75, 100)]
    lost = [*range(30, 60), *range(65, 75)]

    def late(n: int) -> int:
        return (72 - n) * MS if 60 <= n < 65 else MS // 2

    for journal, reasons in (
        ("memory", {"producer_crash": 30 + 6, "overflow_sender": 4}),
        ("none", {"producer_crash": 6, "overflow_sender": 34}),
    ):
        evidence = Evidence(
            cell=cell(traits=Traits(family="f", journal=journal, link="tcp", group=True)),  # type: ignore[arg-type]
            producers=[producer(range(100))],
            consumers=[consumer(have, late=late, subscription="group")],
            supervisor=[*rested(100), *notes],
        )
        row = judge(evidence)
        assert row.lost == len(lost)
        assert row.lost_by_reason == reasons, journal
