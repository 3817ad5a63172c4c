"""Transports are found by name, and mistakes are named."""

import importlib
from pathlib import Path

import pytest

from brokerless.core.errors import ConfigError
from brokerless.losstest import Promise, Traits, Transport, resolve, transport_names
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"link": "carrier-pigeon"}, "carrier-pigeon"),
        ({"max_rate": "fast"}, "max_rate"),
        ({"quiet_s": float("nan")}, "quiet_s must be"),
        ({"quiet_s": -1}, "quiet_s must be"),
        ({"ports": 10**6}, "ports must be"),
        ({"promises": {"kil": Promise("may", ("offline",))}}, "no scenario kil"),
        ({"without": ("lose",)}, "no scenario lose"),
        ({"promises": {"kill": Promise("may")}}, "needs its reasons"),
    ],
)
def test_traits_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs: a promise with no reason would allow every loss, and one with a misspelt name none."""
    (tmp_path / "strange_traits.py").write_text("transport = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("strange_traits")
    traits = Traits(**({"family": "x"} | changes))  # type: ignore[arg-type]
    module.transport = Transport("x", object, object, traits)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=said):
        resolve("strange_traits:transport")
