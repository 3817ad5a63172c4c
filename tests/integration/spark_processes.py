"""Real processes for the Spark tests: a producer, a collector, a landing job.

Started, killed, started again.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Short lives on a busy machine: a JVM that does not optimise is up in a third of the CPU time.
QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
CLI = [sys.executable, "-c", "from brokerless.cli.main import main; main()"]
_PRODUCER = """
import sys, time
from brokerless.core import DiskJournal, Retention
from brokerless.direct import Publisher
address, path, source = sys.argv[1:4]
count, rate = int(sys.argv[4]), float(sys.argv[5])
journal = DiskJournal(path, retention=Retention(max_bytes=1 << 30), fsync="never")
with Publisher(address, source=source, journal=journal) as publisher:
    began, sent = time.monotonic(), 0
    print(publisher.address, flush=True)
    while sent < count:
        for _ in range(max(1, int(rate / 100))):
            publisher.publish("ab"[sent % 2], b"%d" % sent)
            sent += 1
        time.sleep(max(0, began + sent / rate - time.monotonic()))
    publisher.flush()
    print("done", flush=True)
    sys.stdin.read()
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


class Killable:
    """A command that can be started, killed with SIGKILL and started again.

    Its process group dies with it.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.command, self.log = command, log
        self.process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def start(self) -> None:
        """Start it in a session of its own."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | QUICK_JAVA,
            )

    @property
    def running(self) -> bool:
        """Whether it is running now."""
        return self.process is not None and self.process.poll() is None

    def kill(self, *, whole_group: bool = False) -> None:
        """SIGKILL, no goodbye. Without `whole_group` its own children find out by themselves."""
        assert self.process is not None
        if self.running:
            self.kills += 1
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whole_group else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def end(self, timeout: float = 120.0) -> int:
        """SIGTERM, and wait; returns the exit code."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def finish(self, timeout: float = 240.0) -> None:
        """Wait until it ends by itself, with success."""
        assert self.process is not None
        code = self.process.wait(timeout)
        assert code == 0, f"exit code {code}: {self.log.read_text()[-3000:]}"

    def cleanup(self) -> None:
        """Whatever happened, nothing of it is left."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)


@contextlib.contextmanager
def killable(command: list[str], log: Path) -> Iterator[Killable]:
    """A Killable that is gone at the end of the block."""
    made = Killable(command, log)
    try:
        yield made
    finally:
        made.cleanup()


class Producer:
    """A publisher process with a disk journal: what it accepted can be read there."""

    def __init__(self, directory: Path, source: str, count: int, rate: float) -> None:
        self.source, self.count = source, count
        self.journal = directory / f"journal-{source}"
        arguments = ["tcp://127.0.0.1:*", str(self.journal), source, str(count), str(rate)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRODUCER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        assert self.address, "the producer did not start"

    def wait_done(self) -> None:
        """Wait until everything is published; the publisher stays and answers."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"done\n"

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def producer(directory: Path, source: str, count: int, rate: float) -> Iterator[Producer]:
    """A Producer that is ended at the end of the block."""
    made = Producer(directory, source, count, rate)
    try:
        yield made
    finally:
        made.close()


def collector_config(
    directory: Path, addresses: list[str], *, fsync: str = "interval", name: str = "c"
) -> Path:
    """A collector's TOML file; its spool is `<directory>/spool`."""
    file = directory / "collector.toml"
    listed = ", ".join(f'"{a}"' for a in addresses)
    file.write_text(
        f'name = "{name}"\nsave_every_s = 0.3\n[spool]\npath = "{directory}/spool"\nfsync = "{fsync}"\n'
        f"sync_interval_s = 0.05\n[status]\nport = 0\n"
        f'[[input]]\ntype = "direct"\naddresses = [{listed}]\nsent_counts_every_s = 0.5\n'
    )
    return file


def wait_for(condition: object, timeout: float, what: str) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)
