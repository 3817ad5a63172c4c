"""Events in counters: whatever was added up, in whatever order, the sum tells which of them arrived and how often."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.adapters.statsd_plain import increment, messages
from brokerless.losstest.evidence import counter_digits, payload

RUN = 0x5EED
events = st.dictionaries(st.integers(0, 4 * counter_digits.EVENTS), st.integers(1, 3))


def sums(arrived: dict[int, int], run: int = RUN) -> Counter[str]:
    """What a daemon that adds up has in its counters."""
    totals: Counter[str] = Counter()
    for n, times in arrived.items():
        name, amount = increment(payload.encode(run, 0, n, 60))
        totals[name] += times * amount
    return totals


def numbers(name: str, total: float, seen: dict[int, int] | None = None) -> list[int]:
    tags = [payload.decode(message.data) for message in messages(name, total, {} if seen is None else seen)]
    return [tag.n for tag in tags if tag is not None and tag.run == RUN and not tag.probe]


@given(arrived=events, first=st.integers(0, 10**9))
def test_sums_tell_the_events(arrived: dict[int, int], first: int) -> None:
    """Every event that arrived is found as often as it came, and no other, also when sums are floats."""
    arrived = {first + n: times for n, times in arrived.items()}
    found: Counter[int] = Counter()
    for name, total in sums(arrived).items():
        assert total == float(total)
        found.update(numbers(name, float(total)))
    assert found == arrived


@given(states=st.lists(st.sets(st.integers(0, counter_digits.EVENTS - 1)), max_size=6))
def test_no_event_is_new_twice(states: list[set[int]]) -> None:
    """A daemon may know a counter better and worse again; each event is delivered when it is first known, and once."""
    seen: dict[int, int] = {}
    found: list[int] = []
    for state in states:
        for name, total in sums(dict.fromkeys(state, 1)).items():
            found += numbers(name, total, seen)
    assert sorted(found) == sorted(set().union(*states))


@pytest.mark.parametrize("total", [-1, 0.5, float("nan"), float("inf"), 4**counter_digits.EVENTS])
def test_a_sum_that_no_events_make_is_unexpected(total: float) -> None:
    """It is delivered as something that cannot be read, and not passed over."""
    name, _ = counter_digits.counter(RUN, 0)
    assert [payload.decode(message.data) for message in messages(name, total, {})] == [None]


def test_foreign_counters_and_probes_are_no_events() -> None:
    """A probe says that somebody is there; other people's counters say nothing; another run's are known as such."""
    name, amount = increment(payload.encode(RUN, payload.PROBE, 7, 60))
    [message] = messages(name, 3 * amount, {})
    tag = payload.decode(message.data)
    assert tag is not None
    assert tag.probe
    assert list(messages("other.counter", 5, {})) == []
    [(name, total)] = sums({3: 1}, run=RUN + 1).items()
    [message] = messages(name, total, {})
    assert payload.decode(message.data) == payload.Tag(RUN + 1, 0, 3)


@given(arrived=events, noise=st.sampled_from([b"", b"other:3|c", b"_bl.abc:12|g", b"x:1|c|#a:b"]))
def test_the_relay_reads_packets(arrived: dict[int, int], noise: bytes) -> None:
    """It finds what a packet carries, of its own run only, and counters that others add to."""
    lines = [noise, *(f"{name}:{total}|c|#a:b".encode() for name, total in sums(arrived).items())]
    packet = b"\n".join(lines)
    assert Counter(counter_digits.find(packet, RUN)) == arrived
    assert counter_digits.find(packet, RUN + 1) == []
    assert counter_digits.find(b"losstest.0000000000005eed.3:99999999999999999999|c", RUN) == []
