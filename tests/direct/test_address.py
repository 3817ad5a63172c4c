"""Addresses: what is accepted, and what an error says."""

import pytest

from brokerless.core.errors import ConfigError, PeerError
from brokerless.direct.address import Address, live_bind, live_connect, live_hint, parse_address


@pytest.mark.parametrize(
    ("text", "library", "scheme", "local"),
    [
        ("tcp://127.0.0.1:5556", "zmq", "tcp", True),
        ("tcp://localhost:*", "zmq", "tcp", True),
        ("tcp://[::1]:0", "zmq", "tcp", True),
        ("tcp://0.0.0.0:1", "zmq", "tcp", False),
        ("tcp://*:1", "zmq", "tcp", False),
        ("tcp://example.org:1", "zmq", "tcp", False),
        ("ipc:///tmp/x", "zmq", "ipc", True),
        ("inproc://x", "zmq", "inproc", True),
        ("nng+tcp://10.0.0.1:5", "nng", "tcp", False),
        ("nng+ipc://x", "nng", "ipc", True),
    ],
)
def test_addresses_are_understood(text: str, library: str, scheme: str, local: bool) -> None:
    """Library, scheme and whether it leaves the machine; the text comes back."""
    address = parse_address(text)
    assert (address.library, address.scheme, address.local) == (library, scheme, local)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5556",
        "tcp://",
        "tcp://host",
        "tcp://:1",
        "tcp://::1:5",
        "tcp://h:99999",
        "tcp://h:-1",
        "udp://h:1",
        "http://h:1",
        "nng+udp://h:1",
        "ipc://" + "x" * 120,
        "tcp://h:٣",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    """Anything else raises ConfigError that names the field."""
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert caught.value.field == "address"


def test_a_live_address_keeps_the_host_that_the_client_reached() -> None:
    """WELCOME's hint is a port for tcp, so that a publisher bound to 0.0.0.0 or behind a name is found."""
    bound = parse_address("tcp://0.0.0.0:5556")
    assert live_bind(bound) == Address("zmq", "tcp", "0.0.0.0:0")
    assert live_hint(parse_address("tcp://0.0.0.0:7000")) == "7000"
    assert str(live_connect(parse_address("tcp://[fe80::1]:5556"), "7000")) == "tcp://[fe80::1]:7000"
    assert str(live_connect(parse_address("ipc:///a"), "/a.live")) == "ipc:///a.live"


@pytest.mark.parametrize("hint", ["evil.example:80", "0", "70000", "", "-1"])
def test_a_hint_cannot_lead_elsewhere(hint: str) -> None:
    """A hostile publisher cannot send its clients to another host."""
    with pytest.raises(PeerError):
        live_connect(parse_address("tcp://h:1"), hint)


@pytest.mark.parametrize("hint", ["/run/other.sock", "", "/run/", "/run/a", "/run/a" + "x" * 107, "/run/a\0"])
def test_a_hint_cannot_lead_to_the_socket_of_another_program(hint: str) -> None:
    """Beside the control socket, and named after it."""
    with pytest.raises(PeerError):
        live_connect(parse_address("ipc:///run/a"), hint)


def test_a_live_socket_is_looked_for_where_the_client_found_the_control_socket() -> None:
    """The publisher may know the directory by another name, or have been started in it."""
    for hint in ("/run/a.live", "a.live", "/mnt/elsewhere/a.live"):
        assert str(live_connect(parse_address("ipc:///run/a"), hint)) == "ipc:///run/a.live"
    assert str(live_connect(parse_address("ipc://a"), "/run/a.live")) == "ipc://a.live"
    assert str(live_connect(parse_address("nng+ipc://@a"), "@a.live")) == "nng+ipc://@a.live"
