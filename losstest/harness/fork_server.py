"""The process that forks all workers: started once, imports everything once, forks in milliseconds.

It takes requests as JSON lines on a socket and reports which children began and ended. It leaves children unreaped
until the supervisor knows that they ended, so a signal can never hit a process number that was used again.
When the supervisor dies in any way, the kernel kills this process, and with it all children
(PR_SET_PDEATHSIG), stopped ones too.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; exit at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """Forks and reaps."""

    def __init__(self, control: socket.socket, run: Callable[[dict[str, Any], int], None]) -> None:
        """`run` is what each child does: with its task, and a file descriptor to take instructions from."""
        self._control, self._run = control, run
        self._pids: dict[str, int] = {}
        self._ended: set[str] = set()  # reported, and not reaped yet
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        """Until the supervisor closes the socket; then all children are killed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the supervisor has left
            self._serve()
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _serve(self) -> None:
        buffer = b""
        while True:
            fds = [self._control.fileno(), self._wake_r]
            readable, _, _ = select.select(fds, [], [], 0.5)
            if self._wake_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            self._report_ended()
            if self._control.fileno() in readable:
                data = self._control.recv(65536)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._handle(msgspec.json.decode(line))

    def _handle(self, request: dict[str, Any]) -> None:
        what, name = request["do"], request["id"]
        if what == "spawn":
            self._spawn(name, request["task"], request["control"])
        elif what == "reap":
            os.waitpid(self._pids.pop(name), 0)
            self._ended.discard(name)

    def _reply(self, **fields: object) -> None:
        self._control.sendall(msgspec.json.encode(fields) + b"\n")

    def _spawn(self, name: str, task: dict[str, Any], control_path: str) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child(parent, task, control_path)
        self._pids[name] = pid
        self._reply(spawned=name, pid=pid)

    def _child(self, parent: int, task: dict[str, Any], control_path: str) -> None:
        code = 1
        try:
            die_with(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._wake_r, self._wake_w, self._control.fileno()):
                os.close(fd)
            error_log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(error_log, 1)
            os.dup2(error_log, 2)
            control_fd = os.open(control_path, os.O_RDONLY | os.O_CLOEXEC)
            os.unlink(control_path)
            self._run(task, control_fd)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _report_ended(self) -> None:
        for name, pid in self._pids.items():
            if name in self._ended:
                continue
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self._ended.add(name)
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self._reply(exited=name, status=status)


def main(argv: list[str]) -> None:
    """`python -m brokerless.losstest.harness.fork_server FD SUPERVISOR_PID MODULE…`."""
    die_with(int(argv[1]))
    # What is broken on purpose must not be found by `discover:`, nor look like an outage in `brokerless ps`.
    os.environ["BROKERLESS_PRESENCE"] = "off"
    from brokerless.losstest import registry
    from brokerless.losstest.harness import worker

    registry.built_in()
    for module in argv[2:]:
        with contextlib.suppress(Exception):  # whoever needs it says so when it is used
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector does not touch what was there before the fork
    ForkServer(socket.socket(fileno=int(argv[0])), worker.main).serve()


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    main(sys.argv[1:])
