"""The four sockets over ZeroMQ: ROUTER/DEALER for control, PUB/SUB for live; CURVE with its own ZAP answers."""

import contextlib
import ipaddress
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85

from brokerless.core.errors import ConfigError
from brokerless.direct.address import Address
from brokerless.direct.io import base as sockets
from brokerless.direct.io.base import PeerGone
from brokerless.direct.keys import ClientKeys, ServerKeys
from brokerless.direct.protocol import messages

log = logging.getLogger(__name__)
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"brokerless"
# Last answers and Bye get this long to leave when a socket is closed.
_LINGER_MS = 200
# The largest a client of the live socket may say: READY has 25 bytes, and 38 from libraries that also name an
# identity; CURVE's INITIATE has 276 or more.
_LIVE_BYTES = 64
_LIVE_CURVE_BYTES = 384
# Different subscriptions on a live socket, of which ours are one; each costs libzmq up to 2 kB, for as long as the
# connection lasts. Beyond it the socket is recreated: libzmq cannot end the connection of one peer.
_SUBSCRIPTIONS = 1000
# How long the old socket may go on listening.
_REBIND_S = 0.5
# Answers that wait here while the application is busy. A subscriber asks for two at most at a time; for a worker it
# makes no difference where its deliveries wait.
_ANSWERS = 8
# As plain numbers: each operation on the library's enums costs as much as a system call.
_EVENTS, _POLLIN, _DONTWAIT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT)


class ZmqNetwork:
    """One context per publisher or client, because a context has one ZAP handler; inproc needs the common one."""

    def __init__(
        self,
        *,
        shared: bool = False,
        server_keys: ServerKeys | None = None,
        allow: frozenset[bytes] | None = None,
        client_keys: ClientKeys | None = None,
        live_queue: int = sockets.LIVE_QUEUE,
    ) -> None:
        self._shared = shared
        self._live_queue = live_queue
        self._server_keys = server_keys
        self._client_keys = client_keys
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._context = zmq.Context.instance() if shared else zmq.Context()
        self._zap: ZapServer | None = None
        if server_keys is not None and not shared:
            self._zap = ZapServer(self._context, allow)

    def _socket(self, kind: int, address: Address) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if address.scheme == "tcp":
            # Also reaches IPv4 hosts; names resolve to either. A literal IPv4 address needs it off on old kernels.
            socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(address.host) else 1)
            # The kernel finds out whether the peer's machine is there. ZeroMQ's own heartbeats are timers in its I/O
            # threads, which cost every message 12 µs.
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, sockets.KEEPALIVE_S)
            socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, sockets.KEEPALIVE_S)
            socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
            socket.setsockopt(zmq.TCP_MAXRT, 3000 * sockets.KEEPALIVE_S)
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", address: Address) -> Address:
        if self._server_keys is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._server_keys.pair.secret
            socket.curve_publickey = self._server_keys.pair.public
            socket.zap_domain = _DOMAIN
        url = address.with_port(0).url.replace(":0", ":*") if _any_port(address) else address.url
        try:
            socket.bind(url)
        except (zmq.ZMQError, UnicodeError) as error:
            socket.close(0)
            raise sockets.unbindable(address, _strerror(error)) from None
        if _any_port(address):
            bound = socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(bound, bytes)
            return address.with_port(int(bound.decode().rstrip("\0").rpartition(":")[2]))
        return address

    def _connect(self, socket: "zmq.Socket[bytes]", address: Address) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, sockets.RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, sockets.RECONNECT_MAX_MS)
        if self._client_keys is not None:
            socket.curve_secretkey = self._client_keys.pair.secret
            socket.curve_publickey = self._client_keys.pair.public
            socket.curve_serverkey = self._client_keys.server
        try:
            socket.connect(address.url)
        except (zmq.ZMQError, UnicodeError) as error:
            socket.close(0)
            raise ConfigError("address", f"cannot connect to {address}: {_strerror(error)}") from None

    def serve_control(self, address: Address) -> "_Router":
        socket = self._socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, sockets.CONTROL_QUEUE)
        # A flooding client fills its own pipe and then its own TCP window.
        socket.setsockopt(zmq.RCVHWM, 1000)
        return _Router(socket, self._bind(socket, address))

    def serve_live(self, address: Address) -> "_Pub":
        return _Pub(self._live_socket, address)

    def _live_socket(self, address: Address) -> tuple["zmq.Socket[bytes]", Address]:
        socket = self._socket(zmq.PUB, address)
        socket.setsockopt(zmq.SNDHWM, self._live_queue)
        # Subscriptions are the only thing that clients may say here, and ours are empty; a long prefix costs the
        # library 50 times its length. What decides is the handshake, which counts, too.
        socket.setsockopt(zmq.MAXMSGSIZE, _LIVE_BYTES if self._server_keys is None else _LIVE_CURVE_BYTES)
        return socket, self._bind(socket, address)

    def connect_control(self, address: Address) -> "_Client":
        socket = self._socket(zmq.DEALER, address)
        # Requests are repeated by timer; queueing them for a publisher that is away would only repeat them more.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REPLY_BYTES + (16 << 20))
        socket.setsockopt(zmq.SNDHWM, 1000)
        # More wait with the kernel and the publisher: answers can be large.
        socket.setsockopt(zmq.RCVHWM, _ANSWERS)
        self._connect(socket, address)
        return _Client(socket)

    def connect_live(self, address: Address) -> "_Client":
        socket = self._socket(zmq.SUB, address)
        socket.setsockopt(zmq.RCVHWM, self._live_queue)
        socket.setsockopt(zmq.MAXMSGSIZE, 32 << 20)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connect(socket, address)
        return _Client(socket)

    def extra(self) -> list["ZapServer"]:
        return [self._zap] if self._zap is not None else []

    def close(self) -> None:
        if self._zap is not None:
            self._zap.close()
        if not self._shared:
            self._context.destroy(linger=_LINGER_MS)


class _Base:
    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._recv = socket.recv
        self._get = socket.getsockopt

    @property
    def pollable(self) -> Any:
        return self._socket

    def readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        self._socket.close()


class _Bound(_Base):
    def __init__(self, socket: "zmq.Socket[bytes]", address: Address) -> None:
        super().__init__(socket)
        self.address = address

    def close(self) -> None:
        # At once, so that somebody else can bind there; closing itself is done in the background.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        super().close()


class _Client(_Base):
    empty = zmq.Again

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        super().__init__(socket)
        self.recv_ready: Callable[[], bytes] = partial(socket.recv, _DONTWAIT)

    @property
    def descriptor(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def readable(self) -> bool:
        return bool(int(self._get(_EVENTS)) & _POLLIN)

    def recv(self) -> bytes | None:
        # Asking first costs 1 µs, an exception when there is nothing costs 4.
        if not int(self._get(_EVENTS)) & _POLLIN:
            return None
        try:
            return self._recv(_DONTWAIT)
        except zmq.Again:
            return None

    def send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True


class _Router(_Bound):
    _last: "zmq.Frame | None" = None

    def recv(self) -> tuple[bytes, bytes] | None:
        try:
            parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self._last = parts[-1]  # knows who sent it
        # A different number of parts means that it is not one of our clients; decoding refuses it.
        return parts[0].bytes, parts[1].bytes if len(parts) == 2 else b""

    def origin(self) -> tuple[bool, str]:
        return self._is_local(), self._property("User-Id")

    def _is_local(self) -> bool:
        if self.address.scheme != "tcp":
            return True
        try:
            return ipaddress.ip_address(self._property("Peer-Address").partition("%")[0]).is_loopback
        except ValueError:
            return False

    def _property(self, name: str) -> str:
        try:
            return str(self._last.get(name)) if self._last is not None else ""
        except zmq.ZMQError:  # it has none
            return ""

    def send(self, peer: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart((peer, data), zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from None
            raise
        return True

    def departed(self) -> list[bytes]:
        return []


class _Pub(_Bound):
    def __init__(
        self, make: Callable[[Address], tuple["zmq.Socket[bytes]", Address]], address: Address
    ) -> None:
        self._make = make
        self._use(*make(address))

    def _use(self, socket: "zmq.Socket[bytes]", address: Address) -> None:
        super().__init__(socket, address)
        # Copied by libzmq: its zero-copy needs a Python thread to free the message, which costs more than
        # the copy up to about a megabyte (measured: 25 µs against 6 µs for 64 kB). All subscribers share it.
        # The base class's method is the same without what RADIO and ROUTER sockets need.
        self.send: Callable[..., None] = partial(super(zmq.Socket, socket).send, flags=_DONTWAIT)

    def renew_if_crowded(self) -> bool:
        # Over ipc the old socket's name would be taken away from the new one; and there are no strangers there.
        if self.address.scheme != "tcp":
            return False
        patience_s = 0.0  # whoever publishes waits meanwhile, so only the first time
        if not self._socket.closed:
            try:
                if int(self._socket.getsockopt(zmq.TOPICS_COUNT)) <= _SUBSCRIPTIONS:
                    return False
            except zmq.ZMQError:
                return False  # an older library, which does not tell
            self.close()
            self.send = _drop
            patience_s = _REBIND_S
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._use(*self._make(self.address))
                return True
            except ConfigError as error:
                # libzmq stops listening in the background, a moment later.
                if time.monotonic() < deadline:
                    time.sleep(0.001)
                    continue
                if patience_s:
                    log.error("%s; nothing is sent live until that succeeds", error)
                return patience_s > 0


class ZapServer(_Base):
    """Answers the library's question whether a client's key is on the allow-list (ZeroMQ RFC 27)."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allow: frozenset[bytes] | None) -> None:
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP)
        super().__init__(socket)
        self._allow = allow
        self.denied = 0

    def serve(self) -> None:
        """Answer everything that is waiting."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            ok = len(parts) == 7 and parts[5] == b"CURVE" and self._allowed(parts[6])
            request = parts[1] if len(parts) > 1 else b""
            if not ok:
                self.denied += 1
                where = parts[3].decode("ascii", "replace") if len(parts) > 3 else "?"
                log.warning("client at %s refused: its CURVE key is not on the allow-list", where)
            status = (b"200", b"OK", z85.encode(parts[6])) if ok else (b"400", b"not allowed", b"")
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart((b"1.0", request, *status, b""), zmq.DONTWAIT)

    def _allowed(self, raw_key: bytes) -> bool:
        return self._allow is None or (len(raw_key) == 32 and z85.encode(raw_key) in self._allow)


def _drop(data: bytes) -> None:
    """In place of a socket that there is not; subscribers miss the heartbeats, say HELLO again and ask for it all."""


def _any_port(address: Address) -> bool:
    return address.scheme == "tcp" and address.port == 0


def _is_ipv4(host: str) -> bool:
    return host.replace(".", "").isdigit()


def _strerror(error: Exception) -> str:
    if isinstance(error, zmq.ZMQError) and error.errno is not None:
        return str(zmq.strerror(error.errno)) or os.strerror(error.errno)
    return str(error)
