"""Which requests a request server answers: session, allow-list, budgets, repeats. Pure: `now` is given."""

import hmac
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from brokerless.core.errors import ConfigError
from brokerless.core.rate_limit import TokenBucket
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.wire.moldudp64 import END_OF_SESSION, HEADER_BYTES, parse_header
from brokerless.multicast.wire.status import Requester, parse_requester

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


# A cookie is good for the minute in which it was made and the one after it.
_COOKIE_S = 60.0


class AdmittedRequest(NamedTuple):
    """A request that deserves an answer. `messages` 0: a question for the status.

    `proven`: the sender receives what is sent to its address. `current`: it is about the session that is served.
    """

    first: int
    messages: int
    proven: bool = False
    requester: Requester | None = None
    current: bool = True


class _Client:
    """What is remembered of one client: a host, whatever ports it asks from, so that a new port gains nothing."""

    __slots__ = ("bytes", "last", "last_at", "proven_until", "requests", "unproven_bytes")

    def __init__(self, policy: AnswerPolicy, now: float) -> None:
        self.requests = TokenBucket(policy.client_requests_s, policy.client_burst, now)
        # A burst is a tenth of a second, but at least one packet of the largest size.
        self.bytes = TokenBucket(policy.client_bytes_s, max(65_536, policy.client_bytes_s / 10), now)
        self.unproven_bytes = TokenBucket(policy.unproven_bytes_s, max(65_536, policy.unproven_bytes_s), now)
        self.proven_until = 0.0  # by a TCP connection
        self.last: dict[tuple[str, int, int, int], float] = {}  # by address, port, sequence and count
        self.last_at = now


class Admission:
    """Takes requests, and says which to answer. Everything refused is counted by its reason."""

    def __init__(
        self,
        policy: AnswerPolicy,
        *,
        allow: Iterable[str] | None,
        counters: RequestServerCounters,
        now: float,
        secret: bytes = b"",
    ) -> None:
        """`secret` is what cookies are made of: random, and known to nobody else."""
        self._secret = secret
        self.policy = policy
        self.counters = counters
        self._allow = None if allow is None else [parse_network(text) for text in allow]
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._unproven_bytes = TokenBucket(policy.unproven_total_bytes_s, policy.unproven_total_bytes_s, now)
        # Requests that are refused, and repeats, cost time, too: of everything twice the budget is read.
        self._reads = TokenBucket(2 * policy.total_requests_s, 2 * policy.total_burst, now)
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
    ) -> AdmittedRequest | None:
        """Look at one datagram from the request port."""
        counters = self.counters
        counters.requests += 1
        who = parse_requester(packet)
        header = parse_header(packet[:HEADER_BYTES]) if who or len(packet) == HEADER_BYTES else None
        if header is None or header.messages == END_OF_SESSION:
            counters.malformed += 1
            return None
        if not (header.messages or who) or not (header.sequence or not header.messages):
            counters.malformed += 1
            return None
        if not self.allowed(host):
            counters.refused_client += 1
            return None
        if header.messages and header.session != session:
            counters.refused_session += 1
            return None
        client = self._client(host, now)
        proven = now < client.proven_until
        if who is not None and not proven:
            proven = who.cookie != 0 and who.cookie in (
                self.cookie(host, port, now),
                self.cookie(host, port, now - _COOKIE_S),
            )
        wanted = (host, port, header.sequence, header.messages)
        if now - client.last.get(wanted, -1e9) < self.policy.repeat_window_s:
            counters.repeats += 1
            return None
        if not client.requests.take(1, now) or not self._requests.take(1, now):
            counters.refused_budget += 1
            return None
        if now - client.last_at > self.policy.repeat_window_s or len(client.last) > 4096:
            client.last.clear()
        client.last[wanted] = client.last_at = now
        return AdmittedRequest(header.sequence, header.messages, proven, who, header.session == session)

    def cookie(self, host: str, port: int, now: float) -> int:
        """What this address is given, to be sent back with its requests."""
        text = f"{host} {port} {int(now // _COOKIE_S)}".encode()
        return int.from_bytes(hmac.digest(self._secret, text, "sha256")[:8], "big") | 1

    def prove(self, host: str, now: float) -> None:
        """This address has a TCP connection with us: it receives what is sent to it."""
        self._client(host, now).proven_until = now + _COOKIE_S

    def pause_s(self, read: int, now: float) -> float:
        """How long to leave requests unread after so many were read, because the total budget is used up."""
        pause_s = self._reads.wait_s(read, now)
        self._reads.take(read, now + pause_s + 1e-6)  # beyond what rounding may lack
        return pause_s

    def spend(self, host: str, size: int, now: float, *, proven: bool = False) -> bool:
        """May so many bytes be sent to this client now? Counts a refusal."""
        client = self._client(host, now)
        if not proven and not (
            client.unproven_bytes.take(size, now) and self._unproven_bytes.take(size, now)
        ):
            self.counters.refused_unproven += 1
            return False
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
