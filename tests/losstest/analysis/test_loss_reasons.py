"""Attribution: every missing event gets exactly one reason, from evidence; words of the product only choose."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.losstest.analysis.fault_windows import FaultWindows
from brokerless.losstest.analysis.loss_reasons import (
    CODE,
    NONE,
    Attribution,
    _count_until,
    attribute,
    map_declared,
)
from brokerless.losstest.analysis.observations import ACCEPTED, BLOCK, ReceivedEvents, SentEvents
from brokerless.losstest.evidence.evidence import DropCount
from brokerless.losstest.model import REASONS

EVENTS = 100
spans = st.lists(
    st.tuples(st.integers(1, 99), st.integers(1, 99)).map(lambda p: (min(p), max(p))), max_size=3
)
numbers = st.sets(st.integers(0, EVENTS - 1), max_size=30)


def sent() -> SentEvents:
    """Event n is accepted at time n + 1."""
    result = SentEvents(EVENTS)
    result.offered[:] = result.accepted[:] = np.arange(1, EVENTS + 1)
    result.outcome[:] = ACCEPTED
    return result


def mask(chosen: set[int]) -> np.ndarray:
    return np.isin(np.arange(EVENTS), list(chosen))


def run(
    missing: set[int],
    windows: FaultWindows,
    dropped: set[int] = frozenset(),
    declared: dict[str, set[int]] | None = None,
    drops: list[DropCount] | None = None,
    retention: int = 10,
    delayed: set[int] = frozenset(),
) -> Attribution:
    events = sent()
    received = ReceivedEvents("sub-0", events)
    there = ~mask(missing)
    received.delivered[there] = events.accepted[there]
    codes = np.full(EVENTS, NONE, np.uint8)
    for reason, chosen in (declared or {}).items():
        codes[mask(chosen)] = CODE[reason]
    return attribute(
        np.array(sorted(missing), np.int64),
        events,
        received,
        windows,
        dropped=mask(dropped),
        delayed=mask(delayed),
        drops=drops or [],
        declared=codes,
        buffer_events=10_000,
        retention_events=retention,
    )


def reasons(found: Attribution) -> list[str]:
    return [REASONS[code] for code in found.codes.tolist()]


@given(
    missing=numbers,
    dropped=numbers,
    declared=st.dictionaries(st.sampled_from(REASONS[:7]), numbers, max_size=3),
    absent=spans,
    stalled=spans,
    cut=spans,
    deaths=st.lists(st.tuples(st.integers(1, 99), st.integers(-1, 99)), max_size=2),
    producer_deaths=st.lists(st.integers(0, 99), max_size=2),
    drops=st.lists(
        st.builds(
            DropCount,
            st.just("sub-0"),
            st.integers(0, 200),
            st.sampled_from(["overflow_sender", "overflow_receiver", "in_flight"]),
            st.integers(0, 50),
        ),
        max_size=2,
    ),
)
def test_every_missing_event_has_one_reason(
    missing: set[int],
    dropped: set[int],
    declared: dict[str, set[int]],
    absent: list[tuple[int, int]],
    stalled: list[tuple[int, int]],
    cut: list[tuple[int, int]],
    deaths: list[tuple[int, int]],
    producer_deaths: list[int],
    drops: list[DropCount],
) -> None:
    """Whatever the evidence: one reason each, and without claims of eviction or giving up the words change nothing."""
    windows = FaultWindows(
        absent=absent, stalled=stalled, cut=cut, deaths=deaths, producer_deaths=producer_deaths
    )
    found = run(missing, windows, dropped, declared, drops)
    assert len(found.codes) == len(missing)
    assert sum(len(found.of(reason)) for reason in REASONS) == len(missing)
    silent = run(missing, windows, dropped, {}, drops)
    policy = set(declared.get("evicted", ())) | set(declared.get("gave_up", ()))
    for n, spoken, unspoken in zip(sorted(missing), reasons(found), reasons(silent), strict=True):
        if n not in policy:
            assert spoken == unspoken
        if n in dropped and n not in policy:
            assert spoken == "in_flight"
    assert not silent.findings


def test_order_of_the_stages() -> None:
    """What we dropped ourselves comes first, then the producer's death, then times; after all that, nobody knows."""
    windows = FaultWindows(absent=[(70, 80)], stalled=[(75, 90)], producer_deaths=[60])
    found = run({1, *range(55, 100)}, windows, dropped={55})
    assert dict(zip([1, *range(55, 100)], reasons(found), strict=True)) == {
        1: "unattributed",
        55: "in_flight",
        **dict.fromkeys(range(56, 60), "producer_crash"),
        **dict.fromkeys(range(60, 69), "overflow_sender"),  # under way when the consumer was stopped
        **dict.fromkeys(range(69, 79), "offline"),
        **dict.fromkeys(range(79, 89), "overflow_sender"),
        **dict.fromkeys(range(89, 100), "unattributed"),
    }


def test_only_what_came_after_the_last_delivery_was_under_way_to_a_dead_process() -> None:
    """Events behind the last one that it was given are in flight; a hole before that is not."""
    found = run({10, 30, 31}, FaultWindows(deaths=[(32, 29)]))
    assert reasons(found) == ["unattributed", "in_flight", "in_flight"]


def test_a_counter_explains_only_what_it_can() -> None:
    """Drops counted at that time, and at least as many; a counter that rose at another time explains nothing."""
    second = 1_000_000_000
    assert (
        reasons(run({5, 6}, FaultWindows(), drops=[DropCount("sub-0", 9, "overflow_receiver", 2)]))
        == ["overflow_receiver"] * 2
    )
    for count in (
        DropCount("sub-0", 9, "overflow_receiver", 1),
        DropCount("sub-0", 9 + 2 * second, "overflow_receiver", 2),
        DropCount("sub-1", 9, "overflow_receiver", 2),
    ):
        assert reasons(run({5, 6}, FaultWindows(), drops=[count])) == ["unattributed"] * 2


def test_giving_up_is_believed_only_where_something_was_in_the_way() -> None:
    """The product's own decisions count inside a hindrance; outside of it they are a finding."""
    windows = FaultWindows(refusing=[(10, 20)])
    assert reasons(run({12, 50}, windows)) == ["gave_up", "unattributed"]
    found = run({12, 50}, windows, declared={"gave_up": {12, 50}})
    assert reasons(found) == ["gave_up", "unattributed"]
    assert found.findings == ["says gave_up of 1 events, and nothing that was observed supports it"]


def test_declared_positions_become_event_numbers() -> None:
    """Positions of the right epoch are mapped; those that no event has are ignored, and strange words are counted."""
    events = sent()
    events.positions, events.epochs = np.full(EVENTS, -1, np.int64), np.zeros(EVENTS, np.uint32)
    for n, (epoch, position) in enumerate([(7, 10), (7, 20), (7, 30), (8, 20)]):
        events.positions[n], events.epochs[n] = position, epoch
    said = [
        (7, 15, 30, "evicted"),
        (8, 0, 100, "gave_up"),
        (9, 0, 100, "offline"),
        (7, 0, 2**64 - 1, "magic"),
    ]
    codes, strange = map_declared(said, events)
    assert codes[:5].tolist() == [NONE, CODE["evicted"], CODE["evicted"], CODE["gave_up"], NONE]
    assert strange == {"magic": 1}


def test_what_a_filter_took_was_in_flight() -> None:
    """Accepted while the kernel dropped: on its way, also if nobody was there a moment later."""
    found = run({12, 17, 30, 50}, FaultWindows(dropping=[(11, 20)], absent=[(16, 40)]))
    assert reasons(found) == ["in_flight", "in_flight", "offline", "unattributed"]


def test_a_dead_broker_lost_only_its_last_events() -> None:
    """Taken by a broker that died, after everything it had passed on: in flight. A hole before that is not."""
    found = run({5, *range(20, 40)}, FaultWindows(broker_deaths=[30]))
    assert reasons(found) == ["unattributed", *["in_flight"] * 10, *["unattributed"] * 10]


def test_a_broker_that_drops_its_oldest_evicts() -> None:
    """Of an absence from 10 to 60 the broker kept the newest 20: the others are evicted, not offline."""
    windows = FaultWindows(absent=[(10, 60)], broker_keeps=20)
    assert set(reasons(run(set(range(9, 39)), windows))) == {"evicted"}


def test_what_a_consumer_gave_back_when_it_died_is_the_oldest() -> None:
    """It had taken them and not acknowledged: a queue that overflowed afterwards dropped them first."""
    gone = {"absent": [(10, 60)], "deaths": [(10, 5)]}
    assert set(reasons(run(set(range(6, 39)), FaultWindows(**gone, broker_keeps=20)))) == {"evicted"}
    kept_more = reasons(run(set(range(6, 39)), FaultWindows(**gone, broker_keeps=200)))
    assert set(kept_more) == {"in_flight", "offline"}


def test_a_broker_that_takes_nothing_more_does_not_evict() -> None:
    """It kept the oldest 20 of the absence and refused the rest: nobody was there for those."""
    windows = FaultWindows(absent=[(10, 60)], broker_keeps=20)
    assert set(reasons(run(set(range(29, 59)), windows))) == {"offline"}


def test_a_delayed_datagram_that_never_counted_was_in_flight() -> None:
    """The relay held it back; without its record the loss has no known reason."""
    assert reasons(run({5, 7}, FaultWindows(), delayed={5})) == ["in_flight", "unattributed"]


def test_what_a_dead_worker_was_given_before_it_was_missed_is_in_flight() -> None:
    """Only within the time that it takes to miss it: later ones have another reason, or none."""
    windows = FaultWindows(unnoticed=[(20, 30)])
    assert reasons(run({18, 19, 25, 40}, windows)) == [
        "unattributed",
        "in_flight",
        "in_flight",
        "unattributed",
    ]


@given(seed=st.integers(0, 2**32), marks=st.lists(st.integers(0, 1000), max_size=20))
@settings(max_examples=20, deadline=None)
def test_counting_in_portions_is_exact(seed: int, marks: list[int]) -> None:
    """Of a column of several portions in any order, as many times are counted as a comparison with each finds."""
    random = np.random.default_rng(seed)
    column = random.integers(1, 1000, BLOCK + 1000)
    chosen = random.random(len(column)) < 0.5
    counted = _count_until(np.array(marks, np.int64), column, chosen)
    assert counted.tolist() == [int((chosen & (column <= mark)).sum()) for mark in marks]


def test_a_full_queue_takes_nothing_until_it_is_half_empty() -> None:
    """What follows an overflow without a gap is one, too, while the queue is more than half full; later it is not."""
    events = sent()
    received = ReceivedEvents("sub-0", events)
    received.delivered[:] = events.accepted
    received.delivered[10:30] = 45 + np.arange(20)  # twenty wait while the consumer is stopped
    received.delivered[52:55] = 70
    missing = np.array(
        [*range(30, 52), 55, 62], np.int64
    )  # 50 and 51 after it came back; 55 after a gap; 62 empty
    received.delivered[missing] = 0
    found = attribute(
        missing,
        events,
        received,
        FaultWindows(stalled=[(11, 50)], overflow="overflow_sender"),
        dropped=mask(set()),
        delayed=mask(set()),
        drops=[],
        declared=np.full(EVENTS, NONE, np.uint8),
        buffer_events=20,
        retention_events=10,
    )
    assert found.of("overflow_sender").tolist() == list(range(30, 52))
    assert found.of("unattributed").tolist() == [55, 62]
