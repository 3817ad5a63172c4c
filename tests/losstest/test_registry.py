"""Transports are found by name, and mistakes are named."""

import pytest

from brokerless.core.errors import ConfigError
from brokerless.losstest import resolve, transport_names
from brokerless.losstest.harness.scenarios import SCENARIOS


def test_every_transport_resolves_and_promises_only_what_exists() -> None:
    """Names are unique, promises are about real scenarios and real reasons, and every one has a summary."""
    names = transport_names()
    assert len(names) == len(set(names))
    for name in names:
        traits = resolve(name).traits
        assert set(traits.promises) <= set(SCENARIOS), name
        assert traits.summary, name
        assert set(traits.without) <= set(SCENARIOS), name


@pytest.mark.parametrize("name", ["missing:", ":x", "json:nothing", "json:loads", "/nowhere/x.py:t"])
def test_bad_plugins_are_named(name: str) -> None:
    """What is not a transport is refused with its name."""
    with pytest.raises(ConfigError, match=name.partition(":")[0] or "x"):
        resolve(name)
