"""The daemon as a process: signals, configuration file, faults of the machine, and `metrics top`."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core import JournalReader
from brokerless.losstest.harness.ports import Ports
from brokerless.metrics import StatsClient
from tests.command import run_here
from tests.conftest import Until
from tests.metrics.windows import NEVER_S

COMMAND = [str(Path(sys.executable).parent / "brokerless"), "metrics"]


class DaemonProcess:
    """`brokerless metrics serve …` with its output collected in files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen([*COMMAND, "serve", *arguments], stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def address(self, kind: str) -> str:
        """What it said it listens on."""
        deadline = time.monotonic() + 60
        while True:
            found = re.search(rf"listening {kind} (\S+)\n", self.err)
            if found:
                return found[1]
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.02)

    def port(self, kind: str) -> int:
        return int(self.address(kind).rpartition(":")[2])

    def state(self) -> dict[str, dict[str, object]]:
        with urllib.request.urlopen(f"http://{self.address('http')}/state", timeout=10) as answer:
            found: dict[str, dict[str, object]] = json.load(answer)
            return found


@pytest.fixture
def daemons() -> Iterator[list[DaemonProcess]]:
    made: list[DaemonProcess] = []
    yield made
    for daemon in made:
        daemon.process.kill()
        daemon.process.wait()


def test_sigterm_publishes_everything_that_was_received(daemons: list[DaemonProcess], tmp_path: Path) -> None:
    """Datagrams sent before SIGTERM, in a window that would have lasted for years, are in the journal and printed."""
    journal = tmp_path / "journal"
    daemon = DaemonProcess(
        tmp_path,
        "--udp",
        "127.0.0.1:0",
        "--flush",
        str(NEVER_S),
        "--backend",
        f"journal:{journal}",
        "--backend",
        "console",
    )
    daemons.append(daemon)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", daemon.port("udp")))
        for _ in range(2000):
            sock.send(b"a:1|c")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0, daemon.err
    assert "stopped: 2000 lines" in daemon.err
    assert "c a 2000 corrected 2000" in daemon.out
    with JournalReader(journal) as reader:
        rows = [json.loads(e.data) for frame in reader.read(0).frames for e in frame.events()]
    assert [row["value"] for row in rows if row["name"] == "a"] == [2000]


def test_ctrl_c_ends_it_with_workers_too(daemons: list[DaemonProcess], tmp_path: Path, until: Until) -> None:
    """SIGINT to the whole process group, as a terminal sends it: workers finish their window, nothing is left."""
    folder = tmp_path
    with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
        daemon = DaemonProcess.__new__(DaemonProcess)
        daemon._out, daemon._err = folder / "out.txt", folder / "err.txt"
        daemon.process = subprocess.Popen(
            [
                *COMMAND,
                "serve",
                "--udp",
                "127.0.0.1:0",
                "--http",
                "127.0.0.1:0",
                "--workers",
                "2",
                "--flush",
                str(NEVER_S),
            ],
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    daemons.append(daemon)
    port = daemon.port("udp")
    until(lambda: len(daemon.state()["workers"]) == 2)
    pids = [int(str(pid)) for pid in daemon.state()["workers"]]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        for _ in range(100):
            sock.send(b"a:1|c")
    os.killpg(daemon.process.pid, signal.SIGINT)
    assert daemon.process.wait(30) == 0, daemon.err
    assert "stopped: 100 lines" in daemon.err
    assert "Traceback" not in daemon.err
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]


def test_workers_end_when_their_parent_is_killed(
    daemons: list[DaemonProcess], tmp_path: Path, until: Until
) -> None:
    """kill -9 of the daemon leaves no worker behind, and the port can be used again at once."""
    daemon = DaemonProcess(tmp_path, "--udp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--workers", "2")
    daemons.append(daemon)
    address = daemon.address("udp")
    until(lambda: len(daemon.state()["workers"]) == 2)
    pids = [int(str(pid)) for pid in daemon.state()["workers"]]
    daemon.process.kill()
    daemon.process.wait()
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    again = DaemonProcess(tmp_path, "--udp", address)
    daemons.append(again)
    assert again.address("udp") == address


def test_sighup_reads_the_file_again(daemons: list[DaemonProcess], tmp_path: Path, until: Until) -> None:
    """New interval and backends take effect; an address needs a restart and says so; a broken file changes nothing."""
    config = tmp_path / "metrics.toml"
    config.write_text(f'udp = ["127.0.0.1:0"]\nhttp = "127.0.0.1:0"\nflush_s = {NEVER_S}\n')
    daemon = DaemonProcess(tmp_path, "--config", str(config))
    daemons.append(daemon)
    client = StatsClient("127.0.0.1", daemon.port("udp"))
    client.incr("a", 5)
    client.flush()
    config.write_text("udp = [not toml")
    until(lambda: daemon.state()["health"] == "up")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "the old configuration stays" in daemon.err)
    config.write_text(
        'udp = ["127.0.0.1:1"]\nhttp = "127.0.0.1:0"\nflush_s = 0.1\npercentiles = [50.0]\nbackends = ["console"]\n'
    )
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "configuration read; needs a restart: udp" in daemon.err)
    until(lambda: "c a 5 corrected 5" in daemon.out)
    client.close()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_changes_filters_in_workers_too(
    daemons: list[DaemonProcess], tmp_path: Path, until: Until, workers: int
) -> None:
    """A name that the new file denies is refused by whoever receives it."""
    config = tmp_path / "metrics.toml"
    text = f'udp = ["127.0.0.1:0"]\nhttp = "127.0.0.1:0"\nflush_s = 0.1\nworkers = {workers}\n'
    config.write_text(text)
    daemon = DaemonProcess(tmp_path, "--config", str(config))
    daemons.append(daemon)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", daemon.port("udp")))
        sock.send(b"secret.a:1|c")
        until(lambda: "secret.a" in daemon.state()["counters"])
        config.write_text(text + 'deny = ["secret.*"]\n')
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "configuration read" in daemon.err)

        def refused() -> bool:
            sock.send(b"secret.b:1|c")
            return bool(daemon.state()["refused"].get("filtered"))

        until(refused)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--udp", "nonsense"], 2, "is not host:port"),
        (["--udp", "127.0.0.1:99999"], 2, "is not host:port"),
        (["--backend", "foo"], 2, "is none of"),
        (["--flush", "0"], 2, "--flush: must be at least"),
        (["--config", "/nonexistent.toml"], 2, "cannot be read"),
        (["--workers", "0"], 2, "workers"),
        (["--udp", "203.0.113.1:8125"], 2, "cannot bind"),
        (["--backend", "journal:/proc/nowhere"], 1, "journal"),
        (["--state", "/proc/nowhere/state"], 2, "state: cannot write"),
    ],
)
def test_wrong_arguments_end_with_one_line_that_says_what(
    arguments: list[str], code: int, message: str
) -> None:
    """No traceback, an exit code that scripts can use, and the field that is wrong."""
    if "--udp" not in arguments:
        arguments = [*arguments, "--udp", "127.0.0.1:0"]
    done = run_here("metrics", "serve", *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_used_port_is_refused(workers: str, daemons: list[DaemonProcess], tmp_path: Path) -> None:
    """A second daemon on the same port says so and ends, also where both share it among workers; the first goes on."""
    daemon = DaemonProcess(tmp_path, "--udp", "127.0.0.1:0", "--workers", workers)
    daemons.append(daemon)
    done = subprocess.run(
        [*COMMAND, "serve", "--udp", daemon.address("udp"), "--workers", workers],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "in use" in done.stderr) == (2, True)
    assert daemon.process.poll() is None


def test_top_shows_rates_losses_and_clients(
    daemons: list[DaemonProcess], tmp_path: Path, until: Until
) -> None:
    """One look at a daemon whose client lost two datagrams, as a table and as JSON; and no daemon at all."""
    daemon = DaemonProcess(tmp_path, "--udp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--flush", "0.2")
    daemons.append(daemon)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", daemon.port("udp")))
        for number in (1, 2, 5):
            sock.send(b"_bl.topclient"[:12] + b":%d|g\nhits:1|c\nbad" % number)
    until(lambda: daemon.state().get("rollup", {}).get("lost_datagrams") == 2)
    look = ["metrics", "top", daemon.address("http"), "--count", "1"]
    table = run_here(*look, env={"COLUMNS": "160"})
    assert table.returncode == 0, table.stderr
    for wanted in ("hits", "topclien", "2 datagrams lost", "3 lines refused", "kernel drops"):
        assert wanted in table.stdout, table.stdout
    found = json.loads(run_here(*look, "--json").stdout)
    assert found["clients"][0]["lost"] == 2
    live = subprocess.Popen(
        [*COMMAND, "top", daemon.address("http"), "--json", "--interval", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert live.stdout is not None
    ends: set[float] = set()
    until(lambda: ends.add(json.loads(live.stdout.readline())["window"]["end"]) or len(ends) > 1)  # type: ignore[func-returns-value, union-attr]
    live.send_signal(signal.SIGINT)
    assert (live.wait(30), "Traceback" in live.communicate()[1]) == (0, False)
    odd = run_here(*look, "--json", "--prefix", "a b&limit=0")
    assert json.loads(odd.stdout)["counters"] == {}
    screen, terminal = pty.openpty()
    os.set_blocking(screen, False)
    view = subprocess.Popen([*COMMAND, *look[1:-2], "--interval", "0.1"], stdout=terminal)

    def shows(text: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            return text in os.read(screen, 1 << 16)
        return False

    try:
        until(lambda: shows(b"hits"))
        daemon.process.kill()
        daemon.process.wait()
        # The view goes on: the daemon may only be restarting.
        until(lambda: shows(b"no daemon answers"))
        assert view.poll() is None
        view.send_signal(signal.SIGINT)
        assert view.wait(30) == 0  # so a person ends it
    finally:
        view.kill()
        view.wait()
        os.close(screen)
        os.close(terminal)
    for address in (daemon.address("http"), "127.0.0.1:abc", "no such host"):
        gone = run_here("metrics", "top", address)
        assert (gone.returncode, "no daemon answers" in gone.stderr) == (1, True)
        assert "Traceback" not in gone.stderr


def test_a_journal_has_one_writer(daemons: list[DaemonProcess], tmp_path: Path, until: Until) -> None:
    """A second daemon on the same journal is refused with the holder's name; the first goes on."""
    journal = tmp_path / "journal"
    daemon = DaemonProcess(
        tmp_path,
        "--udp",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--flush",
        "0.1",
        "--backend",
        f"journal:{journal}",
    )
    daemons.append(daemon)
    port = daemon.port("udp")
    until(journal.exists)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        sock.send(b"a:1|c")
        until(lambda: daemon.state().get("counters", {}).get("a"))
    second = subprocess.run(
        [*COMMAND, "serve", "--udp", "127.0.0.1:0", "--backend", f"journal:{journal}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (second.returncode, "already open for writing" in second.stderr) == (2, True)
    assert daemon.process.poll() is None


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_daemon_publishes_what_was_sent_while_it_was_away(
    daemons: list[DaemonProcess], tmp_path: Path, until: Until, ports: Ports, workers: str
) -> None:
    """kill -9 with --state: the open window and the outage are in the totals of the next daemon, exactly."""
    udp = f"127.0.0.1:{ports.take()}"  # nobody takes it while the daemon is away
    state = tmp_path / "state"
    arguments = ["--udp", udp, "--http", "127.0.0.1:0", "--state", str(state), "--workers", workers]

    def start(flush: str) -> DaemonProcess:
        folder = tmp_path / f"daemon{len(daemons)}"
        folder.mkdir()
        daemon = DaemonProcess(folder, *arguments, "--flush", flush)
        daemons.append(daemon)
        daemon.address("http")
        return daemon

    def counter(daemon: DaemonProcess, name: str) -> object:
        found = daemon.state().get("counters", {}).get(name)
        return (found["total"], found["total_grade"]) if isinstance(found, dict) else None

    client = StatsClient("127.0.0.1", int(udp.rpartition(":")[2]), heartbeat_s=0.1, flush_s=0.01)
    first = start("0.1")
    client.incr("a", 5)
    client.gauge("g", 3)
    until(lambda: counter(first, "a") == (5, "exact"))
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(30) == 0
    second = start(str(NEVER_S))
    sent = client.counters.datagrams
    client.incr("a", 10)  # never published
    until(lambda: client.counters.datagrams > sent)
    second.process.kill()
    second.process.wait()
    client.incr("a", 100)
    client.incr("only.then", 7)
    client.heartbeat()
    third = start("0.1")
    until(lambda: counter(third, "a") == (115, "exact"))
    until(lambda: counter(third, "only.then") == (7, "exact"))
    assert third.state()["gauges"] == {"g": 3}
    client.close()
    third.process.send_signal(signal.SIGTERM)
    assert third.process.wait(30) == 0
    state.write_bytes(b"garbage")
    done = subprocess.run([*COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "remove it to start over" in done.stderr) == (2, True)
