"""A UDP (or Unix datagram) socket, read many datagrams at a time, that knows what the kernel dropped.

A truncated datagram loses its last line.
"""

import ctypes
import errno
import os
import socket
import stat
import struct
import time
from contextlib import suppress

from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import CopyingReceiver, grow_buffer, kernel_drops

# Half a second of a million plain counters a second; Linux doubles it and caps it at net.core.rmem_max unless
# we may override that (root). The default of 212,992 holds 270 small datagrams.
RECEIVE_BUFFER = 16 * 1024 * 1024
_SO_ATTACH_REUSEPORT_CBPF = 51


class DatagramSocket:
    """A bound socket. `address` is what was really bound (port 0 chooses one)."""

    def __init__(self, sock: socket.socket, *, lossless: bool, dialect: str = "auto") -> None:
        self.sock = sock
        self.lossless = lossless
        self.dialect = dialect
        self.address: str = format_address(sock)
        self._inode = inode_of(self.address) if sock.family == socket.AF_UNIX else None
        self._drops_seen = 0
        self._reader = CopyingReceiver()

    def read(self) -> tuple[list[bytes], int]:
        """What is there now, at most a batch of datagrams, and how many of them were truncated."""
        datagrams, cut = self._reader.read(self.sock)
        for i in cut:
            # The last line may be half a line that reads as a smaller number: better none than a wrong one.
            datagrams[i] = datagrams[i].rpartition(b"\n")[0]
        return datagrams, len(cut)

    def drops(self) -> int:
        """Datagrams the kernel dropped at this socket since the last call."""
        drops = kernel_drops(self.sock)
        new, self._drops_seen = (drops - self._drops_seen) & 0xFFFFFFFF, drops
        return new

    def close(self) -> None:
        """Close it; a Unix socket's file is removed."""
        self.sock.close()
        remove_own(self.address, self._inode)


def bind_udp(
    address: str, *, receive_buffer: int = RECEIVE_BUFFER, reuse_port: bool = False
) -> DatagramSocket:
    """Bind `host:port`. Raises ConfigError when the address is wrong or in use."""
    address, dialect = split_dialect(address, "udp")
    host, port = split_host_port(address, "udp")
    try:
        family, kind, _, _, sockaddr = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError("udp", f"cannot use {address}: {error.strerror or error}") from None
    try:
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        grow_buffer(sock, socket.SO_RCVBUF, receive_buffer)
        sock.bind(sockaddr)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("udp", f"cannot bind {address}: {error.strerror or error}") from None
    return DatagramSocket(sock, lossless=False, dialect=dialect)


def wait_until_free(address: str, timeout_s: float) -> None:
    """Return when nobody has `host:port`; those who share it do not count as nobody. Raises ConfigError in the end."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            bind_udp(address).close()
            return
        except ConfigError as error:
            if os.strerror(errno.EADDRINUSE) not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def bind_unix_datagram(path: str, *, receive_buffer: int = RECEIVE_BUFFER) -> DatagramSocket:
    """Bind a Unix datagram socket; a file left over by a dead process is replaced."""
    path, dialect = split_dialect(path, "unix_dgram")
    remove_stale(path, socket.SOCK_DGRAM, "unix_dgram")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        grow_buffer(sock, socket.SO_RCVBUF, receive_buffer)
        sock.bind(path)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("unix_dgram", f"cannot bind {path}: {error.strerror or error}") from None
    return DatagramSocket(sock, lossless=True, dialect=dialect)


def remove_stale(path: str, kind: socket.SocketKind, field: str) -> None:
    """Remove the socket file of a process that is gone; one that is alive keeps it, and bind will say so.

    Anything that is not a socket raises ConfigError and stays.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(field, f"{path} exists and is not a socket; it is left alone")
    except OSError:
        return  # nothing there, or bind will say what is wrong
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


def remove_own(path: str, inode: tuple[int, int] | None) -> None:
    """Remove the socket file that we bound, unless something else has taken its place."""
    with suppress(OSError):
        if inode is not None and inode_of(path) == inode:
            os.unlink(path)


def inode_of(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None if it is not there."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def steer_by_client(sock: socket.socket, workers: int) -> bool:
    """Let the kernel choose the worker by the client id in a numbered datagram, not by its source port.

    A client that reconnects has a new source port; its numbers must still be checked in one place. Datagrams
    without a number keep being chosen by address. False where the system does not offer it.
    """
    program = [
        (0x20, 0, 0, 0),  # A = first four bytes of the payload
        (0x15, 0, 4, int.from_bytes(b"_bl.", "big")),  # not numbered: to the last instruction
        (0x20, 0, 0, 4),  # A = first half of the client id, which is random
        (0x04, 0, 0, 0x9E3779B9),  # letters differ in few bits; an odd offset spreads them
        (0x94, 0, 0, workers),  # A %= workers
        (0x16, 0, 0, 0),  # return A
        (0x06, 0, 0, 0xFFFFFFFF),  # no such socket: the kernel falls back to the hash of addresses
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_REUSEPORT_CBPF,
            struct.pack("HL", len(program), ctypes.addressof(code)),
        )
    except OSError:
        return False
    return True


def split_dialect(address: str, field: str) -> tuple[str, str]:
    """An address and the dialect of its listener: `127.0.0.1:8125?dialect=dogstatsd`; ConfigError names the field."""
    address, mark, dialect = address.partition("?dialect=")
    if mark and dialect not in ("auto", "statsd", "dogstatsd"):
        raise ConfigError(field, f"dialect must be auto, statsd or dogstatsd, not {dialect!r}")
    return address, dialect or "auto"


def format_address(sock: socket.socket) -> str:
    """`host:port`, `[v6]:port` or the path of a Unix socket."""
    name = sock.getsockname()
    if isinstance(name, tuple):
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    return str(name)
