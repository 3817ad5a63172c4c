"""The supervisor's view of its worker processes.

The zygote only forks and tells of ends. Signals and orders go straight to the workers: while it forks on a busy
machine the zygote may take seconds, and a fault must happen when the supervisor notes it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from brokerless.core.errors import Fault

SPAWN_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps may take long


class Proc:
    """One worker. `status` is the exit code, negative for a signal, None while it runs."""

    def __init__(self, name: str, fifo: Path) -> None:
        self.name = name
        self.pid = 0
        self.status: int | None = None
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        os.mkfifo(fifo)
        # For reading as well, so that neither this nor a write waits for the worker.
        self._orders = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has ended.

        The zygote leaves what has ended unreaped until we know of it, so the number is not another process's.
        """
        if self.status is None and self.pid:
            with contextlib.suppress(ProcessLookupError):  # the zygote is gone, and has taken it along
                os.kill(self.pid, number)

    def tell(self, line: str) -> None:
        """Give an order; nothing happens if it has ended."""
        if self.status is None:
            with contextlib.suppress(BlockingIOError):  # 64 kB of orders that nobody reads
                os.write(self._orders, line.encode() + b"\n")

    def end(self, status: int) -> None:
        """It has ended."""
        self.status = status
        os.close(self._orders)
        self.begun.set()
        self.ended.set()

    async def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False if the time is up."""
        try:
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float = 3.0) -> None:
        """Ask it to stop, and kill it if it does not."""
        if self.status is not None:
            return
        self.tell("stop")
        if not await self.wait(grace_s):
            self.signal(signal.SIGKILL)
            await self.wait(5.0)


class Workers:
    """Starts worker processes through the zygote. Use as an async context manager."""

    def __init__(self, preload: list[str] | None = None) -> None:
        self._preload = preload or []
        self._procs: dict[str, Proc] = {}
        self._zygote: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Workers":
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        arguments = [str(theirs.fileno()), str(os.getpid()), *self._preload]
        self._zygote = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "brokerless.losstest.zygote", *arguments),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._listener = asyncio.create_task(self._listen(reader))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._zygote is not None:
            try:
                await asyncio.wait_for(self._zygote.wait(), 10.0)
            except TimeoutError:
                self._zygote.kill()
                await self._zygote.wait()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)

    @property
    def pid(self) -> int:
        """The zygote's process number."""
        return self._zygote.pid if self._zygote is not None else 0

    def _send(self, order: dict[str, Any]) -> None:
        """One order to the zygote."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(order) + b"\n")

    async def spawn(self, name: str, task: dict[str, Any]) -> Proc:
        """Fork a worker. Raises Fault if the zygote does not answer."""
        fifo = Path(task["log"]).with_suffix(".orders")
        proc = Proc(name, fifo)
        self._procs[name] = proc
        self._send({"do": "spawn", "id": name, "task": task, "orders": str(fifo)})
        try:
            await asyncio.wait_for(proc.begun.wait(), SPAWN_TIMEOUT_S)
        except TimeoutError:
            raise Fault(f"the loss test could not start a process within {SPAWN_TIMEOUT_S} s") from None
        return proc

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            note = msgspec.json.decode(line)
            if "spawned" in note:
                proc = self._procs[note["spawned"]]
                proc.pid = note["pid"]
                proc.begun.set()
            elif "exited" in note:
                self._procs.pop(note["exited"]).end(note["status"])
                self._send({"do": "reap", "id": note["exited"]})
        while self._procs:  # the zygote is gone, and with it all that it had forked
            self._procs.popitem()[1].end(-signal.SIGKILL)
