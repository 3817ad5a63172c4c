"""The four sockets over NNG, the successor of nanomsg: pair1 with many peers for control, pub0/sub0 for live.

A pair1 with many peers has a queue of two for each, and drops what does not fit in silence. So a server sends a peer no
more than fits, and the rest when the peer has shown, by answering a Ping, that it has read that. A client has one peer,
and its pair1 drops nothing.
"""

import contextlib
import ipaddress
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pynng

from brokerless.core.errors import ConfigError, PeerError
from brokerless.direct.address import Address
from brokerless.direct.io import base as sockets
from brokerless.direct.io.base import PeerGone
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.unread import Pings, new_ping

# How many messages for one peer NNG surely keeps, without the Ping after them.
_ROOM = 2
# A Ping that was not answered for so long is followed by another when there is more to send.
_ASK_AGAIN_S = 0.05
_PONG = messages.encode(messages.Pong())[:2]
_LINGER_S = 0.1  # ZeroMQ's here is 0.2 s, and ends when all has left
# Connections that ended and may have left messages behind: their queue holds 256. The library numbers connections
# upwards through 31 bits, so a number is not used again while it is remembered.
_REMEMBERED = 65_536


class NngNetwork:
    """NNG has no context to share."""

    def __init__(self, live_queue: int = sockets.LIVE_QUEUE) -> None:
        self._live_queue = live_queue

    def serve_control(self, address: Address) -> "_PairServer":
        socket = pynng.Pair1(
            polyamorous=True,
            recv_max_size=messages.MAX_REQUEST_BYTES,
            send_buffer_size=sockets.CONTROL_QUEUE,
            recv_buffer_size=256,
            # A peer that does not read must not hold the server: see the module's docstring.
            send_timeout=50,
        )
        return _PairServer(socket, _listen(socket, address))

    def serve_live(self, address: Address) -> "_Pub":
        # Subscribers say nothing here, and whatever a stranger announces would be allocated.
        socket = pynng.Pub0(send_buffer_size=self._live_queue, recv_max_size=64)
        return _Pub(socket, _listen(socket, address))

    def connect_control(self, address: Address) -> "_Client":
        socket = pynng.Pair1(
            recv_max_size=messages.MAX_REPLY_BYTES + (16 << 20),
            recv_buffer_size=sockets.CONTROL_QUEUE,
            send_buffer_size=64,
        )
        return _Client(_dial(socket, address))

    def connect_live(self, address: Address) -> "_Client":
        socket = pynng.Sub0(recv_max_size=32 << 20, recv_buffer_size=self._live_queue)
        socket.subscribe(b"")
        return _Client(_dial(socket, address))

    def extra(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def _listen(socket: Any, address: Address) -> Address:
    url = address.with_port(0).url if address.scheme == "tcp" and not address.port else address.url
    try:
        socket.listen(url)
    except (pynng.NNGException, ValueError) as error:
        socket.close()
        raise sockets.unbindable(address, str(error)) from None
    if address.scheme == "tcp" and not address.port:
        return address.with_port(int(str(socket.listeners[0].url).rpartition(":")[2]))
    return address


def _dial(socket: Any, address: Address) -> Any:
    socket.reconnect_time_min = sockets.RECONNECT_MS
    socket.reconnect_time_max = sockets.RECONNECT_MAX_MS
    try:
        socket.dial(address.url, block=False)
    except (pynng.NNGException, ValueError) as error:
        socket.close()
        raise ConfigError("address", f"cannot connect to {address}: {error}") from None
    return socket


class _Base:
    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._closed = False

    @property
    def pollable(self) -> Any:
        return self._socket.recv_fd

    def readable(self) -> bool:
        return False  # the descriptor is level-triggered: asking it is enough

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close()


class _Client(_Base):
    empty = (pynng.TryAgain, pynng.Timeout)

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self.recv_ready: Callable[[], bytes] = partial(socket.recv, block=False)
        self._sent_at = float("-inf")

    @property
    def descriptor(self) -> int:
        return int(self._socket.recv_fd)

    def recv(self) -> bytes | None:
        try:
            data: bytes = self._socket.recv(block=False)
        except (pynng.TryAgain, pynng.Timeout):
            return None
        return data

    def send(self, data: bytes) -> bool:
        if not self._socket.pipes:
            return False  # what waits for a publisher that is away would be old when it comes
        try:
            self._socket.send(data, block=False)
        except pynng.NNGException:
            return False
        self._sent_at = time.monotonic()
        return True

    def close(self) -> None:
        # NNG throws away what has not left yet, and cannot be asked whether anything is left: the last messages get a
        # moment. What is lost nevertheless comes again after its lease.
        if not self._closed and time.monotonic() - self._sent_at < _LINGER_S:
            time.sleep(_LINGER_S)
        super().close()


class _Window:
    """What is on its way to one peer, and what waits until that was read."""

    __slots__ = ("backlog", "pinged", "pings", "pipe", "sent", "shown")

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.backlog: deque[bytes] = deque()
        self.sent = self.shown = 0  # messages
        self.pings = Pings()
        self.pinged = 0.0

    def read(self, number: int) -> None:
        """The peer has answered a Ping; a number that was not sent to it is ignored."""
        until = self.pings.answered(number)
        if until is not None:
            self.shown = until

    def flush(self) -> None:
        """Send what fits: two, and a Ping after them."""
        while self.backlog and self.sent - self.shown < _ROOM:
            self.pipe.send(self.backlog[0])
            self.backlog.popleft()
            self.sent += 1
            if self.sent - self.shown == _ROOM:
                self._ping()
        if self.backlog and time.monotonic() - self.pinged > _ASK_AGAIN_S:
            # What the client received last may have been lost with an interrupt.
            self._ping()

    def _ping(self) -> None:
        number, ping = new_ping()
        self.pipe.send(ping)
        self.sent += 1
        self.pings.add(number, self.sent)
        self.pinged = time.monotonic()


class _PairServer(_Base):
    def __init__(self, socket: Any, address: Address) -> None:
        super().__init__(socket)
        self.address = address
        self._last: Any = None  # the connection of the last message
        self._windows: dict[bytes, _Window] = {}
        self._departed: deque[bytes] = deque()
        self._gone: dict[bytes, None] = {}
        socket.add_post_pipe_remove_cb(self._removed)

    def _removed(self, pipe: Any) -> None:
        """Called by a thread of the library."""
        with contextlib.suppress(pynng.NNGException):
            self._departed.append(_name(pipe))

    def recv(self) -> tuple[bytes, bytes] | None:
        try:
            message = self._socket.recv_msg(block=False)
        except (pynng.TryAgain, pynng.Timeout):
            return None
        self._last = pipe = message.pipe
        if pipe is None:
            return b"", b""  # its connection has ended meanwhile
        name = _name(pipe)
        if name in self._gone:
            # Said before the connection ended, and read after we told so, which we would not do again.
            self._forget(name)
            return b"", b""
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(pipe)
        data: bytes = message.bytes
        if data[:2] == _PONG:
            with contextlib.suppress(PeerError):
                pong = messages.decode_request(data)
                assert isinstance(pong, messages.Pong)
                window.read(pong.number)
        with contextlib.suppress(pynng.NNGException):  # if it is gone, that is told
            window.flush()
        return name, data

    def origin(self) -> tuple[bool, str]:
        if self.address.scheme != "tcp":
            return True, ""
        try:
            host = str(self._last.remote_address).rpartition(":")[0].strip("[]")
            return ipaddress.ip_address(host).is_loopback, ""
        except (ValueError, AttributeError, pynng.NNGException):
            return False, ""

    def _forget(self, name: bytes) -> None:
        """For a message that is read after the end of its connection, pynng makes a new object and keeps it."""
        with self._socket._pipe_notify_lock:
            self._socket._pipes.pop(int.from_bytes(name, "big"), None)

    def send(self, peer: bytes, data: bytes) -> bool:
        window = self._windows.get(peer)
        if window is None:
            raise PeerGone
        if len(window.backlog) >= sockets.CONTROL_QUEUE:
            return False
        window.backlog.append(data)
        try:
            window.flush()
        except (pynng.TryAgain, pynng.Timeout):
            pass  # with the next one
        except pynng.NNGException:
            raise PeerGone from None
        return True

    def departed(self) -> list[bytes]:
        gone = []
        while self._departed:
            name = self._departed.popleft()
            self._windows.pop(name, None)
            self._forget(name)
            self._gone[name] = None
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
            gone.append(name)
        return gone


class _Pub(_Base):
    def __init__(self, socket: Any, address: Address) -> None:
        super().__init__(socket)
        self.address = address

    def renew_if_crowded(self) -> bool:
        return False  # subscriptions stay with the subscribers

    def send(self, data: bytes) -> None:
        with contextlib.suppress(pynng.TryAgain, pynng.Timeout):
            self._socket.send(data)


def _name(pipe: Any) -> bytes:
    return int(pipe.id).to_bytes(8, "big")
