"""Strangers on the live socket: what they say there costs the publisher nothing."""

import contextlib
import itertools
import random
import socket
import struct
from collections.abc import Callable

import psutil
import pytest
import zmq

from brokerless.core import MemoryJournal
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber
from brokerless.direct.io.zmq import _Pub

from .conftest import eventually

DEADLINE = 20.0


@pytest.mark.parametrize(("transport", "curve"), [("tcp", False), ("ipc", False), ("tcp", True)])
def test_a_long_subscription_ends_the_connection(
    transport: str, curve: bool, new_address: Callable[[str], str]
) -> None:
    """libzmq keeps a node for each byte of a prefix: only short ones are accepted, and ours are empty."""
    server, client = KeyPair.new(), KeyPair.new()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Publisher(
        new_address(transport),
        source="p",
        journal=MemoryJournal(),
        curve=ServerKeys(server) if curve else None,
    ) as pub:
        try:
            stranger = context.socket(zmq.XSUB)
            stranger.linger = 0
            stranger.setsockopt(zmq.RECONNECT_IVL, -1)
            if curve:
                stranger.curve_secretkey, stranger.curve_publickey = client.secret, client.public
                stranger.curve_serverkey = server.public
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            stranger.connect(pub.live_address)
            assert monitor.poll(DEADLINE * 1000)
            monitor.recv_multipart()
            stranger.send(b"\x01" + b"x" * 400)
            assert monitor.poll(DEADLINE * 1000)
            assert int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_DISCONNECTED
        finally:
            context.destroy(linger=0)
        keys = ClientKeys(client, server.public) if curve else None
        with Subscriber(pub.address, start="live", curve=keys) as sub:
            assert sub.wait_joined(DEADLINE)
            pub.publish("t", b"x")
            assert sub.receive(DEADLINE) is not None


def test_a_large_message_to_a_live_socket_of_nng_ends_the_connection() -> None:
    """Its announced size is not allocated."""
    with Publisher("nng+tcp://127.0.0.1:0", source="p", journal=MemoryJournal()) as pub:
        port = int(pub.live_address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as stranger:
            stranger.sendall(b"\0SP\0" + struct.pack(">H", 0x21) + b"\0\0")
            assert len(stranger.recv(8)) == 8
            stranger.sendall(struct.pack(">Q", 8_000_000_000))
            said = b""
            with contextlib.suppress(ConnectionResetError):
                said = stranger.recv(1)  # TimeoutError if it is still waiting for the rest
            assert said == b""


def subscriber_of_zmtp(port: int) -> socket.socket:
    """A connection that has said what a SUB socket says first (ZeroMQ RFC 23)."""
    stranger = socket.create_connection(("127.0.0.1", port), DEADLINE)
    stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    stranger.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")
    said = b""
    while b"READY" not in said:  # what comes earlier breaks its handshake
        more = stranger.recv(1000)
        assert more
        said += more
    return stranger


def test_strangers_that_subscribe_to_everything_they_can_think_of() -> None:
    """libzmq remembers each subscription: beyond a thousand the socket is recreated, and nobody loses anything."""
    chance = random.Random(1)
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address, start="oldest") as sub,
    ):
        assert sub.wait_joined(DEADLINE)
        port = int(pub.live_address.rpartition(":")[2])
        used = []
        for i in range(12):
            # 20,000 subscriptions of 40 bytes are some 40 MB for libzmq.
            with contextlib.closing(subscriber_of_zmtp(port)) as stranger:
                for _ in range(20):
                    said = b"".join(b"\x00\x29\x01" + chance.randbytes(40) for _ in range(1000))
                    with contextlib.suppress(ConnectionError):
                        stranger.sendall(said)
                pub.publish("t", b"%d" % i)
                eventually(lambda i=i: pub.counters.live_renewed > i)
            used.append(psutil.Process().memory_info().rss)
        pub.publish("t", b"last")
        got = [event.data for event in itertools.takewhile(lambda e: e.data != b"last", sub.events(DEADLINE))]
        assert got == [b"%d" % i for i in range(12)]
        assert sub.ledger.account().lost == 0
        assert used[-1] - used[3] < 120 * 1024 * 1024, used
        assert pub.counters.live_errors == 0


def test_a_live_port_that_somebody_else_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is free again everything comes from the journal, and publishing goes on as always."""
    close = _Pub.close
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address, start="live") as sub,
        socket.socket() as thief,
    ):
        assert sub.wait_joined(DEADLINE)
        port = int(pub.live_address.rpartition(":")[2])
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def steal() -> bool:
            with contextlib.suppress(OSError):
                thief.bind(("127.0.0.1", port))
                thief.listen()
                return True
            return False

        def close_and_lose(live: _Pub) -> None:
            close(live)
            eventually(steal)

        monkeypatch.setattr(_Pub, "close", close_and_lose)
        with contextlib.closing(subscriber_of_zmtp(port)) as stranger:
            stranger.sendall(b"".join(b"\x00\x05\x01%04d" % i for i in range(2000)))
            eventually(lambda: pub.counters.live_renewed)
        monkeypatch.setattr(_Pub, "close", close)
        beats = pub.counters.beats
        for i in range(20):
            pub.publish("t", b"%d" % i)
        assert [event.data for event in itertools.islice(sub.events(DEADLINE), 20)] == [
            b"%d" % i for i in range(20)
        ]
        eventually(lambda: pub.counters.beats > beats + 3)
        assert (pub.counters.live_renewed, pub.counters.live_errors) == (1, 0)
        thief.close()
        live = sub.counters.live_frames

        def is_live() -> bool:
            pub.publish("t", b"again")
            return sub.receive(0.1) is not None and sub.counters.live_frames > live

        eventually(is_live, 60)
