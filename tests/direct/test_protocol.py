"""The subscriber's protocol against the publisher's desk, over a link that drops, in virtual time."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, Ledger, Lost, MemoryJournal, Position, Reason, Retention
from brokerless.direct import wire
from brokerless.direct.batch import Batch, Filter
from brokerless.direct.books import Books, Started
from brokerless.direct.desk import Desk
from brokerless.direct.dispatch import Dispatcher
from brokerless.direct.protocol import Follower
from brokerless.direct.settings import Settings, SubscriberCounters
from brokerless.direct.state import State
from brokerless.direct.store import GroupStore

PEER = b"peer"
# Live messages that wait for a follower before newer ones are dropped.
QUEUE = 16


class World:
    """A publisher's journal and desk, one follower, and a link between them that a test can make bad."""

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
        self.books = Books(self.ledger, Filter(topics))
        self.counters = SubscriberCounters()
        self.boot()
        self.follower = Follower(
            wire.Hello(wire.VERSION, "me", policy=wire.Policy(topics=topics)),
            start=start,
            positions=positions or {},
            counters=self.counters,
            random=self.random.random,
            now=self.now,
            settings=Settings(chunk_bytes=2000, held_bytes=4000),
        )

    def boot(self) -> None:
        """Start a publisher with a fresh journal, so with a new epoch."""
        self.journal = MemoryJournal(retention=self.retention)
        self.journal.bind("p")
        self.journal.on_frame = self.on_frame
        self.desk = Desk(
            self.journal,
            Dispatcher(self.journal, None, GroupStore(None)),
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
        if self.follower_attached and self.random.random() >= self.loss and len(self.live) < QUEUE:
            self.live.append(raw)

    @property
    def follower_attached(self) -> bool:
        return hasattr(self, "follower") and self.follower.live[0] > 0

    def beat(self) -> None:
        self.send_live(wire.encode(wire.Beat(self.instance - 1, self.journal.epoch, self.journal.next)))

    def step(self, seconds: float = 0.01) -> None:
        """Let some time pass and move what is on its way."""
        self.now += seconds
        while self.live and self.follower.wants_live:
            self.follower.receive_live(self.live.popleft(), self.now)
        if self.now >= self.follower.next_deadline():
            self.follower.handle_deadline(self.now)
        sent, self.follower.outbox = self.follower.outbox, []
        for message in sent:
            if self.random.random() >= self.loss:
                self.desk.receive(PEER, message, self.now)
        for _, reply in self.desk.outbox:
            if self.random.random() >= self.loss:
                self.control.append(reply)
        self.desk.outbox = []
        while self.control:
            self.follower.receive_control(self.control.popleft(), self.now)
        self.consume()

    def consume(self) -> None:
        while self.follower.ready:
            item = self.follower.ready.popleft()
            if isinstance(item, Batch):
                self.events += [(e.epoch, e.offset) for e in item.events]
                self.books.enter(item.source, item.epoch, item.topics, item.next_offset)
            elif isinstance(item, Lost):
                self.lost.append(item)
                self.books.lost(item)
            elif isinstance(item, Started):
                self.books.started(item)
            else:
                self.books.sent(item)

    def settle(self) -> None:
        """Heal the link and run until everything has arrived."""
        self.loss = 0.0
        for _ in range(600):
            self.beat()
            self.step(0.5)
            if self.follower.state is State.FOLLOWING and self.follower.position == self.journal.next:
                break
        for _ in range(10):
            self.beat()
            self.step(0.5)
        assert self.follower.state is State.FOLLOWING
        assert self.follower.position == self.journal.next


@given(st.integers(0, 10**6), st.floats(0, 0.9), st.integers(1, 200))
def test_whatever_the_link_drops_is_repaired(seed: int, loss: float, events: int) -> None:
    """Live frames, heartbeats, requests and answers may all be lost: every event arrives once, in order."""
    world = World(seed=seed, loss=loss)
    for i in range(events):
        world.journal.append(f"t{i % 3}", b"%d" % i)
        if world.random.random() < 0.5:
            world.beat()
        world.step(world.random.random() * 0.3)
    world.settle()
    assert [offset for _, offset in world.events] == list(range(events))
    assert not world.lost
    account = world.ledger.account()
    assert (account.delivered, account.lost, account.duplicates) == (events, 0, 0)
    assert account.balanced


@given(st.integers(0, 10**6), st.lists(st.integers(0, 5 * QUEUE), min_size=1, max_size=30))
def test_whoever_has_fallen_behind_wastes_nothing(seed: int, bursts: list[int]) -> None:
    """More comes than the live queue holds: nothing that was received is dropped and asked for again.

    Only what was in the queue when replay had passed it already is dropped: one queue for each hole.
    """
    world = World(seed=seed)
    world.settle()
    for burst in bursts:
        for _ in range(burst):
            world.journal.append("t", b"x" * 100)
        world.beat()
        world.step()
    world.settle()
    assert [offset for _, offset in world.events] == list(range(sum(bursts)))
    assert world.counters.held_dropped == 0
    assert world.counters.overlap_frames <= QUEUE * (world.counters.gaps + 1)


def test_the_first_heartbeat_is_waited_for_during_a_replay() -> None:
    """A follower that catches up with a long journal still tells at once that it hears the live stream."""
    world = World()
    for _ in range(500):
        world.journal.append("t", b"x" * 100)
    while not world.follower.attached:
        world.beat()
        world.step()
    assert world.follower.position < 100
    assert not world.follower.wants_live
    world.settle()
    assert world.follower.wants_live


def asked(world: World) -> wire.Replay:
    """The only question that the follower wants sent; taken from its outbox."""
    sent, world.follower.outbox = world.follower.outbox, []
    questions = [wire.decode_request(message) for message in sent]
    (replay,) = [question for question in questions if isinstance(question, wire.Replay)]
    return replay


def missed(world: World, events: int) -> None:
    """The follower learns from a heartbeat that it has missed events."""
    world.loss = 1.0
    for _ in range(events):
        world.journal.append("t", b"x" * 1000)
    world.loss = 0.0
    world.beat()
    world.follower.receive_live(world.live.popleft(), world.now)


def test_a_late_answer_is_an_answer() -> None:
    """A link so slow that an answer takes longer than heartbeats may stay away: no new greeting, and it counts."""
    world = World()
    world.settle()
    missed(world, 1)
    first = asked(world)
    world.desk.receive(PEER, wire.encode(first), world.now)
    (answer,) = [reply for _, reply in world.desk.outbox]
    world.desk.outbox = []
    for _ in range(60):
        world.now += 0.1
        if world.follower.wants_live:
            world.beat()
            world.follower.receive_live(world.live.popleft(), world.now)
        if world.now >= world.follower.next_deadline():
            world.follower.handle_deadline(world.now)
    assert asked_again(world, first) == 2
    world.follower.receive_control(answer, world.now)
    world.consume()
    assert len(world.events) == 1
    assert world.counters.joins == 1


def asked_again(world: World, first: wire.Replay) -> int:
    sent, world.follower.outbox = world.follower.outbox, []
    return [wire.decode_request(message) for message in sent].count(first)


def test_chunks_are_as_large_as_come_in_good_time() -> None:
    """Answers that take long make the next question smaller, quick ones larger, between bounds."""
    world = World()
    world.settle()
    world.follower.settings = Settings()
    world.follower._chunk_bytes = 128 * 1024
    sizes = []
    for took in [0.6] * 8 + [0.01] * 8:
        missed(world, 1)
        question = asked(world)
        sizes.append(question.max_bytes)
        world.now += took
        world.desk.receive(PEER, wire.encode(question), world.now)
        for _, reply in world.desk.outbox:
            world.follower.receive_control(reply, world.now)
        world.desk.outbox = []
        world.consume()
    assert sizes[8] == min(sizes) == 16 * 1024
    assert sizes[-1] == max(sizes) == 1024 * 1024
    assert sizes[:8] == sorted(sizes[:8], reverse=True)


@given(st.integers(0, 10**6), st.floats(0.1, 0.9), st.integers(1, 150))
def test_what_the_journal_evicted_is_declared_and_nothing_else(seed: int, loss: float, events: int) -> None:
    """With a tiny journal some events are evicted before they are repaired: delivered and lost add up exactly."""
    world = World(seed=seed, loss=loss, retention=Retention(max_events=5))
    world.settle()
    for i in range(events):
        world.loss = loss
        world.journal.append(f"t{i % 3}", b"%d" % i)
        world.step(world.random.random() * 0.3)
    world.settle()
    lost = [o for word in world.lost for o in range(word.first, word.last + 1)]
    assert sorted([offset for _, offset in world.events] + lost) == list(range(events))
    assert all(word.reason is Reason.EVICTED for word in world.lost)
    account = world.ledger.account()
    assert (account.delivered, account.lost) == (len(world.events), len(lost))
    assert account.lost_by_reason == ({Reason.EVICTED: len(lost)} if lost else {})
    assert account.balanced


@given(st.integers(0, 10**6), st.lists(st.integers(1, 20), min_size=2, max_size=5))
def test_a_new_epoch_is_neither_loss_nor_duplicate(seed: int, lives: list[int]) -> None:
    """A publisher that restarts without its journal begins a new epoch; all of each epoch that was heard arrives."""
    world = World(seed=seed)
    expected = []
    for events in lives:
        for i in range(events):
            world.journal.append("t", b"%d" % i)
            expected.append((world.journal.epoch, i))
        world.settle()
        world.boot()
        world.follower.receive_control(wire.encode(wire.Refused("restarted", again=True)), world.now)
    assert world.events == expected
    assert not world.lost
    assert world.ledger.account().balanced


def test_a_crash_that_takes_known_events_with_it_is_told() -> None:
    """Events that a heartbeat had announced and a crash destroyed are lost with reason producer_crash."""
    world = World()
    world.journal.append("t", b"0")
    world.settle()
    old = world.journal.epoch
    world.loss = 1.0
    for i in range(1, 6):
        world.journal.append("t", b"%d" % i)
    world.live.append(wire.encode(wire.Beat(world.instance - 1, old, 6)))
    world.step()
    world.boot()
    world.journal.append("t", b"new")
    world.settle()
    assert world.events == [(old, 0), (world.journal.epoch, 0)]
    (word,) = world.lost
    assert (word.epoch, word.first, word.last, word.reason) == (old, 1, 5, Reason.PRODUCER_CRASH)


@given(st.integers(0, 10**6), st.floats(0, 0.8))
def test_without_a_journal_loss_is_counted(seed: int, loss: float) -> None:
    """With no journal to ask, every event is either delivered or declared lost, in the ledger too."""
    world = World(seed=seed, replay=False, start="live")
    world.settle()
    for i in range(60):
        world.loss = loss
        world.journal.append(f"t{i % 2}", b"%d" % i)
        world.loss = 0.0
        world.step(0.01)
    world.settle()
    lost = [o for word in world.lost for o in range(word.first, word.last + 1)]
    assert sorted([offset for _, offset in world.events] + lost) == list(range(60))
    assert {word.reason for word in world.lost} <= {Reason.OVERFLOW_SENDER}
    account = world.ledger.account()
    assert (account.delivered, account.lost, account.pending) == (len(world.events), len(lost), 0)
    assert account.balanced


@given(st.integers(0, 10**6), st.sets(st.sampled_from(["a", "b", "ab", "c"]), min_size=1))
def test_only_wanted_topics_are_delivered(seed: int, topics: set[str]) -> None:
    """Filtering by prefix gives exactly the matching events, and no gap for the rest."""
    world = World(seed=seed, loss=0.3, topics=tuple(sorted(topics)))
    names = ["a", "abc", "b.x", "c", "d"]
    chosen = [world.random.choice(names) for _ in range(80)]
    for topic in chosen:
        world.journal.append(topic, b"")
        world.step()
    world.settle()
    wanted = [i for i, topic in enumerate(chosen) if topic.startswith(tuple(topics))]
    assert [offset for _, offset in world.events] == wanted
    assert world.ledger.account().accepted == len(wanted)


@given(st.binary(max_size=200))
def test_random_bytes_change_nothing(data: bytes) -> None:
    """Whatever arrives on either socket, the follower goes on."""
    world = World()
    world.journal.append("t", b"0")
    world.settle()
    world.follower.receive_live(data, world.now)
    world.follower.receive_control(data, world.now)
    world.journal.append("t", b"1")
    world.settle()
    assert [offset for _, offset in world.events] == [0, 1]


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_frame_with_bad_contents_is_repaired(where: int, change: int) -> None:
    """A live frame that was damaged on its way is dropped or harmless, never an error for the application."""
    world = World()
    world.settle()
    world.loss = 1.0
    world.journal.append_many("t", [b"x" * 20] * 5)
    raw = bytearray(world.journal.read(0).frames[0].raw)
    raw[where % len(raw)] ^= change
    world.follower.receive_live(bytes(raw), world.now)
    world.settle()
    assert world.follower.position == 5
    assert world.ledger.account().lost == 0


def test_a_lie_about_the_end_does_not_make_it_ask_for_ever() -> None:
    """A heartbeat that names an end far beyond the journal's costs one question, not a flood of them."""
    world = World()
    world.journal.append("t", b"0")
    world.settle()
    world.live.append(wire.encode(wire.Beat(world.instance - 1, world.journal.epoch, 1 << 40)))
    for _ in range(50):
        world.step(0.001)
    assert world.follower._request < 5
    world.journal.append("t", b"1")
    world.settle()
    assert [offset for _, offset in world.events] == [0, 1]


def test_a_refusal_ends_it() -> None:
    """A publisher that refuses is an error for the application; a wrong version is named."""
    world = World()
    world.follower.receive_control(wire.encode(wire.Refused("no")), world.now)
    assert world.follower.state is State.REFUSED
    assert "no" in str(world.follower.error)
    assert world.follower.next_deadline() == float("inf")
    other = World()
    welcome = wire.Welcome(99, "p", 1, 1, 0, 0, 0, "live", 1.0)
    other.follower.receive_control(wire.encode(welcome), other.now)
    assert "99" in str(other.follower.error)


def test_an_illegal_transition_raises() -> None:
    """A closed follower stays closed."""
    world = World()
    world.follower.close()
    with pytest.raises(RuntimeError):
        world.follower.close()


@pytest.mark.parametrize(("start", "first"), [("oldest", 0), (7, 7), ("live", 10), (99, 10)])
def test_where_it_starts(start: str | int, first: int) -> None:
    """Each start gives the position it says; an offset in the future means the next event."""
    world = World(start=start)
    world.journal.append_many("t", [b"x"] * 10)
    world.settle()
    world.journal.append("t", b"y")
    world.settle()
    assert [offset for _, offset in world.events] == list(range(first, 11))


def test_a_cursor_that_is_behind_the_journal_loses_what_is_gone() -> None:
    """A saved position older than the journal's beginning: the difference is lost as evicted."""
    world = World(start="cursor", retention=Retention(max_events=4))
    for i in range(10):
        world.journal.append("t", b"%d" % i)
    world.follower._positions["p"] = Position(world.journal.epoch, 2)
    world.settle()
    assert [(w.first, w.last, w.reason) for w in world.lost] == [
        (2, world.journal.oldest - 1, Reason.EVICTED)
    ]
    assert [o for _, o in world.events] == list(range(world.journal.oldest, 10))
