"""A PostgreSQL server for tests: one per worker process; the marks on the tests keep them in one worker."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


def find(name: str) -> str | None:
    """A program of PostgreSQL: Debian keeps the server's beside the version, not on PATH."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(places[-1]) if places else found


def _options() -> dict[str, Any]:
    """For the programs of PostgreSQL: the server refuses to run as root."""
    options: dict[str, Any] = {"check": True, "capture_output": True, "cwd": "/"}
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL cannot run as root, and there is no user postgres")
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    return options


def _settings(directory: Path | str) -> str:
    return f"-k {directory} -c listen_addresses='' -c fsync=off"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A fresh cluster on a Unix socket; its address."""
    initdb, pg_ctl = find("initdb"), find("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="bl-pg-"))
    if "user" in options:
        os.chown(directory, options["user"], options["group"])
    data = directory / "data"
    subprocess.run([initdb, "-D", str(data), "-U", "test", "-A", "trust", "--no-sync"], **options)
    command = [pg_ctl, "-D", str(data), "-w", "-l", str(directory / "log")]
    subprocess.run([*command, "-o", _settings(directory), "start"], **options)
    yield f"postgresql://test@/postgres?host={directory}"
    subprocess.run([*command, "-m", "immediate", "stop"], **options)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def frozen(server: str) -> Iterator[None]:
    """The whole server stands still: connections stay, and nothing is answered."""
    directory = server.rpartition("host=")[2]
    postmaster = int((Path(directory) / "data" / "postmaster.pid").read_text().split()[0])
    stopped: list[int] = []
    try:
        for pid in [postmaster, *(child.pid for child in psutil.Process(postmaster).children())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        yield
    finally:
        for pid in reversed(stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def restart(server: str) -> None:
    """Stop the server in the midst of its work, and start it again."""
    directory = server.rpartition("host=")[2]
    pg_ctl = find("pg_ctl")
    assert pg_ctl is not None
    command = [pg_ctl, "-D", f"{directory}/data", "-w", "-m", "immediate", "-l", f"{directory}/log"]
    subprocess.run([*command, "-o", _settings(directory), "restart"], **_options())
