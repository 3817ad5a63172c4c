"""The receiver: order, sessions, memory; what the simulation does not show in one glance."""

import random

import pytest

from brokerless.core import Reason
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.protocol import Gone
from brokerless.multicast.receiver import LIVE, OLDEST, Receiver
from brokerless.multicast.repair import Missing
from tests.interrupts import Interrupt, Interrupts

A, B = b"ORDERS000A", b"ORDERS000B"


class Numbers(list[int]):
    """A payload: its own sequence numbers."""

    def part(self, skip: int, take: int) -> "Numbers":
        return Numbers(self[skip : skip + take])


def make(start: int = LIVE, *, servers: int = 1, lines: int = 1, **policy: float) -> Receiver[Numbers]:
    return Receiver(
        start=lambda _: start,
        policy=RepairPolicy(**policy),  # type: ignore[arg-type]
        servers=servers,
        random=lambda: 0.0,
        session="ORDERS",
        lines=lines,
    )


def give(
    r: Receiver[Numbers], session: bytes, first: int, count: int, now: float = 0.0, *, repair: bool = False
) -> None:
    if r.wants(session, first, count, now):
        payload = Numbers(range(first, first + count))
        if not r.in_order(session, first, count, payload):
            r.accept(first, count, payload, 100 * count, now, repair=repair)


def taken(r: Receiver[Numbers]) -> list[object]:
    flat: list[object] = []
    for _, item in r.take():
        flat += [item] if isinstance(item, Missing) else list(item)
    return flat


def test_live_begins_with_the_first_packet_and_a_heartbeat_counts() -> None:
    """Whoever joins live begins where the first packet, or heartbeat, says."""
    r = make()
    give(r, A, 50, 3)
    assert taken(r) == [50, 51, 52]
    r = make()
    r.heartbeat(A, 7, 0.0)
    give(r, A, 9, 1)
    assert r.gaps == [(7, 8)]


def test_what_comes_after_a_gap_is_held_and_handed_over_in_order() -> None:
    """Overlapping packets are cut; nothing is handed over twice."""
    r = make(1)
    give(r, A, 1, 2)
    give(r, A, 6, 3)
    give(r, A, 8, 4)
    assert taken(r) == [1, 2]
    give(r, A, 2, 5)
    assert taken(r) == list(range(3, 12))
    assert r.counters.duplicates == 1 + 2
    assert r.held_bytes == 0


def test_a_full_store_keeps_nothing_more_and_loses_nothing() -> None:
    """Beyond the bound packets are not kept; they are missing, asked for, and delivered in the end."""
    r = make(1, max_held_bytes=500)
    give(r, A, 1, 1)
    for first in range(3, 30):
        give(r, A, first, 1)
    assert r.held_bytes <= 500
    assert r.counters.not_held > 0
    asked: set[int] = set()
    for ask in r.asks(1.0):
        asked |= set(range(ask.first, ask.first + ask.messages))
    assert asked == set(range(2, 3)) | set(range(8, 30))
    for number in sorted(asked):
        give(r, A, number, 1, 1.1, repair=True)
    assert taken(r) == list(range(1, 30))


def test_repair_goes_on_when_no_more_gaps_may_be_kept_apart() -> None:
    """With as many gaps as there may be, answers are taken wherever they make no further gap: none waits for others."""
    r = make(1, max_gaps=4)
    for first in (10, 20, 30, 40):
        give(r, A, first, 1)
    assert len(r.gaps) == 4
    give(r, A, 50, 1)  # a fifth gap: not kept, and asked for with the numbers before it
    assert r.gaps[-1] == (41, 50)
    assert r.counters.not_held == 1
    r.asks(1.0)
    give(r, A, 23, 3, 1.0, repair=True)  # in the middle of one: it would make two of it
    assert r.gaps == [(1, 9), (11, 19), (21, 29), (31, 39), (41, 50)]
    assert r.counters.not_held == 4
    give(r, A, 31, 9, 1.0, repair=True)  # the whole of one that is not the first
    give(r, A, 21, 4, 1.0, repair=True)  # the beginning of another
    give(r, A, 47, 4, 1.0, repair=True)  # the end of a third
    assert r.gaps == [(1, 9), (11, 19), (25, 29), (41, 46)]
    for first, count in ((25, 5), (11, 9), (41, 6), (1, 9)):
        give(r, A, first, count, 1.0, repair=True)
    assert taken(r) == list(range(1, 51))


def test_one_strange_header_does_not_end_a_stream() -> None:
    """A far sequence, and another session, are believed only when a second packet says the same."""
    r = make(1)
    give(r, A, 1, 2)
    give(r, A, 10**12, 1)
    assert r.counters.implausible == 1
    give(r, B, 1, 1, 5.0)
    assert r.session == A
    give(r, A, 3, 1, 5.1)
    assert taken(r) == [1, 2, 3]
    give(r, B, 4, 1, 9.0)
    give(r, B, 5, 1, 9.0)
    assert r.session == B
    assert r.gaps == [(1, 4)], "a new session is wanted from its beginning"


def test_a_new_session_closes_the_old_one() -> None:
    """What was missing of the old one is lost because its sender is gone; late packets of it change nothing."""
    r = make(1)
    give(r, A, 1, 1)
    give(r, A, 5, 1)
    give(r, B, 1, 1, 1.0)
    give(r, B, 2, 1, 1.0)
    assert taken(r) == [1, Missing(2, 4, Reason.PRODUCER_CRASH), 5]
    give(r, A, 6, 1, 1.0)
    assert r.session == B
    give(r, B, 1, 2, 1.1, repair=True)
    assert taken(r) == [1, 2]


def test_the_end_of_a_session_is_complete_when_all_is_there() -> None:
    """A gap before the end is still repaired; a sender that goes on after all takes the end back."""
    r = make(1)
    give(r, A, 1, 1)
    r.end(A, 4, 0.0)
    assert not r.complete
    give(r, A, 2, 2, repair=True)
    assert r.complete
    give(r, A, 4, 1)
    assert not r.complete
    assert taken(r) == [1, 2, 3, 4]


def test_oldest_is_whatever_there_is() -> None:
    """What was evicted before is skipped, not lost; what is evicted afterwards is lost."""
    r = make(OLDEST)
    r.heartbeat(A, 100, 0.0)
    assert r.asks(1.0)
    r.gone(0, Gone(A, 1, 1, 60, 100, 5, "src"), 1.1)
    asks = r.asks(1.2)
    assert [(a.first, a.messages) for a in asks] == [(60, 40)]
    assert taken(r) == []
    give(r, A, 60, 5, 1.3, repair=True)
    r.gone(0, Gone(A, 1, 1, 80, 100, 5, "src"), 1.4)
    r.asks(1.5)
    assert taken(r) == [60, 61, 62, 63, 64, Missing(65, 79, Reason.EVICTED)]
    assert (r.counters.skipped, r.counters.lost) == (59, 15)


def test_before_the_base_of_a_session_there_is_nothing_to_be_lost() -> None:
    """A journal that was cut begins a session in the middle: what lies before is not missing."""
    r = make(1)
    r.heartbeat(A, 50, 0.0)
    r.asks(1.0)
    r.gone(0, Gone(A, 1, 41, 45, 50, 5, "src"), 1.1)
    r.asks(1.2)
    assert taken(r) == [Missing(41, 44, Reason.EVICTED)]


def test_two_lines_wait_longer_before_asking() -> None:
    """With A and B a gap is asked for only when the other line had its chance."""
    one, two = make(1), make(1, lines=2)
    for r in (one, two):
        give(r, A, 1, 1)
        give(r, A, 3, 1)
    assert one.asks(0.005)
    assert not two.asks(0.005)
    give(two, A, 2, 1)
    assert not two.asks(1.0)
    assert two.counters.gaps == 0


@pytest.mark.parametrize("seed", range(20))
def test_an_interrupted_receiver_finds_out_what_is_missing(seed: int) -> None:
    """A signal's handler raises in any call: after `recover`, all is handed over once, in order, and counted."""
    rolls = random.Random(seed)
    interrupts = Interrupts(lambda _: rolls.random() < 1 / 40)
    r = make(1, reorder_wait_s=0.0, max_outstanding=8)
    r.heartbeat(A, 1, 0.0)
    now, got = 0.0, []
    while r.expected <= 200:
        now += 0.05
        assert now < 1000
        try:
            with interrupts.active():
                first = rolls.randrange(r.expected, r.expected + 20)
                if now < 5 and rolls.random() < 0.7:
                    give(r, A, first, rolls.randrange(1, 5), now)
                else:
                    r.heartbeat(A, 205, now)
                for ask in r.asks(now):
                    if rolls.random() < 0.7:
                        give(r, A, ask.first, min(ask.messages, 6), now, repair=True)
        except Interrupt:
            r.recover(now)
        got += taken(r)
        c = r.counters
        assert (
            c.missing_kernel + c.missing_network == c.repaired + c.late + c.lost + c.skipped + r.open_missing
        )
        assert c.delivered == len(got)
    assert got == list(range(1, r.expected))
    assert interrupts.raised > 1
