"""A small file system in memory where a broker keeps its data, and a file that takes what room there is.

Needs root: it is mounted in a mount namespace that the run makes for itself, and vanishes with the run's processes.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from brokerless.losstest.evidence.event_log import EventLog
from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.faults import namespaces
from brokerless.losstest.harness.control import ControlChannel

SIZE = 192 << 20  # RabbitMQ takes nothing when less than 50 MB are free, Kafka reserves indexes of 10 MB
POLL_S = 0.01
BLOCK = 1 << 16
_MS_REC, _MS_PRIVATE = 0x4000, 0x4_0000
_TIMEOUT_S = 30.0


def missing() -> str:
    """Why it cannot be had here, or an empty text. Tries it in another process."""
    if os.geteuid() != 0:
        return "root"
    words = [sys.executable, "-c", f"from {__name__} import mount; mount('/tmp')"]
    done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    return "a kernel that mounts a tmpfs in a namespace" if done.returncode else ""


def mount(where: str | Path) -> None:
    """Give this process a mount namespace of its own, with an empty file system of SIZE bytes at `where`."""
    namespaces.unshare("mnt")
    libc = ctypes.CDLL(None, use_errno=True)
    for source, target, kind, flags, options in (
        (b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),  # nothing of it is seen outside
        (b"tmpfs", os.fsencode(where), b"tmpfs", 0, f"size={SIZE}".encode()),
    ):
        if libc.mount(source, target, kind, flags, options) != 0:
            raise OSError(ctypes.get_errno(), f"mount of {target.decode()}")


def room(where: str | Path) -> int:
    """Bytes that are free."""
    found = os.statvfs(where)
    return found.f_bavail * found.f_frsize


def fill(filler: Path) -> None:
    """Take all the room that is left, to the last byte."""
    with open(filler, "ab", buffering=0) as file:
        if free := room(filler.parent):
            with contextlib.suppress(OSError):  # the broker was faster
                os.posix_fallocate(file.fileno(), file.tell(), free)
        size = BLOCK
        while size:
            try:
                size = size if file.write(bytes(size)) == size else size // 2
            except OSError:  # ENOSPC
                size //= 2


def run_disk(where: Path, event_log: EventLog, witness: Witness, control: ControlChannel) -> None:
    """Hold the file system, full or not, until told to stop. The process must have mounted it."""
    filler, full = where / "filler", False
    witness.write(Kind.READY)
    while not control.stop:
        while control.queue:
            full = control.queue.popleft() == "full"
            if full:
                fill(filler)
            else:
                filler.unlink()
            event_log.write("disk", full=full)
        if full:
            fill(filler)  # what was deleted meanwhile
        control.wake.wait(POLL_S)
        control.wake.clear()
