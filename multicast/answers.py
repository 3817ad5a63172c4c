"""Which requests a request server answers: session, allow-list, budgets, repeats. Pure: `now` is given."""

import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from brokerless.core.errors import ConfigError
from brokerless.core.pace import TokenBucket
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.protocol import END_OF_SESSION, HEADER_BYTES, parse_header

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Grant(NamedTuple):
    """A request that deserves an answer."""

    first: int
    messages: int


class _Client:
    """What is remembered of one client: a host, whatever ports it asks from, so that a new port gains nothing."""

    __slots__ = ("bytes", "last", "last_at", "requests")

    def __init__(self, policy: AnswerPolicy, now: float) -> None:
        self.requests = TokenBucket(policy.client_requests_s, policy.client_burst, now)
        # A burst is a tenth of a second, but at least one packet of the largest size.
        self.bytes = TokenBucket(policy.client_bytes_s, max(65_536, policy.client_bytes_s / 10), now)
        self.last: dict[tuple[str, int, int, int], float] = {}  # by address, port, sequence and count
        self.last_at = now


class Desk:
    """Takes requests, and says which to answer. Everything refused is counted by its reason."""

    def __init__(
        self,
        policy: AnswerPolicy,
        *,
        allow: Iterable[str] | None,
        counters: RequestServerCounters,
        now: float,
    ) -> None:
        self.policy = policy
        self.counters = counters
        self._allow = None if allow is None else [parse_network(text) for text in allow]
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._requests = TokenBucket(policy.total_requests_s, policy.total_burst, now)
        self._bytes = TokenBucket(policy.total_bytes_s, max(65_536, policy.total_bytes_s / 10), now)

    def allowed(self, host: str) -> bool:
        """May this address ask at all?"""
        if self._allow is None:
            return True
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address.version == network.version and address in network for network in self._allow)

    def take(
        self, packet: bytes | memoryview, host: str, port: int, session: bytes, now: float
    ) -> Grant | None:
        """Look at one datagram from the request port; a Grant if it is to be answered."""
        counters = self.counters
        counters.requests += 1
        header = parse_header(packet) if len(packet) == HEADER_BYTES else None
        if header is None or not header.sequence or header.messages in (0, END_OF_SESSION):
            counters.malformed += 1
            return None
        if not self.allowed(host):
            counters.refused_client += 1
            return None
        if header.session != session:
            counters.refused_session += 1
            return None
        client = self._client(host, now)
        wanted = (host, port, header.sequence, header.messages)
        if now - client.last.get(wanted, -1e9) < self.policy.linger_s:
            counters.repeats += 1
            return None
        if not client.requests.take(1, now) or not self._requests.take(1, now):
            counters.refused_budget += 1
            return None
        if now - client.last_at > self.policy.linger_s or len(client.last) > 4096:
            client.last.clear()
        client.last[wanted] = client.last_at = now
        return Grant(header.sequence, header.messages)

    def spend(self, host: str, size: int, now: float) -> bool:
        """May so many bytes be sent to this client now? Counts a refusal."""
        client = self._client(host, now)
        if client.bytes.take(size, now) and self._bytes.take(size, now):
            return True
        self.counters.refused_budget += 1
        return False

    def fetch_wait_s(self, host: str, size: int, now: float) -> float:
        """How long a TCP fetch must wait before it may send so many bytes to this client; 0 takes them."""
        own = self._client(host, now).bytes
        wait = max(own.wait_s(size, now), self._bytes.wait_s(size, now))
        if wait <= 0:
            own.take(size, now)
            self._bytes.take(size, now)
        return wait

    def _client(self, host: str, now: float) -> _Client:
        name = network_of(host)
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= self.policy.max_clients:
                self._clients.popitem(last=False)
            client = self._clients[name] = _Client(self.policy, now)
        else:
            self._clients.move_to_end(name)
        return client


def network_of(host: str) -> str:
    """What budgets are counted by: an IPv4 address, or the /64 of an IPv6 one, which is a host's to choose from."""
    if ":" not in host:
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()


def parse_network(text: str) -> Network:
    """An address or network, as in `10.1.0.0/16`. Raises ConfigError."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError("allow", str(error)) from None
