"""The subscriber's protocol against the publisher's control_server, over a link that drops, in virtual time."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, Ledger, Lost, MemoryJournal, Position, Reason, Retention
from brokerless.core.topics import TopicFilter
from brokerless.direct.batch import Batch
from brokerless.direct.counters import SubscriberCounters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import State
from brokerless.direct.protocol.loss_accounting import EpochStarted, LossAccounting
from brokerless.direct.protocol.server import ControlServer
from brokerless.direct.protocol.subscriber import Item, SubscriberProtocol, SubscriberSettings

PEER = b"peer"
# Live messages that wait for a subscriber before newer ones are dropped.
QUEUE = 16


class Simulation:
    """A publisher's journal and control_server, one subscriber, and a link between them that a test can make bad."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        retention: Retention | None = None,
        start: str | int = "oldest",
        topics: tuple[str, ...] = (),
        replay: bool = True,
        positions: dict[str, Position] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 100.0
        self.retention = retention or Retention(max_bytes=10_000_000)
        self.replay = replay
        self.instance = 1
        self.live: deque[bytes] = deque()
        self.control: deque[bytes] = deque()
        self.events: list[tuple[int, int]] = []
        self.lost: list[Lost] = []
        self.ledger = Ledger()
        self.accounting = LossAccounting(self.ledger, TopicFilter(topics))
        self.counters = SubscriberCounters()
        self.boot()
        self.subscriber = SubscriberProtocol(
            messages.Hello(messages.VERSION, "me", policy=messages.Policy(topics=topics)),
            start=start,
            positions=positions or {},
            counters=self.counters,
            random=self.random.random,
            now=self.now,
            settings=SubscriberSettings(chunk_bytes=2000, held_bytes=4000),
        )

    def boot(self) -> None:
        """Start a publisher with a fresh journal, so with a new epoch."""
        self.journal = MemoryJournal(retention=self.retention)
        self.journal.bind("p")
        self.journal.on_frame = self.on_frame
        self.control_server = ControlServer(
            self.journal,
            GroupCoordinator(self.journal, None, GroupStore(None)),
            instance=self.instance,
            live="live",
            beat_s=1.0,
            begin=0,
            replay=self.replay,
        )
        self.instance += 1

    def on_frame(self, frame: Frame) -> None:
        self.send_live(frame.raw)

    def send_live(self, raw: bytes) -> None:
        if self.protocol_attached and self.random.random() >= self.loss and len(self.live) < QUEUE:
            self.live.append(raw)

    @property
    def protocol_attached(self) -> bool:
        return hasattr(self, "subscriber") and self.subscriber.live[0] > 0

    def beat(self) -> None:
        self.send_live(
            messages.encode(messages.Beat(self.instance - 1, self.journal.epoch, self.journal.next))
        )

    def step(self, seconds: float = 0.01) -> None:
        """Let some time pass and move what is on its way."""
        self.now += seconds
        while self.live and self.subscriber.wants_live:
            self.subscriber.receive_live(self.live.popleft(), self.now)
        if self.now >= self.subscriber.next_deadline():
            self.subscriber.handle_deadline(self.now)
        sent, self.subscriber.outbox = self.subscriber.outbox, []
        for message in sent:
            if self.random.random() >= self.loss:
                self.control_server.receive(PEER, message, self.now)
        for _, reply in self.control_server.outbox:
            if self.random.random() >= self.loss:
                self.control.append(reply)
        self.control_server.outbox = []
        while self.control:
            self.subscriber.receive_control(self.control.popleft(), self.now)
        self.consume()

    def consume(self) -> None:
        while self.subscriber.ready:
            self.consume_one(self.subscriber.ready.popleft())

    def consume_one(self, item: Item) -> None:
        if isinstance(item, Batch):
            self.events += [(e.epoch, e.offset) for e in item.events]
            self.accounting.enter(item.source, item.epoch, item.topics, item.next_offset)
        elif isinstance(item, Lost):
            self.lost.append(item)
            self.accounting.lost(item)
        elif isinstance(item, EpochStarted):
            self.accounting.started(item)
        elif isinstance(item, messages.Sent):
            self.accounting.sent(item)

    def settle(self) -> None:
        """Heal the link and run until everything has arrived."""
        self.loss = 0.0
        for _ in range(600):
            self.beat()
            self.step(0.5)
            if self.subscriber.state is State.FOLLOWING and self.subscriber.position == self.journal.next:
                break
        for _ in range(10):
            self.beat()
            self.step(0.5)
        assert self.subscriber.state is State.FOLLOWING
        assert self.subscriber.position == self.journal.next


@given(st.integers(0, 10**6), st.floats(0, 0.9), st.integers(1, 200))
def test_whatever_the_link_drops_is_repaired(seed: int, loss: float, events: int) -> None:
    """Live frames, heartbeats, requests and answers may all be lost: every event arrives once, in order."""
    simulation = Simulation(seed=seed, loss=loss)
    for i in range(events):
        simulation.journal.append(f"t{i % 3}", b"%d" % i)
        if simulation.random.random() < 0.5:
            simulation.beat()
        simulation.step(simulation.random.random() * 0.3)
    simulation.settle()
    assert [offset for _, offset in simulation.events] == list(range(events))
    assert not simulation.lost
    account = simulation.ledger.account()
    assert (account.delivered, account.lost, account.duplicates) == (events, 0, 0)
    assert account.balanced


@given(st.integers(0, 10**6), st.lists(st.integers(0, 5 * QUEUE), min_size=1, max_size=30))
def test_whoever_has_fallen_behind_wastes_nothing(seed: int, bursts: list[int]) -> None:
    """More comes than the live queue holds: nothing that was received is dropped and asked for again.

    Only what was in the queue when replay had passed it already is dropped: one queue for each hole.
    """
    simulation = Simulation(seed=seed)
    simulation.settle()
    for burst in bursts:
        for _ in range(burst):
            simulation.journal.append("t", b"x" * 100)
        simulation.beat()
        simulation.step()
    simulation.settle()
    assert [offset for _, offset in simulation.events] == list(range(sum(bursts)))
    assert simulation.counters.held_dropped == 0
    assert simulation.counters.overlap_frames <= QUEUE * (simulation.counters.gaps + 1)


def test_the_first_heartbeat_is_waited_for_during_a_replay() -> None:
    """A subscriber that catches up with a long journal still tells at once that it hears the live stream."""
    simulation = Simulation()
    for _ in range(500):
        simulation.journal.append("t", b"x" * 100)
    while not simulation.subscriber.attached:
        simulation.beat()
        simulation.step()
    assert simulation.subscriber.position < 100
    assert not simulation.subscriber.wants_live
    simulation.settle()
    assert simulation.subscriber.wants_live


def asked(simulation: Simulation) -> messages.Replay:
    """The only question that the subscriber wants sent; taken from its outbox."""
    sent, simulation.subscriber.outbox = simulation.subscriber.outbox, []
    questions = [messages.decode_request(message) for message in sent]
    (replay,) = [question for question in questions if isinstance(question, messages.Replay)]
    return replay


def missed(simulation: Simulation, events: int) -> None:
    """The subscriber learns from a heartbeat that it has missed events."""
    simulation.loss = 1.0
    for _ in range(events):
        simulation.journal.append("t", b"x" * 1000)
    simulation.loss = 0.0
    simulation.beat()
    simulation.subscriber.receive_live(simulation.live.popleft(), simulation.now)


def test_a_late_answer_is_an_answer() -> None:
    """A link so slow that an answer takes longer than heartbeats may stay away: no new greeting, and it counts."""
    simulation = Simulation()
    simulation.settle()
    missed(simulation, 1)
    first = asked(simulation)
    simulation.control_server.receive(PEER, messages.encode(first), simulation.now)
    (answer,) = [reply for _, reply in simulation.control_server.outbox]
    simulation.control_server.outbox = []
    for _ in range(60):
        simulation.now += 0.1
        if simulation.subscriber.wants_live:
            simulation.beat()
            simulation.subscriber.receive_live(simulation.live.popleft(), simulation.now)
        if simulation.now >= simulation.subscriber.next_deadline():
            simulation.subscriber.handle_deadline(simulation.now)
    assert asked_again(simulation, first) == 2
    simulation.subscriber.receive_control(answer, simulation.now)
    simulation.consume()
    assert len(simulation.events) == 1
    assert simulation.counters.joins == 1


def asked_again(simulation: Simulation, first: messages.Replay) -> int:
    sent, simulation.subscriber.outbox = simulation.subscriber.outbox, []
    return [messages.decode_request(message) for message in sent].count(first)


def test_chunks_are_as_large_as_come_in_good_time() -> None:
    """Answers that take long make the next question smaller, quick ones larger, between bounds."""
    simulation = Simulation()
    simulation.settle()
    simulation.subscriber.settings = SubscriberSettings()
    simulation.subscriber._chunk_bytes = 128 * 1024
    sizes = []
    for took in [0.6] * 8 + [0.01] * 8:
        missed(simulation, 1)
        question = asked(simulation)
        sizes.append(question.max_bytes)
        simulation.now += took
        simulation.control_server.receive(PEER, messages.encode(question), simulation.now)
        for _, reply in simulation.control_server.outbox:
            simulation.subscriber.receive_control(reply, simulation.now)
        simulation.control_server.outbox = []
        simulation.consume()
    assert sizes[8] == min(sizes) == 16 * 1024
    assert sizes[-1] == max(sizes) == 1024 * 1024
    assert sizes[:8] == sorted(sizes[:8], reverse=True)


@given(st.integers(0, 10**6), st.floats(0.1, 0.9), st.integers(1, 150))
def test_what_the_journal_evicted_is_declared_and_nothing_else(seed: int, loss: float, events: int) -> None:
    """With a tiny journal some events are evicted before they are repaired: delivered and lost add up exactly."""
    simulation = Simulation(seed=seed, loss=loss, retention=Retention(max_events=5))
    simulation.settle()
    for i in range(events):
        simulation.loss = loss
        simulation.journal.append(f"t{i % 3}", b"%d" % i)
        simulation.step(simulation.random.random() * 0.3)
    simulation.settle()
    lost = [o for word in simulation.lost for o in range(word.first, word.last + 1)]
    assert sorted([offset for _, offset in simulation.events] + lost) == list(range(events))
    assert all(word.reason is Reason.EVICTED for word in simulation.lost)
    account = simulation.ledger.account()
    assert (account.delivered, account.lost) == (len(simulation.events), len(lost))
    assert account.lost_by_reason == ({Reason.EVICTED: len(lost)} if lost else {})
    assert account.balanced


@given(st.integers(0, 10**6), st.lists(st.integers(1, 20), min_size=2, max_size=5))
def test_a_new_epoch_is_neither_loss_nor_duplicate(seed: int, lives: list[int]) -> None:
    """A publisher that restarts without its journal begins a new epoch; all of each epoch that was heard arrives."""
    simulation = Simulation(seed=seed)
    expected = []
    for events in lives:
        for i in range(events):
            simulation.journal.append("t", b"%d" % i)
            expected.append((simulation.journal.epoch, i))
        simulation.settle()
        simulation.boot()
        refused = messages.encode(messages.Refused("restarted", again=True))
        simulation.subscriber.receive_control(refused, simulation.now)
    assert simulation.events == expected
    assert not simulation.lost
    assert simulation.ledger.account().balanced


def test_a_crash_that_takes_known_events_with_it_is_told() -> None:
    """Events that a heartbeat had announced and a crash destroyed are lost with reason producer_crash."""
    simulation = Simulation()
    simulation.journal.append("t", b"0")
    simulation.settle()
    old = simulation.journal.epoch
    simulation.loss = 1.0
    for i in range(1, 6):
        simulation.journal.append("t", b"%d" % i)
    simulation.live.append(messages.encode(messages.Beat(simulation.instance - 1, old, 6)))
    simulation.step()
    simulation.boot()
    simulation.journal.append("t", b"new")
    simulation.settle()
    assert simulation.events == [(old, 0), (simulation.journal.epoch, 0)]
    (word,) = simulation.lost
    assert (word.epoch, word.first, word.last, word.reason) == (old, 1, 5, Reason.PRODUCER_CRASH)


@given(st.integers(0, 10**6), st.floats(0, 0.8))
def test_without_a_journal_loss_is_counted(seed: int, loss: float) -> None:
    """With no journal to ask, every event is either delivered or declared lost, in the ledger too."""
    simulation = Simulation(seed=seed, replay=False, start="live")
    simulation.settle()
    for i in range(60):
        simulation.loss = loss
        simulation.journal.append(f"t{i % 2}", b"%d" % i)
        simulation.loss = 0.0
        simulation.step(0.01)
    simulation.settle()
    lost = [o for word in simulation.lost for o in range(word.first, word.last + 1)]
    assert sorted([offset for _, offset in simulation.events] + lost) == list(range(60))
    assert {word.reason for word in simulation.lost} <= {Reason.OVERFLOW_SENDER}
    account = simulation.ledger.account()
    assert (account.delivered, account.lost, account.pending) == (len(simulation.events), len(lost), 0)
    assert account.balanced


ENTRIES = {
    "prefix:a": {"a", "abc"},
    "b.": {"b.x"},
    "prefix:ab": {"abc"},
    "c": {"c"},
    "*.**": {"a", "abc", "b.x", "c", "d"},
}
ENTRIES |= {"a*": {"a", "abc"}, "*.x": {"b.x"}, "d.**": {"d"}}


@given(st.integers(0, 10**6), st.sets(st.sampled_from(sorted(ENTRIES)), min_size=1))
def test_only_wanted_topics_are_delivered(seed: int, topics: set[str]) -> None:
    """Patterns and prefixes give exactly the matching events, and no gap for the rest."""
    simulation = Simulation(seed=seed, loss=0.3, topics=tuple(sorted(topics)))
    names = ["a", "abc", "b.x", "c", "d"]
    chosen = [simulation.random.choice(names) for _ in range(80)]
    for topic in chosen:
        simulation.journal.append(topic, b"")
        simulation.step()
    simulation.settle()
    wanted = [i for i, topic in enumerate(chosen) if any(topic in ENTRIES[t] for t in topics)]
    assert [offset for _, offset in simulation.events] == wanted
    assert simulation.ledger.account().accepted == len(wanted)


@given(st.binary(max_size=200))
def test_random_bytes_change_nothing(data: bytes) -> None:
    """Whatever arrives on either socket, the subscriber goes on."""
    simulation = Simulation()
    simulation.journal.append("t", b"0")
    simulation.settle()
    simulation.subscriber.receive_live(data, simulation.now)
    simulation.subscriber.receive_control(data, simulation.now)
    simulation.journal.append("t", b"1")
    simulation.settle()
    assert [offset for _, offset in simulation.events] == [0, 1]


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_frame_with_bad_contents_is_repaired(where: int, change: int) -> None:
    """A live frame that was damaged on its way is dropped or harmless, never an error for the application."""
    simulation = Simulation()
    simulation.settle()
    simulation.loss = 1.0
    simulation.journal.append_many("t", [b"x" * 20] * 5)
    raw = bytearray(simulation.journal.read(0).frames[0].raw)
    raw[where % len(raw)] ^= change
    simulation.subscriber.receive_live(bytes(raw), simulation.now)
    simulation.settle()
    assert simulation.subscriber.position == 5
    assert simulation.ledger.account().lost == 0


def test_a_lie_about_the_end_does_not_make_it_ask_for_ever() -> None:
    """A heartbeat that names an end far beyond the journal's costs one question, not a flood of them."""
    simulation = Simulation()
    simulation.journal.append("t", b"0")
    simulation.settle()
    simulation.live.append(
        messages.encode(messages.Beat(simulation.instance - 1, simulation.journal.epoch, 1 << 40))
    )
    for _ in range(50):
        simulation.step(0.001)
    assert simulation.subscriber._request < 5
    simulation.journal.append("t", b"1")
    simulation.settle()
    assert [offset for _, offset in simulation.events] == [0, 1]


def test_a_refusal_ends_it() -> None:
    """A publisher that refuses is an error for the application; a wrong version is named."""
    simulation = Simulation()
    simulation.subscriber.receive_control(messages.encode(messages.Refused("no")), simulation.now)
    assert simulation.subscriber.state is State.REFUSED
    assert "no" in str(simulation.subscriber.error)
    assert simulation.subscriber.next_deadline() == float("inf")
    other = Simulation()
    welcome = messages.Welcome(99, "p", 1, 1, 0, 0, 0, "live", 1.0)
    other.subscriber.receive_control(messages.encode(welcome), other.now)
    assert "99" in str(other.subscriber.error)


def test_an_illegal_transition_raises() -> None:
    """A closed subscriber stays closed."""
    simulation = Simulation()
    simulation.subscriber.close()
    with pytest.raises(RuntimeError):
        simulation.subscriber.close()


@pytest.mark.parametrize(("start", "first"), [("oldest", 0), (7, 7), ("live", 10), (99, 10)])
def test_where_it_starts(start: str | int, first: int) -> None:
    """Each start gives the position it says; an offset in the future means the next event."""
    simulation = Simulation(start=start)
    simulation.journal.append_many("t", [b"x"] * 10)
    simulation.settle()
    simulation.journal.append("t", b"y")
    simulation.settle()
    assert [offset for _, offset in simulation.events] == list(range(first, 11))


def test_a_cursor_that_is_behind_the_journal_loses_what_is_gone() -> None:
    """A saved position older than the journal's beginning: the difference is lost as evicted."""
    simulation = Simulation(start="cursor", retention=Retention(max_events=4))
    for i in range(10):
        simulation.journal.append("t", b"%d" % i)
    simulation.subscriber._positions["p"] = Position(simulation.journal.epoch, 2)
    simulation.settle()
    assert [(w.first, w.last, w.reason) for w in simulation.lost] == [
        (2, simulation.journal.oldest - 1, Reason.EVICTED)
    ]
    assert [o for _, o in simulation.events] == list(range(simulation.journal.oldest, 10))
