"""The sockets over NNG, bare: what a client says arrives, all of it or not at all."""

from collections.abc import Iterator

import pytest

from brokerless.direct.address import parse_address
from brokerless.direct.io.base import CONTROL_QUEUE
from brokerless.direct.io.nng import NngNetwork, _Client, _PairServer
from brokerless.direct.protocol import messages
from brokerless.losstest.harness.ports import Ports

from ..conftest import eventually

Pair = tuple[_PairServer, _Client]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The two ends of a control connection."""
    network = NngNetwork()
    server = network.serve_control(parse_address("nng+tcp://127.0.0.1:0"))
    client = network.connect_control(server.address)
    yield server, client
    client.close()
    server.close()


def test_a_burst_of_a_client_arrives_whole(pair: Pair) -> None:
    """A worker that settles much at once: nothing of it is dropped on the way, which would cost a lease each."""
    server, client = pair
    eventually(lambda: client.send(b"first"))
    got: list[bytes] = []

    def received(count: int) -> bool:
        while (message := server.recv()) is not None:
            got.append(message[1])
        return len(got) >= count

    eventually(lambda: received(1))
    for round_ in range(20):
        got.clear()
        burst = [b"%d.%d" % (round_, i) + b"." * 20_000 for i in range(20)]
        assert all(client.send(message) for message in burst)
        eventually(lambda: received(20))
        assert got == burst


def test_a_burst_of_a_server_arrives_whole(pair: Pair) -> None:
    """As much as a queue may hold waits here until the client has read what is on its way; more is refused."""
    server, client = pair
    eventually(lambda: client.send(b"hello"))
    heard: list[tuple[bytes, bytes]] = []
    got: list[bytes] = []

    def hear() -> None:
        while (message := server.recv()) is not None:
            heard.append(message)

    def received(count: int) -> bool:
        hear()
        while (data := client.recv()) is not None:
            if data[:2] == messages.encode(messages.Ping())[:2]:
                ping = messages.decode_reply(data)
                assert isinstance(ping, messages.Ping)
                assert client.send(messages.encode(messages.Pong(ping.number)))
            else:
                got.append(data)
        return len(got) >= count

    eventually(lambda: hear() or heard)
    peer = heard[0][0]
    for round_ in range(10):
        burst = [b"%d.%d" % (round_, i) + b"." * 200_000 for i in range(CONTROL_QUEUE)]
        assert all(server.send(peer, message) for message in burst)
        assert not all(server.send(peer, b"%d more" % i) for i in range(CONTROL_QUEUE))
        client.send(messages.encode(messages.Pong(round_)))  # made up: brings nothing
        hear()
        eventually(lambda burst=burst: received(len(burst) + 1))
        window = server._windows[peer]
        eventually(lambda window=window: not received(1000) and window.sent - window.shown < 2)
        assert not window.backlog
        assert got[: len(burst)] == burst
        got.clear()


def test_what_a_client_says_to_nobody_is_not_kept(ports: Ports) -> None:
    """The client is told, and says what counts when there is somebody: old questions do not come in a heap."""
    network = NngNetwork()
    address = parse_address(f"nng+tcp://127.0.0.1:{ports.take()}")
    client = network.connect_control(address)
    try:
        assert not any(client.send(b"old") for _ in range(10))
        server = network.serve_control(address)
        try:
            eventually(lambda: client.send(b"new"))
            got: list[bytes] = []
            eventually(lambda: (message := server.recv()) is not None and (got.append(message[1]) or True))
            assert got == [b"new"]
            assert server.recv() is None
        finally:
            server.close()
        eventually(lambda: not client.send(b"lost"))
    finally:
        client.close()
