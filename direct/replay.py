"""Asking a publisher's journal for ranges of offsets, without following it: for batch readers.

Only the control socket is used, so the live stream of others is not touched.
"""

import secrets
import time
from collections.abc import Iterator

import zmq

from brokerless.core.errors import PeerError
from brokerless.direct.address import parse_address
from brokerless.direct.io.diagnosis import diagnose
from brokerless.direct.io.network import open_network
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages

# A request or its answer may be lost with a connection: ask again.
_ASK_AGAIN_S = 1.0
# A mirror that is asked for a promise first asks the candidate, and answers the next time.
_FENCE_AGAIN_S = 0.2
# Until there is a connection nothing can be sent: look again so soon.
_CONNECTING_S = 0.003
_CHUNK_BYTES = 1024 * 1024


class ReplayClient:
    """Asks one publisher. Not thread-safe; close it."""

    def __init__(self, address: str, *, curve: ClientKeys | None = None) -> None:
        """Connect in the background. Raises ConfigError if that is no address."""
        self.address = address
        self._curve = curve is not None
        parsed = parse_address(address)
        self._network = open_network(parsed, client_keys=curve)
        try:
            self._socket = self._network.connect_control(parsed)
        except BaseException:
            self._network.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket.pollable, zmq.POLLIN)
        self._hello = messages.encode(messages.Hello(messages.VERSION, secrets.token_hex(16), start="oldest"))
        self._number = 0
        self._epoch = 0
        self._request = b""
        self._asked = False

    def welcome(self, timeout_s: float) -> messages.Welcome | None:
        """Send HELLO; None if nobody answered in time. Raises PeerError if we are refused."""
        for reply in self._replies(self._hello, timeout_s):
            if isinstance(reply, messages.Welcome):
                if reply.version != messages.VERSION:
                    raise PeerError(
                        f"{self.address} speaks version {reply.version}, we speak {messages.VERSION}"
                    )
                return reply
            if isinstance(reply, messages.Refused) and not reply.again:
                raise PeerError(f"{self.address} refused: {reply.text}")
        return None

    def diagnose(self) -> str:
        """Why nobody answers, as far as can be seen. Takes some seconds at most."""
        return diagnose(parse_address(self.address), curve=self._curve)

    def fence(self, message: messages.Fence, timeout_s: float) -> messages.Fenced | None:
        """Send HELLO, and ask a mirror for a promise; None if nobody answered in time. Raises PeerError."""
        if self.welcome(timeout_s) is None:
            return None
        for reply in self._replies(messages.encode(message), timeout_s, again_s=_FENCE_AGAIN_S):
            if isinstance(reply, messages.Fenced):
                return reply
        return None

    def challenge(self, number: int) -> None:
        """After `welcome`: give a mirror the number that it must name."""
        self._socket.send(messages.encode(messages.Challenge(number)))

    def state(self, dead_letters: int, timeout_s: float) -> messages.State | None:
        """After `welcome`: the groups and so on of a mirror, with its dead letters from an offset on; None if nobody
        answered in time."""
        for reply in self._replies(messages.encode(messages.StateRequest(0, dead_letters)), timeout_s):
            if isinstance(reply, messages.State):
                return reply
        return None

    def ask(self, epoch: int, offset: int) -> None:
        """Ask for frames from an offset on; `answer` waits for them. Ask early, and the publisher works meanwhile."""
        self._number += 1
        self._epoch = epoch
        self._request = messages.encode(messages.Replay(self._number, epoch, offset, _CHUNK_BYTES))
        self._asked = self._socket.send(self._request)

    def answer(self, timeout_s: float) -> messages.Chunk | None:
        """What was asked for last; None if nobody answered in time. Raises PeerError if the epoch is over."""
        for reply in self._replies(self._request, timeout_s, asked=self._asked):
            if isinstance(reply, messages.Chunk) and reply.request == self._number:
                return reply
            if isinstance(reply, messages.Refused) and reply.again:
                # Forgotten (it restarted) or another epoch: a fresh WELCOME tells which.
                again = self.welcome(timeout_s)
                if again is not None and again.epoch != self._epoch:
                    raise PeerError(f"{self.address} has begun epoch {again.epoch}, {self._epoch} was wanted")
                self._socket.send(self._request)
        return None

    def administer(self, request: messages.Admin, timeout_s: float) -> messages.Report | None:
        """Have a command executed; None if nobody answered in time."""
        for reply in self._replies(messages.encode(request), timeout_s):
            if isinstance(reply, messages.Report) and reply.number == request.number:
                return reply
        return None

    def _replies(
        self, request: bytes, timeout_s: float, *, asked: bool = False, again_s: float = _ASK_AGAIN_S
    ) -> Iterator[messages.Reply]:
        """Send, and send again every second; yields what arrives until the time is over."""
        now = time.monotonic()
        deadline = now + timeout_s
        ask_at = now + again_s if asked else now
        while (now := time.monotonic()) < deadline:
            if now >= ask_at:
                ask_at = now + (again_s if self._socket.send(request) else _CONNECTING_S)
            data = self._socket.recv()
            if data is None:
                self._poller.poll(max(1, round((min(ask_at, deadline) - now) * 1000)))
                continue
            reply = messages.decode_reply(data)
            if isinstance(reply, messages.Ping):
                self._socket.send(messages.encode(messages.Pong(reply.number)))
            else:
                yield reply

    def close(self) -> None:
        """Send BYE and close."""
        self._socket.send(messages.encode(messages.Bye()))
        self._socket.close()
        self._network.close()
