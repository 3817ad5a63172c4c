"""The classic management port: the same commands and the same shape of answers, one command per line."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

COMMANDS = "stats, counters, timers, gauges, delcounters, deltimers, delgauges, health, config, quit"
# A person or a script types a line; nobody needs more.
MAX_COMMAND_BYTES = 4096
IDLE_S = 600.0
MAX_CONNECTIONS = 64

Answer = Callable[[str, list[str]], Awaitable[str]]


class ManagementServer:
    """Serves one listener; `answer(command, arguments)` gives the text to send."""

    def __init__(self, listener: socket.socket, answer: Answer) -> None:
        self._listener = listener
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to accept."""
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=MAX_COMMAND_BYTES)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.TimeoutError, ValueError, asyncio.LimitOverrunError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            return  # by stop(), which waits for this
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            line = await asyncio.wait_for(reader.readline(), IDLE_S)
            if not line:
                return
            command, *arguments = line.decode("utf-8", "replace").split() or [""]
            if command == "quit":
                return
            writer.write((await self._answer(command, arguments)).encode())
            await asyncio.wait_for(writer.drain(), IDLE_S)

    async def stop(self) -> None:
        """Stop accepting and close all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=1.0)


def inspect(values: dict[str, str]) -> str:
    """A mapping the way the classic daemon prints one: `{ 'name': 5, … }`, and END."""
    if not values:
        return "{}\nEND\n\n"
    rows = ",\n".join(f"  {_quote(name)}: {value}" for name, value in values.items())
    return "{\n" + rows + "\n}\nEND\n\n"


def _quote(name: str) -> str:
    return "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"


def matching(names: list[str], wanted: str) -> list[str]:
    """The names that a `del…` argument means: the name itself, or with `.*` everything below it."""
    found = [wanted] if wanted in names else []
    if wanted.endswith(".*"):
        found += [name for name in names if name.startswith(wanted[:-1])]
    return found
