"""Serving an ASGI app by uvicorn: the listening socket, connections that do not finish their requests, TLS, a thread.

Not imported by `brokerless.core` itself: uvicorn is loaded by those who serve something.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from brokerless.core.errors import ConfigError

# A client sends its headers at once; nginx waits for 60 s, which is long enough to hold many places.
HEADER_TIMEOUT_S = 10.0
# Connections without a complete request; beyond it the oldest is closed, so that no number of them stops the app.
MAX_UNFINISHED = 512
START_S = 10.0


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's HTTP, for connections that have to complete a request in time. Each app gets a subclass of its own."""

    header_timeout_s: ClassVar[float] = HEADER_TIMEOUT_S
    max_unfinished: ClassVar[int] = MAX_UNFINISHED
    unfinished: ClassVar[dict["BoundedProtocol", None]]
    max_unread: ClassVar[int] = MAX_UNFINISHED
    unread: ClassVar[dict["BoundedProtocol", None]]
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection begins without a request."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Data came: is there a request under way now?"""
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._expect_request()
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._forget()
        self._was_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """There is more of an answer than the client reads: it waits in memory, and not for ever."""
        super().pause_writing()
        self.unread[self] = None
        if len(self.unread) > self.max_unread:
            next(iter(self.unread))._drop()
        self._expect_reading()

    def resume_writing(self) -> None:
        """It was read."""
        self._was_read()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server stops: what has no end of its own (`scope["endless"]`) ends now, instead of being waited for."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and cycle.scope.get("endless"):
            self.transport.close()

    def _expect_request(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.header_timeout_s, self._drop)
            self.unfinished[self] = None
            if len(self.unfinished) > self.max_unfinished:
                next(iter(self.unfinished))._drop()

    def _expect_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread_timer = asyncio.get_running_loop().call_later(
            self.header_timeout_s, self._check_reading, size
        )

    def _check_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            self._drop()

    def _was_read(self) -> None:
        self.unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _drop(self) -> None:
        self._forget()
        self._was_read()
        self.transport.abort()

    def _forget(self) -> None:
        self.unfinished.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("host", f"{host} cannot be used: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # From here on a client that connects waits for the server; before, it would be refused.
        listener.listen(2048)
    except (OSError, OverflowError, TypeError) as error:
        listener.close()
        if isinstance(error, OSError):
            cause = error.strerror or str(error)
        elif isinstance(error, OverflowError):
            cause = "a port is a number from 0 to 65535"
        else:
            cause = "this is no host name"
        raise ConfigError("port", f"{host}:{port} cannot be used: {cause}") from None
    return listener


def address_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def server_for(
    app: Any,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    max_unfinished: int = MAX_UNFINISHED,
    max_unread: int = MAX_UNFINISHED,
    header_timeout_s: float = HEADER_TIMEOUT_S,
    linger_s: int = 5,
) -> uvicorn.Server:
    """A uvicorn server of the app; open requests get `linger_s` at the end.

    `max_unfinished`: connections without a complete request; `max_unread`: with an answer that is not read. Beyond that
    the oldest is closed, as is one that sends or reads nothing for `header_timeout_s`.
    Raises ConfigError if the certificate cannot be used.
    """
    limits: dict[str, Any] = {"header_timeout_s": header_timeout_s, "unfinished": {}, "unread": {}}
    limits |= {"max_unfinished": max_unfinished, "max_unread": max_unread}
    config = uvicorn.Config(
        app,
        http=type("Protocol", (BoundedProtocol,), limits),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=linger_s,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError("tls_certificate", f"cannot be used: {error}") from None
    return uvicorn.Server(config)


class HttpHost:
    """Serves an app in a thread of its own from here on until `close`; `address` is where.

    Signals stay the program's: a thread may not install handlers.
    """

    def __init__(self, app: Any, listener: socket.socket, **options: Any) -> None:
        """`listener` is closed with it; `options` are those of `server_for`."""
        self._listener = listener
        self.address = address_of(listener)
        self.port = int(listener.getsockname()[1])
        self._server = server_for(app, **options)
        self._server.capture_signals = _no_signals  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, name=f"serve {self.address}", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        """Finish the requests under way and stop. Closing twice is fine."""
        self._server.should_exit = True
        self._thread.join()
        with contextlib.suppress(OSError):
            self._listener.close()


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    yield
