"""A relay in user space between the two ends of a transport: the network's faults, without privileges.

Datagrams are dropped, delayed or doubled one by one, and every event number that was dropped is written
down. TCP cannot lose single packets: a cut holds the bytes back, as the network would until it heals.
"""

import contextlib
import heapq
import selectors
import socket
import struct
import time
from typing import Any

from brokerless.losstest.evidence import counter_digits, payload
from brokerless.losstest.evidence.event_log import EventLog
from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.faults.impairment import Impairment
from brokerless.losstest.harness.control import ControlChannel
from brokerless.losstest.model import Cell, Usage

POLL_S = 0.01
LOG_INTERVAL_S = 1.0
PRODUCER_GROUP, CONSUMER_GROUP = "239.255.76.1", "239.255.76.2"  # of the scope that stays within a site
_IP_MULTICAST_ALL = 49  # Linux; only groups that this socket joined itself
CHUNK = 65536
# A receiver that does not read must be felt by the sender: hold no more than one chunk per direction.
SOCKET_BUFFER = (
    1 << 20
)  # the relay itself must not be what overflows: 1 MiB is more than a run sends in a second


def run_relay(
    config: dict[str, Any], cell: Cell, event_log: EventLog, witness: Witness, control: ControlChannel
) -> None:
    """Relay until told to stop; every second and at the end, log how many bytes have passed."""
    impairment = Impairment(config["seed"])
    kinds: dict[str, type[UdpRelay | TcpRelay]] = {
        "tcp": TcpRelay,
        "udp": UdpRelay,
        "multicast": MulticastRelay,
    }
    relay = kinds[config["kind"]](config, cell, witness, impairment)
    witness.write(Kind.READY)
    logged, told = time.monotonic(), 0
    while not control.stop:
        while control.queue:
            impairment.instruct(control.queue.popleft())
        relay.step(POLL_S)
        # It may be late: on a busy machine it hears of the end of a fault some time after it.
        while relay.connection_events:
            what, at = relay.connection_events.pop(0)
            event_log.write(what, at=at)
        if time.monotonic() - logged > LOG_INTERVAL_S and relay.passed_bytes != told:
            logged, told = time.monotonic(), relay.passed_bytes
            event_log.write("usage", usage=Usage(relayed_bytes=told))
    relay.close()
    event_log.write("usage", usage=Usage(relayed_bytes=relay.passed_bytes))
    event_log.close()


class UdpRelay:
    """From each listening port to its target; answers go back to whoever sent last."""

    def __init__(self, config: dict[str, Any], cell: Cell, witness: Witness, impairment: Impairment) -> None:
        self._cell, self._witness, self._impairment = cell, witness, impairment
        self._client_is_producer = config["connects"] == "producer"
        self._selector = selectors.DefaultSelector()
        self._later: list[tuple[float, int, bytes, socket.socket, tuple[str, int]]] = []
        self._serial = 0
        self.passed_bytes = 0  # of what arrived here, both ways: also what was dropped, not what was doubled
        self.connection_events: list[tuple[str, int]] = []  # never: there are no connections
        for listen, target in config["pairs"]:
            side = _Pair(tuple(target))
            side.inner, side.outer = _udp(tuple(listen)), _udp((target[0], 0))
            self._selector.register(side.inner, selectors.EVENT_READ, side)
            self._selector.register(side.outer, selectors.EVENT_READ, side)

    def step(self, timeout_s: float) -> None:
        """Pass on what has come, and what is due."""
        now = time.monotonic()
        if self._later:
            timeout_s = max(0.0, min(timeout_s, self._later[0][0] - now))
        for key, _ in self._selector.select(timeout_s):
            self._drain(key.fileobj, key.data)  # type: ignore[arg-type]  # only sockets are registered
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, data, out, to = heapq.heappop(self._later)
            _send(out, data, to)

    def _drain(self, sock: socket.socket, pair: "_Pair") -> None:
        for _ in range(256):  # then look at the orders again
            try:
                data, sender = sock.recvfrom(CHUNK)
            except (BlockingIOError, ConnectionRefusedError):
                return
            if sock is pair.inner:
                pair.client = sender
                self._pass(data, pair.outer, pair.target, self._client_is_producer or pair.multicast)
            elif pair.client is not None:
                self._pass(data, pair.inner, pair.client, not self._client_is_producer)

    def _pass(self, data: bytes, out: socket.socket, to: tuple[str, int], to_consumer: bool) -> None:
        self.passed_bytes += len(data)
        delays = self._impairment.delays(to_consumer)
        if to_consumer and (not delays or any(delays)):
            what = Kind.DELAYED if delays else Kind.DROPPED
            for n in (*payload.find(data, self._cell.run), *counter_digits.find(data, self._cell.run)):
                self._witness.write(what, n)
        for delay in delays:
            if delay:
                self._serial += 1
                heapq.heappush(self._later, (time.monotonic() + delay, self._serial, data, out, to))
            else:
                _send(out, data, to)

    def close(self) -> None:
        """Close all sockets; what was delayed goes out first."""
        for _, _, data, out, to in sorted(self._later):
            _send(out, data, to)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class MulticastRelay(UdpRelay):
    """From the producer's group to the consumers'; the ports after the first are unicast (requests)."""

    def __init__(self, config: dict[str, Any], cell: Cell, witness: Witness, impairment: Impairment) -> None:
        (_, port), _ = config["pairs"][0]
        super().__init__(config | {"pairs": config["pairs"][cell.consumers :]}, cell, witness, impairment)
        pair = _Pair((CONSUMER_GROUP, port))
        pair.multicast = True
        pair.inner, pair.outer = _joined(PRODUCER_GROUP, port), _udp(("127.0.0.1", 0))
        pair.outer.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        pair.outer.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
        self._selector.register(pair.inner, selectors.EVENT_READ, pair)


class _Pair:
    multicast = False
    inner: socket.socket  # faces the side that connects
    outer: socket.socket  # faces the side that listens

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.client: tuple[str, int] | None = None


def _udp(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
    sock.bind(address)
    sock.setblocking(False)
    return sock


def _joined(group: str, port: int) -> socket.socket:
    """A socket that receives one group on loopback, and nothing else."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
    sock.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
    sock.bind((group, port))
    membership = socket.inet_aton(group) + socket.inet_aton("127.0.0.1")
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    sock.setblocking(False)
    return sock


def _send(sock: socket.socket, data: bytes, to: tuple[str, int]) -> None:
    # Nobody listens, or the buffer is full: the datagram is gone, as it would be on a network.
    with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
        sock.sendto(data, to)


class _Flow:
    """One direction of a TCP connection: at most one chunk is held."""

    def __init__(self, source: socket.socket, sink: socket.socket, to_consumer: bool) -> None:
        self.source, self.sink, self.to_consumer = source, sink, to_consumer
        self.held = b""
        self.not_before = 0.0  # latency and bandwidth: when what is held may go on


class TcpRelay:
    """Accepts, connects to the target, and copies both ways unless the direction is cut."""

    def __init__(self, config: dict[str, Any], cell: Cell, witness: Witness, impairment: Impairment) -> None:
        self._impairment = impairment
        self._client_is_producer = config["connects"] == "producer"
        self._listeners: list[tuple[socket.socket, tuple[str, int]]] = []
        self._flows: list[_Flow] = []
        self._looked = time.monotonic()
        self.passed_bytes = 0  # both ways, without the headers of IP and TCP
        # (reset, closed by an end or connected, when); to be taken away
        self.connection_events: list[tuple[str, int]] = []
        for listen, target in config["pairs"]:
            sock = socket.create_server(tuple(listen), backlog=64)
            sock.setblocking(False)
            self._listeners.append((sock, tuple(target)))

    def step(self, timeout_s: float) -> None:
        """Accept, and move bytes in every direction that is open."""
        cut = self._impairment
        moved = False
        self._reset_connections()
        if not (cut.cut_to and cut.cut_from):
            moved = self._accept()
        for flow in list(self._flows):
            if not (cut.cut_to if flow.to_consumer else cut.cut_from) and flow in self._flows:
                moved |= self._move(flow)
        if not moved:
            self._wait(timeout_s)

    def _reset_connections(self) -> None:
        """Reset connections as often as was asked for: both ends see an error, and what was under way is gone."""
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        for flow in list(self._flows):
            if flow.to_consumer and flow in self._flows and self._impairment.resets(elapsed):
                for sock in (flow.source, flow.sink):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._drop(flow, "reset")

    def _wait(self, timeout_s: float) -> None:
        """Until something can be moved. With a direction cut, waiting sockets would wake us at once."""
        cut = self._impairment
        held_back = any(flow.held and flow.not_before for flow in self._flows)
        if cut.cut_to or cut.cut_from or held_back or cut.resets_per_s:
            time.sleep(0.002)
            return
        with selectors.DefaultSelector() as selector:
            for sock, _ in self._listeners:
                selector.register(sock, selectors.EVENT_READ)
            for flow in self._flows:
                sock, event = (
                    (flow.sink, selectors.EVENT_WRITE) if flow.held else (flow.source, selectors.EVENT_READ)
                )
                try:
                    known = selector.get_key(sock).events
                    selector.modify(sock, known | event)
                except KeyError:
                    selector.register(sock, event)
            selector.select(timeout_s)

    def _accept(self) -> bool:
        accepted = False
        for listener, target in self._listeners:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                continue
            accepted = True
            try:
                server = socket.create_connection(target, timeout=1.0)
            except OSError:
                client.close()  # nobody is there: the client sees a closed connection and tries again
                continue
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flows.append(_Flow(client, server, self._client_is_producer))
            self._flows.append(_Flow(server, client, not self._client_is_producer))
            self.connection_events.append(("connected", time.monotonic_ns()))
        return accepted

    def _move(self, flow: _Flow) -> bool:
        try:
            if not flow.held:
                flow.held = flow.source.recv(CHUNK)
                if not flow.held:
                    raise ConnectionResetError
                self.passed_bytes += len(flow.held)
                flow.not_before = self._hold_until(flow)
            if flow.not_before > time.monotonic():
                return False
            sent = flow.sink.send(flow.held)
            flow.held = flow.held[sent:]
        except BlockingIOError:
            return False
        except OSError:
            self._drop(flow, "closed")
        return True

    def _hold_until(self, flow: _Flow) -> float:
        """When a chunk that was just read may go on; 0 if at once."""
        wait_s = max(0.0, self._impairment.latency_s())
        if self._impairment.bytes_per_s and flow.to_consumer:
            wait_s += len(flow.held) / self._impairment.bytes_per_s
        return time.monotonic() + wait_s if wait_s else 0.0

    def _drop(self, flow: _Flow, why: str) -> None:
        pair = {flow.source, flow.sink}
        for other in [f for f in self._flows if f.source in pair]:
            self._flows.remove(other)
        for sock in pair:
            sock.close()
        self.connection_events.append((why, time.monotonic_ns()))

    def close(self) -> None:
        """Close everything."""
        for flow in list(self._flows):
            flow.source.close()
            flow.sink.close()
        for listener, _ in self._listeners:
            listener.close()
