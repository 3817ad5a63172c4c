"""The Redis protocol (RESP2), as much as a reference row needs."""

import socket
from types import TracebackType

from brokerless.core.errors import Fault

Reply = bytes | int | list["Reply"] | None


class RedisError(Fault):
    """The server answered with an error."""


class RedisGone(Fault):
    """The server did not answer: the connection is of no use any more."""


class Redis:
    """One connection, one request at a time."""

    def __init__(self, host: str, port: int, timeout_s: float = 10.0) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._file = self._socket.makefile("rb")

    def call(self, *words: str | bytes) -> Reply:
        """Send a command and return its answer. Raises RedisError."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(parts)
        request += b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        try:
            self._socket.sendall(request)
            return self._read()
        except OSError as error:
            raise RedisGone(f"redis: {error}") from error

    def _read(self) -> Reply:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise RedisGone("redis: the connection was closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise RedisError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return int(rest)
        size = int(rest)
        if size < 0:
            return None
        if kind == b"$":
            return self._file.read(size + 2)[:-2]
        return [self._read() for _ in range(size)]

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> "Redis":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
