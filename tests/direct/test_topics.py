"""Topics of groups: patterns that the publisher applies, and what it refuses."""

import pytest

from brokerless.core import MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import Publisher, Worker
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol.messages import Policy

DEADLINE = 30.0


def test_a_group_gets_what_matches_its_patterns(address: str) -> None:
    """The others are skipped, and the group's accounting balances."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", topics=["orders.*", "prefix:sto"]) as worker,
    ):
        for topic in ("orders.eu", "orders.eu.paid", "stock", "orders", "orders.us"):
            pub.publish(topic, topic.encode())
        got = []
        for delivery in worker.deliveries(DEADLINE):
            got.append(delivery.event.topic)
            delivery.ack()
            if len(got) == 3:
                break
        assert got == ["orders.eu", "stock", "orders.us"]
        assert pub.groups()["g"].balanced


def test_a_publisher_refuses_patterns_that_match_nothing() -> None:
    """Whatever a client says, the group is not made, and one that is there stays as it is."""
    coordinator = GroupCoordinator(MemoryJournal(source="p"), None, GroupStore(None))
    with pytest.raises(ConfigError):
        coordinator.join("g", "w", Policy(topics=("a**",)), "oldest", 1)
    assert not coordinator.groups
    coordinator.join("g", "w", Policy(topics=("a.*",)), "oldest", 1)
    with pytest.raises(ConfigError):
        coordinator.join("g", "w", Policy(topics=("prefix:*",)), "oldest", 1)
    assert coordinator.groups["g"].policy.topics == ("a.*",)
