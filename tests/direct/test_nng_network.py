"""The sockets over NNG, bare: what a client says arrives, all of it or not at all."""

from brokerless.direct.address import parse
from brokerless.direct.nng_network import NngNetwork
from brokerless.losstest.ports import Ports

from .conftest import eventually


def test_a_burst_of_a_client_arrives_whole() -> None:
    """A worker that settles much at once: nothing of it is dropped on the way, which would cost a lease each."""
    network = NngNetwork()
    server = network.serve_control(parse("nng+tcp://127.0.0.1:0"))
    client = network.connect_control(server.address)
    try:
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
    finally:
        client.close()
        server.close()


def test_what_a_client_says_to_nobody_is_not_kept(ports: Ports) -> None:
    """The client is told, and says what counts when there is somebody: old questions do not come in a heap."""
    network = NngNetwork()
    address = parse(f"nng+tcp://127.0.0.1:{ports.take()}")
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
