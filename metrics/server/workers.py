"""Several processes on the same UDP ports, and one merged window of all of them.

The parent binds all sockets and keeps them open: a worker that dies is replaced by one that goes on reading
the same socket, so that only what the dead one had collected of the window is lost (and the clients' numbers
show it).
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys

import msgspec

from brokerless.core.errors import Fault
from brokerless.metrics.aggregate.filters import FilterConfig
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.counters import ReceiveCounters
from brokerless.metrics.parser import ParserOptions
from brokerless.metrics.server.udp import DatagramSocket

# Aggregating a full window of 200,000 series takes a worker about a second; this is for a machine on its knees.
REPLY_S = 30.0
STOP_S = 5.0
_LENGTH = struct.Struct("!I")


class WorkerSetup(msgspec.Struct):
    """What a worker is told when it begins: file descriptors of its sockets, and its limits."""

    sockets: list[int]
    max_series: int
    max_clients: int
    repeaters: list[str]
    # Of each socket.
    dialects: list[str]
    options: ParserOptions
    filters: FilterConfig
    auth_keys: list[bytes]
    since_ms: int
    # File descriptor where each new client is noted, to be missed if it dies with its window.
    heard: int


class Limits(msgspec.Struct):
    """What a running worker can be told to do in another way."""

    max_series: int
    options: ParserOptions
    filters: FilterConfig


class Order(msgspec.Struct):
    """From the parent: `close` the window, `last` (close it and stop receiving), `peek` into it, `forget`
    clients, `delete` series, `retain` only these series, `configure`, or `stop`."""

    what: str
    names: list[str] = msgspec.field(default_factory=list)
    table: str = ""
    limits: Limits | None = None


class Reply(msgspec.Struct):
    """From a worker: the window, and its counters since it began."""

    window: Window
    counters: dict[str, int]
    # It knows so many series that it should be told which are alive.
    crowded: bool = False


class WorkerDied(Fault):
    """A worker ended, or did not answer in time."""


class Worker:
    """One process, seen from the parent."""

    def __init__(self, sockets: list[DatagramSocket], setup: WorkerSetup) -> None:
        self.sockets = sockets
        self.setup = setup
        self._lock = asyncio.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.counters: dict[str, int] = {}
        self.crowded = False

    async def start(self) -> None:
        """Start the process; the sockets are inherited."""
        ours, theirs = socket.socketpair()
        fds = [sock.sock.fileno() for sock in self.sockets]
        dialects = [sock.dialect for sock in self.sockets]
        setup = msgspec.structs.replace(self.setup, sockets=fds, dialects=dialects)
        # What it is told goes through the socket: a command line, which everybody can read, must not have the keys.
        command = [sys.executable, "-m", "brokerless.metrics.server.worker", str(theirs.fileno())]
        # Starting takes a millisecond, and happens at start and after a crash.
        self.process = subprocess.Popen(  # noqa: ASYNC220, S603  # our own interpreter and module
            command,
            pass_fds=[*fds, theirs.fileno(), setup.heard],
            stdin=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the parent, which will ask for the last window.
            start_new_session=True,
        )
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._writer.write(frame(msgspec.msgpack.encode(setup)))

    async def ask(self, order: Order) -> Reply | None:
        """Send an order; `stop` and `forget` have no reply. Raises WorkerDied."""
        async with self._lock:
            try:
                self._writer.write(frame(msgspec.msgpack.encode(order)))
                await asyncio.wait_for(self._writer.drain(), REPLY_S)
                if order.what in ("stop", "forget", "delete", "retain", "configure"):
                    return None
                size = _LENGTH.unpack(await asyncio.wait_for(self._reader.readexactly(4), REPLY_S))[0]
                body = await asyncio.wait_for(self._reader.readexactly(size), REPLY_S)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                raise WorkerDied(f"worker {self.process and self.process.pid} is gone: {error!r}") from None
        reply = await asyncio.to_thread(msgspec.msgpack.decode, body, type=Reply)
        self.counters, self.crowded = reply.counters, reply.crowded
        return reply

    async def stop(self) -> None:
        """End the process; one that does not listen is killed."""
        if self.process is None:
            return
        with contextlib.suppress(WorkerDied):
            await self.ask(Order("stop"))
        self._writer.close()
        process = self.process
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


class WorkerPool:
    """All workers, with the interface of one collector."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._settled: dict[str, int] = {}
        self.crashes = 0
        self._kernel_drops = 0
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the sockets."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    @property
    def counters(self) -> ReceiveCounters:
        """Sum over all workers, those that died included."""
        total = dict(self._settled)
        for worker in self._workers:
            add_counts(total, worker.counters)
        return ReceiveCounters(**{**total, "kernel_drops": self._kernel_drops})

    async def start(self) -> None:
        """Start all processes."""
        for worker in self._workers:
            await worker.start()

    async def _all(self, what: str, table: str = "") -> Window:
        order = Order(what, table=table)
        replies = await asyncio.gather(*(self._one(worker, order) for worker in self._workers))
        return await asyncio.to_thread(_merged, [reply.window for reply in replies if reply is not None])

    async def _one(self, worker: Worker, order: Order) -> Reply | None:
        try:
            return await worker.ask(order)
        except WorkerDied:
            self.crashes += 1
            if worker.process is not None:
                worker.process.kill()
                await asyncio.to_thread(worker.process.wait)
            add_counts(self._settled, worker.counters)
            worker.counters = {}
            await worker.start()
            return None

    async def close_window(self) -> Window:
        """End the window in all workers; one that died contributes nothing, and is replaced."""
        window = await self._all("last" if self._stopping else "close")
        # Read here, from the same sockets: a worker that was replaced does not know what was dropped before it.
        window.kernel_drops = sum(sock.drops() for worker in self._workers for sock in worker.sockets)
        self._kernel_drops += window.kernel_drops
        return window

    async def peek(self, table: str) -> Window:
        """A copy of one table of what all workers have in the open window."""
        return await self._all("peek", table)

    async def forget(self, clients: list[str]) -> None:
        """Drop the state of numbered clients that are gone."""
        await self._send_to_all(Order("forget", clients))

    async def delete(self, table: str, names: list[str]) -> None:
        """Remove series from the open window."""
        await self._send_to_all(Order("delete", names, table))

    @property
    def crowded(self) -> bool:
        """Whether a worker knows so many series that it should be told which are alive."""
        return any(worker.crowded for worker in self._workers)

    async def retain(self, series: list[str]) -> None:
        """These series are alive: in workers that know too many, new ones may take the place of all others."""
        await self._send(Order("retain", series), [worker for worker in self._workers if worker.crowded])

    async def configure(self, max_series: int, options: ParserOptions, filters: FilterConfig) -> None:
        """Use other limits and rules from now on, in workers that are started later, too."""
        order = Order("configure", limits=Limits(max_series, options, filters))
        for worker in self._workers:
            worker.setup = msgspec.structs.replace(
                worker.setup, max_series=max_series, options=options, filters=filters
            )
        await self._send(order, self._workers)

    async def _send_to_all(self, order: Order) -> None:
        await self._send(order, self._workers)

    async def _send(self, order: Order, workers: list[Worker]) -> None:
        for worker in workers:
            with contextlib.suppress(WorkerDied):
                await worker.ask(order)

    async def stop(self) -> None:
        """The next window is the last: each worker reads its sockets empty before it closes it."""
        self._stopping = True

    async def end(self) -> None:
        """End all processes."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))


def _merged(windows: list[Window]) -> Window:
    total = Window()
    for window in windows:
        total.merge(window)
    return total


def add_counts(total: dict[str, int], more: dict[str, int]) -> None:
    """Add counters by name."""
    for name, n in more.items():
        total[name] = total.get(name, 0) + n


def frame(body: bytes) -> bytes:
    """A message on the pipe between parent and worker: length, then body."""
    return _LENGTH.pack(len(body)) + body


def open_inherited(fd: int, dialect: str) -> DatagramSocket:
    """A socket that the parent bound."""
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return DatagramSocket(sock, lossless=False, dialect=dialect)
