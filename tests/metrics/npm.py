"""npm's `statsd` daemon as a peer: found in build/npm, or installed there once if npm can."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brokerless.losstest.harness.ports import Ports
from tests.node import install

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "npm"
VERSION = "0.9.0"


def script() -> Path:
    """Path of stats.js, or skip with the reason."""
    found = FOLDER / "node_modules" / "statsd" / "stats.js"
    install(FOLDER, found, f"statsd@{VERSION}")
    return found


class NpmStatsd:
    """A running daemon."""

    def __init__(self, port: int, mgmt: int) -> None:
        self.port, self.mgmt = port, mgmt

    def ask(self, command: str) -> str:
        with socket.create_connection(("127.0.0.1", self.mgmt), 10) as connection:
            connection.sendall(command.encode() + b"\n")
            answer = b""
            while b"END" not in answer:
                answer += connection.recv(65536)
        return answer.decode()

    def values(self, what: str) -> dict[str, float]:
        """`counters` or `gauges`."""
        return {k: float(v) for k, v in re.findall(r"'?([\w.;=\-]+)'?: ([-\d.e+]+)", self.ask(what))}


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[NpmStatsd]:
    """Start it with a long flush interval and no backend, unless told otherwise."""
    ports = Ports()
    port, mgmt = ports.take(), ports.take()
    config = {"port": port, "mgmt_port": mgmt, "address": "127.0.0.1", "mgmt_address": "127.0.0.1"}
    path = folder / "npm.js"
    path.write_text(json.dumps({**config, "backends": [], "flushInterval": 3_600_000, **settings}))
    process = subprocess.Popen(
        ["node", str(script()), str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", mgmt), 1).close()
                break
            except OSError:
                assert process.poll() is None, "npm statsd ended by itself"
                assert time.monotonic() < deadline, "npm statsd did not start"
                time.sleep(0.05)
        yield NpmStatsd(port, mgmt)
    finally:
        process.terminate()
        process.wait(60)
        ports.close()
