"""Processes that are forked from one that has imported our packages.

Starting Python and importing them takes longer than what most processes of tests do, and tests of faults start many.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["brokerless.direct", "brokerless.direct.io.nng"])


class Forked:
    """`function(*args)` in a process of its own; `out` is what it prints."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        reader, writer = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_call, args=(writer, function, args), daemon=True)
        self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.out = os.fdopen(os.dup(reader.fileno()))
        reader.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> None:
        """Wait for its end; AssertionError if it does not come."""
        self._process.join(timeout)
        assert not self.alive, "the process goes on"

    def kill(self) -> None:
        """End it at once, also while it is stopped."""
        self.signal(signal.SIGKILL)
        self.wait(60)
        self.out.close()


def _call(writer: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    os.dup2(writer.fileno(), 1)
    writer.close()
    function(*args)
