"""SourceOwners that a constructor takes are names that the other side reads."""

import pytest

from brokerless.core import MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.protocol.messages import MAX_NAME, MAX_NAME_BYTES

DEADLINE = 20.0


@pytest.mark.parametrize("letter", ["n", "ü"])
def test_the_longest_names_work(letter: str) -> None:
    """A source, a group and a durable subscriber whose names are as long as they may be."""
    name = letter * min(MAX_NAME - 1, (MAX_NAME_BYTES - 1) // len(letter.encode()))
    with (
        Publisher("tcp://127.0.0.1:*", source=name + "s", journal=MemoryJournal()) as pub,
        Subscriber(pub.address, durable=name + "d", start="oldest") as sub,
        Worker(pub.address, group=name + "g") as worker,
    ):
        pub.publish("t", b"x")
        event, delivery = sub.receive(DEADLINE), worker.receive(DEADLINE)
        assert event is not None
        assert delivery is not None
        assert event.source == delivery.event.source == name + "s"


def test_longer_names_are_refused_by_the_constructor() -> None:
    """The limit is told at once, instead of a connection that never gets an answer."""
    name = "n" * (MAX_NAME + 1)
    journal = MemoryJournal()
    with pytest.raises(ConfigError, match=f"source.*{MAX_NAME}"):
        Publisher("tcp://127.0.0.1:*", source=name, journal=journal)
    with pytest.raises(ConfigError, match=f"group.*{MAX_NAME}"):
        Worker("tcp://127.0.0.1:1", group=name)
    with pytest.raises(ConfigError, match=f"durable.*{MAX_NAME}"):
        Subscriber("tcp://127.0.0.1:1", durable=name)
    with pytest.raises(ConfigError, match=f"group.*{MAX_NAME_BYTES}"):
        Worker("tcp://127.0.0.1:1", group="ü" * (MAX_NAME - 1))
