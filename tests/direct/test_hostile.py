"""Hostile peers on the control socket: the publisher keeps serving everybody else, and nothing leaks."""

import os
import random
import socket
import time

import psutil
import pynng
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.groups.coordinator import MAX_GROUPS, GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.server import MAX_SESSIONS, ControlServer

from .conftest import eventually

# The whole million takes a minute, and more on a busy machine.
MANY = pytest.mark.parametrize("hellos", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])

DEADLINE = 20.0


def still_serves(pub: Publisher, events: int = 20) -> None:
    """A new subscriber and a new worker get what is published."""
    with (
        Subscriber(pub.address, start="live") as sub,
        Worker(pub.address, group="check", start="live") as worker,
    ):
        assert sub.wait_joined(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while "check" not in pub.groups() or not pub.groups()["check"].workers:
            worker.receive(0.01)
            assert time.monotonic() < deadline
        for i in range(events):
            pub.publish("check", b"%d" % i)
        wanted = [b"%d" % i for i in range(events)]
        assert [e.data for _, e in zip(range(events), sub.events(DEADLINE), strict=False)] == wanted
        seen = 0
        for delivery in worker.deliveries(DEADLINE):
            delivery.ack()
            seen += 1
            if seen == events:
                break
        assert seen == events
    assert pub._control_server.counters.failures == 0


def test_garbage_over_zeromq() -> None:
    """Random messages, wrong part counts, wrong versions and giant ones harm nobody else."""
    chance = random.Random(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        try:
            for kind in (zmq.DEALER, zmq.REQ, zmq.PAIR, zmq.SUB):
                peer = context.socket(kind)
                peer.linger = 0
                peer.connect(pub.address)
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            peer.connect(pub.address)
            for _ in range(500):
                peer.send(chance.randbytes(chance.randrange(200)))
                peer.send_multipart([b"a", b"b", b"c"])
            peer.send(messages.encode(messages.Hello(99, "future")))
            assert peer.poll(20_000)
            answer = messages.decode_reply(peer.recv())
            assert isinstance(answer, messages.Refused)
            assert "99" in answer.text
            # libzmq itself ends the connection of whoever sends more than MAXMSGSIZE.
            peer.send(b"x" * (messages.MAX_REQUEST_BYTES + 1))
            still_serves(pub)
            assert pub._control_server.counters.bad_requests >= 500
        finally:
            context.destroy(linger=0)


def test_garbage_over_nng() -> None:
    """The same over NNG."""
    chance = random.Random(2)
    with (
        Publisher("nng+tcp://127.0.0.1:0", source="p", journal=MemoryJournal()) as pub,
        pynng.Pair1(polyamorous=True, send_timeout=2000) as peer,
    ):
        peer.dial(pub.address.removeprefix("nng+"), block=True)

        def garbage(n: int) -> None:
            for _ in range(n):
                peer.send(chance.randbytes(chance.randrange(1, 200)))

        garbage(500)
        still_serves(pub)
        # NNG drops what its thread does not come to send in time: of so many in a row perhaps most.
        eventually(lambda: garbage(1) or pub._control_server.counters.bad_requests > 100)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "nng+tcp://127.0.0.1:0"])
def test_garbage_on_the_bare_tcp_port(address: str) -> None:
    """Somebody who does not even speak the socket library's protocol, on both ports, with a giant length too."""
    chance = random.Random(3)
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        for target in (pub.address, pub.live_address) * 5:
            port = int(target.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(chance.randbytes(500))
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(b"\x00SP\x00\x00\x11\x00\x00" + b"\xff" * 8)
        still_serves(pub)


@MANY
def test_a_flood_of_hellos_does_not_starve_others(hellos: int) -> None:
    """A million hellos from one peer: all but a few are ignored, others are served meanwhile, nothing is kept."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        try:
            flood = context.socket(zmq.DEALER)
            flood.linger = 0
            flood.sndhwm = 0
            flood.connect(pub.address)
            hello = messages.encode(messages.Hello(messages.VERSION, "flood", group="flood"))
            for _ in range(hellos):
                flood.send(hello)
            still_serves(pub)
            assert len(pub._control_server.sessions) < 10
            counters = pub._control_server.counters
            eventually(lambda: counters.rationed + counters.hellos >= hellos, 240.0)
            assert counters.hellos < hellos // 100
            still_serves(pub)
        finally:
            context.destroy(linger=0)


def control_server_of(journal: MemoryJournal) -> ControlServer:
    return ControlServer(
        journal,
        GroupCoordinator(journal, None, GroupStore(None)),
        instance=1,
        live="5",
        beat_s=1.0,
        begin=0,
        replay=True,
    )


@MANY
def test_hellos_from_as_many_peers_are_bounded(hellos: int) -> None:
    """Sessions, rations and groups stop growing at their limits, and whoever receives the live stream stays."""
    journal = MemoryJournal()
    journal.bind("p")
    control_server = control_server_of(journal)
    control_server.receive(b"honest", messages.encode(messages.Hello(messages.VERSION, "honest")), 0.0)
    control_server.receive(b"honest", messages.encode(messages.Ready(journal.epoch, 0)), 0.0)
    for i in range(hellos):
        hello = messages.Hello(messages.VERSION, f"c{i}", group=f"g{i}" if i % 2 else "")
        control_server.receive(b"%d" % i, messages.encode(hello), i * 1e-6)
        control_server.outbox.clear()
    assert len(control_server.sessions) <= MAX_SESSIONS
    assert len(control_server._quotas) <= 2 * MAX_SESSIONS + 1
    assert len(control_server._coordinator.groups) == MAX_GROUPS
    assert b"honest" in control_server.sessions


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_the_control_server_survives_any_bytes(requests: list[bytes]) -> None:
    """Whatever a peer says before or after a hello, nothing is raised."""
    journal = MemoryJournal()
    journal.bind("p")
    journal.append("t", b"x")
    control_server = control_server_of(journal)
    for message in requests:
        control_server.receive(b"p", message, 0.0)
    control_server.receive(b"p", messages.encode(messages.Hello(messages.VERSION, "c", group="g")), 0.0)
    for message in requests:
        control_server.receive(b"p", message, 0.0)
    control_server.handle_deadline(100.0)


@given(st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 62) - 1), st.integers(0, 1 << 31))
def test_impossible_offsets_and_credit(first: int, last: int, window: int) -> None:
    """Replays from the far future, acks of everything and credit overflow cost nothing and break nothing."""
    journal = MemoryJournal()
    journal.bind("p")
    journal.append_many("t", [b"x"] * 10)
    control_server = control_server_of(journal)
    control_server.receive(b"p", messages.encode(messages.Hello(messages.VERSION, "c", group="g")), 0.0)
    control_server.receive(b"p", messages.encode(messages.Credit(window)), 0.0)
    settle = messages.Settle(journal.epoch, [(first, last)], [(first, last, 1.0)], [(first, last)])
    started = time.monotonic()
    control_server.receive(b"p", messages.encode(settle), 0.0)
    control_server.receive(b"p", messages.encode(messages.Replay(1, journal.epoch, first, 1 << 30)), 0.0)
    control_server.receive(b"p", messages.encode(messages.Advance(journal.epoch, last)), 0.0)
    control_server._coordinator.run(0.0)
    assert time.monotonic() - started < 5.0
    assert control_server._coordinator.groups["g"].cursor <= 10


def test_a_peer_that_asks_and_never_reads_costs_a_bounded_queue() -> None:
    """Thousands of replay requests whose answers are never read: memory and descriptors stay where they were."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        try:
            for _ in range(64):
                pub.publish_many("t", [b"." * 1000] * 1000)
            process = psutil.Process()
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            peer.rcvhwm = 1
            peer.connect(pub.address)
            peer.send(messages.encode(messages.Hello(messages.VERSION, "greedy")))
            before, files = process.memory_info().rss, len(os.listdir("/proc/self/fd"))
            for i in range(3000):
                peer.send(messages.encode(messages.Replay(i, pub.journal.epoch, 0, 1 << 30)))
            still_serves(pub)
            # Some 5 MiB for it, which its library has as well, and what serving the others took.
            assert process.memory_info().rss - before < 64 * 1024 * 1024
            assert len(os.listdir("/proc/self/fd")) - files < 20
        finally:
            context.destroy(linger=0)
