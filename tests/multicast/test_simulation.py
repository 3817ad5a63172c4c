"""Publisher, request servers and receivers over a bad link, in virtual time."""

import heapq
import math
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from brokerless.core import Backoff, MemoryJournal, Reason, Retention
from brokerless.multicast.answers import Desk
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.intake import Intake
from brokerless.multicast.message import Columns
from brokerless.multicast.packing import Train
from brokerless.multicast.policy import AnswerPolicy, HeartbeatPolicy, RepairPolicy
from brokerless.multicast.protocol import Gone, request, wire_session
from brokerless.multicast.receiver import LIVE, OLDEST, Receiver
from brokerless.multicast.repair import Missing
from brokerless.multicast.retransmit import Retransmitter
from brokerless.multicast.sender import Sender

STEPS = {"done": 0}
NAME = "SIM"
SERVERS = 2
POLICY = RepairPolicy(
    reorder_wait_s=0.002,
    retry=Backoff(first_s=0.02, factor=2.0, limit_s=0.3, jitter=0.5),
    give_up_s=3.0,
    max_outstanding=8,
    tcp_threshold=60,
    tcp_idle_s=0.5,
    max_held_bytes=6_000,
    max_gaps=20,
)


class Follower:
    """One receiver and what it was given; checks order and content as it goes."""

    def __init__(self, world: "World", start: int, lines: int) -> None:
        self.world = world
        self.start = start
        self.receiver: Receiver[Columns] = Receiver(
            start=lambda _: start,
            policy=POLICY,
            servers=SERVERS,
            random=world.random.random,
            session=NAME,
            lines=lines,
        )
        self.intake = Intake(self.receiver)
        self.lines = lines
        self.position: dict[bytes, int] = {}
        self.lost: list[tuple[bytes, Missing]] = []
        self.order: list[bytes] = []

    def collect(self) -> None:
        """Check everything that the receiver hands over against what was published."""
        for session, item in self.receiver.take():
            if session not in self.order:
                self.order.append(session)
            if isinstance(item, Missing):
                first, last = item.first, item.last
                self.lost.append((session, item))
            else:
                first, last = item.first, item.first + len(item.datas) - 1
                truth = self.world.truth[session]
                for event in item.events(NAME, NAME, 0):
                    assert truth[event.offset] == (event.topic, event.seq, event.data, event.key)
            assert first <= last
            if session in self.position:
                assert first == self.position[session], "not in order, or not exactly once"
            self.position[session] = last + 1

    def books(self) -> None:
        """What was missing is repaired, late, lost, not wanted, or still open."""
        c = self.receiver.counters
        missing = c.missing_kernel + c.missing_network
        assert missing == c.repaired + c.late + c.lost + c.skipped + self.receiver.open_missing
        assert c.lost == sum(m.last - m.first + 1 for _, m in self.lost) + sum(
            m.last - m.first + 1 for m in self.receiver._missing.values()
        )
        assert self.receiver.held_bytes <= POLICY.max_held_bytes + 65_536
        assert len(self.receiver.gaps) <= POLICY.max_gaps + 4


class World:
    """Virtual time, a link per receiver, and everything that can break."""

    def __init__(self, seed: int, max_events: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, object]] = []
        self.ticket = 0
        self.loss = self.repeat = 0.0
        self.delay = 0.001
        self.max_events = max_events
        self.truth: dict[bytes, list[tuple[str, int, bytes, str]]] = {}
        self.followers: list[Follower] = []
        self.up = [True] * SERVERS
        self.evicted: dict[bytes, int] = {}
        self.new_journal()

    def new_journal(self) -> None:
        self.journal = MemoryJournal(source=NAME, retention=Retention(max_events=self.max_events))
        self.session = wire_session(NAME, self.journal.epoch)
        self.truth[self.session] = []
        self.start_sender()
        self.shelves = [Retransmitter(self.journal, NAME) for _ in range(SERVERS)]
        self.desks = [
            Desk(AnswerPolicy(), allow=None, counters=RequestServerCounters(), now=self.now)
            for _ in range(SERVERS)
        ]

    def start_sender(self) -> None:
        self.sender: Sender | None = Sender(
            self.session,
            NAME,
            self.journal.next + 1,
            datagram_bytes=300,
            policy=HeartbeatPolicy(),
            now=self.now,
        )

    def later(self, delay: float, action: object) -> None:
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + delay, self.ticket, action))

    def transit(self) -> float | None:
        """How long a datagram takes, or None if it is lost."""
        if self.random.random() < self.loss:
            return None
        return self.delay * (0.2 + self.random.random())

    def multicast(self, packet: bytes | Train) -> None:
        for follower in self.followers:
            for _ in range(follower.lines):
                copies = 2 if self.random.random() < self.repeat else 1
                for _ in range(copies):
                    took = self.transit()
                    if took is not None:
                        self.later(took, (follower, packet, None))

    def publish(self, topic: str, sizes: list[int], key: str) -> None:
        datas = [self.random.randbytes(size) for size in sizes]
        receipt = self.journal.append_many(topic, datas, keys=[key] * len(datas) if key else None)
        for i, data in enumerate(datas):
            self.truth[self.session].append((topic, receipt.seq + i, data, key))
        if self.sender is not None:
            chunk = self.journal.read(max(receipt.offset, self.journal.oldest), max_bytes=1 << 30)
            for frame in chunk.frames:
                for train in self.sender.frame(frame, self.now):
                    if self.random.random() < 0.3:
                        self.multicast(train)  # as receive offload gives it: all of it, or nothing
                        continue
                    for packet in train.split():
                        self.multicast(bytes(packet))
        self.evicted[self.session] = self.journal.oldest

    def ask(self, follower: Follower) -> None:
        session = follower.receiver.session
        for ask in follower.receiver.asks(self.now):
            assert session is not None
            if ask.tcp:
                self.fetch(follower, session, ask)
                continue
            took = self.transit()
            if took is not None:
                packet = request(session, ask.first, ask.messages)
                self.later(took, (ask.server, packet, follower))

    def fetch(self, follower: Follower, session: bytes, ask: object) -> None:
        server = ask.server  # type: ignore[attr-defined]
        took = self.delay
        if self.up[server] and session == self.session:
            for answer in self.shelves[server].stream(ask.first, ask.messages, 2000):  # type: ignore[attr-defined]
                if self.random.random() < self.loss / 2:
                    break  # the connection breaks
                packet = self.shelves[server].packet(answer) if isinstance(answer, Gone) else answer[0]
                self.later(took, (follower, packet, server))
                took += self.delay / 10
        self.later(took + self.delay, (follower, ask, "failed"))

    def serve(self, server: int, packet: bytes, follower: Follower) -> None:
        if not self.up[server]:
            return
        shelf = self.shelves[server]
        who = self.followers.index(follower)
        grant = self.desks[server].take(packet, f"10.0.0.{who}", 5000, shelf.session, self.now)
        if grant is None:
            return
        answer = shelf.answer(grant.first, grant.messages, 300)
        took = self.transit()
        if answer is None or took is None:
            return
        raw = shelf.packet(answer) if isinstance(answer, Gone) else answer[0]
        self.later(took, (follower, raw, server))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        for _ in range(200_000):
            moments = [self.queue[0][0]] if self.queue else []
            if self.sender is not None:
                moments.append(self.sender.next_deadline())
            for follower in self.followers:
                due = follower.receiver.next_deadline()
                if due is not None:
                    moments.append(due)
            at = max(self.now, min(moments, default=math.inf))
            if at > end:
                break
            self.now = at
            while self.queue and self.queue[0][0] <= at:
                self.dispatch(*heapq.heappop(self.queue)[2])  # type: ignore[misc]
            if self.sender is not None and (beat := self.sender.heartbeat(at)) is not None:
                self.multicast(beat)
            for follower in self.followers:
                self.ask(follower)
                follower.collect()
        else:
            raise AssertionError("time does not pass: something is due for ever")
        self.now = end

    def dispatch(self, to: object, what: object, how: object) -> None:
        if isinstance(to, Follower):
            if how == "failed":
                to.receiver.failed(what, self.now)  # type: ignore[arg-type]
            elif isinstance(what, Train):
                to.intake.train(what.buffer, what.packet_bytes, self.now)
            else:
                to.intake.packet(what, self.now, server=how)  # type: ignore[arg-type]
            to.collect()
        else:
            self.serve(to, what, how)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """Rules that break things, and an invariant that holds all the time."""

    @initialize(seed=st.integers(0, 2**32), max_events=st.sampled_from([160, 400, 100_000]))
    def begin(self, seed: int, max_events: int) -> None:
        self.world = World(seed, max_events)
        self.join(LIVE, 1)
        self.world.run(0.05)

    @rule(start=st.sampled_from([LIVE, OLDEST, 1, 7]), lines=st.sampled_from([1, 1, 2]))
    def join(self, start: int, lines: int) -> None:
        STEPS["done"] += 1
        if len(self.world.followers) < 4:
            self.world.followers.append(Follower(self.world, start, lines))

    @rule(
        topic=st.sampled_from(["a", "bb", "ccc"]),
        sizes=st.lists(st.integers(0, 120), min_size=1, max_size=30),
        key=st.sampled_from(["", "", "k1"]),
    )
    def publish(self, topic: str, sizes: list[int], key: str) -> None:
        STEPS["done"] += 1
        self.world.publish(topic, sizes, key)

    @rule(count=st.integers(1, 150), size=st.integers(0, 60))
    def publish_run(self, count: int, size: int) -> None:
        STEPS["done"] += 1
        self.world.publish("run", [size] * count, "")

    @rule(seconds=st.sampled_from([0.0005, 0.002, 0.01, 0.1, 1.0]))
    def pass_time(self, seconds: float) -> None:
        STEPS["done"] += 1
        self.world.run(seconds)

    @rule(
        loss=st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
        repeat=st.sampled_from([0.0, 0.2]),
        delay=st.sampled_from([0.0002, 0.001, 0.02]),
    )
    def weather(self, loss: float, repeat: float, delay: float) -> None:
        STEPS["done"] += 1
        self.world.loss, self.world.repeat, self.world.delay = loss, repeat, delay

    @rule(server=st.integers(0, SERVERS - 1), up=st.booleans())
    def server(self, server: int, up: bool) -> None:
        STEPS["done"] += 1
        self.world.up[server] = up

    @rule()
    def publisher_crashes(self) -> None:
        """It keeps its journal, but says nothing more until it is restarted."""
        STEPS["done"] += 1
        self.world.sender = None

    @rule()
    def publisher_restarts(self) -> None:
        """On its old journal: the same session goes on."""
        STEPS["done"] += 1
        self.world.start_sender()

    @rule()
    def journal_is_lost(self) -> None:
        """The publisher restarts without its journal: a new session."""
        STEPS["done"] += 1
        if len(self.world.truth) < 4:
            self.world.new_journal()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            for follower in self.world.followers:
                follower.collect()
                follower.books()

    def teardown(self) -> None:
        """Heal, drain, and look at who got what."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.loss = world.repeat = 0.0
        world.delay = 0.001
        world.up = [True] * SERVERS
        if world.sender is None:
            world.start_sender()
        world.run(1.5)
        end = world.journal.next + 1
        for _ in range(20):  # with room for 6 kB behind gaps, a long backlog takes its time
            world.run(15.0)
            if all(not f.receiver.gaps for f in world.followers):
                break
        for follower in world.followers:
            follower.books()
            receiver = follower.receiver
            assert receiver.session == world.session
            if not receiver.expected == follower.start > end:  # it waits for what is yet to come
                assert receiver.expected == end, "not everything was delivered or declared lost"
            assert not receiver.gaps
            assert not receiver.held_bytes
            for session, missing in follower.lost:
                if missing.reason is Reason.EVICTED:
                    assert missing.first - 1 < world.evicted[session], "was not evicted"
                elif missing.reason is Reason.PRODUCER_CRASH:
                    assert session != world.session
                else:
                    assert missing.reason is Reason.GAVE_UP


def simulate(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate, Phase.shrink],
        ),
    )


@pytest.mark.timeout(900)  # seconds on a free machine, minutes on a crowded one
def test_every_sequence_exactly_once_or_one_lost() -> None:
    """Over 10,000 steps of any order of faults, each sequence arrives once, in order, or in one Lost."""
    begun = STEPS["done"]
    while STEPS["done"] - begun < 10_000:
        simulate(60, 60)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_sequence_exactly_once_or_one_lost_for_long() -> None:
    """The same over 300,000 steps, with longer histories."""
    begun = STEPS["done"]
    while STEPS["done"] - begun < 300_000:
        simulate(300, 150)
