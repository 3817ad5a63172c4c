"""The relay between two real sockets."""

import socket
import threading
import time
from pathlib import Path

import pytest
from evidence_builder import cell

from brokerless.losstest.evidence import payload
from brokerless.losstest.evidence.reader import Tail, read
from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.faults.impairment import Impairment
from brokerless.losstest.faults.relay import TcpRelay, UdpRelay
from brokerless.losstest.harness.ports import Ports


class Pump:
    """Steps a relay in a thread until stopped."""

    def __init__(self, relay: UdpRelay | TcpRelay) -> None:
        self._relay, self._stop = relay, False
        self._steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._relay.step(0.005)
            self._steps += 1

    def wait_for_step(self) -> None:
        """Wait until a step that began after this call is over: instructions given before are in force."""
        wanted, deadline = self._steps + 2, time.monotonic() + 60
        while self._steps < wanted:
            assert time.monotonic() < deadline, "the relay stands still"
            time.sleep(0.001)

    def stop(self) -> None:
        self._stop = True
        self._thread.join(5)
        self._relay.close()


def test_udp_loss_is_written_down(tmp_path: Path, ports: Ports) -> None:
    """Every event is either received or in the witness as dropped, never both, and answers come back."""
    front, back = ports.take(), ports.take()
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    receiver.bind(("127.0.0.1", back))
    receiver.settimeout(0.5)
    witness = Witness(tmp_path / "relay.wit")
    impairment = Impairment(4)
    config = {"pairs": [(("127.0.0.1", front), ("127.0.0.1", back))], "connects": "producer"}
    impairment.instruct("loss 0.2")
    pump = Pump(UdpRelay(config, cell(), witness, impairment))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    got = set()
    for n in range(300):
        sender.sendto(payload.encode(5, 0, n, 60), ("127.0.0.1", front))
    tail, accounted, deadline = Tail(tmp_path / "relay.wit"), 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data, where = receiver.recvfrom(2000)
        except TimeoutError:
            accounted += len(tail.poll())
            if len(got) + accounted >= 300:
                break
            continue
        tag = payload.decode(data)
        assert tag is not None
        got.add(tag.n)
    tail.close()
    receiver.sendto(b"answer", where)
    sender.settimeout(20)
    assert sender.recv(100) == b"answer"
    pump.stop()
    dropped = {r.n for r in read(tmp_path / "relay.wit").records if r.kind == Kind.DROPPED}
    assert got | dropped == set(range(300))
    assert not got & dropped
    assert 30 < len(dropped) < 100
    sender.close()
    receiver.close()


def test_tcp_cut_holds_bytes_and_heals(ports: Ports, tmp_path: Path) -> None:
    """While cut nothing passes; afterwards everything comes, in order, and a closed end closes the other."""
    front, back = ports.take(), ports.take()
    server = socket.create_server(("127.0.0.1", back))
    impairment = Impairment(4)
    config = {"pairs": [(("127.0.0.1", front), ("127.0.0.1", back))], "connects": "producer"}
    pump = Pump(TcpRelay(config, cell(), Witness(tmp_path / "w"), impairment))
    client = socket.create_connection(("127.0.0.1", front), timeout=20)
    server.settimeout(20)
    peer, _ = server.accept()
    peer.settimeout(20)
    client.sendall(b"one")
    assert peer.recv(10) == b"one"
    impairment.instruct("cut to")
    pump.wait_for_step()
    client.sendall(b"two")
    peer.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peer.recv(10)
    peer.sendall(b"back")  # the other direction is open
    assert client.recv(10) == b"back"
    impairment.instruct("uncut")
    peer.settimeout(20)
    assert peer.recv(10) == b"two"
    client.close()
    assert peer.recv(10) == b""
    peer.close()
    server.close()
    pump.stop()


def test_tcp_is_delayed_limited_and_reset(ports: Ports, tmp_path: Path) -> None:
    """Bytes come later, or no faster than the line; a reset is an error at both ends, and a new connection works."""
    front, back = ports.take(), ports.take()
    server = socket.create_server(("127.0.0.1", back))
    server.settimeout(20)
    impairment = Impairment(4)
    config = {"pairs": [(("127.0.0.1", front), ("127.0.0.1", back))], "connects": "producer"}
    relay = TcpRelay(config, cell(), Witness(tmp_path / "w"), impairment)
    pump = Pump(relay)

    def connected() -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(("127.0.0.1", front), timeout=20)
        peer, _ = server.accept()
        peer.settimeout(20)
        return client, peer

    def took(client: socket.socket, peer: socket.socket, data: bytes) -> float:
        began, left = time.monotonic(), len(data)
        client.sendall(data)
        while left:
            left -= len(peer.recv(65536))
        return time.monotonic() - began

    client, peer = connected()
    impairment.instruct("latency 0.2 0.01")
    assert took(client, peer, b"x") >= 0.19
    impairment.instruct("bandwidth 10000")
    assert took(client, peer, bytes(4000)) >= 0.39
    impairment.instruct("reset 1000")
    for sock in (client, peer):
        with pytest.raises(ConnectionResetError):
            while sock.recv(10):
                pass
        sock.close()
    impairment.instruct("pass")
    pump.wait_for_step()
    assert [what for what, _ in relay.connection_events] == ["connected", "reset"]
    client, peer = connected()
    assert took(client, peer, b"again") < 20
    client.close()
    peer.close()
    server.close()
    pump.stop()
