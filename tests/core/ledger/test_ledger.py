"""The ledger against a plain-set model."""

import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Ledger, Reason
from brokerless.core.errors import ConfigError, UsageError

KEY = ("src", 1, "t")
ranges = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 15)), min_size=1, max_size=40)


class Model:
    """What a ledger must say, computed the slow and obvious way."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.seen: set[int] = set()
        self.lost: dict[int, Reason] = {}
        self.end = base
        self.duplicates = self.reordered = self.late = self.stale = 0

    def observe(self, first: int, count: int) -> set[int]:
        new = set()
        for n in range(first, first + count):
            if n < self.base:
                self.stale += 1
            elif n in self.seen:
                self.duplicates += 1
            else:
                if n in self.lost:
                    self.late += 1
                    del self.lost[n]
                elif n < self.end:
                    self.reordered += 1
                new.add(n)
        self.seen |= new
        self.end = max(self.end, first + count) if first + count > self.base else self.end
        return new

    def declare(self, first: int, last: int, reason: Reason) -> None:
        self.end = max(self.end, last + 1)
        for n in range(max(first, self.base), last + 1):
            if n not in self.seen and n not in self.lost:
                self.lost[n] = reason


@given(st.integers(0, 40), ranges, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9)), max_size=5))
def test_any_ranges_give_the_counts_of_the_model(
    base: int, observed: list[tuple[int, int]], declared: list[tuple[int, int]]
) -> None:
    """Ranges with duplicates, reordering, declared losses and late arrivals give the same accounting as sets do."""
    ledger, model = Ledger(), Model(base)
    ledger.expect(*KEY, base)
    for i, (first, count) in enumerate(observed):
        fresh = ledger.observe(*KEY, first, count)
        new = model.observe(first, count)
        if fresh is None:
            assert new == set(range(first, first + count))
        else:
            assert {n for a, b in fresh for n in range(a, b + 1)} == new
        if i < len(declared):
            at, length = declared[i]
            at += base
            ledger.declare(*KEY, at, at + length, Reason.EVICTED)
            model.declare(at, at + length, Reason.EVICTED)
        account = ledger.account()
        assert account.balanced
        assert account.delivered == len(model.seen)
        assert account.lost == len(model.lost)
        assert account.accepted == model.end - base
        assert account.duplicates == model.duplicates
        assert account.reordered == model.reordered
        assert account.late == model.late
        assert account.stale == model.stale
    again = Ledger.restore(ledger.snapshot())
    assert again.accounts() == ledger.accounts()
    assert again.gaps(*KEY) == ledger.gaps(*KEY)


@given(ranges, ranges)
def test_merging_two_ledgers_is_the_union(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    """Two ledgers of one stream merge to what one consumer with both inputs would have delivered."""
    a, b, model_a, model_b = Ledger(), Ledger(), Model(0), Model(0)
    for ledger, model, observed in ((a, model_a, one), (b, model_b, two)):
        ledger.expect(*KEY, 0)
        for first, count in observed:
            ledger.observe(*KEY, first, count)
            model.observe(first, count)
    a.merge(b)
    account = a.account()
    assert account.balanced
    assert account.delivered == len(model_a.seen | model_b.seen)
    assert account.accepted == max(model_a.end, model_b.end)
    both = len(model_a.seen & model_b.seen)
    assert account.duplicates == model_a.duplicates + model_b.duplicates + both


def test_an_announced_tail_is_pending_and_then_lost() -> None:
    """A lost last message is visible as soon as the producer says how many it sent."""
    ledger = Ledger()
    ledger.observe(*KEY, 0, 10)
    ledger.sent(*KEY, 15)
    assert ledger.account().pending == 5
    assert list(ledger.missing(*KEY)) == [(10, 14)]
    assert ledger.declare(*KEY, 10, 14, "offline") == 5
    account = ledger.account()
    assert (account.lost, account.lost_by_reason, account.pending) == (5, {"offline": 5}, 0)
    assert account.balanced


def test_streams_are_kept_apart_and_added_up() -> None:
    """A new epoch is a new stream: neither loss nor duplicates."""
    ledger = Ledger()
    ledger.observe("s", 1, "t", 0, 100)
    ledger.observe("s", 2, "t", 0, 10)
    ledger.observe("s", 2, "u", 5, 10)
    account = ledger.account("s")
    assert (account.accepted, account.lost, account.duplicates) == (120, 0, 0)
    assert ledger.account(epoch=2).delivered == 20
    assert set(ledger.streams()) == {("s", 1, "t"), ("s", 2, "t"), ("s", 2, "u")}


def test_memory_stays_bounded_with_ten_million_events_and_one_percent_gaps() -> None:
    """The number of intervals stays near its cap, what was shed is counted, and the accounting still balance."""
    ledger = Ledger(max_gaps=10_000)
    rng = random.Random(7)
    tracemalloc.start()
    at, lost = 0, 0
    while at < 10_000_000:
        run = int(rng.expovariate(1 / 99)) + 1
        ledger.observe(*KEY, at, run)
        at += run + 1
        lost += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ledger.intervals <= 10_000
    assert peak < 4 * 1024 * 1024
    account = ledger.account()
    assert account.balanced
    assert account.lost + account.pending == lost - 1
    assert account.shed == account.lost_by_reason["unattributed"] > 0


def test_the_number_of_streams_is_bounded_and_sums_survive() -> None:
    """Beyond max_streams the oldest accounting are closed, and the total still has them."""
    ledger = Ledger(max_streams=10)
    for i in range(100):
        ledger.observe("s", i, "t", 0, 5)
    assert len(list(ledger.streams())) == 10
    assert ledger.account().delivered == 500
    assert Ledger.restore(ledger.snapshot()).account().delivered == 500


def test_a_stream_that_is_still_heard_of_stays_open() -> None:
    """Many short streams push each other out, not the one that goes on all the time."""
    ledger = Ledger(max_streams=10)
    for i in range(200):
        ledger.observe("steady", 1, "t", i)
        ledger.observe("short", i, "t", 0)
    assert ledger.next("steady", 1, "t") == 200
    assert ledger.account().delivered == 400
    assert len(list(ledger.streams())) == 10


@pytest.mark.parametrize("raw", [b"", b"abc", b"\x00" * 40])
def test_a_damaged_snapshot_is_refused(raw: bytes) -> None:
    """Bytes that are not a snapshot raise our error."""
    with pytest.raises(UsageError, match="snapshot"):
        Ledger.restore(raw)


def test_wrong_bounds_are_refused() -> None:
    """A ledger without memory would be no ledger."""
    with pytest.raises(ConfigError):
        Ledger(max_gaps=0)


def test_an_announcement_before_the_first_event_is_not_the_beginning() -> None:
    """A heartbeat that overtakes the events must not make them stale: they are new, and the rest is pending."""
    ledger = Ledger()
    ledger.sent(*KEY, 10)
    ledger = Ledger.restore(ledger.snapshot())
    assert ledger.observe(*KEY, 4, 3) is None
    account = ledger.account()
    assert (account.accepted, account.delivered, account.pending, account.stale) == (6, 3, 3, 0)
    assert account.balanced


def test_a_gap_in_each_of_many_streams_is_shed_without_a_stall() -> None:
    """Room is made in a few passes over the streams, not in one pass for every gap."""
    ledger = Ledger(max_gaps=1000)
    passes = 0

    class Counting(dict):  # type: ignore[type-arg]
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal passes
            passes += 1
            return super().values()

    ledger._trackers = Counting()
    for i in range(5000):
        ledger.expect("s", 1, f"t{i}", 0)
        ledger.observe("s", 1, f"t{i}", 5)
    assert passes < 50
    assert ledger.intervals <= 1000 + 1024
    account = ledger.account()
    assert account.balanced
    assert account.lost + account.pending == 25_000


@given(ranges, ranges, st.booleans(), st.booleans())
def test_merging_after_settling_still_balances(
    one: list[tuple[int, int]], two: list[tuple[int, int]], declare_one: bool, declare_two: bool
) -> None:
    """Whatever was shed or settled on either side, the accounting of the merged ledger balance."""
    ledgers = []
    for observed, declares, reason in ((one, declare_one, "evicted"), (two, declare_two, "offline")):
        ledger = Ledger(max_gaps=16)
        ledger.expect(*KEY, 0)
        for i, (first, count) in enumerate(observed):
            ledger.observe(*KEY, first * 7, count)
            if declares:
                ledger.declare(*KEY, first * 3, first * 7 + i, reason)
        tracker = next(iter(ledger._trackers.values()))
        tracker.shed_lowest(5)
        if declares:
            tracker.shed_lowest(5)
        assert ledger.account().balanced
        ledgers.append(ledger)
    ledgers[0].merge(ledgers[1])
    account = ledgers[0].account()
    assert account.balanced, account
    assert account.delivered >= 0
    ledgers[0].expect(*KEY, 0)
    assert ledgers[0].account().balanced


def test_wrong_arguments_change_nothing() -> None:
    """Counts below one and unknown reasons are the caller's mistake; a later snapshot version is named."""
    ledger = Ledger()
    ledger.observe(*KEY, 0, 5)
    for count in (0, -3):
        with pytest.raises(UsageError):
            ledger.observe(*KEY, 5, count)
    with pytest.raises(UsageError, match="evicted"):
        ledger.declare(*KEY, 5, 6, "nonsense")
    assert ledger.account().delivered == ledger.account().accepted == 5
    body = bytearray(ledger.snapshot()[4:])
    body[1] = 9
    with pytest.raises(UsageError, match="version 9"):
        Ledger.restore(zlib.crc32(body).to_bytes(4, "little") + bytes(body))


@given(
    st.dictionaries(st.sampled_from("tuv"), st.integers(1, 50), min_size=1),
    st.dictionaries(st.sampled_from(["evicted", "offline"]), st.integers(1, 100), min_size=1),
    st.booleans(),
)
def test_events_of_unknown_topics_are_lost_once(
    named: dict[str, int], holes: dict[str, int], before: bool
) -> None:
    """What a source lost is counted once, by topic as far as topics are known to have lost it; whatever comes first."""
    ledger = Ledger()

    def lose() -> None:
        for reason, n in holes.items():
            ledger.lose("s", 1, n, Reason(reason))

    if before:
        lose()
    for topic, n in named.items():
        ledger.expect("s", 1, topic, 0)
        ledger.declare("s", 1, topic, 0, n - 1, next(iter(holes)))
    if not before:
        lose()
    expected = max(sum(holes.values()), sum(named.values()))
    for found in (ledger, Ledger.restore(ledger.snapshot())):
        account = found.account()
        assert (account.lost, account.accepted, account.balanced) == (expected, expected, True)
        assert found.account(topic="t").lost == named.get("t", 0)
        assert found.account(source="other").lost == 0
    both = Ledger()
    both.merge(ledger)
    both.merge(ledger)
    assert both.account().lost == expected


def test_epochs_that_lost_something_are_bounded() -> None:
    """Beyond a bound the oldest are kept as a sum."""
    ledger = Ledger()
    for epoch in range(3000):
        ledger.lose("s", epoch, 2, Reason.EVICTED)
    assert (ledger.account().lost, ledger.account().balanced) == (6000, True)
    assert ledger.account("s", 2999).lost == 2
    assert ledger.account("s", 0).lost == 0
