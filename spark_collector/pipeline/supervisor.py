"""Runs commands as child processes: what ends is started again, and all of them end together."""

import contextlib
import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from brokerless.core import Backoff
from brokerless.core.runtime.process import end_with_parent
from brokerless.spark_collector.pipeline.commands import Command

log = logging.getLogger(__name__)
RETRY = Backoff(first_s=1.0, limit_s=60.0)
# A process that ran for so long was well: the next failure begins with the shortest pause.
_WELL_S = 60.0
_LOOK_S = 0.2
# A table that is to be compacted has been made by then.
_FIRST_S = 60.0


class _Child:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        # What is repeated has something to do when the others have done something.
        self.start_at = 0.0 if command.every_s is None else time.monotonic() + min(command.every_s, _FIRST_S)
        self.failures = 0


class Supervisor:
    """Runs `program` with the arguments of each command until `stop`.

    A command that ends is started again: after its `every_s` if it has one and succeeded, else with back-off.
    `on_change(name, text)` hears of starts and ends. Children that do not end within `grace_s` of SIGTERM are killed;
    if this process is killed, they get SIGTERM from the kernel.
    """

    def __init__(
        self,
        program: Sequence[str],
        commands: Sequence[Command],
        *,
        on_change: Callable[[str, str], None] = lambda name, text: None,
        grace_s: float = 60.0,
    ) -> None:
        self._program = list(program)
        self._children = [_Child(command) for command in commands]
        self._on_change = on_change
        self._grace_s = grace_s
        self.restarts = 0

    def run(self, stop: threading.Event) -> None:
        """Supervise in this thread until `stop` is set; then end all children."""
        try:
            while not stop.is_set():
                for child in self._children:
                    self._look_at(child, time.monotonic())
                stop.wait(_LOOK_S)
        finally:
            self._end()

    def pids(self) -> dict[str, int]:
        """The running processes by name."""
        running = {child.command.name: child.process for child in self._children}
        return {name: process.pid for name, process in running.items() if process is not None}

    def _look_at(self, child: _Child, now: float) -> None:
        if child.process is None:
            if now >= child.start_at:
                self._start(child, now)
            return
        code = child.process.poll()
        if code is None:
            return
        child.process = None
        every_s = child.command.every_s
        if code == 0 and every_s is not None:
            child.failures = 0
            child.start_at = child.began + every_s
            return
        if now - child.began >= _WELL_S:
            child.failures = 0
        pause = RETRY.delay_s(child.failures, random.random)
        child.failures += 1
        child.start_at = now + pause
        self.restarts += 1
        self._on_change(child.command.name, f"ended with {code}; again in {pause:.1f} s")

    def _start(self, child: _Child, now: float) -> None:
        # A session of its own: Ctrl-C at the terminal comes to us, and we end them in order.
        child.process = subprocess.Popen(  # noqa: S603  # our own command line
            [*self._program, *child.command.arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  # nothing here holds a lock that it would need
        )
        child.began = now
        self._on_change(child.command.name, f"started as process {child.process.pid}")

    def _end(self) -> None:
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._grace_s
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("process %d did not end in time and is killed", process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for child in self._children:
            child.process = None
