"""Snapshots over a link that drops, in virtual time: the last value of every key, and the accounting of the rest."""

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.core import Event, Lost, MemoryJournal, Position, Reason, Retention
from brokerless.core.journal import key_state
from brokerless.core.journal.key_state import MemoryState, StateBlock
from brokerless.core.topics import TopicFilter
from brokerless.direct.batch import StateBatch
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import State
from brokerless.direct.protocol.loss_accounting import EpochStarted, Snapshot

from .test_subscriber import PEER, Simulation


class Keyed(Simulation):
    """A publisher that compacts, and a subscriber with a table of last values; blocks of a few events."""

    def __init__(self, **options: Any) -> None:
        self.table: dict[tuple[str, str], bytes] = {}
        self.truth: dict[tuple[str, str], bytes] = {}
        self.edges: list[Snapshot] = []
        self.delivered = 0
        self.wanted = TopicFilter(options.get("topics", ()))
        options.setdefault("retention", Retention(max_events=8))
        super().__init__(start="snapshot", **options)

    def boot(self) -> None:
        super().boot()
        self.journal = MemoryJournal(retention=self.retention, compact="key")
        self.journal.bind("p")
        self.journal.on_frame = self.on_frame
        self.control_server._journal = self.journal
        self.truth.clear()

    def publish(self) -> None:
        """One event of some topic and key; now and then a tombstone."""
        roll = self.random
        topic, key = f"t{roll.randrange(3)}", roll.choice(["", *"abcdefghijkl"])
        data = b"" if roll.random() < 0.3 else b"%d" % self.journal.next
        self.journal.append(topic, data, key=key)
        if key and self.wanted(topic):
            self.truth.pop((topic, key), None)
            if data:
                self.truth[topic, key] = data

    def consume(self) -> None:
        ready = self.subscriber.ready
        while ready:
            item = ready[0]
            if isinstance(item, Snapshot):
                self.edges.append(item)
                if not item.complete:
                    self.table.clear()
                self.accounting.snapshot(item)
            elif isinstance(item, StateBatch):
                self.take(item.events)
                self.accounting.enter_state(item.block, item.next_offset)
            elif isinstance(item, (Lost, EpochStarted, messages.Sent)):
                super().consume_one(item)
            else:
                self.take(item.events)
                super().consume_one(item)
            ready.popleft()

    def take(self, events: list[Event]) -> None:
        self.delivered += len(events)
        for event in events:
            if event.key:
                self.table.pop((event.topic, event.key), None)
                if event.data:
                    self.table[event.topic, event.key] = event.data

    def check(self, epoch: int) -> None:
        """What arrived is what the publisher has, and every event of the epoch is accounted for, by topic."""
        assert self.table == self.truth
        assert self.edges[-1].complete
        for topic, sent in self.journal.sent().items():
            if self.wanted(topic):
                account = self.ledger.account("p", epoch, topic)
                assert account.balanced
                assert (account.accepted, account.pending, account.lost) == (sent, 0, 0)


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0, 0.8),
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.sampled_from([(), ("t1",), ("t0", "t2")]),
)
def test_the_last_value_of_every_key_arrives(
    seed: int, loss: float, bursts: list[int], topics: tuple[str, ...]
) -> None:
    """Whatever the link drops, however far the subscriber falls behind, whenever the publisher restarts."""
    with mock.patch.object(key_state, "_BLOCK_EVENTS", 3):
        simulation = Keyed(seed=seed, topics=topics)
        for burst in bursts:
            simulation.loss = loss
            for _ in range(burst):
                simulation.publish()
                if simulation.random.random() < 0.4:
                    simulation.beat()
                    simulation.step(simulation.random.choice([0.0, 0.1, 3.0]))
            if simulation.random.random() < 0.1:
                simulation.boot()
            if simulation.random.random() < 0.3:
                simulation.settle()
                simulation.check(simulation.journal.epoch)
        simulation.settle()
        simulation.check(simulation.journal.epoch)
        account = simulation.ledger.account()
        assert account.balanced
        assert account.delivered + account.duplicates + account.stale <= simulation.delivered
        assert set(account.lost_by_reason) <= {Reason.PRODUCER_CRASH}
        if not topics:
            total = simulation.ledger.account("p", simulation.journal.epoch)
            assert total.accepted == simulation.journal.next
            assert total.compacted == total.accepted - total.delivered


@pytest.mark.parametrize("room", [1, 6, 100])
def test_keys_that_change_while_a_snapshot_arrives(room: int) -> None:
    """What was handed out and is deleted meanwhile is deleted by the stream, or by another snapshot."""
    with mock.patch.object(key_state, "_BLOCK_EVENTS", 1):
        simulation = Keyed(retention=Retention(max_events=room))
        journal = simulation.journal
        for key in "abc":
            journal.append("t", b"x" * 2500, key=key)
        for _ in range(room):
            journal.append("t", b"end")
        while not simulation.table:
            simulation.beat()
            simulation.step()
        assert set(simulation.table) == {("t", "a")}
        journal.append("t", b"", key="a")
        journal.append("t", b"y", key="b")
        for _ in range(4):
            journal.append("t", b"end")
        simulation.settle()
        assert simulation.table == {("t", "b"): b"y", ("t", "c"): b"x" * 2500}
        assert simulation.counters.snapshots <= (2 if room < 100 else 1) + 1
        assert simulation.ledger.account().balanced


def test_a_publisher_that_keeps_no_state_is_an_error() -> None:
    """The subscriber does not wait for what will not come."""
    simulation = Keyed()
    Simulation.boot(simulation)
    for _ in range(20):
        simulation.step(0.1)
    assert simulation.subscriber.state is State.REFUSED
    assert 'compact="key"' in str(simulation.subscriber.error)


def test_a_saved_position_is_gone_on_from_or_starts_over() -> None:
    """If the journal still has what comes after it, there is no snapshot; if not, or in another epoch, there is one."""
    for offset, same_epoch, snapshots in ((28, True, 0), (3, True, 1), (28, False, 1)):
        simulation = Keyed()
        for _ in range(30):
            simulation.publish()
        epoch = simulation.journal.epoch if same_epoch else 5
        simulation.subscriber._positions["p"] = Position(epoch, offset)
        simulation.settle()
        assert simulation.counters.snapshots == snapshots, (offset, same_epoch)
        if snapshots:
            assert simulation.table == simulation.truth


def hostile(reply: messages.KeyState, count: int = 1) -> Keyed:
    """A subscriber in the middle of a snapshot as of 40 that is answered so."""
    simulation = Keyed()
    for _ in range(50):
        simulation.publish()
    while simulation.subscriber._state_end < 0:
        simulation.step()
    for _ in range(count):
        request = simulation.subscriber._request
        simulation.subscriber._asked_until = simulation.now + 2
        simulation.subscriber._state_end, simulation.subscriber.position = 40, 0
        answer = msgspec.structs.replace(reply, request=request, epoch=simulation.subscriber.epoch)
        simulation.subscriber.receive_control(messages.encode(answer), simulation.now)
    return simulation


def block(offsets: list[int], source: str = "p") -> bytes:
    events = [Event(source, 1, at, "t", at, 0, b"x", "", str(at)) for at in offsets]
    return MemoryState(100, events).read(0, 100, max_bytes=1 << 20).blocks[0]


@pytest.mark.parametrize(
    "reply",
    [
        messages.KeyState(1, 1, 40, 40, [b"nonsense"]),
        messages.KeyState(1, 1, 40, 40, [block([1, 2], "other")]),
        messages.KeyState(1, 1, 40, 0, []),
    ],
    ids=["nonsense", "another source", "no progress"],
)
def test_answers_that_make_no_sense_are_counted(reply: messages.KeyState) -> None:
    """Nothing is handed out, the snapshot is not complete, and in the end the right answer counts."""
    simulation = hostile(reply)
    assert simulation.counters.bad_messages == 1
    assert not any(isinstance(item, StateBatch) for item in simulation.subscriber.ready)
    assert not any(isinstance(item, Snapshot) and item.complete for item in simulation.subscriber.ready)
    simulation.settle()
    assert simulation.table == simulation.truth


def test_damaged_parts_are_lost_and_named() -> None:
    """They are told in their place, and the rest of the snapshot counts."""
    simulation = hostile(messages.KeyState(1, 1, 40, 40, [block([1, 5])], [(6, 40)]))
    simulation.settle()
    (lost,) = simulation.lost
    assert (lost.first, lost.last, lost.reason) == (6, 39, Reason.UNATTRIBUTED)
    account = simulation.ledger.account()
    assert account.balanced
    assert 0 < account.lost <= 34, "an upper bound: most of what was there had been compacted"
    assert simulation.edges[-1].complete


def test_whoever_asks_for_something_else_gets_what_there_is() -> None:
    """Ends that are below the oldest event or beyond the state; and what is open is closed after a while."""
    simulation = Keyed()
    for _ in range(50):
        simulation.publish()
    simulation.settle()
    server, end = simulation.control_server, simulation.journal.state().end
    for number, (offset, state) in enumerate([(0, 3), (1, 3), (1, end + 1), (1 << 61, 1 << 61)]):
        request = messages.Replay(number, simulation.journal.epoch, offset, 100, state=state)
        server.receive(PEER, messages.encode(request), simulation.now)
    replies = [messages.decode_reply(data) for _, data in server.outbox]
    ends = [reply.state for reply in replies if isinstance(reply, messages.KeyState)]
    assert ends == [end] * 4
    assert server._state is not None
    simulation.now += 200
    server.handle_deadline(simulation.now)
    assert server._state is None


def test_blocks_are_cut_where_a_subscriber_is() -> None:
    """A block may begin before the position: what was taken does not come again."""
    simulation = Keyed()
    for _ in range(50):
        simulation.publish()
    simulation.settle()
    subscriber = simulation.subscriber
    subscriber._state_end, subscriber.position = 40, 3
    subscriber._accept_block(StateBlock(block([1, 2, 3, 9, 40, 41])))
    batch = subscriber.ready.pop()
    assert isinstance(batch, StateBatch)
    assert [event.offset for event in batch.events] == [3, 9]
    assert (len(batch), batch.first_offset, batch.next_offset) == (2, 3, 40)
    rest = batch.after(4)
    assert ([event.offset for event in rest.events], len(rest), rest.datas) == ([9], 1, [b"x"])
