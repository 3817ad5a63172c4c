"""The four sockets that direct messaging needs, the same for ZeroMQ and NNG.

    server                      client
    ServerControl  ◀────────▶  ClientControl     requests and answers, addressed to one peer
    ServerLive     ─────────▶  ClientLive        frames to everybody, dropped for whoever is slow

Nothing here ever blocks: `recv` gives None when there is nothing, `send` says whether it was taken. All
errors of the libraries are mapped to ours here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from brokerless.core.errors import ConfigError
from brokerless.direct.address import Address

# Live frames that wait for one slow subscriber, at either end, before newer ones are dropped for it; it repairs
# the gap from the journal. A frame has at most about 1 MiB and is shared by all queues: 64 MiB are the bound.
LIVE_QUEUE = 64
# NNG's own limit for a queue, and 8 GiB of the largest frames.
MAX_LIVE_QUEUE = 8192
# Messages that wait for one client. A subscriber has two answers at most, a worker MAX_MESSAGES deliveries, and both
# some pings. How many bytes that may be is bounded in protocol/unread.py.
CONTROL_QUEUE = 64
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
# Without it a peer whose machine vanished without a word keeps its connection for hours.
KEEPALIVE_S = 5


Empty = type[Exception] | tuple[type[Exception], ...]


class PeerGone(Exception):
    """The peer of a send is not connected any more."""


class Pollable(Protocol):
    """Something a zmq Poller can wait for."""

    @property
    def pollable(self) -> Any:
        """A zmq socket or a file descriptor."""

    def readable(self) -> bool:
        """Whether `recv` would give something now."""

    def close(self) -> None:
        """Close at once; what was not sent yet gets a moment, never an unlimited time."""


class ServerControl(Pollable, Protocol):
    """A publisher's control socket."""

    address: Address

    def recv(self) -> tuple[bytes, bytes] | None:
        """One message and the peer it came from."""

    def origin(self) -> tuple[bool, str]:
        """Where the last message came from: whether from this machine, and its sender's CURVE key if there is one."""

    def send(self, peer: bytes, data: bytes) -> bool:
        """Send to one peer; False if its queue is full. Raises PeerGone."""

    def departed(self) -> list[bytes]:
        """Peers whose connection ended since the last call, if the library tells."""


class ServerLive(Protocol):
    """A publisher's live socket."""

    address: Address

    def send(self, data: bytes) -> None:
        """Send to everybody."""

    def renew_if_crowded(self) -> bool:
        """If strangers have left too much in it, recreate the socket, without them; whether `send` is another now.
        Everybody connects again, and repairs what was missed."""

    def close(self) -> None:
        """Close at once."""


class ClientSocket(Pollable, Protocol):
    """A client's end: of the control socket, or (recv only) of the live socket."""

    @property
    def descriptor(self) -> int:
        """Readable when there may be a message. Ask `readable` before waiting for it: it may tell only of changes."""

    def recv(self) -> bytes | None:
        """One message."""

    @property
    def recv_ready(self) -> Callable[[], bytes]:
        """The library's own way of receiving one message that is there; it raises `empty` if there is none."""

    @property
    def empty(self) -> Empty:
        """What `recv_ready` raises."""

    def send(self, data: bytes) -> bool:
        """Send one message; False if there is no connection now."""


class Served(Pollable, Protocol):
    """Something that a server thread serves beside its control socket."""

    denied: int

    def serve(self) -> None:
        """Deal with everything that is waiting."""


class Network(Protocol):
    """Makes sockets of one library; owns what they share."""

    def serve_control(self, address: Address) -> ServerControl:
        """Bind a control socket. Raises ConfigError if that cannot be."""

    def serve_live(self, address: Address) -> ServerLive:
        """Bind a live socket."""

    def connect_control(self, address: Address) -> ClientSocket:
        """Connect in the background; never waits."""

    def connect_live(self, address: Address) -> ClientSocket:
        """Connect in the background and receive everything."""

    def extra(self) -> Sequence[Served]:
        """What a server must poll and serve as well: authentication."""

    def close(self) -> None:
        """Release everything, within about a second."""


def check_live_queue(frames: int) -> None:
    """Raise ConfigError unless it is a number of frames that a queue can be bounded by."""
    if not 1 <= frames <= MAX_LIVE_QUEUE:
        raise ConfigError("live_queue", f"must be 1 to {MAX_LIVE_QUEUE} frames, not {frames}")


def unbindable(address: Address, problem: str) -> ConfigError:
    """The error for an address that cannot be bound."""
    return ConfigError("address", f"cannot listen at {address}: {problem}")
