"""Discovery: what to do about a name, and that a look finds who is there."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import discovery, presence
from brokerless.core.discovery import Action, Discovery, Found, decide
from brokerless.core.errors import ConfigError

ADDRESSES = st.sampled_from(["tcp://h:1", "tcp://h:2", "tcp://h:3"])
FOUND = st.lists(st.builds(Found, st.just("n"), ADDRESSES, st.floats(0, 9)), max_size=4)


@given(current=st.none() | ADDRESSES, answers=st.booleans(), found=FOUND)
def test_decisions(current: str | None, answers: bool, found: list[Found]) -> None:
    """Who answers is never left for nothing, who is announced is connected to, and a decision is taken once."""
    action, where = decide(current, answers, found)
    announced = {each.address for each in found}
    if current in announced or (current is None and not found):
        assert action is Action.NOTHING
    elif found:
        assert action is Action.CONNECT
        assert where is not None
        assert where.started == max(each.started for each in found)
        assert decide(where.address, answers, found)[0] is Action.NOTHING
    else:
        assert (action is Action.DISCONNECT) == (not answers)


@pytest.mark.parametrize("address", ["discover:", "discover://orders"])
def test_an_address_without_a_name_is_refused(address: str) -> None:
    """With an example of a right one."""
    with pytest.raises(ConfigError, match=r"discover:orders-\*"):
        discovery.pattern_of(address)


def test_other_addresses_are_none_of_its_business() -> None:
    """Only the scheme tells."""
    assert discovery.pattern_of("tcp://h:1") is None
    assert discovery.pattern_of("discover:orders-*") == "orders-*"


def test_components_come_and_go(tmp_path: Path, until: Callable[..., None]) -> None:
    """By name and kind, with where their process began; changes are told."""
    changes = threading.Event()
    first = presence.announce(
        "direct.publisher", "orders-1", ["tcp://h:1"], lambda: {"began": 7}, directory=tmp_path / "p"
    )
    until(lambda: presence.present(tmp_path / "p"))
    found = Discovery(["orders-*"], ["direct.publisher"], changes.set, directory=tmp_path / "p", every_s=0.01)
    try:
        assert [each.since_start for each in found.found["orders-1"]] == [7]
        others = [
            presence.announce(kind, name, [address], dict, directory=tmp_path / "p")
            for kind, name, address in (
                ("direct.publisher", "orders-2", "tcp://h:2"),
                ("direct.publisher", "bills", "tcp://h:3"),
                ("direct.worker", "orders-3", "tcp://h:4"),
                ("direct.publisher", "orders-4", "inproc://here"),
            )
        ]
        until(lambda: set(found.found) == {"orders-1", "orders-2", "orders-4"})
        assert changes.is_set()
        for each in others:
            each.close()
        until(lambda: set(found.found) == {"orders-1"})
    finally:
        found.close()
        first.close()
    assert not any(thread.name == "discovery" for thread in threading.enumerate())


def test_it_needs_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are switched off nothing would ever be found: that is an error."""
    monkeypatch.setenv(presence.ENVIRONMENT, "off")
    with pytest.raises(ConfigError, match="BROKERLESS_PRESENCE"):
        Discovery(["*"], ["direct.publisher"], lambda: None)


def test_inproc_is_for_this_process() -> None:
    """Nobody else can connect to it."""
    component = presence.Component(kind="k", name="n", addresses=["inproc://x"], pid=os.getpid())
    assert discovery._found(component) is not None
    component.pid += 1
    assert discovery._found(component) is None
