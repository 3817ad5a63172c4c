"""When a subscription could not have received, from the supervisor's notes."""

from brokerless.losstest.analysis.fault_windows import NOTICE_NS, FaultWindows, find_fault_windows
from brokerless.losstest.analysis.observations import received_events, sent_events
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
