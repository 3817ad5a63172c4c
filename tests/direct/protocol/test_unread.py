"""What clients leave unread costs a bounded amount of memory, each of them and all together."""

import contextlib
from collections import defaultdict

import psutil
import pynng
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.direct import Publisher, ReplayClient, Subscriber
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages, unread
from brokerless.direct.protocol.server import ControlServer
from brokerless.direct.protocol.unread import UnreadBytes

from ..conftest import eventually
from ..test_hostile import still_serves

MIB = 1024 * 1024
PEERS = st.sampled_from([b"a", b"b"])
STEPS = st.one_of(
    st.tuples(st.just("send"), PEERS, st.integers(1, 3 * MIB)),
    st.tuples(st.just("read"), PEERS, st.integers(0, 9)),
    st.tuples(st.just("forge"), PEERS, st.integers(0, 1 << 62)),
    st.tuples(st.just("ask"), PEERS, st.just(0)),
    st.tuples(st.just("go"), PEERS, st.just(0)),
)


@given(st.lists(STEPS, max_size=60))
def test_the_account_is_what_was_sent_and_not_shown_to_be_read(steps: list[tuple[str, bytes, int]]) -> None:
    """Against the queues themselves: never less than lies in them; nothing, when all is read and answered."""
    account = UnreadBytes()
    queues: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # (bytes, number of a Ping or 0)

    def send(peer: bytes, size: int, number: int = 0) -> None:
        queues[peer].append((size, number))
        if account.sent(peer, size):
            ping(peer)

    def ping(peer: bytes) -> None:
        message = account.ping(peer)
        reply = messages.decode_reply(message)
        assert isinstance(reply, messages.Ping)
        send(peer, len(message), reply.number)

    def read(peer: bytes, count: int) -> None:
        for _, number in [queues[peer].pop(0) for _ in range(min(count, len(queues[peer])))]:
            account.shown(peer, number)

    for what, peer, number in steps:
        match what:
            case "send":
                send(peer, number)
            case "read":
                read(peer, number)
            case "forge":
                before = account.of(peer)
                account.shown(peer, number)
                assert account.of(peer) == before
            case "ask":
                ping(peer)
            case "go":
                account.forget(peer)
                queues[peer].clear()
        for name, queue in queues.items():
            assert account.of(name) >= sum(size for size, _ in queue)
        assert account.total == sum(account.of(name) for name in queues)
    for peer in account.peers(again=True):
        ping(peer)
    for peer in queues:
        read(peer, 1000)
        assert account.of(peer) == 0
    assert (len(account), account.total) == (0, 0)


class Simulation:
    """A control server with a journal of 8 MiB, and what lies in its clients' queues."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.journal.bind("p")
        for _ in range(8):
            self.journal.append_many("t", [b"." * 1000] * 1000)
        self.coordinator = GroupCoordinator(self.journal, None, GroupStore(None))
        self.request = 0
        self.control_server = ControlServer(
            self.journal, self.coordinator, instance=1, live="5", beat_s=1.0, begin=0, replay=True
        )
        self.queues: dict[bytes, list[bytes]] = defaultdict(list)
        self.now = 0.0

    def say(self, peer: bytes, *requests: messages.Request) -> None:
        for message in requests:
            self.now += 0.001
            self.control_server.receive(peer, messages.encode(message), self.now)
            self.send()

    def greet(self, peer: bytes, **more: str) -> None:
        self.say(peer, messages.Hello(messages.VERSION, peer.decode(), **more))

    def ask(self, peer: bytes, request: int | None = None) -> None:
        self.request += 1
        number = self.request if request is None else request
        self.say(peer, messages.Replay(number, self.journal.epoch, 0, 1 << 30))

    def send(self) -> None:
        while self.control_server.outbox:
            outbox, self.control_server.outbox = self.control_server.outbox, []
            for peer, data in outbox:
                self.queues[peer].append(data)
                self.control_server.sent(peer, len(data))

    def work(self) -> None:
        """One round of the groups."""

        def posted() -> None:
            deliveries, self.coordinator.outbox = self.coordinator.outbox, []
            for worker, data in deliveries:
                peer = self.control_server.peer_of(worker)
                assert peer is not None
                self.queues[peer].append(data)
                self.control_server.sent(peer, len(data))
            self.control_server.hold_back()

        self.now += 0.01
        self.control_server.hold_back()
        self.coordinator.run(self.now, posted)
        self.send()

    def read(self, peer: bytes) -> list[messages.Reply]:
        """Read everything that has been sent, and answer pings."""
        replies = [messages.decode_reply(data) for data in self.queues[peer]]
        self.queues[peer].clear()
        for reply in replies:
            if isinstance(reply, messages.Ping):
                self.say(peer, messages.Pong(reply.number))
        return replies

    def size(self, peer: bytes) -> int:
        return sum(map(len, self.queues[peer]))


def chunks(replies: list[messages.Reply]) -> int:
    return sum(isinstance(reply, messages.Chunk) for reply in replies)


def test_who_asks_and_does_not_read_is_not_answered() -> None:
    """Neither more questions nor made-up answers to pings nor a new session bring more; reading does."""
    simulation = Simulation()
    simulation.greet(b"greedy")
    for i in range(200):
        simulation.ask(b"greedy")
        simulation.say(b"greedy", messages.Pong(i), messages.SentRequest())
        if i % 50 == 0:
            simulation.say(b"greedy", messages.Bye())
            simulation.now += 5.0
            simulation.greet(b"greedy")
    assert 3 * MIB < simulation.size(b"greedy") < unread.CLIENT_BYTES + 2 * MIB
    assert chunks(simulation.read(b"greedy")) in (4, 5)
    # The last question waited, and is answered now.
    assert chunks(simulation.read(b"greedy")) == 1
    for _ in range(20):
        simulation.ask(b"greedy")
        assert chunks(simulation.read(b"greedy")) == 1
        simulation.read(b"greedy")


def test_all_together_leave_a_bounded_amount_and_readers_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound for all, each client is given one answer at a time: those who read get everything."""
    monkeypatch.setattr(unread, "TOTAL_BYTES", 10 * MIB)
    simulation = Simulation()
    names = [b"%d" % i for i in range(8)]
    for name in names:
        simulation.greet(name)
        simulation.read(name)
    for _ in range(10):
        for name in names:
            simulation.ask(name)
    assert simulation.control_server.unread.scarce
    # The first ones filled it; each of the others got one.
    assert sum(map(simulation.size, names)) < (10 + len(names)) * 1.1 * MIB
    simulation.greet(b"reader")
    simulation.read(b"reader")
    for _ in range(20):
        simulation.ask(b"reader")
        assert chunks(simulation.read(b"reader")) == 1
    for name in names:
        simulation.control_server.departed(name)
    assert simulation.control_server.unread.total == simulation.control_server.unread.of(b"reader") == 0


def test_workers_that_do_not_read_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """While too much is unread, a worker gets events when it has read the last ones; the others are not harmed."""
    monkeypatch.setattr(unread, "TOTAL_BYTES", 2 * MIB)
    simulation = Simulation()
    for name in (b"hostile", b"good"):
        simulation.greet(name, group=name.decode())
        simulation.read(name)
        simulation.say(name, messages.Credit(10_000))
    taken = 0
    for _ in range(100):
        simulation.work()
        for reply in simulation.read(b"good"):
            if isinstance(reply, messages.Deliver):
                taken += sum(last - first + 1 for first, last, _ in reply.ranges)
                ranges = [(first, last) for first, last, _ in reply.ranges]
                simulation.say(b"good", messages.Settle(simulation.journal.epoch, acks=ranges))
    assert taken == 8000
    assert 3 * MIB < simulation.size(b"hostile") < 6 * MIB
    simulation.read(b"hostile")
    simulation.work()
    assert simulation.size(b"hostile") > 3 * MIB, "it has read, and gets more"


def test_who_left_with_something_unread_is_found_out() -> None:
    """Its queue is there as long as its connection: it is pinged, and sending tells when it is gone."""
    simulation = Simulation()
    simulation.greet(b"short")
    simulation.ask(b"short")
    simulation.say(b"short", messages.Bye())
    assert not simulation.control_server.sessions
    assert simulation.control_server.unread.of(b"short") > 900_000
    simulation.queues.clear()
    simulation.now += 10.0
    assert simulation.control_server.next_deadline() <= simulation.now
    simulation.control_server.handle_deadline(simulation.now)
    assert [peer for peer, _ in simulation.control_server.outbox] == [b"short"]
    simulation.control_server.departed(b"short")
    assert (simulation.control_server.unread.total, len(simulation.control_server.unread)) == (0, 0)


CLIENTS = 40


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "nng+tcp://127.0.0.1:0"])
def test_many_clients_that_never_read(address: str) -> None:
    """Forty of them ask for the whole journal again and again: 4 MiB each are kept for them, and others are served."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(32):
            pub.publish_many("t", [b"." * 1000] * 1000)
        process = psutil.Process()
        hello = messages.encode(messages.Hello(messages.VERSION, "greedy"))
        questions = [messages.encode(messages.Replay(i, pub.journal.epoch, 0, 1 << 30)) for i in range(100)]
        if pub.address.startswith("nng"):
            peers = []
            for _ in range(CLIENTS):
                peer = stack.enter_context(
                    pynng.Pair1(polyamorous=True, recv_buffer_size=1, send_timeout=2000)
                )
                peer.dial(pub.address.removeprefix("nng+"), block=True)
                peers.append(peer)
        else:
            context = stack.enter_context(zmq.Context())
            peers = []
            for _ in range(CLIENTS):
                client = stack.enter_context(context.socket(zmq.DEALER))
                client.linger, client.rcvhwm, client.rcvbuf = 0, 1, 65536
                client.connect(pub.address)
                peers.append(client)
        before = process.memory_info().rss
        for i in range(100):
            for peer in peers:
                peer.send(questions[i] if i else hello)
        eventually(lambda: pub._control_server.counters.replays >= 3 * CLIENTS, 60)
        still_serves(pub)
        with Subscriber(pub.address, start="oldest") as sub:
            assert sum(len(batch) for _, batch in zip(range(32), sub.batches(20), strict=False)) == 32_000
        # These are one process: a client's library reads one or two answers ahead.
        assert process.memory_info().rss - before < CLIENTS * 8 * MIB
        assert pub._control_server.unread.total < CLIENTS * 6 * MIB
    assert pub._control_server.counters.failures == 0


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "nng+tcp://127.0.0.1:0"])
def test_honest_clients_are_never_kept_waiting(address: str) -> None:
    """One that replays far more than may be unread shows what it has read; in the end nothing is on the account."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        for _ in range(40):
            pub.publish_many("t", [b"." * 1000] * 1000)
        with Subscriber(pub.address, start="oldest") as sub:
            assert sum(len(batch) for _, batch in zip(range(40), sub.batches(20), strict=False)) == 40_000
            eventually(lambda: sub.receive(0.01) is None and len(pub._control_server.unread) == 0)
        client = ReplayClient(pub.address)
        try:
            welcome = client.welcome(20.0)
            assert welcome is not None
            at = welcome.oldest
            while at < welcome.next:
                client.ask(welcome.epoch, at)
                chunk = client.answer(20.0)
                assert chunk is not None
                at = chunk.next
        finally:
            client.close()
        eventually(lambda: pub._control_server.unread.total == 0)


def test_one_large_answer_does_not_hold_up_the_next() -> None:
    """A client that asks for the next one while it works on a large one gets it; two that are unread are enough."""
    simulation = Simulation()
    large = unread.CLIENT_BYTES
    for _ in range(4):
        simulation.journal.append_many("t", [b"." * large])
    first = simulation.journal.next - 4
    simulation.greet(b"reader")
    simulation.read(b"reader")
    sizes = []
    for i in range(4):
        simulation.say(b"reader", messages.Replay(i, simulation.journal.epoch, first + min(i, 1), 1 << 20))
        sizes.append(simulation.size(b"reader"))
    assert large < sizes[0] < 2 * large < sizes[1] < 3 * large
    assert sizes[3] == sizes[1]
    assert chunks(simulation.read(b"reader")) == 2
    assert chunks(simulation.read(b"reader")) == 1, "the last question waited"


def test_a_question_that_waits_because_of_others_is_followed_by_a_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a client was sent before too much was unread is too much afterwards: it is asked at once, not in a while."""
    simulation = Simulation()
    simulation.greet(b"reader")
    simulation.read(b"reader")
    simulation.ask(b"reader")
    assert chunks(simulation.read(b"reader")) == 1, "and no ping: that is little"
    monkeypatch.setattr(unread, "TOTAL_BYTES", MIB // 2)
    simulation.ask(b"reader")
    assert [type(reply) for reply in simulation.read(b"reader")] == [messages.Ping]
    assert chunks(simulation.read(b"reader")) == 1


def test_a_held_back_worker_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given more as soon as it has answered."""
    simulation = Simulation()
    simulation.greet(b"w", group="g")
    simulation.read(b"w")
    simulation.say(b"w", messages.Credit(1000))
    simulation.work()
    assert not any(isinstance(reply, messages.Ping) for reply in simulation.read(b"w"))
    monkeypatch.setattr(unread, "TOTAL_BYTES", MIB // 2)
    simulation.say(b"w", messages.Credit(2000))
    simulation.work()
    assert [type(reply) for reply in simulation.read(b"w")] == [messages.Ping]
    simulation.work()
    assert any(isinstance(reply, messages.Deliver) for reply in simulation.read(b"w"))


@pytest.mark.parametrize("affinity", [False, True])
def test_large_events_are_given_out_a_few_at_a_time(affinity: bool) -> None:
    """Whether they come for the first time, by key, or again: a run is a few of them, however many are wanted."""
    journal = MemoryJournal()
    journal.bind("p")
    events = 40
    for i in range(events):
        journal.append_many("t", [b"." * (MIB if i else 1)], keys=[f"key {i}"])
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    policy = messages.Policy(affinity=affinity)
    for worker in ("first", "second"):
        coordinator.join("g", worker, policy, "oldest", 1000)
        granted: list[tuple[int, int, int]] = []
        while len(granted) < events:
            coordinator.run(1.0)
            outbox, coordinator.outbox = coordinator.outbox, []
            assert 0 < sum(len(data) for _, data in outbox) < 10 * MIB
            for _, data in outbox:
                reply = messages.decode_reply(data)
                assert isinstance(reply, messages.Deliver)
                granted += [(o, o, n) for first, last, n in reply.ranges for o in range(first, last + 1)]
        attempt = 1 if worker == "first" else 2
        assert sorted(granted) == [(i, i, attempt) for i in range(events)]
        coordinator.groups["g"].leave(worker)


def test_a_repeated_request_is_not_answered_while_its_answer_is_on_its_way() -> None:
    """A client on a slow link asks again every two seconds: one answer is queued for it, not one for each."""
    simulation = Simulation()
    simulation.greet(b"slow")
    for _ in range(50):
        simulation.ask(b"slow", request=7)
    assert simulation.size(b"slow") < 1.5 * MIB
    assert simulation.control_server.counters.repeated == 49
    assert chunks(simulation.read(b"slow")) == 1
    # It has shown that it read everything, and asks the same again: the answer was lost there.
    simulation.ask(b"slow", request=7)
    assert chunks(simulation.read(b"slow")) == 1
