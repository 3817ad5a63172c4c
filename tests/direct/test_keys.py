"""CURVE: keys, files, and that a client without an allowed key gets nothing."""

import stat
from pathlib import Path

import pytest

from brokerless.core import MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber, Worker, load_public

from .conftest import eventually

DEADLINE = 20.0


def test_keys_are_saved_and_loaded(tmp_path: Path) -> None:
    """What is saved is loaded; the secret is for its owner only and is never overwritten nor shown."""
    pair = KeyPair.new()
    secret, public = pair.save(tmp_path / "k")
    assert KeyPair.load(secret) == pair
    assert load_public(public) == load_public(secret) == pair.public
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert pair.secret.decode() not in repr(pair)
    with pytest.raises(ConfigError, match="never overwritten"):
        pair.save(tmp_path / "k")
    with pytest.raises(ConfigError, match="secret"):
        KeyPair.load(public)
    with pytest.raises(ConfigError):
        KeyPair.load(tmp_path / "nothing")
    for wrong in (b"short", b"x" * 39 + b"\n", "ü" * 40):
        with pytest.raises(ConfigError):
            ClientKeys(pair, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="CURVE"):
        Publisher("nng+tcp://127.0.0.1:0", source="p", curve=ServerKeys(pair))


def test_only_allowed_clients_get_anything() -> None:
    """An allowed client works; one with another key, and one without any, gets not a single byte of ours."""
    server, friend, stranger = KeyPair.new(), KeyPair.new(), KeyPair.new()
    with Publisher(
        "tcp://127.0.0.1:*",
        source="p",
        journal=MemoryJournal(),
        curve=ServerKeys(server),
        allow=[friend.public],
    ) as pub:
        pub.publish("secret.topic", b"secret data")
        with (
            Subscriber(pub.address, start="oldest", curve=ClientKeys(friend, server.public)) as sub,
            Worker(pub.address, group="g", curve=ClientKeys(friend, server.public)) as worker,
        ):
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"secret data"
            assert sub.wait_joined(DEADLINE)
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.ack()
        eventually(lambda: not pub._control_server.sessions)  # all that they said has been heard
        greeted = pub._control_server.counters.hellos
        for keys in (ClientKeys(stranger, server.public), ClientKeys(friend, stranger.public), None):
            with Subscriber(pub.address, start="oldest", curve=keys) as sub:
                assert sub.receive(0.7) is None
                # The first one is asked for its key; the others do not get so far.
                eventually(
                    lambda sub=sub: sub.receive(0.01) is None and pub._control_server.counters.denied > 0
                )
                assert sub.connected == 0
                assert sub.counters.joins == 0
                assert not list(sub.ledger.streams())
        assert pub._control_server.counters.hellos == greeted


def test_without_a_list_every_client_with_the_servers_key_may_come() -> None:
    """allow=None: knowing the server's public key is enough; not knowing it is not."""
    server = KeyPair.new()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal(), curve=ServerKeys(server)) as pub:
        pub.publish("t", b"x")
        with Subscriber(pub.address, start="oldest", curve=ClientKeys(KeyPair.new(), server.public)) as sub:
            assert sub.receive(DEADLINE) is not None
        with Subscriber(pub.address, start="oldest") as sub:
            assert sub.receive(0.5) is None
