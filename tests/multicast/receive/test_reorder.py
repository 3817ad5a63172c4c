"""The receiver: order, sessions, memory; what the simulation does not show in one glance."""

import random

import pytest

from brokerless.core import Reason
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.gaps import Missing
from brokerless.multicast.receive.reorder import LIVE, OLDEST, Receiver
from brokerless.multicast.wire.moldudp64 import Gone
from brokerless.multicast.wire.status import Status
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
    for repair_request in r.due_requests(1.0):
        asked |= set(range(repair_request.first, repair_request.first + repair_request.messages))
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
    r.due_requests(1.0)
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
    assert r.due_requests(1.0)
    r.gone(0, Gone(A, 1, 1, 60, 100, 5, "src"), 1.1)
    due_requests = r.due_requests(1.2)
    assert [(a.first, a.messages) for a in due_requests] == [(60, 40)]
    assert taken(r) == []
    give(r, A, 60, 5, 1.3, repair=True)
    r.gone(0, Gone(A, 1, 1, 80, 100, 5, "src"), 1.4)
    r.due_requests(1.5)
    assert taken(r) == [60, 61, 62, 63, 64, Missing(65, 79, Reason.EVICTED)]
    assert (r.counters.skipped, r.counters.lost) == (59, 15)


def test_before_the_base_of_a_session_there_is_nothing_to_be_lost() -> None:
    """A journal that was cut begins a session in the middle: what lies before is not missing."""
    r = make(1)
    r.heartbeat(A, 50, 0.0)
    r.due_requests(1.0)
    r.gone(0, Gone(A, 1, 41, 45, 50, 5, "src"), 1.1)
    r.due_requests(1.2)
    assert taken(r) == [Missing(41, 44, Reason.EVICTED)]


def test_two_lines_wait_longer_before_asking() -> None:
    """With A and B a gap is asked for only when the other line had its chance."""
    one, two = make(1), make(1, lines=2)
    for r in (one, two):
        give(r, A, 1, 1)
        give(r, A, 3, 1)
    assert repairs(one, 0.005)
    assert not repairs(two, 0.005)
    give(two, A, 2, 1)
    assert not repairs(two, 1.0)
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
                for repair_request in r.due_requests(now):
                    if rolls.random() < 0.7:
                        give(r, A, repair_request.first, min(repair_request.messages, 6), now, repair=True)
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


def repairs(r: "Receiver[Numbers]", now: float) -> list[tuple[int, int]]:
    """What is asked for, without questions for the status."""
    return [(ask.first, ask.messages) for ask in r.due_requests(now) if ask.messages]


def questions(r: "Receiver[Numbers]", now: float) -> int:
    """How many questions for the status are sent."""
    return sum(not ask.messages for ask in r.due_requests(now))


def status(following: int, oldest: int = 1, session: bytes = A) -> Status:
    return Status(session, following, 1, 0, 1, oldest, 5, 1, "src")


def test_silence_makes_it_stale_and_a_packet_ends_that() -> None:
    """After three seconds without a living sender: stale, counted once, the servers asked; answers do not end it."""
    r = make(LIVE)
    r.heartbeat(A, 5, 0.0)
    assert questions(r, 0.0) == 1, "at the beginning"
    assert questions(r, 2.9) == 0
    assert not r.stale
    assert questions(r, 3.0) == 1
    assert r.stale
    r.status(status(9), 3.1)
    assert r.stale, "a server is not the sender"
    assert repairs(r, 3.2) == [(5, 4)], "but what it has is asked for"
    assert questions(r, 10.0) == 1
    r.heartbeat(A, 9, 10.1)
    assert not r.stale
    assert r.counters.stale == 1


def test_it_is_stale_even_before_anything_was_heard_and_a_server_alone_is_enough() -> None:
    """A late joiner finds the session by the server's answer, and gets everything from the oldest on."""
    r = make(OLDEST)
    assert questions(r, 0.0) == 1
    r.status(status(100, oldest=41), 0.1)
    assert r.session == A
    assert repairs(r, 0.2) == [(1, 99)]
    r.due_requests(4.0)
    assert r.stale


def test_an_ended_session_is_not_stale() -> None:
    """After its end, silence is what is expected."""
    r = make(1)
    give(r, A, 1, 4)
    r.end(A, 5, 0.1)
    r.due_requests(100.0)
    assert not r.stale


def test_a_sender_that_goes_back_is_noticed_and_followed() -> None:
    """A journal restored from a copy: heartbeats and data below what was sent, and nothing else, for a second."""
    r = make(1)
    give(r, A, 1, 100)
    taken(r)
    for i in range(3):
        r.heartbeat(A, 51, 1.0 + i * 0.5)
    assert r.counters.rewinds == 1
    give(r, A, 51, 10, 2.1)
    assert taken(r) == list(range(51, 61)), "handed out, although these numbers had been used"


def test_packets_that_are_merely_late_are_no_rewind() -> None:
    """Old packets, of the slower line for example, between new ones: nothing happens."""
    r = make(1, lines=2)
    for i in range(100):
        give(r, A, 1 + i, 1, i * 0.1)
        give(r, A, max(1, i - 5), 1, i * 0.1)
        r.heartbeat(A, max(1, i - 3), i * 0.1)
    assert r.counters.rewinds == 0
    assert taken(r) == list(range(1, 101))


def test_what_is_not_proven_begins_no_session() -> None:
    """With authentication a recorded packet neither begins a session nor proves that anybody is alive."""
    r = make(LIVE)
    r.heartbeat(A, 5, 0.0, live=False)
    assert r.session is None
    assert r.counters.replayed == 1
    r.heartbeat(A, 5, 0.0)
    r.heartbeat(A, 5, 2.0, live=False)
    r.due_requests(3.0)
    assert r.stale, "a repeat of an old heartbeat hides no silence"
