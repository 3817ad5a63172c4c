"""The smallest HTTP/1.1 receiver that will do: POST with Content-Length, one thread, no framework.

It can misbehave on order: answer 500 to everything, or take requests and never answer.
"""

import contextlib
import select
import socket

import msgspec

from brokerless.losstest.adapters.base import Consumer, Message, Setup

MAX_HEAD = 65536
_STATUS = {200: "OK", 400: "Bad Request", 500: "Internal Server Error"}


class Request(msgspec.Struct):
    """A complete request."""

    method: str
    headers: dict[str, str]
    body: bytes


def parse_request(buffer: bytes) -> tuple[Request | None, int]:
    """The first request in the buffer and how many bytes it took; (None, 0) if it is not complete.

    Raises ValueError for what is not HTTP.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > MAX_HEAD:
            raise ValueError("head too long")
        return None, 0
    first, *lines = buffer[:end].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    method, _, rest = first.partition(" ")
    if not rest.startswith("/") and rest != "*":
        raise ValueError("no request line")
    size = int(headers.get("content-length", "0"))
    total = end + 4 + size
    if len(buffer) < total:
        return None, 0
    return Request(method, headers, buffer[end + 4 : total]), total


def response(status: int, body: bytes = b"") -> bytes:
    """A complete response."""
    head = f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class HttpConsumer(Consumer):
    """Receives POSTs; answers 200 when the harness acknowledges, which is after the commit."""

    def __init__(self, setup: Setup) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(setup.listen(setup.index))
        self._listener.listen(256)
        self._peers: dict[socket.socket, bytes] = {}
        self._mode = "answer-200"

    def command(self, word: str) -> None:
        """Change the behaviour; connections that were left hanging are closed when it heals."""
        if self._mode == "hang" and word == "answer-200":
            for sock in list(self._peers):
                self._drop(sock)
        self._mode = word

    def body_of(self, request: Request) -> bytes:
        """The event in a request; subclasses unwrap it."""
        return request.body

    def receive(self, timeout_s: float) -> list[Message]:
        if self._listener.fileno() < 0:
            return []
        messages: list[Message] = []
        readable, _, _ = select.select([self._listener, *self._peers], [], [], timeout_s)
        for sock in readable:
            if sock is self._listener:
                peer, _ = sock.accept()
                peer.settimeout(5.0)
                self._peers[peer] = b""
            else:
                messages += self._read(sock)
        return messages

    def _read(self, sock: socket.socket) -> list[Message]:
        data = b""
        with contextlib.suppress(OSError):
            data = sock.recv(65536)
        if not data:
            self._drop(sock)
            return []
        self._peers[sock] += data
        messages: list[Message] = []
        while True:
            try:
                request, used = parse_request(self._peers[sock])
            except ValueError:
                self._answer(sock, 400)
                self._drop(sock)
                return messages
            if request is None:
                return messages
            self._peers[sock] = self._peers[sock][used:]
            if self._mode == "answer-500":
                self._answer(sock, 500)
            elif self._mode != "hang":
                messages.append(Message(self.body_of(request), ack=lambda: self._answer(sock, 200)))

    def _answer(self, sock: socket.socket, status: int) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(response(status))

    def _drop(self, sock: socket.socket) -> None:
        self._peers.pop(sock, None)
        sock.close()

    def close(self) -> None:
        for sock in (self._listener, *self._peers):
            sock.close()
