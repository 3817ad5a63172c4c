"""A standalone Spark cluster on this machine, from the pip package alone: for trying things out.

One master and some workers on 127.0.0.1, as background processes that outlive the command. What was started
is written to `cluster.json` in its directory, and only those processes are ever stopped.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from brokerless.core.errors import Fault, UsageError
from brokerless.core.runtime.process import process_start
from brokerless.spark_collector.session.java import java_home
from brokerless.spark_collector.session.session import require_pyspark
from brokerless.spark_collector.session.spark_home import spark_home

# A JVM on a busy machine of two cores takes 5 to 15 s until it answers.
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
# Free ports are looked for before the master takes them: another process may be faster.
PORT_ATTEMPTS = 3
# What Spark's own parser takes that makes sense for a worker; a plain number would be bytes.
_MEMORY = re.compile(r"[1-9][0-9]*[mgt]b?", re.IGNORECASE)
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class Member(msgspec.Struct, frozen=True):
    """One process of the cluster.

    `started` is its kernel start time, so that a reused pid is never killed.
    """

    role: str
    pid: int
    started: int


class ClusterInfo(msgspec.Struct, frozen=True):
    """A running cluster: `url` is what `--master` wants."""

    url: str
    web: str
    members: list[Member]


class ClusterError(Fault):
    """The cluster did not come up; `log` names the file that says why."""

    def __init__(self, problem: str, log: str) -> None:
        super().__init__(f"{problem}; see {log}")
        self.problem = problem
        self.log = log


def start_cluster(
    directory: str | Path, *, workers: int = 2, cores: int = 1, memory: str = "1g", port: int = 0
) -> ClusterInfo:
    """Start a master and `workers` workers and return when all are registered.

    One core and 1 GB per worker is the smallest that runs the jobs. `port` is the master's (0: a free one).
    Raises UsageError, with nothing started, if an argument is wrong or a cluster runs already in this
    directory; ClusterError, with everything stopped again, if it does not come up.
    """
    require_pyspark()
    _check(workers, cores, memory, port)
    directory = Path(directory).absolute()
    if (running := read_cluster(directory)) and any(_alive(m) for m in running.members):
        raise UsageError(f"a cluster runs already in {directory} ({running.url}); stop it first")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        info = _start_master(directory, port)
        for n in range(workers):
            work = directory / f"worker-{n}"
            size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(work), "--webui-port", "0")
            _spawn(directory, info, f"worker-{n}", _WORKER, *size, info.url)
        _wait(lambda: len(alive_workers(info)) >= workers, info, directory, "the workers did not register")
    except BaseException:
        stop_cluster(directory)
        raise
    return info


def _check(workers: int, cores: int, memory: str, port: int) -> None:
    for name, value in (("--workers", workers), ("--cores", cores)):
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if not _MEMORY.fullmatch(memory):
        raise UsageError(f"--memory {memory}: a whole number with m, g or t, such as 512m or 2g")
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: must be 0 (a free one) to 65535")


def _start_master(directory: Path, port: int) -> ClusterInfo:
    """The master, once it answers. Ports that somebody else takes first are looked for again."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        free, web_port = _free_ports(2)
        url, web = f"spark://127.0.0.1:{port or free}", f"http://127.0.0.1:{web_port}"
        info = ClusterInfo(url, web, [])
        log = directory / "master.log"
        begin = log.stat().st_size if log.exists() else 0
        ports = ("--port", str(port or free), "--webui-port", str(web_port))
        _spawn(directory, info, "master", _MASTER, *ports)
        try:
            _wait(lambda web=web: _state(web) is not None, info, directory, "the master did not answer")  # type: ignore[misc]
        except ClusterError:
            taken = b"BindException" in log.read_bytes()[begin:]
            if port or not taken or attempt == PORT_ATTEMPTS:
                raise
            continue
        return info
    raise AssertionError("unreachable")


def stop_cluster(directory: str | Path) -> int:
    """Stop what `start_cluster` started in this directory; returns how many processes that were."""
    directory = Path(directory).absolute()
    info = read_cluster(directory)
    if info is None:
        return 0
    running = [m for m in reversed(info.members) if _alive(m)]
    for member in running:
        _signal(member, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(_alive(m) for m in running) and time.monotonic() < deadline:
        time.sleep(0.05)
    for member in running:
        _signal(member, signal.SIGKILL)
    (directory / "cluster.json").unlink(missing_ok=True)
    return len(running)


def read_cluster(directory: str | Path) -> ClusterInfo | None:
    """What was started in this directory, running or not; None if nothing was."""
    try:
        return msgspec.json.decode((Path(directory) / "cluster.json").read_bytes(), type=ClusterInfo)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def alive_workers(info: ClusterInfo) -> list[str]:
    """The ids of the workers that the master has registered."""
    state = _state(info.web)
    found: list[dict[str, str]] = (state or {}).get("workers", [])
    return [worker["id"] for worker in found if worker["state"] == "ALIVE"]


def _state(web: str) -> dict[str, list[dict[str, str]]] | None:
    import urllib.request  # a tenth of what a Spark worker imports at its start, and needed here alone

    try:
        with urllib.request.urlopen(f"{web}/json/", timeout=5) as answer:  # noqa: S310  # our own http address
            state: dict[str, list[dict[str, str]]] = json.load(answer)
            return state
    except (OSError, ValueError):
        return None


def _spawn(directory: Path, info: ClusterInfo, role: str, java_class: str, *args: str) -> None:
    home = spark_home()
    env = os.environ | {
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "SPARK_DAEMON_MEMORY": "256m",  # a master with two workers needs less than the default 1 GB
        # Daemons that hardly run anything: starting fast matters, the best machine code does not.
        # A master that moves to the next port would not be found: it must say that its own is taken.
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.port.maxRetries=0",
    }
    with (directory / f"{role}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603  # pyspark's own launcher
            [str(home / "bin" / "spark-class"), java_class, "--host", "127.0.0.1", *args],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,  # Ctrl-C in our terminal must not end a cluster that was asked to stay
        )
    info.members.append(Member(role, process.pid, process_start(process.pid) or 0))
    aside = directory / "cluster.json.new"
    aside.write_bytes(msgspec.json.encode(info))
    os.replace(aside, directory / "cluster.json")


def _wait(ready: Callable[[], bool], info: ClusterInfo, directory: Path, problem: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        dead = next((m for m in info.members if not _alive(m)), None)
        if dead is not None:
            raise ClusterError(f"{dead.role} ended at once", str(directory / f"{dead.role}.log"))
        if time.monotonic() > deadline:
            raise ClusterError(f"{problem} within {START_TIMEOUT_S:.0f} s", str(directory / "*.log"))
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held at once so that they differ."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in held]
    for s in held:
        s.close()
    return ports


def _alive(member: Member) -> bool:
    with contextlib.suppress(ChildProcessError):
        # A child of ours that ended stays a zombie until it is waited for.
        os.waitpid(member.pid, os.WNOHANG)
    return process_start(member.pid) == member.started


def _signal(member: Member, number: int) -> None:
    if _alive(member):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, number)
