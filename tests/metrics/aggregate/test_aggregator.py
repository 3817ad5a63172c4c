"""The fast path (line_counts, receive, aggregator) gives what the simple loop over lines gives."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerless.metrics.aggregate import collect
from brokerless.metrics.aggregate.aggregator import Aggregator
from brokerless.metrics.aggregate.collect import MAX_DISTINCT_LINES, Collector
from brokerless.metrics.aggregate.line_counts import FastLineCounts, PureLineCounts
from brokerless.metrics.aggregate.rollup import Rollup, RollupConfig
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.speed import ACCELERATED
from tests.metrics.reference import Reference

NAMES = ["a", "b.c", "d e", "a;x=1", "long/name", ""]
# Numbers that floats add up exactly in any order, so that "identical" can be asked for.
NUMBERS = [
    "1",
    "2",
    "-3",
    "007",
    "00.5",
    "0.0000152587890625",
    "1" + "0" * 150,
    "0.5",
    "12.25",
    "+4",
    "0",
    "1e2",
    "x",
    "",
    "1.2.3",
    "7_7",
    "nan",
    ".5",
    "5.",
]
KINDS = ["c", "ms", "h", "d", "g", "s", "q", "c ", ""]
EXTRAS = [
    "",
    "|@0.5",
    "|@0.25",
    "|#x:1",
    "|#y,x:1",
    "|@0.5|#t|g:1",
    "|T1700000000",
    "|c:1234",
    "|zz",
    "|card:low",
]
WHOLE = [
    "",
    "junk",
    "_e{1,1}:a|b",
    "_sc|a|0",
    "_sc|a|7",
    "a:1|c:2|ms",
    "a:1:2|ms",
    "g:1:+2|g",
    "a:1|ms\r",
    "_bl.x:1|g",
]


def random_line(rnd: random.Random) -> str:
    if rnd.random() < 0.1:
        return rnd.choice(WHOLE)
    return f"{rnd.choice(NAMES)}:{rnd.choice(NUMBERS)}|{rnd.choice(KINDS)}{rnd.choice(EXTRAS)}"


@pytest.fixture(params=[PureLineCounts, FastLineCounts], autouse=True)
def counts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here, once with the C module and once without."""
    if request.param is FastLineCounts and not ACCELERATED:
        pytest.skip("built without the C module")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("aggregate.collect", "aggregate.reorder"):
            patch.setattr(f"brokerless.metrics.{module}.new_line_counts", request.param)
        yield


def aggregated(batches: list[list[bytes]], cut_after: set[int]) -> Window:
    receive, aggregator = Collector(), Aggregator()
    for at, batch in enumerate(batches):
        receive.datagrams(batch, now=float(at))
        if at in cut_after:
            aggregator.take(receive.snapshot(end_window=False), unnumbered_lossy=bool(at % 2))
    aggregator.take(receive.snapshot(end_window=True), unnumbered_lossy=True)
    return aggregator.close()


def same(window: Window, simple: Reference) -> None:
    flush = Rollup(RollupConfig(), start=0.0).fold(window, 1.0)
    assert window.counters == simple.counters
    assert {p.series: p.corrected for p in flush.counters} == simple.counters
    assert flush.gauges == {k: v for k, v in simple.gauges.items() if not k.startswith("_bl.")}
    assert {s: sorted(t.values) for s, t in window.timers.items() if t.sketch is None} == {
        s: sorted(v) for s, v in simple.timers.items() if window.timers[s].sketch is None
    }
    assert {s: t.count for s, t in window.timers.items()} == simple.timer_counts
    for series, timer in window.timers.items():
        if timer.sketch is not None:
            assert timer.sketch.min == min(simple.timers[series])
            assert timer.sketch.max == max(simple.timers[series])
    # Of a long member a hash is kept.
    assert {s: (len(m), {x for x in m if len(x) < 32}) for s, m in window.sets.items()} == {
        s: (len(m), {x for x in m if len(x) < 32}) for s, m in simple.sets.items()
    }
    assert window.refused == simple.refused
    assert window.lines == simple.lines
    assert sorted(window.passed) == sorted(simple.passed)
    timestamped = [(p.kind, p.series, p.timestamp) for p in window.timestamped]
    assert set(timestamped) == {point[:3] for point in simple.timestamped}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(), st.integers(1, 60), st.integers(1, 30))
def test_random_traffic_of_all_types_gives_identical_results(seed: int, datagrams: int, lines: int) -> None:
    """Random lines of every type, good and bad, in random datagrams and cuts: as by the simple loop."""
    rnd = random.Random(seed)
    simple = Reference()
    batches: list[list[bytes]] = []
    for _ in range(rnd.randint(1, 6)):
        batch = []
        for _ in range(rnd.randint(1, datagrams)):
            payload = "\n".join(random_line(rnd) for _ in range(rnd.randint(1, lines))).encode()
            simple.datagram(payload)
            batch.append(payload)
        batches.append(batch)
    same(aggregated(batches, {at for at in range(len(batches)) if rnd.random() < 0.3}), simple)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.lists(st.binary(max_size=60), max_size=6), max_size=6))
def test_random_bytes_give_identical_results(batches: list[list[bytes]]) -> None:
    """The same for datagrams of any bytes at all."""
    simple = Reference()
    for batch in batches:
        for payload in batch:
            simple.datagram(payload)
    same(aggregated(batches, set()), simple)


def test_a_bad_line_harms_nobody() -> None:
    """Good lines before and after bad ones in the same datagram count; the bad ones are sampled."""
    window = aggregated([[b"a:1|c\n\x00\xff|||:::\na:2|c\na:x|c\nt:1.5.2|ms\nt:2|ms"]], set())
    assert window.counters == {"a": 3}
    assert window.timers["t"].values == [2.0]
    assert sum(window.refused.values()) == 3
    assert (b"a:x|c") in [line for _, line in window.refused_samples]


def test_gauges_keep_the_order_of_lines_within_and_across_datagrams() -> None:
    """Set, move, set again, with equal lines repeated: the last word wins."""
    batches = [[b"g:5|g\ng:+1|g\ng:5|g", b"g:+1|g\ng:+1|g"], [b"g:-2|g\nh:1|g"], [b"h:2|g", b"h:1|g"]]
    flush = Rollup(RollupConfig(), start=0.0).fold(aggregated(batches, {0}), 1.0)
    assert flush.gauges == {"g": 5, "h": 1}


def test_series_are_bounded_and_counted_when_the_limit_is_hit() -> None:
    """Beyond max_series lines are refused by reason, and known series keep counting."""
    receive, aggregator = Collector(), Aggregator(max_series=10)
    receive.datagrams([b"\n".join(b"s%d:1|c\nt%d:1.5|ms\ng%d:1|g" % (i, i, i) for i in range(20))] * 2, 0.0)
    aggregator.take(receive.snapshot(end_window=True), unnumbered_lossy=False)
    window = aggregator.close()
    assert len(window.counters) + len(window.timers) + len(window.gauges) == 10
    assert window.refused["series_limit"] == 2 * 50


@pytest.mark.parametrize("line", [b"k:%d|c", b"k%d:1|ms"])
def test_memory_of_distinct_lines_is_bounded_by_cuts(line: bytes) -> None:
    """A flood of lines, or of timers, that never repeat asks for a snapshot long before it fills the memory."""
    receive = Collector()
    cuts = 0
    for i in range(400):
        flood = b"\n".join(line % (i * 1000 + j) for j in range(1000))
        receive.datagrams([flood], 0.0)
        if receive.wants_snapshot:
            snapshot = receive.snapshot(end_window=False)
            assert snapshot.unnumbered.distinct < MAX_DISTINCT_LINES + 2000
            cuts += 1
    assert cuts == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.floats(0, 1e22), min_size=1, max_size=50), st.sampled_from(["", ".6f", ".3f", ".17g", ".1f"])
)
def test_timer_values_are_read_to_the_last_bit(values: list[float], form: str) -> None:
    """However a client writes a number, it is the one that Python reads."""
    texts = [f"{value:{form}}" for value in values]
    batch = [f"t:{text}|ms\nt:{text}|h" for text in texts]
    window = aggregated([[line.encode() for line in batch]], set())
    assert sorted(window.timers["t"].values) == sorted([float(text) for text in texts] * 2)


@given(st.lists(st.binary(max_size=8) | st.sampled_from([b"_bl.", b"_bl.aaaaaaaa:1|g", b"_bl", b"x_bl."])))
def test_datagrams_are_looked_through_alike(batch: list[bytes]) -> None:
    """Their bytes, and whether any may be numbered: by the C module as without it."""
    assert collect.look_through(batch) == collect._look_through(batch)


def test_many_lines_in_any_order_of_arrival() -> None:
    """Tables that grow many times over lose nothing."""
    rnd = random.Random(5)
    lines = [
        f"k{rnd.randrange(30_000)}:1|c\nt{rnd.randrange(3000)}:{rnd.randrange(100)}|ms" for _ in range(60_000)
    ]
    simple = Reference()
    batches = []
    for at in range(0, len(lines), 1000):
        payload = "\n".join(lines[at : at + 1000]).encode()
        simple.datagram(payload)
        batches.append([payload])
    same(aggregated(batches, {7}), simple)
