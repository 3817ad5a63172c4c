"""Which addresses deliveries may go to: an explicit table, no look-ups, no sockets.

`names.py`, `client.py` and `proxy.py` ask it, before a look-up's result is used and where a socket is made.

`ipaddress`' own `is_global` is not enough: it answers differently between Python versions, and it looks neither into
translated forms (64:ff9b::7f00:1 is 127.0.0.1 behind a NAT64) nor at tunnels.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.webhooks.rules import MAX_URL

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_BLOCKED_V4 = [
    (ipaddress.IPv4Network(network), rule)
    for network, rule in (
        ("0.0.0.0/8", "this network"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local, cloud metadata"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "IETF protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.31.196.0/24", "AS112"),
        ("192.52.193.0/24", "AMT"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "AS112"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved, broadcast"),
    )
]
# Everything outside of 2000::/3 is blocked, so only exceptions inside of it are listed.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_BLOCKED_V6 = [
    (ipaddress.IPv6Network(network), rule)
    for network, rule in (
        ("2001::/23", "IETF protocol assignments, Teredo, ORCHID"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("2620:4f:8000::/48", "AS112"),
        ("3ffe::/16", "6bone, withdrawn"),
        ("3fff::/20", "documentation"),
    )
]
# A cloud provider's own addresses that are not in any private range.
_METADATA = {
    ipaddress.ip_address("168.63.129.16"): "cloud platform",
    ipaddress.ip_address("100.100.100.200"): "cloud metadata",
}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_V4_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
# ISATAP: interface identifiers ::0:5efe:a.b.c.d and ::200:5efe:a.b.c.d carry an IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


class AddressPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator opens (`allow`) or closes (`deny`) beside the table, as networks; `allow` wins.

    `schemes` is https alone by default: webhooks carry signed business data over other people's networks.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ("https",)

    def __post_init__(self) -> None:
        _networks("allow", self.allow)
        _networks("deny", self.deny)
        if not self.schemes or set(self.schemes) - {"http", "https"}:
            raise ConfigError("schemes", "must be 'https', 'http' or both")


class AddressGuard:
    """The table and a policy, compiled."""

    def __init__(self, policy: AddressPolicy) -> None:
        self.policy = policy
        self._allow = _networks("allow", policy.allow)
        self._deny = _networks("deny", policy.deny)

    def blocked(self, address: str) -> str | None:
        """The rule that forbids this literal address, or None: it may be connected to."""
        parsed = parse_literal(address)
        if parsed is None:
            return "not an address"
        embedded = _embedded(parsed)
        for candidate in (parsed, embedded):
            if candidate is not None and any(candidate in network for network in self._allow):
                return None
        for candidate in (parsed, embedded):
            if candidate is not None and any(candidate in network for network in self._deny):
                return "denied by the operator"
        return _rule(parsed)

    def check_url(self, url: str) -> str:
        """Return the URL if it may be registered, else ConfigError. Names are looked at again when connecting."""
        problem = _url_problem(url, self.policy.schemes)
        if problem is None:
            host = urlsplit(url).hostname or ""
            if parse_literal(host) is not None:
                rule = self.blocked(host)
                problem = f"the address {host} is not allowed ({rule})" if rule else None
            elif host.rstrip(".") == "localhost" or host.rstrip(".").endswith(".localhost"):
                rule = self.blocked("127.0.0.1")
                problem = f"the host {host} is not allowed ({rule})" if rule else None
        if problem is not None:
            raise ConfigError("url", problem)
        return url


def parse_literal(host: str) -> Address | None:
    """The address that a resolver makes of a literal, also in the decimal, octal, hex and short forms."""
    text = host.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        pass
    try:
        # The C library's own rules, which getaddrinfo applies too: 2130706433, 0x7f.1, 0177.0.0.1.
        return ipaddress.IPv4Address(socket.inet_aton(text))
    except (OSError, UnicodeEncodeError, ValueError):
        return None


def _rule(address: Address) -> str | None:
    if address in _METADATA:
        return _METADATA[address]
    if isinstance(address, ipaddress.IPv4Address):
        return next((rule for network, rule in _BLOCKED_V4 if address in network), None)
    if address in _V4_MAPPED or address in _NAT64:
        embedded = _embedded(address)
        return "translated: " + rule if embedded is not None and (rule := _rule(embedded)) else None
    if address not in _GLOBAL_V6:
        return "not a global IPv6 address"
    rule = next((rule for network, rule in _BLOCKED_V6 if address in network), None)
    if rule is None and (embedded := _embedded(address)) is not None and (inner := _rule(embedded)):
        return "tunnelled: " + inner
    return rule


def _embedded(address: Address) -> Address | None:
    """The IPv4 address inside a mapped, NAT64, 6to4 or ISATAP address."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    number = int(address)
    if address in _V4_MAPPED or address in _NAT64 or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return address.sixtofour


def _networks(field: str, texts: Sequence[str]) -> list[Network]:
    try:
        return [ipaddress.ip_network(text) for text in texts]
    except ValueError as error:
        raise ConfigError(field, str(error)) from None


def _url_problem(url: str, schemes: Sequence[str]) -> str | None:
    if len(url) > MAX_URL:
        return f"has {len(url)} characters, the limit is {MAX_URL}"
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        return "must be printable ASCII without spaces or backslashes (encode other characters)"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in schemes:
        return f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    if not parts.hostname:
        return "has no host"
    if "@" in parts.netloc:
        return "must not contain a user name or password (use the headers field)"
    if "#" in url:
        return "must not contain a fragment"
    if port == 0:
        return "port 0 cannot be connected to"
    return None
