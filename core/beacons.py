"""Announcements on a LAN: small signed datagrams to a multicast group. Only for processes that call `join_lan`.

    beacon = "BLp1" | 16 bytes of HMAC-SHA256 over the rest | msgpack of `Beacon`

One datagram per component and second. Without the key nobody can make one. A recorded one is refused after
`CLOCK_WINDOW_S`, and says nothing but what was true then. A component that was not heard for `SILENCE_S` counts as dead
and is forgotten `FORGET_S` later; one that is closed says so.
"""

import hmac
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from brokerless.core import presence
from brokerless.core.config import MIN_KEY_BYTES, check_key, split_host_port
from brokerless.core.errors import ConfigError
from brokerless.core.presence import Component

# Administratively scoped (RFC 2365): routers do not forward it.
GROUP = "239.255.83.53:8353"
MARK = b"BLp1"
TAG_BYTES = 16
# NTP keeps clocks within milliseconds; a minute also allows for machines that have just started.
CLOCK_WINDOW_S = 60.0
# Three beacons may be lost before a component counts as dead.
SILENCE_S = 3.5
FORGET_S = 60.0
# One datagram that no network splits. What does not fit of the state is left out.
MAX_BYTES = 1400
# Whoever has the key could fill the memory of all others; a LAN with more components than this wants several groups.
MAX_COMPONENTS = 10_000
# Neighbours, and no routers.
_TTL = 1
_log = logging.getLogger("brokerless.core.beacons")


class Beacon(msgspec.Struct, array_like=True):
    """What one datagram says."""

    time: float
    leaving: bool
    component: Component


def encode(component: Component, key: bytes, now: float, *, leaving: bool = False) -> bytes:
    """One datagram: with the whole state if it fits, else with what `ps` and discovery need, else without."""
    state = component.state
    essential = {name: state[name] for name in ("began", "next", "epoch", "counters") if name in state}
    fewer = {name: value for name, value in essential.items() if name != "counters"}
    body = b""
    for part in (state, essential, fewer, {}):
        said = msgspec.structs.replace(component, state=part)
        body = msgspec.msgpack.encode(Beacon(now, leaving, said), enc_hook=str)
        if len(body) + len(MARK) + TAG_BYTES <= MAX_BYTES:
            break
    return MARK + hmac.digest(key, body, "sha256")[:TAG_BYTES] + body


def decode(data: bytes, key: bytes, now: float) -> Beacon | None:
    """The beacon, or None if it was not made with the key, is old, or is no beacon."""
    start = len(MARK) + TAG_BYTES
    if not data.startswith(MARK) or len(data) < start:
        return None
    body = data[start:]
    if not hmac.compare_digest(hmac.digest(key, body, "sha256")[:TAG_BYTES], data[len(MARK) : start]):
        return None
    try:
        beacon = msgspec.msgpack.decode(body, type=Beacon)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return beacon if abs(now - beacon.time) <= CLOCK_WINDOW_S else None


def reachable(address: str, sender: str, *, same_host: bool) -> str | None:
    """The address as others can use it: a wildcard becomes the sender's; None if it leads nowhere from here."""
    scheme, _, place = address.partition("://")
    if scheme.removeprefix("nng+") != "tcp":
        return address if same_host and scheme.removeprefix("nng+") == "ipc" else None
    host, _, port = place.rpartition(":")
    if host in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - read, not bound
        return f"{scheme}://{sender}:{port}"
    try:
        loopback = ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return None if loopback and not same_host else address


class Neighbours:
    """What was heard, without sockets: `now` is an argument."""

    def __init__(self, key: bytes, host: str) -> None:
        self._key = key
        self._host = host
        self._heard: dict[tuple[str, int, str], tuple[float, float, Component]] = {}
        self.refused = 0  # datagrams without the key, too old, or broken
        self.left_out = 0  # components beyond MAX_COMPONENTS

    def receive(self, data: bytes, sender: str, wall: float, now: float) -> None:
        """One datagram from an address, at this time of day (`wall`) and of the monotonic clock (`now`)."""
        beacon = decode(data, self._key, wall)
        if beacon is None:
            self.refused += 1
            return
        component = beacon.component
        key = (component.host, component.pid, component.id)
        before = self._heard.get(key)
        if before is not None and beacon.time < before[0]:
            return
        if beacon.leaving:
            self._heard.pop(key, None)
            return
        if before is None and len(self._heard) >= MAX_COMPONENTS:
            self.left_out += 1
            return
        same_host = component.host == self._host
        usable = [reachable(address, sender, same_host=same_host) for address in component.addresses]
        component.addresses = [address for address in usable if address is not None]
        self._heard[key] = (beacon.time, now, component)

    def components(self, now: float) -> list[Component]:
        """Everybody heard of lately; `alive` says whether still."""
        for key, (_, at, _component) in list(self._heard.items()):
            if now - at > SILENCE_S + FORGET_S:
                self._heard.pop(key, None)
        heard = list(self._heard.values())
        return [msgspec.structs.replace(c, alive=now - at <= SILENCE_S) for _, at, c in heard]


class LanPresence:
    """The sockets: sends this process's components, and hears everybody's, until it is closed."""

    def __init__(self, interface: str, key: bytes, group: str) -> None:
        check_key(key, "key")
        try:
            host, port = split_host_port(group, "lan")
            if not ipaddress.IPv4Address(host).is_multicast or not port:
                raise ValueError
            ipaddress.IPv4Address(interface)
        except ValueError:  # a ConfigError is one, too
            raise ConfigError(
                "lan",
                f"needs the IPv4 address of an interface and a group 239.x.x.x:port, not {interface!r}, {group!r}",
            ) from None
        self._key = key
        self._to = (host, port)
        self._neighbours = Neighbours(key, socket.gethostname())
        self._lock = threading.Lock()
        self._said: dict[str, Component] = {}
        self._stopped = False
        self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._open(interface)
        except OSError as error:
            self._sender.close()
            self._receiver.close()
            raise ConfigError(
                "lan", f"{interface} cannot be used for {group}: {error.strerror or error}"
            ) from None
        self._thread = threading.Thread(target=self._run, name="presence beacons", daemon=True)
        self._thread.start()

    def _open(self, interface: str) -> None:
        self._sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
        self._sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _TTL)
        self._sender.setblocking(False)
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._receiver.bind(self._to)
        member = struct.pack("4s4s", socket.inet_aton(self._to[0]), socket.inet_aton(interface))
        self._receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        self._receiver.settimeout(0.5)

    def send(self, components: Sequence[Component]) -> None:
        """One beacon each; a last one for those that are gone. What the network refuses is tried a second later."""
        now = time.time()
        here = {component.id: component for component in components}
        with self._lock:
            gone = [component for name, component in self._said.items() if name not in here]
            self._said = here
        for component in gone:
            self._send(encode(component, self._key, now, leaving=True))
        for component in components:
            self._send(encode(component, self._key, now))

    def _send(self, data: bytes) -> None:
        try:
            self._sender.sendto(data, self._to)
        except OSError as error:
            _log.debug("a beacon could not be sent: %s", error)

    def components(self) -> list[Component]:
        """Everybody heard of lately."""
        with self._lock:
            return self._neighbours.components(time.monotonic())

    @property
    def refused(self) -> int:
        """Datagrams that were not made with our key, were too old, or broken."""
        return self._neighbours.refused

    def _run(self) -> None:
        while not self._stopped:
            try:
                data, (sender, _) = self._receiver.recvfrom(65536)
            except TimeoutError:
                continue
            except OSError as error:
                if not self._stopped:
                    _log.warning("beacons cannot be heard any more: %s", error)
                return
            with self._lock:
                self._neighbours.receive(data, sender, time.time(), time.monotonic())

    def close(self) -> None:
        """Say that this process's components are gone, and end."""
        presence.attach_lan(None)
        self.send([])
        self._stopped = True
        self._thread.join(5)
        self._sender.close()
        self._receiver.close()


def join_lan(interface: str, *, key: bytes, group: str = GROUP) -> LanPresence:
    """Announce every component of this process on a LAN, and see those of others, until the result is closed.

    `interface` is this machine's IPv4 address there. `key` is a secret of at least 16 bytes that all members share;
    `group` is a multicast group and port. Raises ConfigError if these cannot be used.
    """
    lan = LanPresence(interface, key, group)
    presence.attach_lan(lan)
    return lan


def read_key(path: Path) -> bytes:
    """A key from a file, without the white space at its ends. Raises ConfigError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("lan_key", f"{path}: {error.strerror}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError("lan_key", f"{path} holds {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
    return key
