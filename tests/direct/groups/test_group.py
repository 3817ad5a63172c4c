"""The coordinator's rules, against a model that knows where every event is."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from brokerless.direct.groups.group import MAX_CREDIT, Group
from brokerless.direct.groups.members import GroupState, Lease
from brokerless.direct.protocol.messages import Policy

LEASE_S = 10.0
MAX_DELIVER = 4


class GroupMachine(RuleBasedStateMachine):
    """Workers come, go, ack, nack and sleep; the publisher crashes. Every event ends settled exactly once."""

    affinity = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tail = 0
        policy = Policy(LEASE_S, MAX_DELIVER, self.affinity)
        self.group = Group("g", GroupState(0, 0, policy=policy))
        self.held: dict[str, dict[int, int]] = {}  # worker → offset → attempt
        self.attempts: dict[int, int] = {}
        self.done: set[int] = set()
        self.dead: set[int] = set()
        self.doubtful: set[int] = set()  # taken back without a word of the worker
        self.names = 0

    def key(self, offset: int) -> str:
        return "" if offset % 5 == 0 else f"k{offset % 3}"

    @rule(n=st.integers(1, 10))
    def publish(self, n: int) -> None:
        self.tail += n

    @rule(credit=st.integers(0, 8))
    @precondition(lambda self: len(self.held) < 4)
    def join(self, credit: int) -> None:
        name = f"w{self.names}"
        self.names += 1
        self.group.join(name, credit)
        self.held[name] = {}

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.group.leave(name)
        self.doubtful |= set(self.held.pop(name))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def leave_in_order(self, data: st.DataObject) -> None:
        """Nothing of what it held was begun, so none of it was an attempt."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.group.leave(name, unbegun=True)
        for offset in self.held.pop(name):
            self.attempts[offset] -= 1

    @rule(data=st.data())
    @precondition(lambda self: any(self.held.values()))
    def unbegun(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        offset = data.draw(st.sampled_from(sorted(self.held[name])))
        self.group.unbegun(name, offset, offset)
        del self.held[name][offset]
        self.attempts[offset] -= 1

    @rule(data=st.data())
    @precondition(lambda self: self.doubtful)
    def unbegun_too_late(self, data: st.DataObject) -> None:
        """A worker tells after its lease, or to the next publisher, that it had not begun."""
        offset = data.draw(st.sampled_from(sorted(self.doubtful)))
        if any(offset in held for held in self.held.values()):
            return
        self.group.unbegun("whoever", offset, offset)
        self.doubtful.discard(offset)
        if offset not in self.done | self.dead:
            self.attempts[offset] -= 1

    @rule()
    def change_affinity(self) -> None:
        self.affinity = not self.affinity
        self.group.change_policy(Policy(LEASE_S, MAX_DELIVER, self.affinity))
        if self.affinity:
            self.sort_by_key()

    def sort_by_key(self) -> None:
        while self.group.next < self.tail:
            self.group.queue_keyed(self.group.next, self.key(self.group.next))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def lease(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        room = self.group.members[name].room
        if room <= 0:
            return
        if self.group.returned:
            leases = self.group.lease_from_returned(name, room, self.now)
        elif self.affinity:
            self.sort_by_key()
            leases = self.group.lease_keyed(name, room, self.now)
        else:
            upto = min(self.tail, self.group.next + room)
            if upto == self.group.next:
                return
            leases = self.group.lease_new(name, [(self.group.next, upto - 1)], upto, self.now)
        for lease in leases:
            self.take(name, lease)

    def take(self, name: str, lease: Lease) -> None:
        for offset in range(lease.first, lease.last + 1):
            assert offset not in self.done
            assert offset not in self.dead
            assert all(offset not in held for held in self.held.values()), "two workers hold one event"
            assert lease.attempt > self.attempts.get(offset, 0)
            assert lease.attempt <= MAX_DELIVER
            self.attempts[offset] = lease.attempt
            self.held[name][offset] = lease.attempt

    @rule(data=st.data())
    @precondition(lambda self: any(self.held.values()))
    def ack(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        offset = data.draw(st.sampled_from(sorted(self.held[name])))
        assert self.group.ack(name, offset, offset) == 1
        del self.held[name][offset]
        self.done.add(offset)

    @rule(data=st.data(), delay=st.sampled_from([0.0, 1.0, 50.0]))
    @precondition(lambda self: any(self.held.values()))
    def nack(self, data: st.DataObject, delay: float) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        offset = data.draw(st.sampled_from(sorted(self.held[name])))
        assert self.group.nack(name, offset, offset, delay, self.now) == 1
        del self.held[name][offset]

    @rule(first=st.integers(0, 60), length=st.integers(0, 5))
    @precondition(lambda self: self.held)
    def ack_what_is_not_held(self, first: int, length: int) -> None:
        """Late or foreign acks settle only what was delivered before."""
        name = sorted(self.held)[0]
        before = {o for o in range(first, first + length + 1) if self.attempts.get(o)} - self.done - self.dead
        held = {o for h in self.held.values() for o in h}
        mine = set(self.held[name]) & before
        newly = self.group.ack(name, first, first + length)
        assert newly <= len(before)
        settled = {o for o in before if self.group.is_settled(o)}
        assert mine <= settled
        for offset in settled & held:
            for h in self.held.values():
                h.pop(offset, None)
        self.done |= settled

    @rule(seconds=st.sampled_from([0.5, 2.0, 11.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.group.handle_deadline(self.now)
        for member in self.group.members.values():
            still = {o for _, held in member.leases for a, b in held for o in range(a, b + 1)}
            self.doubtful |= set(self.held[member.name]) - still
            self.held[member.name] = {o: a for o, a in self.held[member.name].items() if o in still}
            self.group.heard(member.name)

    @rule()
    def append_dead_letter(self) -> None:
        for offset in self.group.dead[:]:
            self.group.dead.remove(offset)
            if self.group.dead_letter_written(offset):
                assert self.attempts[offset] == MAX_DELIVER
                self.dead.add(offset)

    @rule()
    def crash(self) -> None:
        """The publisher is killed and reads its state back; what was out comes again."""
        self.group = Group("g", self.group.state())
        self.held = {}
        self.doubtful = {o for o, made in self.attempts.items() if made} - self.done - self.dead

    @invariant()
    def ledger_balances(self) -> None:
        group = self.group
        settled = {o for o in range(self.tail) if group.is_settled(o)}
        assert settled == self.done | self.dead
        assert group.acked + group.dead_lettered == len(self.done) + len(self.dead)
        held = {o for h in self.held.values() for o in h}
        unsettled = set(range(group.next)) - settled
        assert held <= unsettled
        # Everything that is not settled is held by somebody or waits to be granted.
        assert len(unsettled) == group.leased_live + group.waiting
        assert group.cursor == min(unsettled, default=group.next)

    @invariant()
    def attempts_are_forgotten(self) -> None:
        assert all(not self.group.is_settled(offset) for offset in self.group.attempts)

    def teardown(self) -> None:
        """In the end a patient worker settles everything that is left."""
        for name in list(self.held):
            self.group.leave(name)
        self.group.join("last", MAX_CREDIT)
        self.held = {"last": {}}
        for _ in range(20):
            self.now += 100.0
            if self.affinity:
                self.sort_by_key()
            self.group.handle_deadline(self.now)
            self.group.heard("last")
            self.append_dead_letter()
            leases = self.group.lease_from_returned("last", 10_000, self.now)
            if self.affinity:
                leases += self.group.lease_keyed("last", 10_000, self.now)
            for lease in leases:
                self.take("last", lease)
                self.group.ack("last", lease.first, lease.last)
                self.done |= set(range(lease.first, lease.last + 1))
            self.held["last"].clear()
        assert self.group.cursor == self.group.next


class KeyedGroupMachine(GroupMachine):
    """The same with key affinity."""

    affinity = True


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(stateful_step_count=40)
TestKeyedGroup = KeyedGroupMachine.TestCase
TestKeyedGroup.settings = settings(stateful_step_count=40)


def test_a_keys_events_never_overtake_each_other() -> None:
    """With affinity, of each key the events are granted in order, to one worker at a time."""
    chance = random.Random(5)
    group = Group("g", GroupState(0, 0, policy=Policy(affinity=True)))
    for name in ("a", "b", "c"):
        group.join(name, 6)
    for offset in range(300):
        group.queue_keyed(offset, f"k{offset % 7}")
    held: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    last: dict[int, int] = {}
    while group.cursor < 300:
        name = chance.choice("abc")
        for lease in group.lease_keyed(name, group.members[name].room, 0.0):
            for offset in range(lease.first, lease.last + 1):
                assert last.get(offset % 7, -1) < offset
                last[offset % 7] = offset
                others = [o for n, h in held.items() if n != name for o in h]
                assert all(o % 7 != offset % 7 for o in others), "a key is with two workers"
                held[name].append(offset)
        name = chance.choice("abc")
        if held[name]:
            offset = held[name].pop(chance.randrange(len(held[name])))
            group.ack(name, offset, offset)


def test_a_delayed_key_holds_back_its_later_events() -> None:
    """An event returned with a delay keeps the later ones of its key waiting, and others not."""
    group = Group("g", GroupState(0, 0, policy=Policy(affinity=True)))
    group.join("w", 1)
    for offset, key in enumerate(["a", "a", "b"]):
        group.queue_keyed(offset, key)
    assert group.lease_keyed("w", 1, 0.0) == [Lease(0, 0, 1)]
    group.nack("w", 0, 0, 5.0, 0.0)
    assert group.lease_keyed("w", 1, 1.0) == [Lease(2, 2, 1)]
    group.ack("w", 2, 2)
    assert group.lease_keyed("w", 1, 4.9) == []
    assert group.next_deadline() == 5.0
    assert group.lease_keyed("w", 1, 5.0) == [Lease(0, 0, 2)]


def test_a_new_publisher_keeps_the_order_of_keys_and_counts_only_what_was_granted() -> None:
    """After a restart each key goes on in order; what was only read ahead has its first attempt before it."""
    group = Group("g", GroupState(0, 0, policy=Policy(affinity=True, max_deliver=2)))
    group.join("a", 3)
    for offset in range(12):
        group.queue_keyed(offset, f"k{offset % 3}")
    granted = {o for g in group.lease_keyed("a", 3, 0.0) for o in range(g.first, g.last + 1)}
    group = Group("g", group.state())
    group.handle_deadline(0.0)
    for name in ("a", "b"):
        group.join(name, 100)
    for offset in range(group.next, 12):
        group.queue_keyed(offset, f"k{offset % 3}")
    leases = [lease for name in ("b", "a") for lease in group.lease_keyed(name, 100, 0.0)]
    attempts = {o: g.attempt for g in leases for o in range(g.first, g.last + 1)}
    assert attempts == {o: 2 if o in granted else 1 for o in range(12)}
    for key in range(3):
        holders = {
            m.name for m in group.members.values() for _, h in m.leases for o in range(key, 12, 3) if o in h
        }
        assert len(holders) == 1, "a key is with two workers"


def test_a_last_attempt_that_may_not_have_been_one_waits_for_a_lease() -> None:
    """A lease ended: dead only when the worker had the time of another to say that it had not begun."""
    group = Group("g", GroupState(0, 0, policy=Policy(lease_s=10.0, max_deliver=1)))
    group.join("w", 2)
    group.lease_new("w", [(0, 1)], 2, 0.0)
    group.handle_deadline(10.0)
    assert group.dead == []
    assert group.next_deadline() == 20.0
    group.unbegun("w", 1, 1)
    group.handle_deadline(20.0)
    assert group.dead == [0]
    assert group.lease_from_returned("w", 1, 20.0) == [Lease(1, 1, 1)]


def test_a_worker_that_hangs_loses_its_keys_and_their_order_is_kept() -> None:
    """Its lease over, its keys go to another; what it still holds of a key comes before the later ones."""
    group = Group("g", GroupState(0, 0, policy=Policy(lease_s=10.0, affinity=True)))
    group.join("a", 1)
    group.queue_keyed(0, "k")
    group.queue_keyed(1, "k")
    assert group.lease_keyed("a", 1, 0.0) == [Lease(0, 0, 1)]
    group.set_credit("a", 2)
    assert group.lease_keyed("a", 1, 5.0) == [Lease(1, 1, 1)]
    group.join("b", 10)
    group.queue_keyed(2, "k")
    group.handle_deadline(10.0)
    group.queue_keyed(3, "k")
    assert group.lease_keyed("a", 10, 10.0) == []
    assert group.lease_keyed("b", 10, 10.0) == [Lease(0, 0, 2)]
    group.handle_deadline(15.0)
    assert group.lease_keyed("b", 10, 15.0) == [Lease(1, 1, 2), Lease(2, 3, 1)]
    group.heard("a")
    group.ack("b", 0, 3)
    for offset in range(4, 40):
        group.queue_keyed(offset, f"k{offset}")
    assert group.lease_keyed("a", 2, 20.0), "it is there again, and gets keys"


def test_credit_is_bounded_whatever_is_asked_for() -> None:
    """A worker cannot ask for more than MAX_CREDIT, nor for less than nothing."""
    group = Group("g", GroupState(0, 0))
    group.join("w", 2**31)
    assert group.members["w"].room == MAX_CREDIT
    group.set_credit("w", -5)
    assert group.members["w"].room == 0
    group.set_credit("stranger", 5)
    assert "stranger" not in group.members


def test_a_stuck_event_stops_new_ones_before_memory_grows() -> None:
    """Every second event settled and the first one stuck: at MAX_PIECES nothing new is granted."""
    group = Group("g", GroupState(0, 0))
    group.join("w", MAX_CREDIT)
    group.lease_new("w", [(0, 19_999)], 20_000, 0.0)
    offset = 1
    while group.may_grow:
        group.ack("w", offset, offset)
        offset += 2
    assert offset < 10_000
    group.ack("w", 0, offset)
    assert group.may_grow


def test_what_is_evicted_is_lost_and_what_is_held_is_not() -> None:
    """The journal dropped events: those waiting are lost, one that a worker holds can still be acknowledged."""
    group = Group("g", GroupState(0, 0))
    group.join("w", 1)
    group.lease_new("w", [(0, 0)], 1, 0.0)
    assert group.lose(10) == [(1, 9)]
    assert (group.lost, group.cursor) == (9, 0)
    assert group.ack("w", 0, 0) == 1
    assert (group.cursor, group.acked) == (10, 1)


def test_what_was_acknowledged_is_not_among_the_lost() -> None:
    """Events settled out of order stay settled when the journal drops the ones around them."""
    group = Group("g", GroupState(0, 0))
    group.join("w", 100)
    group.lease_new("w", [(0, 9)], 10, 0.0)
    group.ack("w", 4, 6)
    group.leave("w")
    assert group.lose(10) == [(0, 3), (7, 9)]
    assert (group.lost, group.acked, group.cursor, group.waiting) == (7, 3, 10, 0)
