"""Peers that speak the protocol and mean harm: nothing stays of them, and they do not hold up the server."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from brokerless.core import Frame, MemoryJournal
from brokerless.core.errors import Closed, NotAcknowledged
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.group import MAX_CREDIT, MAX_MESSAGES, Group, GroupState
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages, server
from brokerless.direct.protocol.messages import Policy
from brokerless.direct.protocol.server import ControlServer, _page

from ..conftest import eventually

VERSION = messages.VERSION


@contextmanager
def dealer(address: str) -> Iterator["zmq.Socket[bytes]"]:
    """A bare client socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(address)
        yield peer


def say(peer: "zmq.Socket[bytes]", *requests: messages.Request) -> None:
    for message in requests:
        peer.send(messages.encode(message))


def new_control_server(events: int = 0) -> ControlServer:
    journal = MemoryJournal()
    journal.bind("p")
    if events:
        journal.append_many("t", [b"x"] * events)
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    return ControlServer(journal, coordinator, instance=1, live="5", beat_s=1.0, begin=0, replay=True)


def send_to(
    at: ControlServer, peer: bytes, *requests: messages.Request, now: float = 0.0
) -> list[messages.Reply]:
    """Say something to a control server; what it answers."""
    for message in requests:
        at.receive(peer, messages.encode(message), now)
    answers = [messages.decode_reply(data) for to, data in at.outbox if to == peer]
    at.outbox.clear()
    return answers


# ---- ghosts: a worker is known to its group as long as it is there ---------------------------------------------


def test_a_peer_that_changes_its_name_is_one_worker() -> None:
    """Each hello with another name ends the worker before; when the peer is gone, none is left, and nothing is held."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", [b"x"] * 100)
        with dealer(pub.address) as peer:
            for i in range(10):
                say(
                    peer,
                    messages.Hello(VERSION, f"c{i}", group="g", policy=Policy(lease_s=86400)),
                    messages.Credit(10),
                )
            eventually(lambda: pub._control_server.counters.hellos == 10)
            eventually(lambda: pub.groups()["g"].leased == 10)
            assert (pub.groups()["g"].workers, pub._control_server.workers) == (1, 1)
        eventually(lambda: not pub._control_server.workers)
        status = pub.groups()["g"]
        assert (status.workers, status.leased, status.pending) == (0, 0, 100)


@pytest.mark.parametrize(
    "then",
    [
        messages.Hello(VERSION, "a", group="other"),
        messages.Hello(VERSION, "b", group="g"),
        messages.Hello(VERSION, "a"),
        messages.Hello(VERSION, "b", durable="d"),
    ],
)
@pytest.mark.parametrize("peer", [b"1", b"2"])
def test_whoever_becomes_another_gives_back_what_it_held(then: messages.Hello, peer: bytes) -> None:
    """Another name, group or role of the same peer, or the same worker's name in another group."""
    at = new_control_server(events=5)
    send_to(at, b"1", messages.Hello(VERSION, "a", group="g"), messages.Credit(5))
    at._coordinator.run(0.0)
    group = at._coordinator.groups["g"]
    assert group.leased == 5
    send_to(at, peer, then)
    same = peer == b"1" or then.group == "other"
    assert ("a" in group.members) is not same
    assert group.leased == (0 if same else 5)
    assert all(at.sessions[session.peer] is session for session in at._workers.values())
    members = {name for g in at._coordinator.groups.values() for name in g.members}
    assert members == set(at._workers)


@pytest.mark.parametrize("peer", [b"1", b"2"])
def test_the_same_worker_keeps_what_it_held(peer: bytes) -> None:
    """A worker that greets again, over the same or a new connection, has one session and its leases."""
    at = new_control_server(events=5)
    send_to(at, b"1", messages.Hello(VERSION, "a", group="g"), messages.Credit(5))
    at._coordinator.run(0.0)
    send_to(at, peer, messages.Hello(VERSION, "a", group="g"))
    assert list(at.sessions) == [peer]
    assert at.peer_of("a") == peer
    assert at._coordinator.groups["g"].leased == 5


def test_nng_workers_that_leave_at_once_leave_nothing() -> None:
    """Hello, Credit and the end of the connection in one go, many times: no worker stays behind."""
    with Publisher("nng+tcp://127.0.0.1:0", source="p", journal=MemoryJournal()) as pub:
        port = int(pub.address.rpartition(":")[2])
        for i in range(200):
            hello = messages.encode(messages.Hello(VERSION, f"c{i}", group="g", start="live"))
            parts = [
                struct.pack(">QI", len(m) + 4, 1) + m for m in (hello, messages.encode(messages.Credit(9)))
            ]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(b"\0SP\0\0\x11\0\0")
                raw.recv(8)
                raw.sendall(b"".join(parts))
        control = pub._server._control
        with Worker(pub.address, group="g", start="live") as worker:
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].workers == 1)
            # Whatever is left of the others would stay in one of these.
            eventually(lambda: worker.receive(0.01) is None and pub._control_server.workers == 1)
            eventually(lambda: len(control._windows) == 1)  # type: ignore[attr-defined]
            eventually(lambda: len(control._socket.pipes) < 50)  # type: ignore[attr-defined]


# ---- what it costs ---------------------------------------------------------------------------------------------


def test_extending_events_one_by_one_costs_few_leases() -> None:
    """However a worker extends what it holds, its leases stay few, and end in time."""
    group = Group("g", GroupState(0, 0, policy=Policy(lease_s=16.0)))
    group.join("w", 10_000)
    group.lease_new("w", [(0, 9_999)], 10_000, 0.0)
    for offset in range(0, 10_000, 2):
        assert group.extend("w", offset, offset, offset / 1000) == 1
    leases = group.members["w"].leases
    assert len(leases) < 20
    assert group.members["w"].held == sum(held.total for _, held in leases) == 10_000
    assert [until for until, _ in leases] == sorted(until for until, _ in leases)
    # At the earliest a lease after its extension, at the latest a sixteenth later.
    assert group.handle_deadline(16.0) == 5_001
    for second in range(1, 11):
        group.handle_deadline(15.99 + second)
        assert group.leased == 4_999 - 500 * (second - 1)
        group.handle_deadline(16.0 + second)
    assert group.leased == 0


def test_extending_one_event_does_not_hold_another() -> None:
    """A worker that extends one event again and again loses the other one when its lease is over."""
    group = Group("g", GroupState(0, 0, policy=Policy(lease_s=16.0)))
    group.join("w", 2)
    group.lease_new("w", [(0, 1)], 2, 0.0)
    for tenth in range(170):
        group.extend("w", 0, 0, tenth / 10)
        group.handle_deadline(tenth / 10)
    assert (group.leased, group.returned.total) == (1, 1)


def test_changing_the_policy_does_not_make_leases_without_end() -> None:
    """Long and short leases in turn: their number is bounded, and a short one does not wait for a long one."""
    group = Group("g", GroupState(0, 0))
    group.join("w", 1000)
    group.lease_new("w", [(0, 999)], 1000, 0.0)
    for offset in range(1000):
        group.change_policy(Policy(lease_s=10.0 + offset))
        group.extend("w", offset, offset, 0.0)
    assert len(group.members["w"].leases) <= 2 * MAX_MESSAGES
    group.change_policy(Policy(lease_s=1.0))
    group.returned.add(2000, 2000)
    group.lease_from_returned("w", 1, 0.0)
    assert group.next_deadline() == 1.0


def test_acknowledging_what_is_not_there_costs_nothing() -> None:
    """A thousand ranges beyond the end, with many events given back: none of those is looked at."""
    group = Group("g", GroupState(0, 0))
    group.join("w", MAX_CREDIT)
    group.lease_new("w", [(0, 49_999)], 50_000, 0.0)
    group.nack("w", 0, 49_999, 1000.0, 0.0)
    looks = 0

    class Watched(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += 1
            return super().__iter__()

        def __contains__(self, key: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    group.attempts.made = Watched(group.attempts.made)
    assert group.ack_all("w", [(1 << 60, 1 << 61)] * 1000) == 0
    assert looks == 0
    assert group.ack_all("w", [(3, 4), (10, 1 << 61), (4, 5)]) == 3 + 49_990
    assert sorted(group.attempts) == [0, 1, 2, 6, 7, 8, 9]


def test_many_dead_letters_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gives up thousands of events with one message: others have their turn, and frames are read once."""
    decode, decoded = Frame.events, []
    monkeypatch.setattr(Frame, "events", lambda frame: decoded.append(frame) or decode(frame))
    journal, dead = MemoryJournal(), MemoryJournal()
    for each in (journal, dead):
        each.bind("p")
    journal.append_many("t", [b"x"] * 3000)
    coordinator = GroupCoordinator(journal, dead, GroupStore(None))
    group = coordinator.join("g", "w", Policy(max_deliver=1), "", 3000)
    coordinator.run(0.0)
    assert group.leased == 3000
    coordinator.settle("g", "w", messages.Settle(journal.epoch, [], [(0, 2999, 0.0)]), 0.0)
    runs = 0
    while coordinator.next_deadline() <= 0.0:
        before = group.dead_lettered
        coordinator.run(0.0)
        runs += 1
        assert 0 < group.dead_lettered - before <= 1000
        if runs == 1:  # the last one is done after all
            assert group.ack("w", 2999, 2999) == 1
    assert (group.dead_lettered, group.acked, dead.next, group.cursor) == (2999, 1, 2999, 3000)
    assert len(decoded) <= 2 * runs


def test_pages_of_topics_are_what_a_filter_gives() -> None:
    """Prefixes that overlap, that match nothing, the empty one, and all pages together."""
    topics = sorted([f"a.{i}" for i in range(50)] + ["b", "b.c", "bc", "ä", "\U0010ffff", "\U0010ffffx"])
    for prefixes in [(), ("",), ("a.1", "a."), ("b", "b."), ("x",), ("\U0010ffff",), ("ä", "a.49", "a.4")]:
        for after in ["", "a.3", "b", "zz", "\U0010ffff"]:
            wanted = [t for t in topics if t > after and (not prefixes or t.startswith(prefixes))]
            assert _page(topics, prefixes, after) == (wanted, False)
    many = [f"{i:06}" for i in range(2 * messages.MAX_SENT_TOPICS + 1)]
    seen: list[str] = []
    more = True
    while more:
        page, more = _page(many, ("0",), seen[-1] if seen else "")
        assert len(page) <= messages.MAX_SENT_TOPICS
        seen += page
    assert seen == many


def test_expensive_requests_do_not_stop_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round ends after some time, however many messages are waiting: between two of them others have their turn."""
    answer = ControlServer._answer_sent
    beats: list[int] = []

    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal(), heartbeat_s=0.01) as pub:

        def slow(at: ControlServer, session: server.Session, request: messages.SentRequest) -> None:
            time.sleep(0.01)
            beats.append(pub.counters.beats)
            answer(at, session, request)

        monkeypatch.setattr(ControlServer, "_answer_sent", slow)
        with dealer(pub.address) as peer:
            say(peer, messages.Hello(VERSION, "c"), *[messages.SentRequest()] * 50)
            eventually(lambda: len(beats) == 50)
    assert beats[-1] - beats[0] >= 40


# ---- newcomers, and no room ------------------------------------------------------------------------------------


def test_whoever_greets_again_and_again_is_one_newcomer() -> None:
    """Eager heartbeats are for who has just come: not for one that says hello, or goodbye and hello, for ever."""
    at = new_control_server()
    for i in range(10):
        send_to(at, b"1", messages.Hello(VERSION, "c"), now=float(i))
    assert (at.newcomers, at.arrivals) == (1, 1)
    send_to(at, b"1", messages.Bye(), messages.Hello(VERSION, "c"), now=10.0)
    assert (at.newcomers, at.arrivals) == (1, 1)
    send_to(at, b"1", messages.Ready(at._journal.epoch, 0), now=11.0)
    send_to(at, b"2", messages.Hello(VERSION, "d"), now=11.0)
    assert (at.newcomers, at.arrivals) == (1, 2)
    at.departed(b"2")
    assert at.newcomers == 0


def test_a_full_publisher_makes_room_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever greeted and did nothing has to go, the oldest first; whoever is Ready, or works, stays."""
    monkeypatch.setattr(server, "MAX_SESSIONS", 4)
    at = new_control_server()
    send_to(at, b"ready", messages.Hello(VERSION, "r"), messages.Ready(at._journal.epoch, 0))
    send_to(at, b"works", messages.Hello(VERSION, "w", group="g"))
    for i in range(20):
        (answer,) = send_to(at, b"%d" % i, messages.Hello(VERSION, f"c{i}"))
        assert isinstance(answer, messages.Welcome)
    assert list(at.sessions) == [b"ready", b"works", b"18", b"19"]
    assert at.newcomers == 2


def test_without_room_a_newcomer_is_asked_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is not for ever, and those that have been silent are asked whether they are there."""
    monkeypatch.setattr(server, "MAX_SESSIONS", 2)
    at = new_control_server()
    for name in (b"1", b"2"):
        send_to(at, name, messages.Hello(VERSION, "c"), messages.Ready(at._journal.epoch, 0))
    at.receive(b"2", messages.encode(messages.Pong()), 30.0)
    at.handle_deadline(31.0)
    at.receive(b"3", messages.encode(messages.Hello(VERSION, "c")), 31.0)
    assert [(to, type(messages.decode_reply(data))) for to, data in at.outbox] == [
        (b"1", messages.Ping),
        (b"3", messages.Refused),
    ]
    assert messages.decode_reply(at.outbox[1][1]) == messages.Refused(
        "there are 2 clients already", again=True
    )
    at.outbox.clear()
    at.departed(b"1")  # sending the ping told
    (answer,) = send_to(at, b"3", messages.Hello(VERSION, "c"), now=32.0)
    assert isinstance(answer, messages.Welcome)


def test_newcomers_get_in_after_many_short_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that greet and go fill the sessions; a subscriber and a worker are served at once nevertheless."""
    monkeypatch.setattr(server, "MAX_SESSIONS", 20)
    # Nobody is asked whether it is there, or it may be found out meanwhile that some are gone.
    monkeypatch.setattr(server, "PING_S", float("inf"))
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        for i in range(30):
            with dealer(pub.address) as peer:
                say(peer, messages.Hello(VERSION, f"c{i}"))
                assert peer.poll(20_000)
        assert len(pub._control_server.sessions) == 20
        with Subscriber(pub.address) as sub, Worker(pub.address, group="g") as worker:
            assert sub.wait_joined(10)
            pub.publish("t", b"x")
            assert sub.receive(10) is not None
            assert worker.receive(10) is not None


# ---- other threads ---------------------------------------------------------------------------------------------


def test_only_the_server_thread_looks_at_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """groups() and publish(wait="acked") see what the server thread saw at one moment, not what it is changing."""
    lookers: set[str] = set()

    def watched(name: str) -> None:
        original = getattr(Group, name)

        def look(group: Group, *args: int) -> object:
            lookers.add(threading.current_thread().name)
            return original.fget(group) if isinstance(original, property) else original(group, *args)

        monkeypatch.setattr(Group, name, property(look) if isinstance(original, property) else look)

    for name in ("is_settled", "has_failed", "waiting", "leased", "lost"):
        watched(name)
    with Publisher("inproc://looks", source="p", journal=MemoryJournal()) as pub:
        with Worker("inproc://looks", group="g") as worker:
            eventually(lambda: worker.receive(0.01) is None and "g" in pub.groups())
            waiting = threading.Thread(target=pub.publish, args=("t", b"x"), kwargs={"wait": "acked"})
            waiting.start()
            delivery = worker.receive(10)
            assert delivery is not None
            delivery.ack()
            eventually(lambda: worker.receive(0.01) is None and not waiting.is_alive())
            assert pub.groups()["g"].acked == 1
        server = pub._server._thread.name
        assert lookers == {server}
    assert pub.groups()["g"].balanced  # closed: nobody else looks


def test_groups_while_workers_come_and_go() -> None:
    """Every snapshot balances, and looking never fails."""
    with Publisher("inproc://come-and-go", source="p", journal=MemoryJournal()) as pub:
        over = threading.Event()
        problems: list[object] = []

        def look() -> None:
            try:
                while not over.is_set():
                    problems.extend(g for g in pub.groups().values() if not g.balanced)
            except Exception as error:
                problems.append(error)

        looker = threading.Thread(target=look)
        looker.start()
        try:
            for _ in range(10):
                pub.publish_many("t", [b"x"] * 20)
                with Worker("inproc://come-and-go", group="g") as worker:
                    for n in range(15):
                        delivery = worker.receive(10)
                        assert delivery is not None
                        (delivery.ack if n % 3 else delivery.nack)()
        finally:
            over.set()
            looker.join(10)
        assert not problems


def test_those_who_wait_for_an_acknowledgement_are_let_go_by_close() -> None:
    """A publisher that is closed will not hear of it any more."""
    pub = Publisher("inproc://let-go", source="p", journal=MemoryJournal())
    caught: list[Exception] = []

    def publish() -> None:
        try:
            pub.publish("t", b"x", wait="acked", groups=["nobody"], timeout=60.0)
        except NotAcknowledged as error:
            caught.append(error)

    waiting = threading.Thread(target=publish)
    waiting.start()
    eventually(lambda: pub._coordinator._waiters)
    pub.close()
    waiting.join(10)
    assert len(caught) == 1


def test_nothing_is_written_to_a_descriptor_that_was_closed() -> None:
    """After close() its number may be another file's."""
    pub = Publisher("inproc://descriptor", source="p", journal=MemoryJournal())
    number = pub._server._wakeup.fd
    pub.close()
    reader, writer = os.pipe()
    taken = [writer]
    try:
        while number not in (reader, *taken) and len(taken) < 100:
            taken.append(os.dup(writer))
        pub._server.wake()
        with pytest.raises(Closed):
            pub.forget_group("x")
        with pytest.raises(Closed):
            pub.forget_subscriber("x")
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        for descriptor in (reader, *taken):
            os.close(descriptor)


def test_several_threads_close_a_publisher() -> None:
    """One does it, the others wait until it is done; none of them fails."""
    for i in range(20):
        pub = Publisher(f"inproc://closed-{i}", source="p", journal=MemoryJournal())
        together = threading.Barrier(3)
        results: list[object] = []

        def close(
            pub: Publisher = pub, together: threading.Barrier = together, to: list[object] = results
        ) -> None:
            together.wait()
            try:
                pub.close()
                to.append(pub._server._thread.is_alive())
            except BaseException as error:
                to.append(error)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert results == [False] * 3
