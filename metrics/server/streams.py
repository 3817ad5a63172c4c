"""TCP and Unix stream sockets: newline-separated lines, however the bytes are cut into reads."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError
from brokerless.metrics.counters import ReceiveCounters
from brokerless.metrics.limits import MAX_LINE_BYTES
from brokerless.metrics.server.udp import (
    format_address,
    inode_of,
    remove_own,
    remove_stale,
    split_dialect,
)

# asyncio buffers twice as much per connection: 32 MB for 1000 of them.
READ = 16 * 1024
# When there are max_streams connections, one that has been idle for this long makes room for a new one.
IDLE_S = 10.0
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
        self._paths: list[tuple[str, tuple[int, int] | None]] = []
        self._dialects: list[str] = []
        self._servers: list[asyncio.Server] = []
        # Connections and when they last sent something, the longest idle first.
        self._tasks: dict[asyncio.Task[None], float] = {}
        self._max_streams = max_streams
        self._stopping = False
        try:
            for text in tcp:
                address, dialect = split_dialect(text, "tcp")
                self._listeners.append(listen_tcp(address, "tcp"))
                self._dialects.append(dialect)
            for text in unix:
                path, dialect = split_dialect(text, "unix")
                self._listeners.append(self._listen_unix(path))
                self._dialects.append(dialect)
        except BaseException:
            self._close_listeners()
            raise
        self.addresses = [format_address(listener) for listener in self._listeners]

    def _listen_unix(self, path: str) -> socket.socket:
        remove_stale(path, socket.SOCK_STREAM, "unix")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError("unix", f"cannot bind {path}: {error.strerror or error}") from None
        self._paths.append((path, inode_of(path)))
        return listener

    async def start(self, take: Callable[[bytes, str], None], counters: ReceiveCounters) -> None:
        """Accept; `take` gets complete lines and the dialect of their listener."""
        self._take = take
        self._counters = counters
        for listener, dialect in zip(self._listeners, self._dialects, strict=True):
            accept = partial(self._accept, dialect)
            self._servers.append(await asyncio.start_server(accept, sock=listener, limit=READ))

    async def _accept(self, dialect: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (len(self._tasks) >= self._max_streams and not self._make_room()) or self._stopping:
            self._counters.streams_refused += 1
            writer.close()
            return
        self._counters.stream_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = time.monotonic()
        try:
            await self._serve(task, dialect, reader)
        except asyncio.CancelledError:
            return  # by stop(), which waits for this, or because another connection needs the place
        finally:
            self._tasks.pop(task, None)
            writer.close()

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest, if that is long enough."""
        task, since = next(iter(self._tasks.items()))
        if time.monotonic() - since < IDLE_S:
            return False
        del self._tasks[task]
        task.cancel()
        self._counters.streams_evicted += 1
        return True

    async def _serve(self, task: asyncio.Task[None], dialect: str, reader: asyncio.StreamReader) -> None:
        splitter = LineSplitter()
        with suppress(OSError):
            while data := await reader.read(READ):
                if task in self._tasks:
                    del self._tasks[task]
                    self._tasks[task] = time.monotonic()
                lines = splitter.feed(data)
                self._counters.stream_overlong += splitter.overlong
                splitter.overlong = 0
                if lines:
                    self._take(lines, dialect)
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
        for path, inode in self._paths:
            remove_own(path, inode)


def listen_tcp(address: str, field: str) -> socket.socket:
    """A listening TCP socket on `host:port`, or ConfigError."""
    host, port = split_host_port(address, field)
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
