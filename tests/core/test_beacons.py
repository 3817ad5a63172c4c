"""Announcements on a LAN: only with the key, only fresh ones, and within bounds."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import beacons, presence
from brokerless.core.beacons import Neighbours, join_lan, reachable
from brokerless.core.errors import ConfigError
from brokerless.core.presence import Component

KEY = b"k" * 16
PUBLISHER = """
import sys
from brokerless.core.beacons import join_lan
from brokerless.direct import Publisher
lan = join_lan("127.0.0.1", key=b"k" * 16, group=sys.argv[1])
with Publisher("tcp://127.0.0.1:*", source="orders-1", journal=sys.argv[2]) as publisher:
    publisher.publish("t", b"before anybody heard")
    print(publisher.address, flush=True)
    sys.stdin.read()
lan.close()
"""


def component(**changes: object) -> Component:
    fields = {"kind": "direct.publisher", "name": "n", "addresses": ["tcp://10.0.0.1:5"], "id": "1", "pid": 7}
    return Component(**{**fields, "host": "there", **changes})  # type: ignore[arg-type]


@given(data=st.binary(max_size=200), at=st.integers(0, 200), flip=st.integers(1, 255))
def test_only_the_key_makes_beacons(data: bytes, at: int, flip: int) -> None:
    """Rubbish, another key and a changed byte are refused and counted; nothing raises."""
    heard = Neighbours(KEY, "here")
    good = beacons.encode(component(), KEY, 100.0)
    changed = bytearray(good)
    changed[at % len(good)] ^= flip
    for bad in (data, beacons.MARK + data, bytes(changed), beacons.encode(component(), b"x" * 16, 100.0)):
        heard.receive(bad, "10.0.0.1", 100.0, 1.0)
    assert (heard.refused, heard.components(1.0)) == (4, [])


def test_recorded_beacons_are_refused() -> None:
    """After a minute by their time; before that an older one changes nothing, and who left stays gone."""
    heard = Neighbours(KEY, "here")
    old = beacons.encode(component(name="old"), KEY, 100.0)
    heard.receive(beacons.encode(component(name="new"), KEY, 101.0), "10.0.0.1", 101.0, 1.0)
    heard.receive(old, "10.0.0.1", 101.0, 1.0)
    assert [c.name for c in heard.components(1.0)] == ["new"]
    heard.receive(beacons.encode(component(), KEY, 102.0, leaving=True), "10.0.0.1", 102.0, 1.0)
    assert heard.components(1.0) == []
    heard.receive(old, "10.0.0.1", 100.0 + beacons.CLOCK_WINDOW_S + 1, 1.0)
    assert heard.refused == 1


def test_silence_is_death_and_then_forgotten() -> None:
    """Three beacons may be lost."""
    heard = Neighbours(KEY, "here")
    heard.receive(beacons.encode(component(), KEY, 100.0), "10.0.0.1", 100.0, 0.0)
    assert [c.alive for c in heard.components(3.0)] == [True]
    assert [c.alive for c in heard.components(4.0)] == [False]
    assert heard.components(beacons.SILENCE_S + beacons.FORGET_S + 1) == []


def test_one_datagram_whatever_the_state() -> None:
    """A state that does not fit is cut to what discovery needs."""
    state = {"began": 5, "counters": {f"c{n}": n for n in range(500)}, "losses": ["x" * 50] * 50}
    data = beacons.encode(component(state=state), KEY, 1.0)
    assert len(data) <= beacons.MAX_BYTES
    beacon = beacons.decode(data, KEY, 1.0)
    assert beacon is not None
    assert beacon.component.state == {"began": 5}


@pytest.mark.parametrize(
    ("address", "same_host", "seen"),
    [
        ("tcp://10.0.0.1:5", False, "tcp://10.0.0.1:5"),
        ("tcp://0.0.0.0:5", False, "tcp://10.9.9.9:5"),
        ("nng+tcp://*:5", False, "nng+tcp://10.9.9.9:5"),
        ("tcp://127.0.0.1:5", False, None),
        ("tcp://127.0.0.1:5", True, "tcp://127.0.0.1:5"),
        ("tcp://localhost:5", False, None),
        ("ipc:///tmp/x", True, "ipc:///tmp/x"),
        ("ipc:///tmp/x", False, None),
        ("inproc://x", True, None),
    ],
)
def test_addresses_as_others_see_them(address: str, same_host: bool, seen: str | None) -> None:
    """A wildcard is the sender's address; what only its own machine can reach is left out."""
    assert reachable(address, "10.9.9.9", same_host=same_host) == seen


@pytest.mark.parametrize(
    ("interface", "key", "group"),
    [
        ("127.0.0.1", b"short", beacons.GROUP),
        ("localhost", KEY, beacons.GROUP),
        ("127.0.0.1", KEY, "10.0.0.1:5"),
        ("127.0.0.1", KEY, "239.255.1.1:x"),
        ("203.0.113.99", KEY, beacons.GROUP),
    ],
)
def test_bad_settings_are_refused(interface: str, key: bytes, group: str) -> None:
    """With the name of what is wrong; nothing is left open."""
    with pytest.raises(ConfigError):
        join_lan(interface, key=key, group=group)
    assert presence._process.lan is None


@pytest.fixture
def group() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"239.255.83.54:{reserved.getsockname()[1]}"


def test_a_publisher_elsewhere_is_found(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """Two processes that share no directory, only a key: the subscriber finds the publisher, and notices its end."""
    from brokerless.direct import Subscriber

    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "theirs"))
    lan = join_lan("127.0.0.1", key=KEY, group=group)
    command = [sys.executable, "-c", PUBLISHER, group, str(tmp_path / "j")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "ours"))
        with Subscriber("discover:orders-?", start="oldest") as subscriber:
            event = subscriber.receive(timeout=30)
            assert event is not None
            assert event.data == b"before anybody heard"
            (found,) = presence.matching("orders-*", ["direct.publisher"])
            assert found.addresses[0] == address
        child.communicate("", timeout=30)
        until(lambda: presence.matching("*", ["direct.publisher"]) == [])
    finally:
        child.kill()
        child.communicate()
        lan.close()
    assert lan.refused == 0
