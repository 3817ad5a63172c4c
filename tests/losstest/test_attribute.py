"""Attribution: every missing event gets exactly one reason, single-event evidence before times."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.intervals import IntervalSet
from brokerless.losstest.attribute import IN_FLIGHT_NS, Marks, World, attribute, map_declared, reason_for
from brokerless.losstest.model import REASONS

spans = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda p: (min(p), max(p))), max_size=3
)
numbers = st.sets(st.integers(0, 99), max_size=30)


@given(
    missing=numbers,
    swallowed=numbers,
    declared=st.dictionaries(st.sampled_from(REASONS[:7]), numbers, max_size=3),
    absent=spans,
    stalled=spans,
    cut=spans,
    deaths=spans,
    producer_deaths=st.lists(st.integers(0, 99), max_size=2),
    drops=st.dictionaries(st.sampled_from(["overflow_sender", "overflow_receiver"]), st.integers(0, 50)),
)
def test_every_missing_event_has_one_reason(
    missing: set[int],
    swallowed: set[int],
    declared: dict[str, set[int]],
    absent: list[tuple[int, int]],
    stalled: list[tuple[int, int]],
    cut: list[tuple[int, int]],
    deaths: list[tuple[int, int]],
    producer_deaths: list[int],
    drops: dict[str, int],
) -> None:
    """Whatever the evidence, the lists are disjoint, complete, and only known reasons are used."""
    marks = Marks(
        declared={reason: IntervalSet((n, n) for n in sorted(ns)) for reason, ns in declared.items()},
        swallowed=IntervalSet((n, n) for n in sorted(swallowed)),
    )
    world = World(absent=absent, stalled=stalled, cut=cut, deaths=deaths, producer_deaths=producer_deaths)
    found = attribute(sorted(missing), {n: n for n in range(100)}, marks, world, drops)
    assert sorted(n for ns in found.values() for n in ns) == sorted(missing)
    assert set(found) <= set(REASONS)
    told = {n for ns in declared.values() for n in ns}
    for n in missing & told:
        assert any(n in found.get(reason, []) for reason in declared if n in declared[reason])
    for n in (missing & swallowed) - told:
        assert n in found["in_flight"]


def test_order_of_the_evidence() -> None:
    """A declared loss wins over the relay's word, that over the producer's death, that over times."""
    marks = Marks(declared={"evicted": IntervalSet([(1, 1)])}, swallowed=IntervalSet([(1, 2)]))
    world = World(absent=[(0, 100)], stalled=[(0, 100)], producer_deaths=[50])
    assert [reason_for(n, n, marks, world) for n in (1, 2, 3, 60, 200)] == [
        *("evicted", "in_flight", "producer_crash", "offline", "unattributed"),
    ]


def test_shortly_before_a_death_is_in_flight() -> None:
    """What was accepted within the horizon before a consumer's end was under way to it; earlier was not."""
    world = World(deaths=[(3 * IN_FLIGHT_NS, 3 * IN_FLIGHT_NS + 5)])
    assert reason_for(0, 2 * IN_FLIGHT_NS, Marks(), world) == "in_flight"
    assert reason_for(0, 3 * IN_FLIGHT_NS + 4, Marks(), world) == "in_flight"
    assert reason_for(0, IN_FLIGHT_NS, Marks(), world) == "unattributed"


def test_declared_positions_become_event_numbers() -> None:
    """Positions of the right epoch are mapped; those that no event has are ignored."""
    positions = {(7, 10): 0, (7, 20): 1, (7, 30): 2, (8, 20): 3}
    found = map_declared([(7, 15, 30, "evicted"), (8, 0, 100, "gave_up"), (9, 0, 100, "offline")], positions)
    assert {reason: list(ns) for reason, ns in found.items()} == {"evicted": [(1, 2)], "gave_up": [(3, 3)]}


def test_what_a_filter_or_a_dead_broker_took_was_in_flight() -> None:
    """Accepted while the kernel dropped, or before the broker died: on its way. Later it is somebody else's fault."""
    world = World(dropping=[(10, 20)], absent=[(15, 40)])
    reasons = [reason_for(0, t, Marks(), world) for t in (5, 12, 17, 30, 50)]
    assert reasons == ["unattributed", "in_flight", "in_flight", "offline", "unattributed"]
    world = World(broker_deaths=[30])
    assert [reason_for(0, t, Marks(), world) for t in (29, 31)] == ["in_flight", "unattributed"]
