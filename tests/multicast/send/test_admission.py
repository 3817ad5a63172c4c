"""Which requests are answered."""

import pytest

from brokerless.core.errors import ConfigError
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.send.admission import Admission, AdmittedRequest
from brokerless.multicast.wire.moldudp64 import end_of_session, heartbeat, request

SESSION = b"ORDERS0001"


def admission(allow: list[str] | None = None, **policy: float) -> tuple[Admission, RequestServerCounters]:
    counters = RequestServerCounters()
    return Admission(AnswerPolicy(**policy), allow=allow, counters=counters, now=0.0), counters  # type: ignore[arg-type]


def test_a_request_is_granted_and_nonsense_is_not() -> None:
    """Right session, a number of messages, a sequence from 1: granted; the rest is counted by its fault."""
    d, c = admission()
    assert d.take(request(SESSION, 5, 3), "10.0.0.1", 1, SESSION, 0.0) == AdmittedRequest(5, 3)
    for packet in (
        b"",
        heartbeat(SESSION, 5),
        end_of_session(SESSION, 5),
        request(SESSION, 0, 1),
        request(SESSION, 5, 3) + b"x",
    ):
        assert d.take(packet, "10.0.0.1", 1, SESSION, 1.0) is None
    assert c.malformed == 5
    assert d.take(request(b"OTHER00001", 5, 3), "10.0.0.1", 1, SESSION, 1.0) is None
    assert c.refused_session == 1


def test_a_repeat_within_the_linger_is_not_answered_twice() -> None:
    """The same request of the same client; another client, or later, is another matter."""
    d, c = admission(repeat_window_s=0.01)
    packet = request(SESSION, 5, 3)
    assert d.take(packet, "10.0.0.1", 1, SESSION, 0.0)
    assert d.take(packet, "10.0.0.1", 1, SESSION, 0.005) is None
    assert d.take(packet, "10.0.0.2", 1, SESSION, 0.005)
    assert d.take(packet, "10.0.0.1", 1, SESSION, 0.02)
    assert c.repeats == 1


def test_budgets_hold_for_each_client_and_for_all() -> None:
    """One client gets its burst and no more; many clients together get the total."""
    d, c = admission(
        client_requests_s=10, client_burst=5, total_requests_s=100, total_burst=12, repeat_window_s=0
    )
    granted = [
        sum(d.take(request(SESSION, 1 + i, 1), host, 1, SESSION, 0.0) is not None for i in range(20))
        for host in "abcd"
    ]
    assert granted == [5, 5, 2, 0]
    assert c.refused_budget == 80 - 12
    assert d.take(request(SESSION, 99, 1), "a", 1, SESSION, 1.0)
    d, c = admission(client_bytes_s=100_000)
    assert d.spend("a", 60_000, 0.0)
    assert not d.spend("a", 60_000, 0.0)
    assert d.spend("a", 60_000, 1.0)


def test_a_new_port_or_address_of_the_same_host_is_no_new_budget() -> None:
    """Whoever asks from many ports, or from many addresses of one IPv6 network, is one client."""
    for ask_from in (
        lambda i: ("10.0.0.1", i),
        lambda i: (f"fd77::{i:x}", 1),
        lambda i: (f"fe80::{i:x}%lo", i),
    ):
        d, c = admission(client_requests_s=10, client_burst=5)
        taken = [d.take(request(SESSION, 1, 1), *ask_from(i), SESSION, 0.0) for i in range(1, 101)]
        assert sum(admitted is not None for admitted in taken) == 5
        assert c.refused_budget == 95
    d, _ = admission(client_bytes_s=100_000)
    assert d.fetch_wait_s("10.0.0.1", 60_000, 0.0) == 0, "by TCP"
    assert d.fetch_wait_s("10.0.0.1", 60_000, 0.0) > 0
    assert not d.spend("10.0.0.1", 60_000, 0.0), "and by datagram: the same budget"
    assert d.fetch_wait_s("10.0.0.2", 60_000, 0.0) == 0


def test_only_allowed_addresses_are_answered() -> None:
    """Addresses and networks, IPv4 and IPv6; a wrong entry is refused when it is given."""
    d, c = admission(["10.1.0.0/16", "::1"])
    packet = request(SESSION, 1, 1)
    assert d.take(packet, "10.1.2.3", 1, SESSION, 0.0)
    assert d.take(packet, "::1", 1, SESSION, 0.0)
    for host in ("10.2.0.1", "fe80::1%lo", "nonsense"):
        assert d.take(packet, host, 1, SESSION, 0.0) is None
    assert c.refused_client == 3
    with pytest.raises(ConfigError):
        admission(["10.1.0.0/33"])


def test_clients_are_forgotten_beyond_the_bound() -> None:
    """A flood from forged addresses cannot fill memory."""
    d, _ = admission(max_clients=100)
    for i in range(1000):
        d.take(request(SESSION, 1, 1), f"10.0.{i // 250}.{i % 250}", i, SESSION, i * 0.001)
    assert len(d._clients) <= 100
    for i in range(20_000):
        d.take(request(SESSION, 1 + i, 1), "10.0.0.1", 1, SESSION, 1.0 + i * 0.0002)
    assert len(d._client("10.0.0.1", 9.0).last) <= 4097
