"""The verdict against a plain model: whatever happened to each event, the row says exactly that."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from worlds import ANY, MS, START, Declared, Evidence, cell, consumer, due, producer, record, rested

from brokerless.losstest import tally
from brokerless.losstest.evidence import ConsumerLog
from brokerless.losstest.model import REASONS, Promise, Traits
from brokerless.losstest.sieve import sieve
from brokerless.losstest.verdict import judge
from brokerless.losstest.witness import Kind

FATES = ("committed", "rejected", "unknown", "unknown_delivered", "swallowed", "held", "silent", *REASONS[:7])
fates = st.lists(st.sampled_from(FATES), min_size=1, max_size=120)


@given(fates=fates, doubles=st.lists(st.integers(0, 119), max_size=20), inventions=st.integers(0, 5))
def test_every_fate_is_counted(fates: list[str], doubles: list[int], inventions: int) -> None:
    """Any mixture of fates gives the same counts as counting them, and the books balance."""
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
            links=[record(Kind.SWALLOWED, n) for n in by["swallowed"]],
            world=rested(len(fates)),
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
    expected = Counter({reason: len(by[reason]) for reason in REASONS[:7]})
    expected["in_flight"] += len(by["swallowed"]) + len(by["held"])
    expected["unattributed"] = len(by["silent"])
    assert row.lost_by_reason == {reason: n for reason, n in expected.items() if n}
    assert row.lost == sum(expected.values())
    assert row.balanced
    assert (row.verdict == "pass") == (not inventions and not by["silent"] and bool(accepted))


@given(order=st.permutations(range(30)))
def test_reordering_against_a_model(order: list[int]) -> None:
    """An event counts as reordered when a later one came before it, and at no other time."""
    log = consumer([])
    for i, n in enumerate(order):
        t = due(100) + i
        log.records += [record(Kind.DELIVERED, n, t), record(Kind.COMMITTED, n, t)]
    row = judge(Evidence(cell=cell(), producers=[producer(range(30))], consumers=[log], world=rested(200)))
    expected = sum(n < max(order[:i], default=-1) for i, n in enumerate(order))
    assert row.reordered == expected


COUNTED_FATES = ("committed", "unknown", "unknown_delivered", "swallowed", "silent", "twice")


@given(fates=st.lists(st.sampled_from(COUNTED_FATES), min_size=1, max_size=80))
def test_counted_events_are_judged_one_by_one(fates: list[str]) -> None:
    """In counters that only add up, a loss is never taken for an event that may not have been sent, nor the reverse."""
    by = {fate: [n for n, f in enumerate(fates) if f == fate] for fate in COUNTED_FATES}
    unknown = [*by["unknown"], *by["unknown_delivered"]]
    totals: Counter[str] = Counter()
    for n in (*by["committed"], *by["unknown_delivered"], *by["twice"], *by["twice"]):
        name, amount = tally.counter(5, n)
        totals[name] += amount
    arrived = [n for name, total in totals.items() for n in Counter(tally.arrivals(name, total)).elements()]
    row = judge(
        Evidence(
            cell=cell(),
            producers=[producer([n for n in range(len(fates)) if n not in unknown], unknown=unknown)],
            consumers=[consumer(arrived)],
            links=[record(Kind.SWALLOWED, n) for n in by["swallowed"]],
            world=rested(len(fates)),
        )
    )
    assert (row.unknown, row.unknown_delivered) == (len(unknown), len(by["unknown_delivered"]))
    assert (row.lost, row.duplicates) == (len(by["swallowed"]) + len(by["silent"]), len(by["twice"]))
    lost = {reason: [] for _, _, reason in row.lost_ranges}
    for first, last, reason in row.lost_ranges:
        lost[reason] += range(first, last + 1)
    assert lost.get("in_flight", []) == by["swallowed"]
    assert lost.get("unattributed", []) == by["silent"]
    assert row.balanced


def test_two_subscriptions_are_counted_each() -> None:
    """Every event is owed to each fan-out subscription; the loss of one does not hide in the other."""
    logs = [consumer(range(10)), consumer(range(7), index=1, subscription="sub-1")]
    row = judge(
        Evidence(cell=cell(consumers=2), producers=[producer(range(10))], consumers=logs, world=rested(10))
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
            world=rested(10),
        )
    )
    assert (row.accepted, row.committed, row.lost, row.duplicates) == (10, 10, 0, 1)


def test_not_rested_means_pending_and_unknown() -> None:
    """Without a complete drain nothing is called lost."""
    world = [note for note in rested(10) if note["what"] != "quiescent"]
    row = judge(
        Evidence(cell=cell(), producers=[producer(range(10))], consumers=[consumer(range(4))], world=world)
    )
    assert (row.verdict, row.lost, row.pending) == ("unknown", 0, 6)
    assert row.balanced


def test_a_delivery_after_the_rest_means_unknown() -> None:
    """If something still came after the supervisor thought that all was quiet, the verdict is withdrawn."""
    log = consumer(range(4))
    log.records.append(record(Kind.DELIVERED, 4, due(10) + 2000 * MS))
    row = judge(Evidence(cell=cell(), producers=[producer(range(10))], consumers=[log], world=rested(10)))
    assert row.verdict == "unknown"


def outage(
    accepted: int, have: list[int], world: list[dict[str, object]], **changes: object
) -> dict[str, int]:
    """Reasons of a run with one consumer that had `have`, was down from 40 to 60 ms, and came back."""
    before = consumer([n for n in have if n < 40])
    after = consumer([n for n in have if n >= 60], incarnation=2, ready=due(60))
    notes = [{"t": due(40), "what": "down", "consumer": 0, "incarnation": 1}, *world, *rested(accepted)]
    return judge(
        Evidence(
            cell=cell(**changes),
            producers=[producer(range(accepted))],
            consumers=[before, after] if world == [] else [consumer(have)],
            world=sorted(notes if world == [] else notes[1:], key=lambda note: int(str(note["t"]))),
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
        world=rested(10),
        drops={"overflow_receiver": 4},
    )
    assert judge(evidence).lost_by_reason == {"overflow_receiver": 4}
    evidence.drops = {"overflow_receiver": 3}
    assert judge(evidence).lost_by_reason == {"unattributed": 4}


def test_promises_decide_between_pass_and_fail() -> None:
    """The same loss passes if it was promised with that reason, and fails if not."""

    def verdict(promise: Promise) -> str:
        evidence = Evidence(
            cell=cell(promise=promise),
            producers=[producer(range(10))],
            consumers=[consumer(range(9))],
            links=[record(Kind.SWALLOWED, 9)],
            world=rested(10),
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
        world=rested(10),
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
                world=sorted([*notes, *rested(200)], key=lambda note: int(str(note["t"]))),
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
            world=sorted([*notes, *rested(100)], key=lambda note: int(str(note["t"]))),
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
    """Losing as many events as the sieve took is not enough: it must be the same ones."""
    took = [n for n in range(100) if sieve(1, n, 0.1)]
    other = [n + 1 for n in took if n + 1 not in took]
    seeded = cell(scenario="seeded", sieve=0.1, control=True, promise=Promise("must", ("in_flight",)))

    def verdict(missing: list[int]) -> str:
        evidence = Evidence(
            cell=seeded,
            producers=[producer(range(100))],
            consumers=[consumer(n for n in range(100) if n not in missing)],
            links=[record(Kind.SWALLOWED, n) for n in missing],
            world=rested(100),
        )
        return judge(evidence).verdict

    assert verdict(took) == "pass"
    assert verdict(other) == "fail"
    assert verdict(took[1:]) == "fail"


def test_an_empty_run_is_no_pass() -> None:
    """Nothing accepted, nothing lost: that is not a result."""
    row = judge(Evidence(cell=cell(), consumers=[ConsumerLog(0, 1, "sub-0", [])], world=rested(0)))
    assert row.verdict != "pass"
    assert START > 0


def test_the_filter_is_believed_from_its_order_until_it_is_gone() -> None:
    """Missing events accepted between the filter's own times are in flight, one outside them is unattributed."""
    lost = {30, 31, 49, 80}
    filters = [
        {"t": due(32), "begun": due(30), "what": "filter", "order": "loss 0.05"},
        {"t": due(50), "begun": due(45), "what": "filter", "order": "pass"},
    ]
    evidence = Evidence(
        cell=cell(network="nft"),
        producers=[producer(range(100))],
        consumers=[consumer(n for n in range(100) if n not in lost)],
        world=rested(99),
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
        world = [{"t": due(10), "what": "down", "consumer": 0, "incarnation": 1, "how": "kill"}, *rested(99)]
        evidence = Evidence(
            cell=cell(traits=Traits(family="f", quiet_s=0.05)),
            producers=[producer(range(100))],
            consumers=[first, second],
            world=world,
        )
        found = judge(evidence).lost_by_reason
        assert found.pop(reason, 0) >= 99 - ready
        assert set(found) <= {"offline", "in_flight"}
