"""metrics/sequence_lines.py and reorder.py: numbers read, duplicates dropped, order restored, memory bounded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.reorder import HOLD, Reorder
from brokerless.metrics.limits import MAX_RANGES
from brokerless.metrics.parser import ParserOptions
from brokerless.metrics.sequence_lines import Heartbeat, number_line, parse_totals, split_datagram, total_line


def emitted(reorder: Reorder) -> list[int]:
    """Numbers (the payloads of these tests) in the order in which they left."""
    out: list[int] = []
    for segment in reorder.segments:
        out += [int(line[1:].split(b":")[0]) for line, n in segment.counts.lines() for _ in range(n)]
    return out


def payload(number: int) -> bytes:
    return b"n%d:1|c" % number


@given(st.integers(), st.integers(1, 400), st.floats(0, 0.6), st.floats(0, 0.2))
def test_each_number_leaves_once_and_in_order_when_reordering_is_small(
    seed: int, count: int, loss: float, repeat: float
) -> None:
    """Against the plain set of what arrived: nothing twice, nothing lost, order restored."""
    rnd = random.Random(seed)
    arrivals = [n for n in range(1, count + 1) if rnd.random() >= loss]
    if not arrivals:
        return
    jittered = sorted(arrivals, key=lambda n: n + rnd.random() * (HOLD / 2))
    # The first datagram of a client is where it begins: what overtakes it counts as late.
    jittered.sort(key=lambda n: n != arrivals[0])
    repeats = 0
    reorder = Reorder(b"aaaaaaaa", jittered[0], [])
    for number in jittered:
        assert reorder.offer(number, payload(number))
        if rnd.random() < repeat:
            repeats += 1
            assert not reorder.offer(number, payload(number))
    reorder.close_window()
    assert emitted(reorder) == arrivals
    assert reorder.duplicates == repeats
    assert [n for first, last in reorder.fresh for n in range(first, last + 1)] == arrivals


def test_what_was_given_up_may_still_come_and_is_not_a_duplicate() -> None:
    """More than HOLD later: late, counted once, and a second time a duplicate."""
    reorder = Reorder(b"aaaaaaaa", 1, [])
    for number in [1, *range(3, HOLD + 10)]:
        reorder.offer(number, payload(number))
    assert reorder.offer(2, payload(2))
    assert not reorder.offer(2, payload(2))
    assert (reorder.late, reorder.duplicates) == (1, 1)


def test_memory_of_a_client_with_endless_gaps_is_bounded() -> None:
    """Every second datagram lost: ranges stay below the cap, what is too old to tell is dropped and counted."""
    reorder = Reorder(b"aaaaaaaa", 1, [])
    for number in range(1, 6 * MAX_RANGES, 2):
        reorder.offer(number, b"a:1|c")
    reorder.close_window()
    assert len(reorder._seen) <= MAX_RANGES
    assert not reorder.offer(2, b"a:1|c")
    assert reorder.stale == 1


@given(st.binary(max_size=80))
def test_no_bytes_after_the_prefix_make_it_raise(rest: bytes) -> None:
    """A datagram that begins like a numbered one and is none is ordinary traffic."""
    split_datagram(b"_bl." + rest)
    beat, _ = parse_totals(b"aaaaaaaa", 1, b"_bl.aaaaaaaa." + rest)
    assert isinstance(beat, Heartbeat)
    beat.read_totals(ParserOptions())
    receive = Collector()
    receive.datagrams([b"_bl." + rest, b"_bl.aaaaaaaa:1|g\n_bl.aaaaaaaa." + rest], 0.0)
    receive.snapshot(end_window=True)


@pytest.mark.parametrize(
    "head",
    [
        b"_bl.short:1|g",
        b"_bl.aaaaaaaa:0|g",
        b"_bl.aaaaaaaa:-1|g",
        b"_bl.aaaaaaaa:1|c",
        b"_bl.aaaaaaaa:%d|g" % 10**17,
        b"_bl.aaaaaaaa:3.4|g",
        b"_bl.aaaaaaaa:3.|g",
        b"_bl.aaaaaaaa:3.-1|g",
        b"_bl.aaaaaaaa:3.1.1|g",
    ],
)
def test_numbers_that_are_none_are_not_believed(head: bytes) -> None:
    """Wrong id, zero, negative, another type, absurdly large, or more heartbeats than datagrams."""
    assert split_datagram(head + b"\na:1|c") is None


def test_lines_of_a_heartbeat_are_read_back() -> None:
    """What the client writes is what the daemon reads, tags cleaned as for the counter itself."""
    lines = [
        total_line("aaaaaaaa", "a b", "x:1,b", 7),
        "_bl.aaaaaaaa.end:1|g",
        "_bl.aaaaaaaa.failed:3|g",
        "other:1|c",
    ]
    found = split_datagram("\n".join([number_line("aaaaaaaa", 9, 2), *lines]).encode())
    assert found is not None
    beat, rest = parse_totals(*found)
    assert (beat.number, beat.heartbeats, beat.end, beat.failed) == (9, 2, True, 3)
    beat.read_totals(ParserOptions())
    assert beat.totals == {"a_b;b;x=1": 7}
    assert rest == b"other:1|c"


def test_clients_are_bounded() -> None:
    """Beyond max_clients a client's datagrams still count, unnumbered, and it is counted."""
    receive = Collector(max_clients=2)
    receive.datagrams([b"_bl.client%02d:1|g\na:1|c" % n for n in range(5)], 0.0)
    snapshot = receive.snapshot(end_window=True)
    assert len(snapshot.clients) == 2
    assert dict(snapshot.unnumbered.lines()) == {b"a:1|c": 3}
    assert receive.counters.clients_refused == 3
