"""The relay on real sockets: what it swallows it writes down, what it passes arrives."""

import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import cell

from brokerless.core.errors import ConfigError
from brokerless.losstest import payload
from brokerless.losstest.mischief import Mischief
from brokerless.losstest.ports import Ports
from brokerless.losstest.relay import TcpRelay, UdpRelay
from brokerless.losstest.witness import Kind, Tail, Witness, read


def test_ports_are_not_given_twice(ports: Ports) -> None:
    """Two leasers on one machine never get the same port; a lease that ended can be had again."""
    other = Ports()
    taken = [ports.take() for _ in range(50)] + [other.take() for _ in range(50)]
    assert len(set(taken)) == 100
    other.close()


@given(seed=st.integers(0, 1000))
def test_mischief_is_a_function_of_the_seed(seed: int) -> None:
    """The same seed drops the same packets; about the proportion that was ordered."""

    def dropped() -> list[int]:
        mischief = Mischief(seed)
        mischief.order("loss 0.1")
        return [i for i in range(1000) if not mischief.delays(True)]

    assert dropped() == dropped()
    assert 50 < len(dropped()) < 160


def test_orders() -> None:
    """Each order has its effect, only in its direction; an unknown one is an error."""
    mischief = Mischief(1)
    assert mischief.delays(True) == mischief.delays(False) == [0.0]
    mischief.order("cut to")
    assert (mischief.delays(True), mischief.delays(False)) == ([], [0.0])
    mischief.order("cut from")
    assert (mischief.delays(True), mischief.delays(False)) == ([0.0], [])
    mischief.order("cut both")
    assert (mischief.delays(True), mischief.delays(False)) == ([], [])
    mischief.order("uncut")
    mischief.order("duplicate 1")
    assert (mischief.delays(True), mischief.delays(False)) == ([0.0, 0.0], [0.0])
    mischief.order("reorder 1 0.5")
    assert mischief.delays(True) == [0.5]
    mischief.order("burst 1 3")
    assert [mischief.delays(True) for _ in range(3)] == [[], [], []]
    with pytest.raises(ConfigError):
        mischief.order("explode")


class Pump:
    """Steps a relay in a thread until stopped."""

    def __init__(self, relay: UdpRelay | TcpRelay) -> None:
        self._relay, self._stop = relay, False
        self._steps = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._relay.step(0.005)
            self._steps += 1

    def obey(self) -> None:
        """Wait until a step that began after this call is over: orders given before are in force."""
        wanted, deadline = self._steps + 2, time.monotonic() + 60
        while self._steps < wanted:
            assert time.monotonic() < deadline, "the relay stands still"
            time.sleep(0.001)

    def stop(self) -> None:
        self._stop = True
        self._thread.join(5)
        self._relay.close()


def test_udp_loss_is_written_down(tmp_path: Path, ports: Ports) -> None:
    """Every event is either received or in the witness as swallowed, never both, and answers come back."""
    front, back = ports.take(), ports.take()
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    receiver.bind(("127.0.0.1", back))
    receiver.settimeout(0.5)
    witness = Witness(tmp_path / "relay.wit")
    mischief = Mischief(4)
    config = {"pairs": [(("127.0.0.1", front), ("127.0.0.1", back))], "connects": "producer"}
    mischief.order("loss 0.2")
    pump = Pump(UdpRelay(config, cell(), witness, mischief))
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
    swallowed = {r.n for r in read(tmp_path / "relay.wit").records if r.kind == Kind.SWALLOWED}
    assert got | swallowed == set(range(300))
    assert not got & swallowed
    assert 30 < len(swallowed) < 100
    sender.close()
    receiver.close()


def test_tcp_cut_holds_bytes_and_heals(ports: Ports, tmp_path: Path) -> None:
    """While cut nothing passes; afterwards everything comes, in order, and a closed end closes the other."""
    front, back = ports.take(), ports.take()
    server = socket.create_server(("127.0.0.1", back))
    mischief = Mischief(4)
    config = {"pairs": [(("127.0.0.1", front), ("127.0.0.1", back))], "connects": "producer"}
    pump = Pump(TcpRelay(config, cell(), Witness(tmp_path / "w"), mischief))
    client = socket.create_connection(("127.0.0.1", front), timeout=20)
    server.settimeout(20)
    peer, _ = server.accept()
    peer.settimeout(20)
    client.sendall(b"one")
    assert peer.recv(10) == b"one"
    mischief.order("cut to")
    pump.obey()
    client.sendall(b"two")
    peer.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peer.recv(10)
    peer.sendall(b"back")  # the other direction is open
    assert client.recv(10) == b"back"
    mischief.order("uncut")
    peer.settimeout(20)
    assert peer.recv(10) == b"two"
    client.close()
    assert peer.recv(10) == b""
    peer.close()
    server.close()
    pump.stop()
