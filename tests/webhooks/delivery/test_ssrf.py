"""The table of addresses that deliveries may not go to."""

import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.webhooks.delivery.ssrf import AddressGuard, AddressPolicy, parse_literal

GUARD = AddressGuard(AddressPolicy(schemes=("http", "https")))
BLOCKED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.254",
    "127.0.0.1",
    "127.1.2.3",
    "127.255.255.254",
    "169.254.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.254",
    "192.0.0.1",
    "192.0.0.170",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "192.168.255.255",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "127.1",
    "127.0.1",
    "0",
    "0x0",
    "00",
    "0xa9fea9fe",
    "2852039166",
    "0xA.1",
    "10.1",
    "3232235521",
    "192.168.257",
    "0300.0250.0.1",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:7f00:1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "64:ff9b:1:ffff::127.0.0.1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2002:0a00:0001::1",
    "3fff::1",
    "fc00::1",
    "fd00:ec2::254",
    "fdff::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "4000::1",
    "5f00::1",
    "2a00:1450::5efe:7f00:1",
    "2a00:1450::200:5efe:10.0.0.1",
    "[::1]",
    "[::ffff:127.0.0.1]",
]
OPEN = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.1",
    "93.184.216.34",
    "100.63.255.255",
    "100.128.0.1",
    "126.255.255.255",
    "128.0.0.1",
    "169.253.255.255",
    "172.15.255.255",
    "172.32.0.1",
    "192.167.255.255",
    "192.169.0.1",
    "198.17.255.255",
    "198.20.0.1",
    "223.255.255.255",
    "2606:4700:4700::1111",
    "2a00:1450:4001:82a::200e",
    "2001:4860:4860::8888",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2a00:1450::5efe:808:808",
    "134744072",
    "0x08080808",
]


def test_table_is_long_enough() -> None:
    """The table of forbidden forms has well over the sixty that are asked for."""
    assert len(set(BLOCKED)) >= 60


@pytest.mark.parametrize("address", BLOCKED)
def test_blocked(address: str) -> None:
    """Private, special, mapped, translated and oddly written addresses are refused."""
    assert GUARD.blocked(address)


@pytest.mark.parametrize("address", OPEN)
def test_open(address: str) -> None:
    """Public neighbours of the blocked ranges are not refused."""
    assert GUARD.blocked(address) is None


@pytest.mark.parametrize("address", BLOCKED)
def test_blocked_in_urls(address: str) -> None:
    """The same forms are refused as the host of a URL at registration."""
    host = f"[{address.strip('[]')}]" if ":" in address else address
    with pytest.raises(ConfigError):
        GUARD.check_url(f"https://{host}/hook")


@given(st.ip_addresses(v=4))
def test_wrapping_never_opens(address: ipaddress.IPv4Address) -> None:
    """An IPv4 address that is blocked stays blocked in every IPv6 form that carries it."""
    number = int(address)
    forms = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
        ipaddress.IPv6Address((0x2A001450 << 96) | (0x5EFE << 32) | number),
        ipaddress.IPv6Address(number),
    ]
    if GUARD.blocked(str(address)):
        assert all(GUARD.blocked(str(form)) for form in forms)
    assert GUARD.blocked(str(address)) == GUARD.blocked(str(number)) == GUARD.blocked(hex(number))


@given(st.ip_addresses(v=6))
def test_ipv6_outside_global_unicast_is_blocked(address: ipaddress.IPv6Address) -> None:
    """Nothing that Python itself calls private is open, and nothing outside of 2000::/3 except translations."""
    if GUARD.blocked(str(address)) is None:
        assert not address.is_loopback
        assert not address.is_link_local
        assert not address.is_multicast
        assert (
            address in ipaddress.IPv6Network("2000::/3")
            or address.ipv4_mapped
            or int(address) >> 96 == 0x64FF9B
        )


@given(st.text(max_size=30))
def test_never_raises(text: str) -> None:
    """Any text is either blocked, open or not an address; and a URL is fine or a ConfigError."""
    if parse_literal(text) is None:
        assert GUARD.blocked(text) == "not an address"
    for url in (text, f"https://{text}/", f"https://example.com/{text}"):
        with suppress(ConfigError):
            assert GUARD.check_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "ftp://example.com/",
        "file:///etc/passwd",
        "https://",
        "https://user:pw@example.com/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com/#x",
        "https://exa mple.com/",
        "https://example.com\\@127.0.0.1/",
        "https://example.com/\r\nX: y",
        "https://localhost/",
        "https://a.localhost./",
        "https://[::1",
        "https://example.com/" + "x" * 2100,
        "https://ex\u00e4mple.com/",
    ],
)
def test_urls_that_cannot_be_registered(url: str) -> None:
    """Other schemes, credentials, tricks of URL parsers, and local names are refused."""
    with pytest.raises(ConfigError):
        GUARD.check_url(url)


def test_policy_opens_and_closes() -> None:
    """The operator's allow-list opens exactly its networks, deny closes public ones, and http needs a word."""
    guard = AddressGuard(AddressPolicy(allow=("127.0.0.0/8",), deny=("8.8.8.0/24",)))
    assert guard.blocked("127.0.0.1") is None
    assert guard.blocked("::ffff:127.0.0.1") is None
    assert guard.blocked("10.0.0.1")
    assert guard.blocked("8.8.8.8")
    assert guard.blocked("::ffff:8.8.8.8")
    assert guard.check_url("https://localhost:8000/x")
    with pytest.raises(ConfigError):
        guard.check_url("http://127.0.0.1/")
    for bad in ({"allow": ("nonsense",)}, {"deny": ("1.2.3.4/99",)}, {"schemes": ("gopher",)}):
        with pytest.raises(ConfigError):
            AddressPolicy(**bad)  # type: ignore[arg-type]
