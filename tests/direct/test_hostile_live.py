"""Strangers on the live socket: what they say there costs the publisher nothing."""

import contextlib
import socket
import struct
from collections.abc import Callable

import pytest
import zmq

from brokerless.core import MemoryJournal
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber

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
