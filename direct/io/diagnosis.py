"""Why does a publisher not answer? A look at what listens at its address, for people who would otherwise wait."""

import contextlib
import socket

from brokerless.direct.address import Address

_TIMEOUT_S = 2.0
# ZMTP 3: signature and version 3.1. libzmq then sends the rest of its own; given a mechanism it may close instead.
_ZMTP_HELLO = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1"
_ZMTP_BYTES = 64
_SP_START = b"\0SP\0"
_MECHANISM = slice(12, 32)


def diagnose(address: Address, *, curve: bool) -> str:
    """What seems to be wrong, in one sentence. Waits at most some seconds; `curve`: the client has CURVE keys."""
    if address.scheme == "inproc":
        return "no publisher of this process is bound there"
    try:
        first = _first_bytes(address)
    except ConnectionRefusedError:
        return "nobody listens there"
    except FileNotFoundError:
        return "there is no such socket"
    except TimeoutError:
        return "it cannot be reached: nothing answers the connection"
    except OSError as error:
        return f"it cannot be reached: {error.strerror or error}"
    if first.startswith(_SP_START):
        if address.library == "nng":
            return "it listens and speaks NNG, but does not answer: is it a publisher's address, not a live port?"
        return f"it speaks NNG, and this is an address for ZeroMQ: use nng+{address}"
    if first[:1] == b"\xff" and len(first) >= 10 and first[9] == 0x7F:
        return _diagnose_zmtp(address, first, curve)
    return (
        "something else than a publisher listens there"
        if first
        else "it accepts connections and says nothing"
    )


def _diagnose_zmtp(address: Address, first: bytes, curve: bool) -> str:
    if address.library == "nng":
        return f"it speaks ZeroMQ, and this is an address for NNG: use {address.url}"
    needs_curve = first[_MECHANISM].rstrip(b"\0") == b"CURVE"
    if needs_curve and not curve:
        return "it needs CURVE keys: give curve=ClientKeys(…), --curve and --server-key in a shell"
    if curve and len(first) >= _ZMTP_BYTES and not needs_curve:
        return "it does not use CURVE, and this client was given keys for it"
    if needs_curve:
        return "it uses CURVE and refuses us: its key is not the one we were given, or it does not allow ours"
    return "it listens and speaks ZeroMQ, but does not answer: is it a publisher's address, not a live port?"


def _first_bytes(address: Address) -> bytes:
    if address.scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.connect(address.place)
            return _handshake(connection)
    host = address.host.strip("[]")
    with socket.create_connection((host, address.port), _TIMEOUT_S) as connection:
        return _handshake(connection)


def _handshake(connection: socket.socket) -> bytes:
    """What the other side sends first, up to a whole ZMTP greeting, or until it closes or falls silent."""
    received = b""
    connection.settimeout(_TIMEOUT_S / 2)
    with contextlib.suppress(OSError):
        received = connection.recv(_ZMTP_BYTES)
        if received[:1] == b"\xff":
            connection.sendall(_ZMTP_HELLO)
            while len(received) < _ZMTP_BYTES and (more := connection.recv(_ZMTP_BYTES)):
                received += more
    return received
