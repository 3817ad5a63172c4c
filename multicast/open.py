"""Puts the parts of a subscriber together: addresses, sockets, receiver, engine."""

import socket
from collections.abc import Callable, Sequence

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.multicast.acquire import Acquirer
from brokerless.multicast.auth import opener, sealer
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.engine import Engine
from brokerless.multicast.intake import Intake
from brokerless.multicast.message import Columns
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.protocol import SESSION_BYTES, Gone
from brokerless.multicast.receiver import Receiver
from brokerless.multicast.sockets import Address, parse_address, receiving_socket, unicast_socket
from brokerless.multicast.transmit import Io, check_io


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """What `Subscriber` was given."""

    groups: list[str]
    interfaces: list[str]
    sender: str | None
    request_servers: Sequence[str] | None
    session: str | None
    repair: RepairPolicy
    tcp: bool
    auth_key: bytes | None
    opaque: bool
    receive_buffer_bytes: int
    max_queue_bytes: int
    io: Io


def open_engine(
    wiring: Wiring,
    start: Callable[[bytes], int],
    counters: SubscriberCounters,
    random: Callable[[], float],
    *,
    on_gone: Callable[[Gone], None],
) -> Engine:
    """Join, and return the engine. Raises ConfigError or SocketFault, and then nothing is left open."""
    check_io(wiring.io)
    if not wiring.groups or not wiring.interfaces:
        raise ConfigError("group", "give at least one group and one interface")
    if wiring.session is not None and not 0 < len(wiring.session) <= SESSION_BYTES:
        raise ConfigError("session", f"has 1 to {SESSION_BYTES} characters")
    groups = [parse_address(text, "group", multicast=True) for text in wiring.groups]
    servers = _servers(wiring, groups[0])
    receiver: Receiver[Columns] = Receiver(
        start=start,
        policy=wiring.repair,
        servers=len(servers),
        random=random,
        session=wiring.session,
        lines=len(groups) * len(wiring.interfaces),
        tcp=wiring.tcp,
        counters=counters,
    )
    key = wiring.auth_key
    intake = Intake(
        receiver, unseal=opener(key) if key is not None else None, opaque=wiring.opaque, on_gone=on_gone
    )
    opened: list[socket.socket] = []
    try:
        for group in groups:
            opened.append(
                receiving_socket(group, wiring.interfaces, wiring.sender, wiring.receive_buffer_bytes)
            )
        lines = list(opened)
        answers: dict[int, socket.socket] = {}
        for family in {server.family for server in servers}:
            answers[family] = unicast_socket(family, _local(family, servers), 0)
            opened.append(answers[family])
        return Engine(
            lines,
            [Acquirer(line, wiring.io) for line in lines],
            intake,
            servers,
            answers,
            seal=sealer(key) if key is not None else None,
            max_queue_bytes=wiring.max_queue_bytes,
        )
    except BaseException:
        for sock in opened:
            sock.close()
        raise


def _servers(wiring: Wiring, group: Address) -> list[Address]:
    if wiring.request_servers is not None:
        if isinstance(wiring.request_servers, str):
            raise ConfigError("request_servers", "must be a list of HOST:PORT")
        return [parse_address(text, "request_servers") for text in wiring.request_servers]
    if wiring.sender is not None:
        return [Address(wiring.sender, group.port + 1)]
    local = {"127.0.0.1", "lo", "::1"}
    if set(wiring.interfaces) <= local:
        return [Address("::1" if ":" in group.host else "127.0.0.1", group.port + 1)]
    raise ConfigError(
        "request_servers",
        "give the publisher's request address (Publisher.request_address), or [] for no repair",
    )


def _local(family: int, servers: list[Address]) -> str:
    """Bind to loopback if only loopback is asked: then nobody else can send us anything."""
    if family == socket.AF_INET6:
        return "::1" if all(s.host == "::1" for s in servers if s.family == family) else "::"
    on_loopback = all(s.host.startswith("127.") for s in servers if s.family == family)
    return "127.0.0.1" if on_loopback else "0.0.0.0"  # noqa: S104 - answers come from another machine
