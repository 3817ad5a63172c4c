"""Publisher, request servers and receivers over a bad link, in virtual time."""

import heapq
import itertools
import math
import random
from collections import deque

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from brokerless.core import Backoff, MemoryJournal, Reason, Retention
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy, FlowControl, HeartbeatPolicy, RepairPolicy
from brokerless.multicast.receive.decode import PacketDecoder
from brokerless.multicast.receive.gaps import Missing
from brokerless.multicast.receive.reorder import LIVE, OLDEST, Receiver
from brokerless.multicast.send.admission import Admission
from brokerless.multicast.send.flow_control import FlowController
from brokerless.multicast.send.positions import Positions
from brokerless.multicast.send.retransmit import Retransmitter
from brokerless.multicast.send.session import Sender
from brokerless.multicast.send.sharing import Sharing
from brokerless.multicast.wire.auth import Role, Signer
from brokerless.multicast.wire.message import Columns
from brokerless.multicast.wire.moldudp64 import Gone, heartbeat, request, wire_session
from brokerless.multicast.wire.packing import GsoBatch
from brokerless.multicast.wire.status import ANY_SESSION, Requester, extended_request, status_packet

STEPS = {"done": 0}
NAME = "SIM"
SERVERS = 2
KEY = b"k" * 16
# A heartbeat is due every second; one that takes its time, or comes just before the sender is silent, adds to that.
DETECTION_S = 1.2
# The floor lets the largest publish of the rules through in less than a second.
FLOW = FlowControl(window_events=30, timeout_s=2.0, floor_events_s=200)
NO_FLOOR = FlowControl(window_events=30, timeout_s=2.0)
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


class SimulatedReceiver:
    """One receiver and what it was given; checks order and content as it goes."""

    def __init__(self, simulation: "Simulation", start: int, lines: int) -> None:
        self.simulation = simulation
        self.start = start
        self.receiver: Receiver[Columns] = Receiver(
            start=lambda _: start,
            policy=POLICY,
            servers=SERVERS,
            random=simulation.random.random,
            session=NAME,
            lines=lines,
            now=simulation.now,
        )
        self.decoder = PacketDecoder(
            self.receiver,
            auth_key=KEY if simulation.signs else None,
            requester=len(simulation.receivers),
            clock_us=simulation.clock_us,
        )
        self.deaf = False  # multicast does not come here
        self.stopped_at: int | None = None  # where its application takes nothing more
        self.healed_by_joining = True
        self.stale_attempts = self.rewinds = 0
        self.behind_since: float | None = None
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
                truth = self.simulation.truth[session]
                for event in item.events(NAME, NAME, 0):
                    assert (event.topic, event.seq, event.data, event.key) in truth[event.offset]
            assert first <= last
            if session in self.position:
                assert first == self.position[session], "not in order, or not exactly once"
            self.position[session] = last + 1
        if self.receiver.counters.rewinds != self.rewinds:  # it said so, and begins again where the sender is
            self.rewinds = self.receiver.counters.rewinds
            assert self.receiver.session is not None
            self.position.pop(self.receiver.session, None)

    def watch(self) -> None:
        """At no time is it silently behind by more than the stated detection time."""
        if self.receiver.stale_attempts != self.stale_attempts:
            self.stale_attempts = self.receiver.stale_attempts
            self.deaf = self.deaf and not self.healed_by_joining
        simulation, receiver = self.simulation, self.receiver
        knows = receiver.session == simulation.session and receiver.highest > simulation.journal.next
        if receiver.stale or knows:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = simulation.now
        else:
            silent_s = simulation.now - self.behind_since
            assert silent_s <= POLICY.stale_after_s + DETECTION_S, "behind, and does not say so"

    def check_accounts(self) -> None:
        """What was missing is repaired, late, lost, not wanted, or still open."""
        c = self.receiver.counters
        missing = c.missing_kernel + c.missing_network
        assert missing == c.repaired + c.late + c.lost + c.skipped + self.receiver.open_missing
        assert c.lost == sum(m.last - m.first + 1 for _, m in self.lost) + sum(
            m.last - m.first + 1 for m in self.receiver._missing.values()
        )
        assert self.receiver.held_bytes <= POLICY.max_held_bytes + 65_536
        assert len(self.receiver.gaps) <= POLICY.max_gaps + 4


class Simulation:
    """Virtual time, a link per receiver, and everything that can break."""

    def __init__(
        self, seed: int, max_events: int, signs: bool, *, flow_control: FlowControl | None = None
    ) -> None:
        self.flow_control = flow_control
        self.requests = 0  # that the servers got
        self.shared = 0  # answers to the whole group
        self.random = random.Random(seed)
        self.now = 0.0
        self.signs = signs
        roles: tuple[Role, ...] = ("group", "request", "answer")
        self.sign = {role: Signer(KEY, role, self.clock_us) if signs else None for role in roles}
        self.recorded: deque[bytes] = deque(maxlen=100)
        self.queue: list[tuple[float, int, object]] = []
        self.ticket = 0
        self.loss = self.repeat = 0.0
        self.cut = False  # the publisher's interface is gone: what it multicasts reaches nobody
        self.delay = 0.001
        self.max_events = max_events
        # Of each session, by offset: what was published with it. More than one, if a journal was restored.
        self.truth: dict[bytes, list[list[tuple[str, int, bytes, str]]]] = {}
        self.receivers: list[SimulatedReceiver] = []
        self.up = [True] * SERVERS
        self.evicted: dict[bytes, int] = {}
        self.new_journal()

    def new_journal(self) -> None:
        journal = MemoryJournal(source=NAME, retention=Retention(max_events=self.max_events))
        self.truth[wire_session(NAME, journal.epoch)] = []
        self.use(journal)

    def clock_us(self) -> int:
        return int(self.now * 1e6) + 1_000_000_000

    def signed(self, packet: bytes, role: Role) -> bytes:
        """As it is on the wire, where somebody writes it down."""
        sign = self.sign[role]
        if sign is not None:
            packet += sign(packet)
            self.recorded.append(packet)
        return packet

    def restore(self, share: float) -> None:
        """The journal is an older copy of itself from now on, and nobody knows."""
        keep = int(self.journal.next * share)
        copy = MemoryJournal(source=NAME, retention=Retention(max_events=self.max_events))
        copy._stage.epoch = self.journal.epoch  # a copy has the epoch of the original
        for versions in self.truth[self.session][:keep]:
            topic, _, data, key = versions[-1]
            copy.append_many(topic, [data], keys=[key] if key else None)
        self.use(copy)

    def use(self, journal: MemoryJournal) -> None:
        self.journal = journal
        self.session = wire_session(NAME, journal.epoch)
        self.start_sender()
        sign, sign_shared = self.sign["answer"], self.sign["group"]
        self.retransmitters = [
            Retransmitter(journal, NAME, sign=sign, sign_shared=sign_shared) for _ in range(SERVERS)
        ]
        self.admissions = [
            Admission(AnswerPolicy(), allow=None, counters=RequestServerCounters(), now=self.now)
            for _ in range(SERVERS)
        ]
        self.sharing = [Sharing(AnswerPolicy(), self.now) for _ in range(SERVERS)]
        self.positions = Positions(100)
        self.flow_at, self.by_floor = self.now, 0
        self.flow = (
            FlowController(policy, self.positions, self.now) if (policy := self.flow_control) else None
        )

    def start_sender(self) -> None:
        self.sender: Sender | None = Sender(
            self.session,
            NAME,
            self.journal.next + 1,
            datagram_bytes=300,
            policy=HeartbeatPolicy(),
            now=self.now,
            sign=self.sign["group"],
        )

    def later(self, delay: float, action: object) -> None:
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + delay, self.ticket, action))

    def transit(self) -> float | None:
        """How long a datagram takes, or None if it is lost."""
        if self.random.random() < self.loss:
            return None
        return self.delay * (0.2 + self.random.random())

    def multicast(self, packet: bytes | GsoBatch, *, by_stranger: bool = False) -> None:
        if self.cut and not by_stranger:
            return
        if isinstance(packet, bytes):
            self.recorded.append(packet)
        for subject in self.receivers:
            for _ in range(0 if subject.deaf else subject.lines):
                copies = 2 if self.random.random() < self.repeat else 1
                for _ in range(copies):
                    took = self.transit()
                    if took is not None:
                        self.later(took, (subject, packet, None))

    def hold_back(self, events: int) -> None:
        """Wait as `publish` does: whoever is stopped or gone does not stop the others for ever."""
        policy = self.flow_control
        assert self.flow is not None
        assert policy is not None
        # Without a floor one that is alive is waited for until its gaps are repaired or given up, one after another.
        patience_s = policy.timeout_s + 2.0 if policy.floor_events_s else 300.0
        waiting_since = self.now
        while self.flow.wait_s(self.journal.next + 1, events, self.now) > 0:
            known = [p for p in self.positions.known().values() if self.now <= p.at + policy.timeout_s]
            assert any(self.journal.next + 1 - p.taken >= policy.window_events for p in known), (
                "waits for nobody who has told its position lately"
            )
            self.solicit()
            self.run(0.05)
            assert self.now < waiting_since + patience_s, "held back for longer than is stated"
        slowest = self.positions.slowest(self.now, timeout_s=policy.timeout_s)
        if slowest is not None and self.journal.next + 1 - slowest >= policy.window_events:
            self.by_floor += events
            burst = 200 if policy.floor_events_s else 0
            assert self.by_floor <= policy.floor_events_s * (self.now - self.flow_at) + burst, (
                "ahead of the window by more than the floor"
            )
        self.solicit()

    def solicit(self) -> None:
        if self.sender is not None:
            self.multicast(self.sender.solicit())

    def publish(self, topic: str, sizes: list[int], key: str) -> None:
        if self.flow is not None:
            self.hold_back(len(sizes))
        datas = [self.random.randbytes(size) for size in sizes]
        receipt = self.journal.append_many(topic, datas, keys=[key] * len(datas) if key else None)
        truth = self.truth[self.session]
        for i, data in enumerate(datas):
            if receipt.offset + i == len(truth):
                truth.append([])
            truth[receipt.offset + i].append((topic, receipt.seq + i, data, key))
        if self.sender is not None:
            chunk = self.journal.read(max(receipt.offset, self.journal.oldest), max_bytes=1 << 30)
            for frame in chunk.frames:
                for batch in self.sender.frame(frame, self.now):
                    if self.random.random() < 0.3:
                        self.multicast(batch)  # as receive offload gives it: all of it, or nothing
                        continue
                    for packet in batch.split():
                        self.multicast(bytes(packet))
        self.evicted[self.session] = max(self.journal.oldest, self.evicted.get(self.session, 0))

    def repair_request(self, subject: SimulatedReceiver) -> None:
        session = subject.receiver.session
        for repair_request in subject.receiver.due_requests(self.now):
            if not repair_request.messages:
                took = self.transit()
                if took is not None:
                    expected = subject.receiver.expected
                    who = Requester(0, self.receivers.index(subject), expected, 0)
                    taken = min(expected, subject.stopped_at or expected)
                    packet = extended_request(session or ANY_SESSION, taken, 0, who)
                    self.signed(packet, "request")
                    self.later(took, (repair_request.server, packet, subject))
                continue
            assert session is not None
            if repair_request.tcp:
                self.fetch(subject, session, repair_request)
                continue
            took = self.transit()
            if took is not None:
                packet = request(session, repair_request.first, repair_request.messages)
                self.signed(packet, "request")
                self.later(took, (repair_request.server, packet, subject))

    def fetch(self, subject: SimulatedReceiver, session: bytes, repair_request: object) -> None:
        server = repair_request.server  # type: ignore[attr-defined]
        took = self.delay
        if self.up[server] and session == self.session:
            for answer in self.retransmitters[server].stream(
                repair_request.first, repair_request.messages, 2000
            ):  # type: ignore[attr-defined]
                if self.random.random() < self.loss / 2:
                    break  # the connection breaks
                packet = self.retransmitters[server].packet(answer) if isinstance(answer, Gone) else answer[0]
                self.later(took, (subject, packet, server))
                took += self.delay / 10
        self.later(took + self.delay, (subject, repair_request, "failed"))

    def serve(self, server: int, packet: bytes, subject: SimulatedReceiver) -> None:
        if not self.up[server]:
            return
        retransmitter = self.retransmitters[server]
        who = self.receivers.index(subject)
        admitted = self.admissions[server].take(
            packet, f"10.0.0.{who}", 5000, retransmitter.session, self.now
        )
        took = self.transit()
        if admitted is None or took is None:
            return
        if not admitted.messages:
            assert admitted.requester is not None
            if admitted.current:
                self.positions.update(admitted.requester, admitted.first, self.now)
            receivers = self.sharing[server].waiting(len(self.receivers))
            raw = status_packet(retransmitter.status(1, admitted.requester.requester, receivers))
            self.later(took, (subject, self.signed(raw, "answer"), server))
            return
        self.requests += 1
        answer = retransmitter.answer(admitted.first, admitted.messages, 300)
        took = self.transit()
        if answer is None or took is None:
            return
        if not isinstance(answer, Gone):
            size, receivers = len(answer[0]), len(self.receivers)
            decision = self.sharing[server].decide(who, admitted.first, size, receivers, self.now)
            if decision == "group":
                self.shared += 1
                shared = retransmitter.answer(admitted.first, admitted.messages, 300, shared=True)
                assert isinstance(shared, tuple)
                self.multicast(shared[0])
            if decision != "one":
                return
        raw = retransmitter.packet(answer) if isinstance(answer, Gone) else answer[0]
        if self.signs:
            self.recorded.append(raw)
        self.later(took, (subject, raw, server))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        for _ in range(200_000):
            moments = [self.queue[0][0]] if self.queue else []
            if self.sender is not None:
                moments.append(self.sender.next_deadline())
            for subject in self.receivers:
                due = subject.receiver.next_deadline()
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
            for subject in self.receivers:
                self.repair_request(subject)
                subject.collect()
                subject.watch()
        else:
            raise AssertionError("time does not pass: something is due for ever")
        self.now = end

    def dispatch(self, to: object, what: object, how: object) -> None:
        if isinstance(to, SimulatedReceiver):
            if how == "failed":
                to.receiver.failed(what, self.now)  # type: ignore[arg-type]
            elif isinstance(what, GsoBatch):
                to.decoder.batch(what.buffer, what.packet_bytes, self.now)
            else:
                to.decoder.packet(what, self.now, server=how)  # type: ignore[arg-type]
            to.collect()
        else:
            self.serve(to, what, how)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """Rules that break things, and an invariant that holds all the time."""

    @initialize(
        seed=st.integers(0, 2**32),
        max_events=st.sampled_from([160, 400, 100_000]),
        signs=st.booleans(),
        flow_control=st.sampled_from([None, FLOW, NO_FLOOR]),
    )
    def begin(self, seed: int, max_events: int, signs: bool, flow_control: FlowControl | None) -> None:
        self.simulation = Simulation(seed, max_events, signs, flow_control=flow_control)
        self.join(LIVE, 1)
        self.simulation.run(0.05)

    @rule(start=st.sampled_from([LIVE, OLDEST, 1, 7]), lines=st.sampled_from([1, 1, 2]))
    def join(self, start: int, lines: int) -> None:
        STEPS["done"] += 1
        if len(self.simulation.receivers) < 4:
            self.simulation.receivers.append(SimulatedReceiver(self.simulation, start, lines))

    @rule(
        topic=st.sampled_from(["a", "bb", "ccc"]),
        sizes=st.lists(st.integers(0, 120), min_size=1, max_size=30),
        key=st.sampled_from(["", "", "k1"]),
    )
    def publish(self, topic: str, sizes: list[int], key: str) -> None:
        STEPS["done"] += 1
        self.simulation.publish(topic, sizes, key)

    @rule(count=st.integers(1, 150), size=st.integers(0, 60), times=st.sampled_from([1, 1, 4]))
    def publish_run(self, count: int, size: int, times: int) -> None:
        """More than once: so that flow control learns positions, and has to wait for them."""
        STEPS["done"] += 1
        for i in range(times):
            if i:
                self.simulation.run(0.03)
            self.simulation.publish("run", [size] * count, "")

    @rule(seconds=st.sampled_from([0.0005, 0.002, 0.01, 0.1, 1.0]))
    def pass_time(self, seconds: float) -> None:
        STEPS["done"] += 1
        self.simulation.run(seconds)

    @rule(
        loss=st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
        repeat=st.sampled_from([0.0, 0.2]),
        delay=st.sampled_from([0.0002, 0.001, 0.02]),
    )
    def weather(self, loss: float, repeat: float, delay: float) -> None:
        STEPS["done"] += 1
        self.simulation.loss, self.simulation.repeat, self.simulation.delay = loss, repeat, delay

    @rule(server=st.integers(0, SERVERS - 1), up=st.booleans())
    def server(self, server: int, up: bool) -> None:
        STEPS["done"] += 1
        self.simulation.up[server] = up

    @rule()
    def publisher_crashes(self) -> None:
        """It keeps its journal, but says nothing more until it is restarted."""
        STEPS["done"] += 1
        self.simulation.sender = None

    @rule()
    def publisher_restarts(self) -> None:
        """On its old journal: the same session goes on."""
        STEPS["done"] += 1
        self.simulation.start_sender()

    @rule()
    def journal_is_lost(self) -> None:
        """The publisher restarts without its journal: a new session."""
        STEPS["done"] += 1
        if len(self.simulation.truth) < 4:
            self.simulation.new_journal()

    @rule(lost=st.booleans())
    def publishers_interface_is_lost(self, lost: bool) -> None:
        """It goes on accepting while nothing leaves, until the interface is back; servers may be reached."""
        STEPS["done"] += 1
        self.simulation.cut = lost

    @rule(index=st.integers(0, 3), joining_helps=st.booleans())
    def interface_is_lost(self, index: int, joining_helps: bool) -> None:
        """Multicast does not come to one receiver any more; joining again helps, or does not."""
        STEPS["done"] += 1
        subject = self.simulation.receivers[index % len(self.simulation.receivers)]
        subject.deaf, subject.healed_by_joining = True, joining_helps

    @rule()
    def interface_is_back(self) -> None:
        """Everybody hears again."""
        STEPS["done"] += 1
        for subject in self.simulation.receivers:
            subject.deaf = False

    @rule(share=st.floats(0, 1))
    def journal_is_restored(self, share: float) -> None:
        """An older copy, with the same epoch: what must not happen, but is noticed if it does."""
        STEPS["done"] += 1
        self.simulation.restore(share)

    @rule(times=st.sampled_from([1, 1, 15]))
    def packets_are_replayed(self, times: int) -> None:
        """With a key: somebody sends to the group what was recorded, questions and answers, too; perhaps for long."""
        STEPS["done"] += 1
        recorded = list(self.simulation.recorded) if self.simulation.signs else []
        for _ in range(times if recorded else 0):
            for packet in recorded:
                self.simulation.multicast(packet, by_stranger=True)
            if times > 1:
                self.simulation.run(0.4)

    @rule(following=st.integers(1, 10_000))
    def packets_are_forged(self, following: int) -> None:
        """With a key: heartbeats of our session and of another one, signed with the wrong key or not at all."""
        STEPS["done"] += 1
        if self.simulation.signs:
            for session in (self.simulation.session, wire_session(NAME, following)):
                beat = heartbeat(session, following)
                forged = beat + Signer(b"z" * 16, "group", self.simulation.clock_us)(beat)
                for packet in (beat, forged):
                    self.simulation.multicast(packet, by_stranger=True)

    @rule(index=st.integers(0, 3))
    def application_stops(self, index: int) -> None:
        """One takes nothing more, so that a publisher with flow control waits for it, down to its floor."""
        STEPS["done"] += 1
        if self.simulation.flow_control is NO_FLOOR:
            return  # then it would wait for ever
        subject = self.simulation.receivers[index % len(self.simulation.receivers)]
        subject.stopped_at = subject.receiver.expected

    @rule()
    def applications_go_on(self) -> None:
        STEPS["done"] += 1
        for subject in self.simulation.receivers:
            subject.stopped_at = None

    @rule(server=st.integers(0, SERVERS - 1))
    def requests_flood(self, server: int) -> None:
        """A stranger uses up a server's budget."""
        STEPS["done"] += 1
        simulation = self.simulation
        for i in range(3000):
            simulation.admissions[server].take(
                request(simulation.session, 1 + i, 1), "10.9.9.9", 1, simulation.session, simulation.now
            )

    @invariant()
    def accounts_balance(self) -> None:
        if hasattr(self, "simulation"):
            for subject in self.simulation.receivers:
                subject.collect()
                subject.check_accounts()

    def teardown(self) -> None:
        """Heal, drain, and look at who got what."""
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.loss = simulation.repeat = 0.0
        simulation.delay = 0.001
        simulation.up = [True] * SERVERS
        # Whoever still hears nothing asks the servers again within `stale_retry`, and learns what there is.
        simulation.run(POLICY.stale_after_s + 10.0)
        for subject in simulation.receivers:
            if subject.receiver.session == simulation.session:
                assert subject.receiver.highest > simulation.journal.next, (
                    "does not know what the servers know"
                )
        simulation.cut = False
        for subject in simulation.receivers:
            subject.deaf = False
        if simulation.sender is None:
            simulation.start_sender()
        simulation.run(1.5)
        end = simulation.journal.next + 1
        for _ in range(20):  # with room for 6 kB behind gaps, a long backlog takes its time
            simulation.run(15.0)
            if all(not f.receiver.gaps for f in simulation.receivers):
                break
        for subject in simulation.receivers:
            subject.check_accounts()
            receiver = subject.receiver
            assert receiver.session == simulation.session
            if not receiver.expected == subject.start > end:  # it waits for what is yet to come
                assert receiver.expected == end, "not everything was delivered or declared lost"
            assert not receiver.gaps
            assert not receiver.held_bytes
            for session, missing in subject.lost:
                if missing.reason is Reason.EVICTED:
                    assert missing.first - 1 < simulation.evicted[session], "was not evicted"
                elif missing.reason is Reason.PRODUCER_CRASH:
                    assert session != simulation.session or subject.rewinds
                else:
                    assert missing.reason is Reason.GAVE_UP


def simulate(number: int, examples: int, steps: int) -> None:
    """Each number has histories of its own, the same ones in every run."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        seed(number)(type("Seeded", (Machine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def lose_and_repair(receivers: int, *, shared: bool, seed: int, signs: bool) -> tuple[Simulation, int]:
    """300 packets, of which some are lost: by everybody, or each by one. Returns how many losses there were."""
    simulation = Simulation(seed, 100_000, signs)
    for _ in range(receivers):
        simulation.receivers.append(SimulatedReceiver(simulation, LIVE, 1))
    simulation.run(1.0)
    lost = 0
    for i in range(300):
        loses = simulation.random.random() < 0.16
        victims = simulation.receivers if shared else [simulation.receivers[i % receivers]]
        for subject in victims if loses else []:
            subject.deaf = True
        lost += loses
        simulation.publish("a", [100], "")
        for subject in simulation.receivers:
            subject.deaf = False
        simulation.run(0.01)
    simulation.run(5.0)
    for subject in simulation.receivers:
        assert subject.receiver.expected == 301
        assert not subject.lost
        subject.check_accounts()
    return simulation, lost


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_of_sixteen_asks_for_what_all_lost(seed: int, signs: bool) -> None:
    """Packets that 16 receivers lost cost at most 1.5 requests each, and one repair for all of them."""
    simulation, lost = lose_and_repair(16, shared=True, seed=seed, signs=signs)
    assert lost > 30
    assert simulation.requests <= 1.5 * lost
    assert simulation.shared >= 0.9 * lost


@pytest.mark.parametrize("seed", range(3))
def test_what_one_of_sixteen_lost_goes_to_it_alone(seed: int) -> None:
    """Losses of single receivers are repaired by unicast, but for the first few, until that is known to be usual."""
    simulation, lost = lose_and_repair(16, shared=False, seed=seed, signs=False)
    assert lost > 30
    assert simulation.requests <= 1.5 * lost
    assert simulation.shared <= 0.3 * lost


@pytest.mark.timeout(900)  # seconds on a free machine, minutes on a crowded one
def test_every_sequence_exactly_once_or_one_lost() -> None:
    """Over 10,000 steps of any order of faults, each sequence arrives once, in order, or in one Lost."""
    begun = STEPS["done"]
    for number in itertools.takewhile(lambda _: STEPS["done"] - begun < 10_000, itertools.count()):
        simulate(number, 60, 60)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_sequence_exactly_once_or_one_lost_for_long() -> None:
    """The same over 300,000 steps, with longer histories."""
    begun = STEPS["done"]
    for number in itertools.takewhile(lambda _: STEPS["done"] - begun < 300_000, itertools.count(1000)):
        simulate(number, 300, 150)
