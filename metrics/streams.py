"""TCP and Unix stream sockets: newline-separated lines, however the bytes are cut into reads."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from brokerless.core.errors import ConfigError
from brokerless.metrics.counters import IngestCounters
from brokerless.metrics.parser import MAX_LINE_BYTES
from brokerless.metrics.udp import remove_stale, show_address, split_address

READ = 64 * 1024
# Streams get half a second to hand over what is already in their buffers when the daemon stops.
DRAIN_S = 0.5


class LineSplitter:
    """Bytes of one stream into complete lines; pure. A line beyond the limit is skipped to its newline."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""
        self._skipping = False
        self.overlong = 0

    def feed(self, data: bytes) -> bytes:
        """Complete lines, joined by newlines; empty when there is none yet."""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        if not newline:
            self._rest = self._bounded(rest)
            return b""
        if self._skipping:
            self._skipping = False
            whole = whole.partition(b"\n")[2]
        self._rest = self._bounded(rest)
        return whole

    def _bounded(self, rest: bytes) -> bytes:
        if self._skipping:
            return b""
        if len(rest) > self._limit:
            self._skipping = True
            self.overlong += 1
            return b""
        return rest

    @property
    def unfinished(self) -> bytes:
        """What came after the last newline."""
        return self._rest


class StreamServer:
    """Listens on TCP addresses and Unix paths. Bound when made, so that errors come early."""

    def __init__(self, tcp: list[str], unix: list[str], *, max_streams: int) -> None:
        self._listeners: list[socket.socket] = []
        self._paths: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._max_streams = max_streams
        self._stopping = False
        try:
            for address in tcp:
                self._listeners.append(listen_tcp(address, "tcp"))
            for path in unix:
                self._listeners.append(self._listen_unix(path))
        except BaseException:
            self._close_listeners()
            raise
        self.addresses = [show_address(listener) for listener in self._listeners]

    def _listen_unix(self, path: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            remove_stale(path, socket.SOCK_STREAM)
            listener.bind(path)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError("unix", f"cannot bind {path}: {error.strerror or error}") from None
        self._paths.append(path)
        return listener

    async def start(self, take: Callable[[bytes], None], counters: IngestCounters) -> None:
        """Accept; `take` gets complete lines."""
        self._take = take
        self._counters = counters
        for listener in self._listeners:
            self._servers.append(await asyncio.start_server(self._accept, sock=listener, limit=READ))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._max_streams or self._stopping:
            self._counters.streams_refused += 1
            writer.close()
            return
        self._counters.stream_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader)
        except asyncio.CancelledError:
            return  # by stop(), which waits for this
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        splitter = LineSplitter()
        with suppress(OSError):
            while data := await reader.read(READ):
                lines = splitter.feed(data)
                self._counters.stream_overlong += splitter.overlong
                splitter.overlong = 0
                if lines:
                    self._take(lines)
        # Without its newline a last line may be half a line: `a:12` of `a:123|c`.
        if splitter.unfinished:
            self._counters.stream_unfinished += 1

    async def stop(self) -> None:
        """Stop accepting, take what the connections still have, then close them."""
        self._stopping = True
        for server in self._servers:
            server.close()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=DRAIN_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=DRAIN_S)
        self._close_listeners()

    def close(self) -> None:
        """Close the listeners; for a server that never started."""
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)


def listen_tcp(address: str, field: str) -> socket.socket:
    """A listening TCP socket on `host:port`, or ConfigError."""
    host, port = split_address(address, field)
    try:
        family, kind, _, _, sockaddr = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(field, f"cannot use {address}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(field, f"cannot bind {address}: {error.strerror or error}") from None
    return listener
