"""Multicast sockets: addresses, joins, options. Packets stay on this machine unless told otherwise."""

import logging
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError, Fault
from brokerless.core.runtime.datagrams import grow_buffer

log = logging.getLogger("brokerless.multicast")

# Not in Python's socket module on all versions; the numbers are Linux's ABI.
IP_MULTICAST_ALL = 49
IPV6_MULTICAST_ALL = 29
_NO_GROUP = "0.0.0.0"  # noqa: S104 - the field that setting an interface does not use
MCAST_JOIN_SOURCE_GROUP = 46
# Packets stay here: TTL 0 does not leave the host, and 127.0.0.1 is the loopback interface.
DEFAULT_INTERFACE = "127.0.0.1"
DEFAULT_TTL = 0
# 8 MiB hold 60 ms of a 1 Gbit/s feed; the kernel's default of 208 kB holds 1.7 ms, less than one time slice
# of a Python thread.
DEFAULT_RECEIVE_BUFFER = 8 * 1024 * 1024
# One GSO call is up to 64 kB; the default of 208 kB would make the sender wait after three of them.
DEFAULT_SEND_BUFFER = 4 * 1024 * 1024


class SocketFault(Fault):
    """The kernel refused a socket operation; `errno` says why."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"{what}: {error.strerror or error}")
        self.errno = error.errno


class Address(NamedTuple):
    """Host (numeric) and port."""

    host: str
    port: int

    @property
    def family(self) -> int:
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, field: str, *, multicast: bool = False, any_port: bool = False) -> Address:
    """`239.255.7.7:30001` or `[ff15::7]:30001`; host names are looked up. Raises ConfigError."""
    host, port = split_host_port(text, field)
    if not any_port and not port:
        raise ConfigError(field, f"{text!r} needs a port other than 0")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(field, f"{host!r} cannot be resolved: {error}") from None
    numeric = str(found[4][0])
    if multicast and not is_multicast(numeric):
        raise ConfigError(field, f"{numeric} is not a multicast group (224.0.0.0/4 or ff00::/8)")
    return Address(numeric, port)


def pair_lines(groups: Sequence[Address], interfaces: Sequence[str]) -> list[tuple[Address, str]]:
    """Which group goes by which interface. Raises ConfigError.

    One group on every interface; several groups on one interface; or as many of both: the first group on the first
    interface, the second on the second.
    """
    if not groups or not interfaces:
        raise ConfigError("group", "give at least one group and one interface")
    if len(groups) == len(interfaces):
        return list(zip(groups, interfaces, strict=True))
    if len(groups) == 1 or len(interfaces) == 1:
        return [(group, interface) for group in groups for interface in interfaces]
    raise ConfigError("interface", f"{len(groups)} groups need one interface or as many as there are groups")


def is_multicast(host: str) -> bool:
    """Is this the address of a group?"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    raw = socket.inet_pton(family, host.partition("%")[0])
    return raw[0] == 0xFF if family == socket.AF_INET6 else raw[0] >> 4 == 0xE


def interface_index(interface: str, family: int) -> int:
    """The index of an interface given by name, index or one of its addresses. Raises ConfigError."""
    try:
        if interface.isdecimal():
            socket.if_indextoname(int(interface))
            return int(interface)
    except (OSError, OverflowError):
        raise ConfigError("interface", f"there is no interface number {interface}") from None
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        pass
    if interface in ("127.0.0.1", "::1"):
        return socket.if_nametoindex("lo")
    if family == socket.AF_INET6:
        raise ConfigError("interface", f"{interface!r}: for IPv6 give the interface by name, such as eth0")
    raise ConfigError("interface", f"{interface!r} is neither an interface nor an address of one")


def _mreqn(host: str, interface: str) -> bytes:
    """`struct ip_mreqn`: group, and the interface by address or by index."""
    try:
        address, index = socket.inet_pton(socket.AF_INET, interface), 0
    except OSError:
        address, index = bytes(4), interface_index(interface, socket.AF_INET)
    return socket.inet_pton(socket.AF_INET, host) + address + struct.pack("=i", index)


def sending_socket(group: Address, interface: str, ttl: int, source: str | None = None) -> socket.socket:
    """A socket connected to the group, that sends by that interface with that TTL."""
    if not 0 <= ttl <= 255:
        raise ConfigError("ttl", "must be 0 to 255")
    sock = socket.socket(group.family, socket.SOCK_DGRAM)
    try:
        if group.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, _mreqn(_NO_GROUP, interface))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        else:
            index = interface_index(interface, group.family)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, ttl)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        if source is not None:
            sock.bind((source, 0))
        grow_buffer(sock, socket.SO_SNDBUF, DEFAULT_SEND_BUFFER)
        sock.connect(_sockaddr(group, interface))
        return sock
    except OSError as error:
        sock.close()
        raise SocketFault(f"cannot send to {group} by {interface}", error) from None
    except BaseException:
        sock.close()
        raise


def _sockaddr(group: Address, interface: str) -> tuple[str, int] | tuple[str, int, int, int]:
    """For the socket calls; an IPv6 group of narrow scope needs the interface with it."""
    if group.family == socket.AF_INET:
        return group.host, group.port
    return group.host, group.port, 0, interface_index(interface, group.family)


def receiving_socket(
    group: Address,
    interface: str,
    source: str | None = None,
    buffer_bytes: int = DEFAULT_RECEIVE_BUFFER,
) -> socket.socket:
    """A non-blocking socket that has joined the group on the interface, only from `source` if given.

    One socket per interface: the kernel binds a link-local IPv6 group to a single one.
    """
    sock = socket.socket(group.family, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound to the group itself, not to any address: unicast to this port, and other groups that somebody
        # else on this machine joined, do not come here.
        sock.bind(_sockaddr(group, interface))
        if group.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)
            with suppress(OSError):  # needs Linux 5.7; without it both sockets of two interfaces hear both
                name = socket.if_indextoname(interface_index(interface, group.family))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode() + b"\0")
        _join(sock, group, interface, source)
        granted = grow_buffer(sock, socket.SO_RCVBUF, buffer_bytes)
        if granted < buffer_bytes:
            log.warning(
                "the kernel gives a receive buffer of %d bytes where %d were wanted; bursts beyond it are "
                "dropped and repaired. As root: sysctl net.core.rmem_max=%d",
                granted,
                buffer_bytes,
                buffer_bytes,
            )
        sock.setblocking(False)
        return sock
    except OSError as error:
        sock.close()
        raise SocketFault(f"cannot join {group} on {interface}", error) from None
    except BaseException:
        sock.close()
        raise


def _join(sock: socket.socket, group: Address, interface: str, source: str | None) -> None:
    if source is None:
        if group.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, _mreqn(group.host, interface))
        else:
            where = struct.pack("=I", interface_index(interface, group.family))
            membership = socket.inet_pton(socket.AF_INET6, group.host) + where
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
        return
    # `struct group_source_req`: the same for both families.
    index = (
        interface_index(interface, group.family) if not _is_ipv4(interface) else index_of_address(interface)
    )
    level = socket.IPPROTO_IP if group.family == socket.AF_INET else socket.IPPROTO_IPV6
    request = struct.pack("=I4x", index) + _storage(group.host) + _storage(source)
    sock.setsockopt(level, MCAST_JOIN_SOURCE_GROUP, request)


def _is_ipv4(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True


def index_of_address(address: str) -> int:
    """The index of the interface that has this IPv4 address. Raises ConfigError."""
    for index, name in socket.if_nameindex():
        if address_of_interface(name) == address:
            return index
    if address.startswith("127."):
        return socket.if_nametoindex("lo")
    raise ConfigError("interface", f"no interface has the address {address}")


def address_of_interface(name: str) -> str | None:
    """The IPv4 address of an interface; None if it has none."""
    answer = _ask_interface(name, 0x8915)  # SIOCGIFADDR
    return None if answer is None else socket.inet_ntop(socket.AF_INET, answer[20:24])


def _ask_interface(name: str, what: int) -> bytes | None:
    """What the kernel says of an interface (`struct ifreq`); None: nothing."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return bytes(fcntl.ioctl(probe.fileno(), what, struct.pack("16s24x", name.encode())))
        except OSError:
            return None


def _storage(host: str) -> bytes:
    """`struct sockaddr_storage` with that address."""
    if ":" in host:
        raw = struct.pack("=HHI", socket.AF_INET6, 0, 0) + socket.inet_pton(socket.AF_INET6, host)
    else:
        raw = struct.pack("=HH", socket.AF_INET, 0) + socket.inet_pton(socket.AF_INET, host)
    return raw.ljust(128, b"\0")


def unicast_socket(family: int, host: str, port: int) -> socket.socket:
    """A non-blocking socket for requests and answers."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.bind((host, port))
        grow_buffer(sock, socket.SO_RCVBUF, DEFAULT_RECEIVE_BUFFER // 2)
        grow_buffer(sock, socket.SO_SNDBUF, DEFAULT_SEND_BUFFER)
        sock.setblocking(False)
        return sock
    except OSError as error:
        sock.close()
        raise SocketFault(f"cannot bind UDP {host}:{port}", error) from None


def interface_mtu(interface: str, family: int) -> int:
    """The largest IP packet that goes through this interface in one piece; 1,500 where unknown."""
    try:
        index = index_of_address(interface) if _is_ipv4(interface) else interface_index(interface, family)
        answer = _ask_interface(socket.if_indextoname(index), 0x8921)  # SIOCGIFMTU
    except (OSError, ConfigError):
        answer = None
    return 1500 if answer is None else int(struct.unpack_from("=i", answer, 16)[0])
