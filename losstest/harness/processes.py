"""The supervisor's view of its worker processes.

The fork server only forks and reports ends. Signals and instructions go straight to the workers: on a busy machine
a fork may take seconds, and a fault must happen when the supervisor logs it.
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

STOP_TIMEOUT_S = 10.0  # for an orderly stop, on a busy machine
SPAWN_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps may take long


class Proc:
    """One worker. `status` is the exit code, negative for a signal, None while it runs."""

    def __init__(self, name: str, fifo: Path) -> None:
        self.name = name
        self.pid = 0
        self.status: int | None = None
        self.told_to_end = False  # by us; what ends otherwise is a problem of the run
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        os.mkfifo(fifo)
        # For reading as well, so that neither this nor a write waits for the worker.
        self._control = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has ended.

        The fork server leaves what has ended unreaped until we know of it, so the number is not another process's.
        """
        if self.status is None and self.pid:
            self.told_to_end |= number in (signal.SIGKILL, signal.SIGTERM)
            with contextlib.suppress(ProcessLookupError):  # the fork server is gone, and has taken it along
                os.kill(self.pid, number)

    def send(self, line: str) -> None:
        """Send an instruction; nothing happens if it has ended."""
        if self.status is None:
            with contextlib.suppress(BlockingIOError):  # 64 kB of instructions that nobody reads
                os.write(self._control, line.encode() + b"\n")

    def end(self, status: int) -> None:
        """It has ended."""
        self.status = status
        os.close(self._control)
        self.begun.set()
        self.ended.set()

    async def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False if the time is up."""
        try:
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> bool:
        """Ask it to stop, and kill it if it does not; False if it had to be killed."""
        if self.status is not None:
            return True
        self.told_to_end = True
        self.send("stop")
        if await self.wait(STOP_TIMEOUT_S):
            return True
        self.signal(signal.SIGKILL)
        await self.wait(5.0)
        return False


class Workers:
    """Starts worker processes through the fork server. Use as an async context manager."""

    def __init__(self, preload: list[str] | None = None, library: str = "") -> None:
        """`preload` are modules that the workers share, `library` is loaded into them before anything else."""
        self._preload = preload or []
        self._library = library
        self._procs: dict[str, Proc] = {}
        self._fork_server: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Workers":
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        arguments = [str(theirs.fileno()), str(os.getpid()), *self._preload]
        self._fork_server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "brokerless.losstest.harness.fork_server", *arguments),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for us: it would die of it in the middle of its imports
            env=os.environ | ({"LD_PRELOAD": self._library} if self._library else {}),
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
        if self._fork_server is not None:
            try:
                await asyncio.wait_for(self._fork_server.wait(), 10.0)
            except TimeoutError:
                self._fork_server.kill()
                await self._fork_server.wait()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)

    @property
    def pid(self) -> int:
        """The fork server's process number."""
        return self._fork_server.pid if self._fork_server is not None else 0

    def _send(self, request: dict[str, Any]) -> None:
        """Send one request to the fork server."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(request) + b"\n")

    async def spawn(self, name: str, task: dict[str, Any]) -> Proc:
        """Fork a worker. Raises Fault if the fork server does not answer."""
        fifo = Path(task["log"]).with_suffix(".control")
        proc = Proc(name, fifo)
        self._procs[name] = proc
        self._send({"do": "spawn", "id": name, "task": task, "control": str(fifo)})
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
        while self._procs:  # the fork server is gone, and with it all that it had forked
            self._procs.popitem()[1].end(-signal.SIGKILL)
