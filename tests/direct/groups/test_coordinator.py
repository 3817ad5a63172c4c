"""Groups of a publisher without a journal: each event at most once, and every one that nobody gets is counted."""

import threading
from collections import Counter
from pathlib import Path

import pytest

from brokerless.core import MemoryJournal, Reason, Retention
from brokerless.core.errors import ConfigError, NotAcknowledged
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.group import MAX_MESSAGES, Group
from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol.messages import Policy

from ..conftest import eventually, have_room

DEADLINE = 20.0
# Longer than any pause of a loaded machine that a test must survive without losing an event.
PATIENT_S = 30.0


def join(pub: Publisher, worker: Worker) -> None:
    """Let the worker's loop run until the publisher knows it and its room; it has no thread of its own."""

    def joined() -> bool:
        assert worker.receive(0.01) is None
        return have_room(pub, 1)

    eventually(joined)


def visit(pub: Publisher) -> None:
    """Make the group known to the publisher, and leave it without workers."""
    with Worker(pub.address, group="g") as worker:
        join(pub, worker)
    eventually(lambda: pub.groups()["g"].workers == 0)


def test_each_event_goes_to_one_worker_once(address: str) -> None:
    """Two workers share the events of a publisher that keeps nothing; with room in time, none is lost."""
    got: Counter[bytes] = Counter()
    with Publisher(address, source="p", unclaimed_s=PATIENT_S) as pub:
        workers = [Worker(pub.address, group="g", prefetch=20) for _ in range(2)]

        def work(worker: Worker) -> None:
            for delivery in worker:
                assert delivery.attempt == 1
                got[delivery.event.data] += 1
                delivery.ack()

        threads = [threading.Thread(target=work, args=(w,)) for w in workers]
        for thread in threads:
            thread.start()
        try:
            assert pub.wait_for_workers(2, DEADLINE)
            for i in range(1000):
                pub.publish("t", b"%d" % i)
            pub.flush()
            eventually(lambda: pub.groups()["g"].acked == 1000)
        finally:
            for worker in workers:
                worker.close()
            for thread in threads:
                thread.join(DEADLINE)
        assert len(got) == 1000
        assert set(got.values()) == {1}
        assert pub.groups()["g"].balanced


def test_what_no_worker_claims_in_time_is_counted(address: str) -> None:
    """With all workers away events are lost as offline, and the next worker is told exactly which."""
    with Publisher(address, source="p", unclaimed_s=0.2) as pub:
        visit(pub)
        first = pub.publish("t", b"0").offset
        last = pub.publish("t", b"1").offset
        pub.flush()
        eventually(lambda: pub.groups()["g"].lost == 2)
        assert pub.groups()["g"].lost_by_reason == {"offline": 2}
        with Worker(pub.address, group="g") as worker:
            eventually(lambda: worker.receive(0.01) is None and worker.losses)
            (lost,) = worker.losses
            assert (lost.first, lost.last, lost.reason) == (first, last, Reason.OFFLINE)
        assert pub.groups()["g"].balanced


def test_a_worker_without_room_costs_what_is_stated(address: str) -> None:
    """A worker that holds as much as it can take gets nothing more; the rest is lost as overflow, in time."""
    with (
        Publisher(address, source="p", unclaimed_s=0.2) as pub,
        Worker(pub.address, group="g", prefetch=3) as worker,
    ):
        held = []
        join(pub, worker)
        for i in range(3):
            pub.publish("t", b"%d" % i)
            pub.flush()
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            held.append(delivery)
        for i in range(3, 10):
            pub.publish("t", b"%d" % i)
        pub.flush()
        eventually(lambda: pub.groups()["g"].lost == 7)
        assert pub.groups()["g"].lost_by_reason == {"overflow_sender": 7}
        for delivery in held:
            delivery.ack()
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 3)
        assert pub.groups()["g"].balanced
        eventually(lambda: worker.receive(0.01) is None and sum(lost.count for lost in worker.losses) == 7)


def test_what_a_worker_gives_back_or_leaves_behind_is_lost(address: str) -> None:
    """A nack gives up, a worker that leaves takes what it held with it: nothing is ever delivered twice."""
    with Publisher(address, source="p", unclaimed_s=PATIENT_S) as pub:
        with Worker(pub.address, group="g") as worker:
            join(pub, worker)
            for data in (b"nacked", b"left"):
                pub.publish("t", data)
            pub.flush()
            first, second = worker.receive(DEADLINE), worker.receive(DEADLINE)
            assert first is not None
            assert second is not None
            first.nack()

            def given_up() -> bool:
                assert worker.receive(0.01) is None
                return pub.groups()["g"].lost == 1

            eventually(given_up)
        eventually(lambda: pub.groups()["g"].lost == 2)
        assert pub.groups()["g"].lost_by_reason == {"gave_up": 1, "in_flight": 1}
        with Worker(pub.address, group="g") as worker:
            assert worker.receive(0.3) is None
        assert pub.groups()["g"].balanced


def test_waiting_for_an_acknowledgement_of_a_lost_event(address: str) -> None:
    """publish(wait="acked") does not take a lost event for an acknowledged one."""
    with Publisher(address, source="p", unclaimed_s=0.2) as pub:
        visit(pub)
        with pytest.raises(NotAcknowledged) as caught:
            pub.publish("t", b"x", wait="acked", timeout=DEADLINE)
        assert caught.value.missing == ("g",)


def test_a_group_that_was_away_is_told_what_was_evicted(address: str, tmp_path: Path) -> None:
    """With a journal: when the first worker returns it is told the evicted range, and gets all the others."""
    journal = MemoryJournal(retention=Retention(max_events=100))
    with Publisher(address, source="p", journal=journal) as pub:
        visit(pub)
        for i in range(300):
            pub.publish("t", b"%d" % i)
        pub.flush()
        oldest = journal.oldest
        assert oldest > 0
        with Worker(pub.address, group="g") as worker:
            got = []
            while len(got) < 300 - oldest:
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                got.append(delivery.event.offset)
                delivery.ack()
            assert got == list(range(oldest, 300))
            told = sorted((lost.first, lost.last, lost.reason) for lost in worker.losses)
            assert [reason for _, _, reason in told] == [Reason.EVICTED] * len(told)
            assert [o for first, last, _ in told for o in range(first, last + 1)] == list(range(oldest))
        assert pub.groups()["g"].lost_by_reason == {"evicted": oldest}
        assert pub.groups()["g"].balanced


def test_a_grant_that_did_not_leave_is_given_to_another() -> None:
    """What could not be sent was not delivered: it is granted again, still for the first time."""
    group = Group("g", GroupState(0, 0), lossy=True)
    group.join("a", 10)
    group.join("b", 10)
    group.lease_new("a", [(0, 4)], 5, now=0.0)
    group.take_back("a", 0, 4)
    (lease,) = group.lease_from_returned("b", 10, now=0.0)
    assert (lease.first, lease.last, lease.attempt) == (0, 4, 1)
    assert group.ack("b", 0, 4) == 5
    assert group.cursor == 5
    assert group.next_deadline() == float("inf")


def test_what_never_arrived_is_lost_when_its_lease_ends() -> None:
    """A socket may drop a message in silence: the lease tells. It costs that event, and no other waits for it."""
    group = Group("g", GroupState(0, 0), lossy=True)
    group.join("a", 10)
    group.lease_new("a", [(0, 0)], 1, now=0.0)  # dropped on the way
    for offset in range(1, 3 * MAX_MESSAGES):
        assert [m.name for m in group.with_room()] == ["a"]
        group.lease_new("a", [(offset, offset)], offset + 1, now=1.0)
        assert group.ack("a", offset, offset) == 1
    assert group.handle_deadline(group.policy.lease_s + 0.5) == 1
    assert group.lost_by_reason == {Reason.IN_FLIGHT: 1}
    assert group.cursor == 3 * MAX_MESSAGES
    assert group.leased == group.waiting == 0


def test_an_acknowledgement_after_the_lease_still_counts() -> None:
    """What was counted as lost and was processed after all is taken back, once: the accounting balance all the time."""
    group = Group("g", GroupState(0, 0), lossy=True)
    group.join("a", 10)
    group.lease_new("a", [(0, 4)], 5, now=0.0)
    group.handle_deadline(group.policy.lease_s + 0.5)
    assert (group.lost, group.acked) == (5, 0)
    assert group.ack("a", 1, 2) == 2
    assert group.ack("a", 1, 2) == 0
    assert (group.lost, group.acked) == (3, 2)
    assert group.lost_by_reason == {Reason.IN_FLIGHT: 3}


def test_a_worker_that_did_not_read_for_a_moment_gets_more_when_it_is_heard() -> None:
    """A delivery that could not be sent is granted again to the same worker as soon as it says a word."""
    journal = MemoryJournal()
    journal.bind("p")
    coordinator = GroupCoordinator(journal, None, GroupStore(None), lossy_after_s=PATIENT_S)
    coordinator.join("g", "a", Policy(30.0, 5, False, []), "live", 10)
    journal.append("t", b"x")
    coordinator.run(0.0)
    ((worker, data),) = coordinator.outbox
    coordinator.outbox = []
    coordinator.undelivered(worker, data, 0.0)
    coordinator.run(0.1)
    assert coordinator.outbox == []
    coordinator.groups["g"].heard("a")
    coordinator.run(0.2)
    assert [name for name, _ in coordinator.outbox] == ["a"]


@pytest.mark.parametrize("live_queue", [0, -1, 100_000])
def test_queues_without_a_sensible_bound_are_refused(live_queue: int) -> None:
    """The live queue's bound is checked at both ends, before anything is opened."""
    with pytest.raises(ConfigError, match="live_queue"):
        Publisher("tcp://127.0.0.1:*", source="p", live_queue=live_queue)
    with pytest.raises(ConfigError, match="live_queue"):
        Subscriber("tcp://127.0.0.1:1", live_queue=live_queue)
