"""The classic management port: the same commands and the same shape of answers, one command per line."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from brokerless.metrics.aggregate.rollup import Rollup
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.counters import BackendCounters
from brokerless.metrics.numbers import format_number
from brokerless.metrics.parser import Number
from brokerless.metrics.server.config import MetricsConfig

COMMANDS = "stats, counters, timers, gauges, delcounters, deltimers, delgauges, health, config, quit"
# A person or a script types a line; nobody needs more.
MAX_COMMAND_BYTES = 4096
IDLE_S = 600.0
MAX_CONNECTIONS = 64
# With as many, one that has been idle for this long makes room for a new one.
ROOM_S = 10.0


class NamedBackend(Protocol):
    """A backend or repeater, as far as `stats` shows it."""

    name: str
    counters: BackendCounters


class Daemon(Protocol):
    """What the commands need of the server."""

    config: MetricsConfig
    rollup: Rollup
    health: str
    started_at: float

    @property
    def outputs(self) -> Sequence[NamedBackend]:
        """Backends and repeaters."""

    def receive_counters(self) -> dict[str, int]:
        """Counters of the sockets, over all processes."""

    async def peek(self, table: str = "") -> Window:
        """A copy of the open window."""

    async def in_rollup(self, work: Callable[[Rollup], Any]) -> Any:
        """Run `work` in the thread that owns the rollup."""

    async def delete(self, what: str, names: list[str]) -> None:
        """Forget series."""


class ManagementServer:
    """Serves one listener with the commands of a daemon."""

    def __init__(self, listener: socket.socket, daemon: Daemon) -> None:
        self._listener = listener
        self._commands = Commands(daemon)
        # Connections and when they last asked, the longest idle first.
        self._tasks: dict[asyncio.Task[None], float] = {}

    async def start(self) -> None:
        """Begin to accept."""
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=MAX_COMMAND_BYTES)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS and not self._make_room():
            writer.close()
            return
        try:
            with suppress(OSError, asyncio.TimeoutError, ValueError, asyncio.LimitOverrunError):
                await self._serve(task, reader, writer)
        except asyncio.CancelledError:
            return  # by stop(), which waits for this, or because another connection needs the place
        finally:
            self._tasks.pop(task, None)
            writer.close()

    def _make_room(self) -> bool:
        task, since = next(iter(self._tasks.items()))
        if time.monotonic() - since < ROOM_S:
            return False
        del self._tasks[task]
        task.cancel()
        return True

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            self._tasks.pop(task, None)
            self._tasks[task] = time.monotonic()
            line = await asyncio.wait_for(reader.readline(), IDLE_S)
            if not line:
                return
            command, *arguments = line.decode("utf-8", "replace").split() or [""]
            if command == "quit":
                return
            writer.write((await self._commands.answer(command, arguments)).encode())
            await asyncio.wait_for(writer.drain(), IDLE_S)

    async def stop(self) -> None:
        """Stop accepting and close all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=1.0)


class Commands:
    """One server's commands."""

    def __init__(self, server: Daemon) -> None:
        self._server = server

    async def answer(self, command: str, arguments: list[str]) -> str:
        """The text for one command."""
        server = self._server
        if command == "help":
            return f"Commands: {COMMANDS}\n\n"
        if command == "health":
            if arguments and arguments[0].lower() in ("up", "down"):
                server.health = arguments[0].lower()
            return f"health: {server.health}\n"
        if command == "config":
            return self._config()
        if command == "stats":
            return await self._stats()
        if command in ("counters", "gauges", "timers"):
            return await self._values(command)
        if command in ("delcounters", "delgauges", "deltimers"):
            return await self._delete(command.removeprefix("del"), arguments)
        return "ERROR\n"

    def _config(self) -> str:
        rows = []
        for name, value in msgspec.to_builtins(self._server.config).items():
            if isinstance(value, dict):
                rows += [f"{name} > {key}: {inner}" for key, inner in value.items()]
            elif isinstance(value, list):
                rows += [f"{name} > {at}: {inner}" for at, inner in enumerate(value)]
            else:
                rows.append(f"{name}: {value}")
        return "\n" + "\n".join(rows) + "\n"

    async def _stats(self) -> str:
        server = self._server
        window = await server.peek()
        receive = server.receive_counters()
        rollup = server.rollup.counters
        refused = rollup.refused + sum(window.refused.values())
        rows = [
            f"uptime: {round(time.time() - server.started_at)}",
            f"messages.bad_lines_seen: {refused}",
            f"messages.lines: {rollup.lines + window.lines}",
            f"messages.lost_datagrams: {rollup.lost_datagrams}",
        ]
        rows += [f"receive.{name}: {value}" for name, value in receive.items()]
        rows += [f"refused.{reason}: {n}" for reason, n in server.rollup.refused.items()]
        for backend in server.outputs:
            rows += [f"{backend.name}.{name}: {value}" for name, value in backend.counters.snapshot().items()]
        return "\n".join(rows) + "\nEND\n\n"

    async def _values(self, what: str) -> str:
        """Formatted in a thread: the text of 200,000 series would keep the event loop from receiving."""
        server = self._server
        window = await server.peek(what)
        gauges = await server.in_rollup(lambda rollup: dict(rollup.gauges))
        idle = await server.in_rollup(lambda rollup: rollup.names(what))
        return await asyncio.to_thread(_text, what, window, idle, gauges)

    async def _delete(self, what: str, arguments: list[str]) -> str:
        window = await self._server.peek(what)
        names = await self._server.in_rollup(lambda rollup: rollup.names(what))
        names += _new(getattr(window, what), names)
        out = []
        for wanted in arguments:
            found = matching(names, wanted)
            if not found:
                out.append(f"metric {wanted} not found\n")
            for name in found:
                out.append(f"deleted: {name}\n")
            await self._server.delete(what, found)
        return "".join(out) + "END\n\n"


def _text(what: str, window: Window, idle: list[str], gauges: dict[str, Number]) -> str:
    if what == "counters":
        names = [*idle, *_new(window.counters, idle)]
        return inspect({name: format_number(window.counters.get(name, 0)) for name in names})
    if what == "gauges":
        for name, change in window.gauges.items():
            moved = gauges.get(name, 0) + change.delta
            gauges[name] = moved if change.value is None else change.value
        return inspect({name: format_number(value) for name, value in gauges.items()})
    return inspect({name: _timer(window, name) for name in [*idle, *_new(window.timers, idle)]})


def _new(table: Iterable[str], known: list[str]) -> list[str]:
    have = set(known)
    return [name for name in table if name not in have]


def _timer(window: Window, name: str) -> str:
    timer = window.timers.get(name)
    if timer is None:
        return "[]"
    if timer.sketch is not None:
        return f"[ {format_number(timer.count)} values in a sketch ]"
    return "[ " + ", ".join(format_number(value) for value in timer.values) + " ]"


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
