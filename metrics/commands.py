"""Answers of the management port, in the classic daemon's words."""

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from brokerless.metrics.mgmt import COMMANDS, inspect, matching
from brokerless.metrics.numbers import show
from brokerless.metrics.parser import Number
from brokerless.metrics.window import Window

if TYPE_CHECKING:
    from brokerless.metrics.server import MetricsServer


class Commands:
    """One server's commands."""

    def __init__(self, server: "MetricsServer") -> None:
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
        ingest = server.ingest_counters()
        books = server.books.counters
        refused = books.refused + sum(window.refused.values())
        rows = [
            f"uptime: {round(time.time() - server.started_at)}",
            f"messages.bad_lines_seen: {refused}",
            f"messages.lines: {books.lines + window.lines}",
            f"messages.lost_datagrams: {books.lost_datagrams}",
        ]
        rows += [f"ingest.{name}: {value}" for name, value in ingest.items()]
        rows += [f"refused.{reason}: {n}" for reason, n in server.books.refused.items()]
        for backend in [*server.backends, *server.repeaters]:
            rows += [f"{backend.name}.{name}: {value}" for name, value in backend.counters.snapshot().items()]
        return "\n".join(rows) + "\nEND\n\n"

    async def _values(self, what: str) -> str:
        """Formatted in a thread: the text of 200,000 series would keep the event loop from receiving."""
        server = self._server
        window = await server.peek(what)
        gauges = await server.in_books(lambda books: dict(books.gauges))
        idle = await server.in_books(lambda books: books.names(what))
        return await asyncio.to_thread(_text, what, window, idle, gauges)

    async def _delete(self, what: str, arguments: list[str]) -> str:
        window = await self._server.peek(what)
        names = await self._server.in_books(lambda books: books.names(what))
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
        return inspect({name: show(window.counters.get(name, 0)) for name in names})
    if what == "gauges":
        for name, change in window.gauges.items():
            moved = gauges.get(name, 0) + change.delta
            gauges[name] = moved if change.value is None else change.value
        return inspect({name: show(value) for name, value in gauges.items()})
    return inspect({name: _timer(window, name) for name in [*idle, *_new(window.timers, idle)]})


def _new(table: Iterable[str], known: list[str]) -> list[str]:
    have = set(known)
    return [name for name in table if name not in have]


def _timer(window: Window, name: str) -> str:
    timer = window.timers.get(name)
    if timer is None:
        return "[]"
    if timer.sketch is not None:
        return f"[ {show(timer.count)} values in a sketch ]"
    return "[ " + ", ".join(show(value) for value in timer.values) + " ]"
