"""Gaps: when they are asked for, of whom, how often, and when they are given up."""

from brokerless.core import Backoff, Reason
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.gaps import GapTable

POLICY = RepairPolicy(
    reorder_wait_s=0.01,
    retry=Backoff(first_s=0.1, factor=2, limit_s=1, jitter=0),
    give_up_s=2,
    max_outstanding=4,
)


def table(
    servers: int = 1, policy: RepairPolicy = POLICY, *, tcp: bool = False
) -> tuple[GapTable, SubscriberCounters]:
    counters = SubscriberCounters()
    return GapTable(policy, servers, lambda: 0.0, counters, tcp=tcp), counters


def test_a_gap_that_closes_within_the_reorder_wait_is_never_asked_for() -> None:
    """Reordering costs nothing: no request, and nothing counts as missing."""
    gaps, counters = table()
    gaps.add(5, 9, 0.0, 0.01)
    assert gaps.due_requests(0.005) == ([], [])
    assert gaps.fill(5, 9, 0.006, repair=False) == [(5, 9)]
    assert gaps.due_requests(1.0) == ([], [])
    assert gaps.next_deadline() is None
    assert (counters.gaps, counters.missing_network, counters.requests) == (0, 0, 0)


def test_one_request_per_gap_and_retries_with_back_off() -> None:
    """Asked once after the wait, again after 0.1, 0.2, 0.4 s, and given up after 2 s, all of it counted."""
    gaps, counters = table()
    gaps.add(5, 9, 0.0, 0.01)
    times = []
    lost = []
    while (due := gaps.next_deadline()) is not None:
        due_requests, gone = gaps.due_requests(due)
        times += [round(due, 3) for _ in due_requests]
        lost += gone
    assert times == [0.01, 0.11, 0.31, 0.71, 1.51]
    assert [(m.first, m.last, m.reason) for m in lost] == [(5, 9, Reason.GAVE_UP)]
    assert (counters.gaps, counters.requests, counters.lost, counters.missing_network) == (1, 5, 5, 5)
    assert counters.unanswered == 5


def test_servers_are_asked_in_turn() -> None:
    """Every retry goes to another server."""
    gaps, _ = table(servers=3)
    gaps.add(5, 9, 0.0, 0.01)
    asked = []
    for _ in range(3):
        due = gaps.next_deadline()
        assert due is not None
        asked += [repair_request.server for repair_request in gaps.due_requests(due)[0]]
    assert sorted(asked) == [0, 1, 2]


def test_gone_is_believed_when_every_server_says_so() -> None:
    """One server that has it no longer: ask the other. Both: evicted, and only that part."""
    gaps, _ = table(servers=2)
    gaps.add(5, 9, 0.0, 0.01)
    repair_request = gaps.due_requests(0.02)[0][0]
    gaps.gone(repair_request.server, 1, 8, 0.03)
    due_requests, lost = gaps.due_requests(0.03)
    assert not lost
    assert {(a.server, a.first, a.messages) for a in due_requests} >= {(1 - repair_request.server, 5, 3)}
    gaps.gone(1 - repair_request.server, 1, 8, 0.04)
    due_requests, lost = gaps.due_requests(0.04)
    assert [(m.first, m.last, m.reason) for m in lost] == [(5, 7, Reason.EVICTED)]
    assert list(gaps) == [(8, 9)]


def test_an_answer_that_holds_less_teaches_how_much_fits() -> None:
    """After a short answer the rest is asked for at once, in pieces of that size, as many as may fly."""
    gaps, counters = table()
    gaps.add(1, 100, 0.0, 0.01)
    assert [(a.first, a.messages) for a in gaps.due_requests(0.02)[0]] == [(1, 100)]
    gaps.fill(1, 10, 0.03, repair=True)
    due_requests, _ = gaps.due_requests(0.03)
    assert [(a.first, a.messages) for a in due_requests] == [(11, 10), (21, 10), (31, 10), (41, 10)]
    gaps.fill(11, 20, 0.04, repair=True)
    assert [(a.first, a.messages) for a in gaps.due_requests(0.04)[0]] == [(51, 10)]
    assert counters.repaired == 20


def test_a_gap_is_filled_in_the_middle() -> None:
    """What arrives in the middle splits a gap; what had arrived before is not new."""
    gaps, counters = table()
    gaps.add(1, 10, 0.0, 0.01)
    gaps.due_requests(0.02)
    assert gaps.fill(4, 6, 0.03, repair=False) == [(4, 6)]
    assert list(gaps) == [(1, 3), (7, 10)]
    assert gaps.fill(1, 10, 0.03, repair=True) == [(1, 3), (7, 10)]
    assert (counters.late, counters.repaired) == (3, 7)
    assert not gaps


def test_without_servers_a_gap_is_lost_after_the_wait() -> None:
    """Nobody to ask: in_flight, or overflow_receiver if the kernel dropped packets there."""
    gaps, _ = table(servers=0)
    gaps.add(1, 3, 0.0, 0.01)
    gap = gaps.add(7, 8, 0.0, 0.01)
    assert gap is not None
    gap.kernel = True
    lost = gaps.due_requests(0.02)[1]
    assert [(m.first, m.last, m.reason) for m in lost] == [
        (1, 3, Reason.IN_FLIGHT),
        (7, 8, Reason.OVERFLOW_RECEIVER),
    ]


def test_a_long_gap_goes_over_tcp_one_at_a_time_and_falls_back() -> None:
    """Over the threshold: one fetch at a time; a fetch that fails is followed by a datagram request."""
    policy = RepairPolicy(
        reorder_wait_s=0.01, tcp_threshold=50, tcp_idle_s=0.5, retry=POLICY.retry, give_up_s=20
    )
    gaps, counters = table(policy=policy, tcp=True)
    gaps.add(1, 100, 0.0, 0.01)
    gaps.add(200, 300, 0.0, 0.01)
    due_requests = gaps.due_requests(0.02)[0]
    assert [(a.first, a.tcp) for a in due_requests] == [(1, True)], "the second waits for the first"
    gaps.fill(1, 60, 0.03, repair=True)
    gaps.failed(1, 0.04)
    later = []
    while len(later) < 2:
        due = gaps.next_deadline()
        assert due is not None
        later += gaps.due_requests(due)[0]
    assert {(a.first, a.tcp) for a in later} == {(61, False), (200, True)}
    assert counters.fetches == 2


def test_a_fetch_that_makes_progress_is_not_given_up() -> None:
    """The deadline counts from the last progress."""
    policy = RepairPolicy(reorder_wait_s=0.01, tcp_threshold=50, tcp_idle_s=0.5, give_up_s=1)
    gaps, _ = table(policy=policy, tcp=True)
    gaps.add(1, 1000, 0.0, 0.01)
    gaps.due_requests(0.02)
    for i in range(10):
        at = 0.1 + i * 0.4
        assert gaps.due_requests(at) == ([], [])
        gaps.fill(1 + i * 10, 10 + i * 10, at, repair=True)
    assert list(gaps) == [(101, 1000)]


def test_where_tcp_does_not_work_a_long_gap_is_repaired_by_datagrams() -> None:
    """When no server answers over TCP, datagrams bring it all at their pace; later TCP is tried again."""
    policy = RepairPolicy(retry=Backoff(first_s=0.1, factor=2, limit_s=1, jitter=0), tcp_threshold=20)
    gaps, counters = table(servers=2, policy=policy, tcp=True)
    gaps.add(1, 10_000, 0.0, 0.0)
    now, fetched = 0.0, []
    while gaps and now < 5.0:
        due = gaps.next_deadline()
        assert due is not None
        now = max(now, due)
        for asked in gaps.due_requests(now)[0]:
            if asked.tcp:
                fetched.append(asked.server)
                gaps.failed(asked.first, now + 0.001)
            else:
                gaps.fill(
                    asked.first,
                    min(asked.first + 9, asked.first + asked.messages - 1),
                    now + 0.01,
                    repair=True,
                )
        now += 0.01
    assert not gaps, "within five seconds"
    assert sorted(fetched) == [0, 1]
    assert counters.lost == 0
    gaps.add(10_001, 20_000, now + 20, 0.0)
    assert [asked.tcp for asked in gaps.due_requests(now + 20)[0]] == [True]
