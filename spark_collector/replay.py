"""A publisher's journal over its address: the executors of a Spark job replay ranges of offsets themselves.

Only the control socket is used, so the live stream of others is not touched. The publisher's journal must
hold the
wanted range; a publisher that is away is behind, not lost.
"""

import secrets
import time
from collections.abc import Iterator

import zmq

from brokerless.core import Frame
from brokerless.core.errors import Fault, PeerError
from brokerless.direct import address as addresses
from brokerless.direct import wire
from brokerless.direct.sockets import open_network
from brokerless.spark_collector.places import Extent, Gone

# A publisher on the same network answers within milliseconds; one that is starting within a second.
ANSWER_TIMEOUT_S = 3.0
# A task that has begun to read waits longer, because giving up means doing its whole range again.
READ_TIMEOUT_S = 20.0
# A request or its answer may be lost with a connection: ask again.
_ASK_AGAIN_S = 1.0
# Until there is a connection nothing can be sent: look again so soon.
_CONNECTING_S = 0.003
_CHUNK_BYTES = 1024 * 1024


class PublisherAway(Fault):
    """A publisher did not answer while its journal was being read; Spark tries the task again."""

    def __init__(self, address: str, waited_s: float) -> None:
        super().__init__(f"the publisher at {address} has not answered for {waited_s:.0f} s")
        self.address = address
        self.waited_s = waited_s


class ReplayClient:
    """Asks one publisher. Not thread-safe; close it."""

    def __init__(self, address: str) -> None:
        self.address = address
        parsed = addresses.parse(address)
        self._network = open_network(parsed)
        try:
            self._socket = self._network.connect_control(parsed)
        except BaseException:
            self._network.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket.pollable, zmq.POLLIN)
        self._hello = wire.encode(wire.Hello(wire.VERSION, secrets.token_hex(16), start="oldest"))
        self._number = 0
        self._epoch = 0
        self._request = b""
        self._asked = False

    def welcome(self, timeout_s: float) -> wire.Welcome | None:
        """Greet; None if nobody answered in time. Raises PeerError if we are refused."""
        for reply in self._replies(self._hello, timeout_s):
            if isinstance(reply, wire.Welcome):
                if reply.version != wire.VERSION:
                    raise PeerError(f"{self.address} speaks version {reply.version}, we speak {wire.VERSION}")
                return reply
            if isinstance(reply, wire.Refused) and not reply.again:
                raise PeerError(f"{self.address} refused: {reply.text}")
        return None

    def ask(self, epoch: int, offset: int) -> None:
        """Ask for frames from an offset on; `answer` waits for them. Ask early, and the publisher works
        meanwhile.
        """
        self._number += 1
        self._epoch = epoch
        self._request = wire.encode(wire.Replay(self._number, epoch, offset, _CHUNK_BYTES))
        self._asked = self._socket.send(self._request)

    def answer(self, timeout_s: float) -> wire.Chunk | None:
        """What was asked for last; None if nobody answered in time. Raises PeerError if the epoch is over."""
        for reply in self._replies(self._request, timeout_s, asked=self._asked):
            if isinstance(reply, wire.Chunk) and reply.request == self._number:
                return reply
            if isinstance(reply, wire.Refused) and reply.again:
                # Forgotten (it restarted) or another epoch: a fresh WELCOME tells which.
                again = self.welcome(timeout_s)
                if again is not None and again.epoch != self._epoch:
                    raise PeerError(f"{self.address} has begun epoch {again.epoch}, {self._epoch} was wanted")
                self._socket.send(self._request)
        return None

    def _replies(self, request: bytes, timeout_s: float, *, asked: bool = False) -> Iterator[wire.Reply]:
        """Send, and send again every second; yields what arrives until the time is over."""
        now = time.monotonic()
        deadline = now + timeout_s
        ask_at = now + _ASK_AGAIN_S if asked else now
        while (now := time.monotonic()) < deadline:
            if now >= ask_at:
                ask_at = now + (_ASK_AGAIN_S if self._socket.send(request) else _CONNECTING_S)
            data = self._socket.recv()
            if data is None:
                self._poller.poll(max(1, round((min(ask_at, deadline) - now) * 1000)))
                continue
            yield wire.decode_reply(data)

    def close(self) -> None:
        """Say goodbye and close."""
        self._socket.send(wire.encode(wire.Bye()))
        self._socket.close()
        self._network.close()


class EndpointPlace:
    """A publisher as a place of the data source."""

    def __init__(self, address: str) -> None:
        self.key = address

    def extent(self) -> Extent | None:
        """What its journal holds; None while it is away."""
        client = ReplayClient(self.key)
        try:
            welcome = client.welcome(ANSWER_TIMEOUT_S)
        finally:
            client.close()
        if welcome is None:
            return None
        if not welcome.replay:
            raise PeerError(f"{self.key} has no journal, so nothing can be replayed: collect it instead")
        return Extent(
            welcome.source, welcome.oldest, welcome.next, [(welcome.epoch, welcome.begin)], welcome.source
        )

    def frames(self, first: int, stop: int) -> Iterator[Frame | Gone]:
        """Replay a range. Raises PublisherAway if it stops answering."""
        client = ReplayClient(self.key)
        try:
            welcome = client.welcome(READ_TIMEOUT_S)
            if welcome is None:
                raise PublisherAway(self.key, READ_TIMEOUT_S)
            client.ask(welcome.epoch, first)
            while first < stop:
                chunk = client.answer(READ_TIMEOUT_S)
                if chunk is None:
                    raise PublisherAway(self.key, READ_TIMEOUT_S)
                if first < chunk.next < stop:
                    client.ask(welcome.epoch, chunk.next)
                yield from self._parts(chunk, first, stop)
                if chunk.next <= first:
                    yield Gone(first, stop - 1, "evicted")
                    return
                first = chunk.next
        finally:
            client.close()

    def _parts(self, chunk: wire.Chunk, first: int, stop: int) -> Iterator[Frame | Gone]:
        parts: list[tuple[int, Frame | Gone]] = []
        for begin, after, reason in chunk.gone:
            low, high = max(begin, first), min(after, stop) - 1
            if high >= low:
                parts.append((low, Gone(low, high, "evicted" if reason == "evicted" else "corrupt")))
        for raw in chunk.frames:
            frame = Frame.parse(raw)
            if frame.first_offset < stop and frame.next_offset > first:
                parts.append((frame.first_offset, frame))
        for _, part in sorted(parts, key=lambda p: p[0]):
            yield part

    def blame(self, gone: Gone) -> Exception:
        """The error for a range that the publisher's journal cannot read."""
        return PeerError(
            f"{self.key}: its journal is damaged at offsets {gone.first} to {gone.last}; "
            "set onCorrupt=quarantine to go on without them"
        )
