"""Real HTTP targets on loopback, and dispatchers that may talk to them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig, Schedule

LOCAL = AddressPolicy(allow=("127.0.0.0/8", "::1/128"), schemes=("http", "https"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Got:
    """One request that a target received."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.at = time.monotonic()


Answer = int | bytes | tuple[int, dict[str, str]] | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Target:
    """An HTTP server whose answers the test decides; `answer(got, number)` is called for each request."""

    def __init__(self, answer: Callable[[Got, int], Answer] | None = None) -> None:
        self.got: list[Got] = []
        self.answer = answer or (lambda _got, _number: 200)
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, ssl: Any = None, host: str = "127.0.0.1") -> None:
        self._server = await asyncio.start_server(self._serve, host, 0, ssl=ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http{'s' if ssl else ''}://127.0.0.1:{self.port}/hook"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *rest = head.split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in rest if line)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                got = Got(method, path, headers, body)
                self.got.append(got)
                answer = self.answer(got, len(self.got))
                if callable(answer):
                    await answer(writer)
                    return
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    status, extra = (answer, {}) if isinstance(answer, int) else answer
                    lines = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
                    text = b"ok" if status != 204 else b""
                    writer.write(
                        f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(text)}\r\n\r\n".encode() + text
                    )
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    @property
    def bodies(self) -> list[str]:
        return [got.body.decode() for got in self.got]


@pytest.fixture
async def targets() -> AsyncIterator[Callable[..., Awaitable[Target]]]:
    """`await targets(answer)` starts a target."""
    made: list[Target] = []

    async def make(answer: Callable[[Got, int], Answer] | None = None, **options: Any) -> Target:
        target = Target(answer)
        await target.start(**options)
        made.append(target)
        return target

    yield make
    for target in made:
        await target.stop()


def config(**changes: Any) -> DispatcherConfig:
    """Quick retries to loopback, without ownership checks."""
    fields: dict[str, Any] = {
        "policy": LOCAL,
        "verification": "none",
        "schedule": Schedule(delays_s=(0.02,) * 200),
        "attempt_timeout_s": 2.0,
        "connect_timeout_s": 2.0,
        "poll_s": 0.02,
    }
    return DispatcherConfig(**(fields | changes))


@pytest.fixture
async def dispatchers(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Dispatcher]]]:
    """`await dispatchers(**config)` starts a dispatcher; all on one outbox unless `outbox` says otherwise."""
    made: list[Dispatcher] = []

    async def make(outbox: str | Path | None = None, **changes: Any) -> Dispatcher:
        dispatcher = Dispatcher(outbox or tmp_path / "outbox.sqlite", source="test", config=config(**changes))
        await dispatcher.start()
        made.append(dispatcher)
        return dispatcher

    yield make
    for dispatcher in made:
        await dispatcher.stop()


async def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float = 20) -> None:
    """Wait for a condition (or a coroutine's result) with a deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture(name="make_config")
def _make_config() -> Callable[..., DispatcherConfig]:
    return config
