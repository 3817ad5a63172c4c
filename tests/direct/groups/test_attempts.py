"""What counts as an attempt, over real sockets: only what a handler was given."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import NotAcknowledged
from brokerless.direct import Publisher, Worker, read_dead_letters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.group import AWAIT_S, Group
from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol.messages import Deliver, Policy, Settle, decode_reply

from ..conftest import eventually

DEADLINE = 20.0
LEASE_S = 0.3


def work(worker: Worker, n: int) -> dict[int, int]:
    """Acknowledge `n` events; return their attempts."""
    attempts: dict[int, int] = {}
    while len(attempts) < n:
        delivery = worker.receive(DEADLINE)
        assert delivery is not None
        attempts[delivery.event.offset] = delivery.attempt
        delivery.ack()
    return attempts


def test_what_an_orderly_worker_had_not_begun_is_no_attempt(address: str) -> None:
    """Workers come and go, each with all events handed out: those that no handler had come as for the first time."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", [b"x"] * 100)
        for i in range(3):
            with Worker(pub.address, group="g", max_deliver=1) as worker:
                assert set(work(worker, 5).values()) == {1}
            eventually(lambda: pub.groups()["g"].workers == 0)
            assert (pub.groups()["g"].acked, pub.groups()["g"].dead_lettered) == (5 * (i + 1), 0)
        with Worker(pub.address, group="g", max_deliver=1) as worker:
            assert set(work(worker, 85).values()) == {1}


def test_what_a_worker_had_begun_and_left_unsettled_is_an_attempt(address: str) -> None:
    """The handler fails and the worker is closed: with one attempt allowed, that was it, and only for that event."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", [b"x"] * 10)
        with Worker(pub.address, group="g", max_deliver=1) as worker:
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
        eventually(lambda: pub.groups()["g"].dead_lettered == 1)
        (letter,) = read_dead_letters(pub.dead_letters)
        assert letter.event.offset == delivery.event.offset
        eventually(lambda: pub.groups()["g"].workers == 0)
        assert pub.groups()["g"].waiting == 9


def test_a_farewell_counts_only_if_every_word_before_it_was_read() -> None:
    """A Settle was lost on its way: what the worker held may have been handled, so it is not a first attempt again."""
    for read, attempt in ((True, 1), (False, 2)):
        journal = MemoryJournal()
        journal.bind("p")
        journal.append("t", b"x")
        coordinator = GroupCoordinator(journal, None, GroupStore(None))
        coordinator.join("g", "w", Policy(), "oldest", 10)
        coordinator.run(0.0)
        if read:
            coordinator.settle("g", "w", Settle(journal.epoch, number=1), 0.0)
        coordinator.bye("g", "w", 1)
        coordinator.join("g", "x", Policy(), "oldest", 10)
        coordinator.outbox.clear()
        coordinator.run(0.0)
        ((_, data),) = coordinator.outbox
        deliver = decode_reply(data)
        assert isinstance(deliver, Deliver)
        assert deliver.ranges == [(0, 0, attempt)]


def test_a_new_publisher_is_told_what_was_not_begun_and_what_was_done(
    new_address: Callable[[str], str], tmp_path: Path
) -> None:
    """A publisher is restarted under a worker with events handed out: none is dead, none comes twice."""
    address = new_address("ipc")
    pub = Publisher(address, source="p", journal=DiskJournal(tmp_path / "j"))
    try:
        pub.publish_many("t", [b"x"] * 50)
        with Worker(address, group="g", max_deliver=1, prefetch=20) as worker:
            for i in range(3):
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                assert (delivery.event.offset, delivery.attempt) == (i, 1)
                pub.close()
                pub = Publisher(address, source="p", journal=DiskJournal(tmp_path / "j"))
                delivery.ack()
            assert work(worker, 47) == dict.fromkeys(range(3, 50), 1)
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 50)
        assert pub.groups()["g"].dead_lettered == 0
    finally:
        pub.close()


def test_what_a_slow_handler_did_not_come_to_is_no_attempt(address: str) -> None:
    """A lease ends with events handed out that were not begun: they come again as for the first time."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", lease_s=LEASE_S, max_deliver=2) as worker,
    ):
        pub.publish_many("t", [b"x"] * 10)
        delivery = worker.receive(DEADLINE)
        assert delivery is not None
        # For the worker the lease began later: it must not end between two of the next events.
        over = time.monotonic() + LEASE_S
        eventually(lambda: pub.groups()["g"].waiting == 10 and time.monotonic() > over)
        delivery.ack()
        assert set(work(worker, 9).values()) == {1}


def test_keys_stay_in_order_when_the_publisher_is_new(
    new_address: Callable[[str], str], tmp_path: Path
) -> None:
    """Two workers with keys handed out, and a publisher that is restarted: of each key all events come in order."""
    address = new_address("ipc")
    pub = Publisher(address, source="p", journal=DiskJournal(tmp_path / "j"))
    seen: dict[str, list[int]] = {}
    try:
        pub.publish_many("t", [b"x"] * 60, keys=[f"k{i % 4}" for i in range(60)])
        with (
            Worker(address, group="g", key_affinity=True, prefetch=8) as one,
            Worker(address, group="g", key_affinity=True, prefetch=8) as other,
        ):

            def take(worker: Worker) -> None:
                delivery = worker.receive(0.02)
                if delivery is not None:
                    seen.setdefault(delivery.event.key, []).append(delivery.event.offset)
                    delivery.ack()

            def take_turns() -> int:
                take(one)
                take(other)
                return sum(map(len, seen.values()))

            eventually(lambda: take_turns() >= 10)
            pub.close()
            pub = Publisher(address, source="p", journal=DiskJournal(tmp_path / "j"))
            eventually(lambda: take_turns() >= 60)
        assert seen == {f"k{k}": list(range(k, 60, 4)) for k in range(4)}
    finally:
        pub.close()


def test_who_waits_is_told_of_a_dead_letter_among_many(new_address: Callable[[str], str]) -> None:
    """The event that is waited for is given up together with thousands of others: it was not acknowledged."""
    with (
        Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", max_deliver=1, prefetch=5000) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        eventually(lambda: worker.receive(0.01) is None and pub.wait_for_workers(1, 0))
        answer = pool.submit(pub.publish, "t", b"first", wait="acked", timeout=DEADLINE)
        deliveries = [worker.receive(DEADLINE)]
        pub.publish_many("t", [b"x"] * 2400)
        deliveries += [worker.receive(DEADLINE) for _ in range(2400)]
        for delivery in deliveries[::2] + deliveries[1::2]:  # in pieces, so that they are many failures
            assert delivery is not None
            delivery.nack()
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].dead_lettered == 2401)
        with pytest.raises(NotAcknowledged):
            answer.result(DEADLINE)
        assert pub.publish("t", b"last") is not None
        eventually(lambda: worker.receive(0.01) is not None)
        assert not pub._coordinator.groups["g"].failed, "nobody waits: nothing to remember"


def test_failures_are_forgotten_while_others_wait(new_address: Callable[[str], str]) -> None:
    """Where somebody always waits, what was given up before the oldest of them began is not remembered for ever."""
    with (
        Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", max_deliver=1) as worker,
        contextlib.ExitStack() as newer,
    ):
        eventually(lambda: worker.receive(0.01) is None and pub.wait_for_workers(1, 0))

        def give_up() -> int:
            receipt = pub.publish("t", b"x")
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.nack()
            eventually(
                lambda: worker.receive(0.01) is None and pub.groups()["g"].dead_lettered > receipt.offset
            )
            return receipt.offset

        failed = pub._coordinator.groups["g"].failed
        with pub._coordinator.watching():
            first = give_up()
            assert pub._server.ask(lambda: first in failed)
            newer.enter_context(pub._coordinator.watching())
        second = give_up()
        assert pub._server.ask(lambda: (first in failed, second in failed)) == (False, True)


def test_workers_of_a_forgotten_group_rejoin(address: str) -> None:
    """A group is dropped under its worker: the worker makes a new one, and gets what is published then."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", start="live") as worker,
    ):
        eventually(lambda: worker.receive(0.01) is None and pub.wait_for_workers(1, 0))
        pub.publish("t", b"1")
        work(worker, 1)
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 1)
        groups = pub._coordinator.groups
        old = groups["g"]
        pub.forget_group("g")
        eventually(lambda: worker.receive(0.01) is None and groups.get("g", old) is not old)
        receipt = pub.publish("t", b"2")
        assert list(work(worker, 1)) == [receipt.offset]
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 1)


def test_a_delayed_event_holds_back_what_has_arrived_of_its_key(address: str) -> None:
    """Given back with a delay while later ones of its key are here already: they come after it, others meanwhile."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", key_affinity=True, prefetch=12) as worker,
    ):
        pub.publish_many("t", [b"x"] * 60, keys=["a", "b"] * 30)
        first = worker.receive(DEADLINE)
        assert first is not None
        first.nack(0.3)
        attempts = work(worker, 60)
        order = list(attempts)
        assert [offset for offset in order if offset % 2 == 0] == list(range(0, 60, 2))
        assert [offset for offset in order if offset % 2] == list(range(1, 60, 2))
        assert order[0] == 1, "the other key does not wait"
        assert attempts == {offset: 2 if offset == 0 else 1 for offset in range(60)}


def test_keys_whose_event_was_given_up_go_on(address: str) -> None:
    """The event that was given back is a dead letter: the later ones of its key come all the same, in order."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", key_affinity=True, max_deliver=1) as worker,
    ):
        pub.publish_many("t", [b"x"] * 20, keys=["a"] * 20)
        first = worker.receive(DEADLINE)
        assert first is not None
        first.nack()
        assert work(worker, 19) == dict.fromkeys(range(1, 20), 1)


def test_a_delay_that_is_over_is_no_deadline_even_if_nobody_has_room() -> None:
    """Key affinity: the server would go round and round until somebody takes the event."""
    journal = MemoryJournal()
    journal.bind("p")
    journal.append_many("t", [b"."] * 2, keys=["a", "b"])
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    coordinator.join("g", "w", Policy(affinity=True), "oldest", 1)
    coordinator.run(0.0)
    group = coordinator.groups["g"]
    assert group.nack("w", 0, 0, 5.0, 1.0) == 1
    coordinator.run(1.0)
    assert group.leased == 1, "the other one"
    assert coordinator.next_deadline() == 6.0
    coordinator.run(6.0)
    assert coordinator.next_deadline() > 6.0
    group.leave("w")
    coordinator.run(7.0)
    assert coordinator.next_deadline() > 7.0
    coordinator.join("g", "other", Policy(affinity=True), "oldest", 2)
    coordinator.run(8.0)
    assert group.leased == 2


@pytest.mark.parametrize("affinity", [False, True])
def test_what_was_held_waits_for_its_holder(affinity: bool) -> None:
    """After a restart nobody else is given what a worker held, until it says what it has settled, or for too long."""
    policy = Policy(1000.0, 5, affinity)
    before = Group("g", GroupState(0, 0, policy=policy))
    for worker in ("one", "other"):
        before.join(worker, 10)
    for offset in range(4):
        if affinity:
            before.queue_keyed(offset, "k")
    if affinity:
        assert before.keyed is not None
        for worker in ("one", "other"):
            before.lease_keyed(worker, 10, 0.0)
    else:
        before.lease_new("other", [(0, 3)], 4, 0.0)
    (holder,) = [member.name for member in before.members.values() if member.held]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(before.state()), type=GroupState)
    assert state.holders == [holder]
    after = Group("g", state)
    after.handle_deadline(10.0)
    (free,) = {"one", "other"} - {holder}
    after.join(free, 10)
    assert after.awaited == {holder}
    after.join(holder)
    assert after.ack(holder, 0, 3) == 4  # before it asks for more
    after.set_credit(holder, 10)
    assert not after.awaited
    assert after.cursor == 4
    # A holder that does not come back holds up nobody for long.
    alone = Group("g", state)
    alone.handle_deadline(10.0)
    assert alone.next_deadline() <= 10.0 + AWAIT_S
    alone.handle_deadline(10.0 + AWAIT_S)
    assert not alone.awaited
