"""Discovery by SRV records, against a DNS server on loopback."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from brokerless.core import srv
from brokerless.core.errors import ConfigError
from brokerless.core.srv import SrvLookup
from brokerless.direct import Publisher, Subscriber

SERVICE = "_orders._tcp.shop.example"


class Server:
    """Answers from a table over UDP until it is closed; while `silent`, it says nothing."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.silent = False
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def service(self, *ports: int) -> None:
        """One target per port, all on this machine."""
        self.records[SERVICE + ".", "SRV"] = [f"0 0 {port} h{port}.shop.example." for port in ports]
        for port in ports:
            self.records[f"h{port}.shop.example.", "A"] = ["127.0.0.1"]

    def _run(self) -> None:
        while True:
            data, sender = self._socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            self.asked += 1
            question = query.question[0]
            kind = dns.rdatatype.to_text(question.rdtype)
            answer = dns.message.make_response(query)
            answer.flags |= dns.flags.AA
            found = self.records.get((question.name.to_text(), kind), [])
            if found:
                answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
            elif not any(name == question.name.to_text() for name, _ in self.records):
                answer.set_rcode(dns.rcode.NXDOMAIN)
            if not self.silent:
                self._socket.sendto(answer.to_wire(), sender)

    def close(self) -> None:
        host, _, port = self.address.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (host, int(port)))
        self._thread.join(20)
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def port_of(publisher: Publisher) -> int:
    return int(publisher.address.rpartition(":")[2])


def test_targets_come_and_go(server: Server, until: Callable[..., None]) -> None:
    """All targets with an address are found, a name without a record has none, and answers are kept for their time."""
    lookup = SrvLookup(f"{SERVICE}@{server.address}")
    assert lookup.targets() == {}
    server.service(1001, 1002)
    server.records[SERVICE + ".", "SRV"].append("0 0 1003 gone.shop.example.")
    until(lambda: len(lookup.targets()) == 2)
    assert lookup.targets() == {f"h{n}.shop.example:{n}": [f"tcp://127.0.0.1:{n}"] for n in (1001, 1002)}
    asked = server.asked
    assert lookup.targets()
    assert server.asked == asked
    server.service(1002)
    until(lambda: list(lookup.targets()) == ["h1002.shop.example:1002"])


def test_a_silent_server_changes_nothing(
    server: Server,
    until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was known stays, and the log says it once."""
    monkeypatch.setattr(srv, "TIMEOUT_S", 0.2)
    server.service(1001)
    lookup = SrvLookup(f"{SERVICE}@{server.address}")
    before = lookup.targets()
    assert before
    server.silent = True
    until(lambda: [lookup.targets(), caplog.records][1])
    assert lookup.targets() == before
    assert SERVICE in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "orders",
        "_orders._udp.example",
        "_orders._tcp..x",
        f"{SERVICE}@dns",
        f"{SERVICE}@::1",
    ],
)
def test_what_is_no_service_is_refused(text: str) -> None:
    """With an example of a right one."""
    with pytest.raises(ConfigError, match=r"_orders\._tcp\.shop\.example"):
        SrvLookup(text)


def test_publishers_are_followed_by_srv_records(
    server: Server, tmp_path: Path, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They appear, move and come back at another port with their journal; nothing is missed and nothing comes twice."""
    monkeypatch.setenv("BROKERLESS_PRESENCE", "off")
    got: dict[str, list[int]] = {"a": [], "b": []}

    def receive(wanted: int) -> None:
        while sum(map(len, got.values())) < wanted:
            event = sub.receive(timeout=60)
            got[event.source].append(int(event.data))

    with Subscriber(f"discover:srv:{SERVICE}@{server.address}", start="oldest") as sub:
        with Publisher("tcp://127.0.0.1:*", source="a", journal=tmp_path / "a") as a:
            first = port_of(a)
            a.publish("t", b"0")
            server.service(port_of(a))
            receive(1)
            with Publisher("tcp://127.0.0.1:*", source="b", journal=tmp_path / "b") as b:
                b.publish("t", b"0")
                server.service(port_of(a), port_of(b))
                receive(2)
                a.publish("t", b"1")
                receive(3)
        with Publisher("tcp://127.0.0.1:*", source="a", journal=tmp_path / "a") as moved:
            assert port_of(moved) != first
            moved.publish("t", b"2")
            server.service(port_of(moved))
            receive(4)
        assert got == {"a": [0, 1, 2], "b": [0]}
        assert sub.ledger.account().lost == 0
