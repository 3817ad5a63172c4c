"""When a subscription could not have received, from the supervisor's notes."""

from brokerless.losstest.analysis.fault_windows import NOTICE_NS, FaultWindows, find_fault_windows
from brokerless.losstest.analysis.observations import received_events, sent_events
from brokerless.losstest.analysis.verdict import judge
from brokerless.losstest.model import Promise, Traits
from tests.losstest.evidence_builder import ANY, MS, START, Evidence, cell, consumer, due, producer, rested

EVENTS = 300


def windows(traits: Traits, *notes: dict[str, object], delivered: range = range(EVENTS)) -> FaultWindows:
    """Of a run whose only consumer was there all the time."""
    evidence = Evidence(
        cell=cell(traits=traits, promise=ANY),
        producers=[producer(range(EVENTS))],
        consumers=[consumer(delivered, subscription="group" if traits.group else "sub-0")],
        supervisor=[*rested(EVENTS), *notes],
    )
    sent = sent_events(evidence.producers, EVENTS)
    return find_fault_windows(evidence, next(received_events(evidence, sent)), sent)


def test_a_line_with_latency_holds_connections_back_and_not_datagrams() -> None:
    """Buffers before a slow connection may overflow; datagrams that it delays are noted one by one."""
    notes = ({"t": due(100), "what": "relay", "instruction": "latency 0.05 0.02"},)
    healed = {"t": due(200), "what": "relay", "instruction": "pass"}
    (stalled,) = windows(Traits(family="f", link="tcp"), *notes, healed).stalled
    assert stalled[0] == due(100)
    assert due(200) < stalled[1] <= due(202)
    assert not windows(Traits(family="f", link="udp"), *notes, healed).stalled


def test_after_a_cut_a_connection_must_be_made_again() -> None:
    """Until the first event that was sent after the healing arrives, nobody is there."""
    notes = (
        {"t": due(100), "what": "cut", "direction": "both"},
        {"t": due(200), "what": "uncut"},
    )
    found = windows(Traits(family="f", link="tcp"), *notes)
    assert found.cut == [(due(100), due(200))]
    assert any(begin == due(200) and end < due(203) for begin, end in found.absent)


def test_what_came_while_the_backlog_was_worked_off_is_a_backlog_too() -> None:
    """Full buffers drop until something arrives promptly, and not only until the first event after the healing does."""
    notes = (
        {"t": due(100), "what": "cut", "direction": "to"},
        {"t": due(200), "what": "uncut"},
    )

    def late(n: int) -> int:
        return (60 if 200 < n < 270 else 1) * MS

    kept = [n for n in range(EVENTS) if not 100 <= n < 200 and n not in (265, 290)]
    evidence = Evidence(
        cell=cell(traits=Traits(family="f", link="tcp"), buffer_events=1000),
        producers=[producer(range(EVENTS))],
        consumers=[consumer(kept, late=late)],
        supervisor=[*rested(EVENTS), *notes],
    )
    row = judge(evidence)
    assert row.lost_by_reason == {"overflow_sender": 100 + 1, "unattributed": 1}
    assert row.lost_ranges[-1] == (290, 290, "unattributed")


def test_a_reset_counts_when_the_relay_made_it() -> None:
    """The relay may hear of the end late: what is lost until then, and until it is connected again, is explained."""
    traits = Traits(family="f", link="tcp")
    kept = [n for n in range(EVENTS) if not 210 <= n < 240 and n != 270]
    notes: list[dict[str, object]] = [
        {"t": due(100), "what": "relay", "instruction": "reset 4"},
        {"t": due(200), "what": "relay", "instruction": "pass"},
    ]
    reasons = []
    for resets in ([], [due(120), due(215)]):
        evidence = Evidence(
            cell=cell(traits=traits, buffer_events=1000),
            producers=[producer(range(EVENTS))],
            consumers=[consumer(kept)],
            supervisor=[*rested(EVENTS), *notes],
            resets=resets,
        )
        reasons.append(judge(evidence).lost_by_reason)
    assert reasons == [
        {"unattributed": 31},  # nothing that was seen explains them
        {"in_flight": 5, "offline": 25, "unattributed": 1},
    ]


def test_an_end_that_connects_again_after_a_reset_is_seen_by_the_relay() -> None:
    """It closes its other connection, and what was sent until it was back is explained; nothing else is."""
    traits = Traits(family="f", link="tcp")
    kept = [n for n in range(EVENTS) if not 208 <= n < 240 and n != 270]
    notes: list[dict[str, object]] = [
        {"t": due(100), "what": "relay", "instruction": "reset 4"},
        {"t": due(200), "what": "relay", "instruction": "pass"},
    ]
    reasons = []
    for closed, connected in (
        ([], []),
        ([due(210)], [due(105), due(239)]),
        ([due(150), due(210)], [due(205)]),
    ):
        evidence = Evidence(
            cell=cell(traits=traits, buffer_events=1000),
            producers=[producer(range(EVENTS))],
            consumers=[consumer(kept)],
            supervisor=[*rested(EVENTS), *notes],
            resets=[due(120)],
            closed=closed,
            connected=connected,
        )
        reasons.append(judge(evidence).lost_by_reason)
    assert reasons == [
        {"unattributed": 33},  # nothing that was seen explains them
        {"in_flight": 2, "offline": 30, "unattributed": 1},
        {
            "unattributed": 33
        },  # it did not connect again: what arrived later came another way, and so could these
    ]


def test_buffers_are_full_when_they_hold_what_they_held_when_they_overflowed() -> None:
    """They hold bytes, and so fewer events: as full again is an overflow again, and half as full is not."""
    notes: list[dict[str, object]] = [
        {"t": due(50), "what": "pause", "consumer": 0},
        {"t": due(150), "what": "resume", "consumer": 0},
    ]

    def late(n: int) -> int:
        """Stopped with 40 under way; starved with 35, and again with 20."""
        held = {50 <= n < 90: 150, 190 <= n < 225: 240, 250 <= n < 270: 280}
        return (held[True] - n) * MS if True in held else MS // 2

    lost = [*range(90, 150), *range(225, 230), *range(270, 275)]
    evidence = Evidence(
        cell=cell(traits=Traits(family="f", link="tcp"), buffer_events=1000),
        producers=[producer(range(EVENTS))],
        consumers=[consumer([n for n in range(EVENTS) if n not in lost], late=late)],
        supervisor=[*rested(EVENTS), *notes],
    )
    row = judge(evidence)
    assert row.lost_by_reason == {"overflow_sender": 60 + 5, "unattributed": 5}
    assert row.lost_ranges[-1] == (270, 274, "unattributed")


def test_a_restarted_broker_has_no_consumers_at_first() -> None:
    """As a restarted producer has none."""
    notes = ({"t": due(100), "what": "broker-down"}, {"t": due(150), "what": "broker-up"})
    found = windows(Traits(family="f", journal="broker", link="tcp"), *notes)
    assert found.broker_deaths == [due(100)]
    assert any(begin == due(150) for begin, _ in found.absent)


def test_only_a_broker_with_a_limit_evicts() -> None:
    """A broker that keeps everything cannot have dropped its oldest, however much came after."""
    evicts = {"beyond-retention": Promise("may", ("evicted",))}
    assert windows(Traits(family="f", journal="broker", promises=evicts)).broker_keeps == 10
    assert windows(Traits(family="f", journal="broker")).broker_keeps == 0


def test_a_dead_worker_is_missed_after_a_while() -> None:
    """Of a group; a subscriber that died shares its events with nobody."""
    note = {"t": due(299) + MS, "what": "down", "consumer": 0, "incarnation": 1, "how": "kill"}
    (span,) = windows(Traits(family="f", group=True), note).unnoticed
    assert span[1] - span[0] == NOTICE_NS
    assert span[0] >= START
    assert not windows(Traits(family="f"), note).unnoticed


def test_only_a_queue_that_was_full_drops_after_its_consumer_is_back() -> None:
    """With room for what came meanwhile nothing overflowed: what is missing then has another reason."""
    traits = Traits(family="f", journal="broker")
    notes = ({"t": due(100), "what": "down", "consumer": 0, "incarnation": 1, "how": "kill"},)
    for room, full in ((60, True), (90, False)):
        evidence = Evidence(
            cell=cell(traits=traits, retention_events=room),
            producers=[producer(range(EVENTS))],
            consumers=[consumer(range(100)), consumer(range(150, EVENTS), incarnation=2, ready=due(150))],
            supervisor=[*rested(EVENTS), *notes],
        )
        sent = sent_events(evidence.producers, EVENTS)
        [received] = received_events(evidence, sent)
        assert bool(find_fault_windows(evidence, received, sent).stalled) == full
