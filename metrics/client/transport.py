"""The client's socket: connected, never blocking, re-resolved now and then, replaced after a fork."""

import errno
import socket
import time
from typing import Any

import msgspec


class Outcome(msgspec.Struct, frozen=True):
    """Whether a datagram went out, and whether the network complained about an earlier one."""

    sent: bool
    unreachable: bool = False


SENT = Outcome(True)
FAILED = Outcome(False)
# After a failed look-up, wait before the next: a resolver that is down takes seconds per try.
RETRY_S = 5.0


class Transport:
    """Sends datagrams to `host:port`, or to a Unix datagram socket when `host` is a path."""

    def __init__(self, host: str, port: int, *, ipv6: bool, resolve_s: float) -> None:
        self._host = host
        self._port = port
        self._family = socket.AF_INET6 if ipv6 else socket.AF_INET
        self._unix = "/" in host
        self._resolve_s = resolve_s
        self._socket: socket.socket | None = None
        self._address: object = None
        self._look_at = 0.0

    def send(self, payload: bytes) -> Outcome:
        """Send without waiting; never raises."""
        now = time.monotonic()
        if now >= self._look_at:
            self._resolve(now)
        if self._socket is None:
            return FAILED
        try:
            self._socket.send(payload)
            return SENT
        except ConnectionRefusedError:
            return self._after_refusal(payload)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.EDESTADDRREQ, errno.ECONNRESET, errno.EBADF):
                self._look_at = 0.0
            return FAILED

    def _after_refusal(self, payload: bytes) -> Outcome:
        """UDP: the complaint was about an earlier datagram, and this one was not sent yet."""
        if self._unix:
            self._look_at = 0.0
            return Outcome(False, True)
        try:
            assert self._socket is not None
            self._socket.send(payload)
            return Outcome(True, True)
        except OSError:
            return Outcome(False, True)

    def _resolve(self, now: float) -> None:
        """Look the address up again; the socket is replaced only if it changed, so that the port stays."""
        try:
            if self._unix:
                family, address = socket.AF_UNIX, self._host
                self._look_at = float("inf")
            else:
                found = socket.getaddrinfo(self._host, self._port, self._family, socket.SOCK_DGRAM)[0]
                family, address = found[0], found[4]  # type: ignore[assignment]
                self._look_at = now + self._resolve_s
            if address != self._address or self._socket is None or self._unix:
                self._connect(family, address)
        except (OSError, UnicodeError):
            self._look_at = now + RETRY_S
            if self._unix:
                self._drop()

    def _connect(self, family: int, address: Any) -> None:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        self._drop()
        self._socket = sock
        self._address = address

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def forked(self) -> None:
        """In a child: use a socket of our own, so that datagrams of both never share a source port."""
        self._drop()
        self._look_at = 0.0

    def close(self) -> None:
        """Close the socket; nothing is sent any more."""
        self._drop()
        self._look_at = float("inf")
