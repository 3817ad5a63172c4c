"""Why a publisher does not answer is said at the client: wrong key, wrong library, nobody there, no live port."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from brokerless.core import MemoryJournal
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber, Worker
from brokerless.direct.address import parse_address
from brokerless.direct.io.diagnosis import diagnose

from ..conftest import eventually

DEADLINE = 30.0


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def listening(first: bytes) -> Iterator[str]:
    """Something else that listens, and says this."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(first)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_what_listens_is_named() -> None:
    """Each kind of wrong address or key has its own sentence."""
    keys = KeyPair.new()
    with (
        Publisher("tcp://127.0.0.1:*", source="plain") as plain,
        Publisher("nng+tcp://127.0.0.1:0", source="nng") as nng,
        Publisher("tcp://127.0.0.1:*", source="curve", curve=ServerKeys(keys)) as curve,
        listening(b"HTTP/1.1 400 Bad Request\r\n") as other,
    ):
        found = {
            "nobody": diagnose(parse_address(f"tcp://127.0.0.1:{closed_port()}"), curve=False),
            "nng": diagnose(parse_address(nng.address.removeprefix("nng+")), curve=False),
            "zmq": diagnose(parse_address("nng+" + plain.address), curve=False),
            "needs": diagnose(parse_address(curve.address), curve=False),
            "plain": diagnose(parse_address(plain.address), curve=True),
            "key": diagnose(parse_address(curve.address), curve=True),
            "live": diagnose(parse_address(plain.live_address), curve=False),
            "other": diagnose(parse_address(other), curve=False),
        }
    assert found["nobody"] == "nobody listens there"
    assert "use nng+tcp://" in found["nng"]
    assert "it speaks ZeroMQ" in found["zmq"]
    assert "needs CURVE keys" in found["needs"]
    assert "does not use CURVE" in found["plain"]
    assert "refuses us" in found["key"]
    assert "not a live port" in found["live"]
    assert "something else" in found["other"]


@pytest.mark.parametrize("kind", ["subscriber", "worker"])
def test_a_wrong_key_is_told_at_the_client(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client with the wrong server key does not wait in silence: `unanswered` and the log say why."""
    wrong = ClientKeys(KeyPair.new(), KeyPair.new().public)
    with Publisher("tcp://127.0.0.1:*", source="p", curve=ServerKeys(KeyPair.new())) as pub:
        client: Subscriber | Worker = (
            Subscriber(pub.address, curve=wrong)
            if kind == "subscriber"
            else Worker(pub.address, group="g", curve=wrong)
        )
        with client, caplog.at_level(logging.WARNING):
            eventually(lambda: client.receive(0.05) is None and client.unanswered, DEADLINE)
            assert "its key is not the one we were given" in client.unanswered[pub.address]
            assert "does not answer" in caplog.text


def test_an_answer_ends_the_complaint() -> None:
    """A publisher that comes later is followed, and nothing is left in `unanswered`."""
    address = f"tcp://127.0.0.1:{closed_port()}"
    with Subscriber(address) as sub:
        eventually(lambda: sub.receive(0.05) is None and sub.unanswered, DEADLINE)
        assert sub.unanswered == {address: "nobody listens there"}
        with Publisher(address, source="p", journal=MemoryJournal()) as pub:
            assert sub.wait_joined(DEADLINE)
            pub.publish("t", b"x")
            assert sub.receive(DEADLINE) is not None
            eventually(lambda: sub.receive(0.05) is None and not sub.unanswered, DEADLINE)


def test_a_live_stream_that_cannot_be_reached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """WELCOME names a port where nobody is: events come by replay, and the log and a counter say so."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal(), heartbeat_s=0.05) as pub:
        pub._control_server._live = str(closed_port())
        with Subscriber(pub.address, start="oldest") as sub, caplog.at_level(logging.WARNING):
            pub.publish("t", b"x")
            eventually(lambda: sub.receive(0.05) is not None, DEADLINE)
            eventually(lambda: sub.receive(0.05) is None and sub.counters.live_unreachable, DEADLINE)
            assert "its live stream" in caplog.text
