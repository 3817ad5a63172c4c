"""The shell blocks of README and guides do what they say: every line as it is printed, in order, and twice.

They run in a network of their own, which has the addresses, interfaces and ports that the pages name.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"
PAGES = [ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "docs" / "console.md", *GUIDES.glob("*.md")]
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python title=\"([^\"]+)\"\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# These change the machine or need an engine; what they name is checked further below.
NOT_RUN = ("pip", "docker", "kubectl")
# These go on until they are told to stop, once they have said the words (or at once).
SERVE = {
    "uvicorn": "running on",
    "python": "",
    "brokerless console": "console at",
    "brokerless sub": "following",
    "brokerless mcast sub": "following",
    "brokerless pub": "publishing at",
    "brokerless mirror run": "serving at",
    "brokerless webhooks serve": "listening on",
}
# What a page takes for granted, and what can be seen in the end.
PRICES = """
import time
from brokerless.core import DiskJournal
from brokerless.direct import Publisher
journal = DiskJournal("var/prices", compact="key")
with Publisher("tcp://127.0.0.1:5556", source="prices", journal=journal) as pub:
    pub.publish("prices.eu", b"1.08", key="EURUSD")
    pub.flush()
    print("running on", flush=True)
    time.sleep(600)
"""
MIRRORED = """
import time
from brokerless.core import DiskJournal
from brokerless.direct import Publisher
mirrors = ["tcp://10.0.0.2:5560"]
with Publisher("tcp://10.0.0.1:5556", source="shop", journal=DiskJournal("var/orders"), mirrors=mirrors) as pub:
    pub.publish("orders.eu", b"17")
    print("running on", flush=True)
    time.sleep(600)
"""
BEFORE = {
    "lan": ["printf 'one\\ntwo\\n' > orders.txt"],
    "last_value": ["python prices.py"],
    "mirrors": ["python mirrored.py"],
    "mirrors 2": [
        "for name in server mirror publisher billing; do brokerless keys new $name.key; done",
        "brokerless pub tcp://10.0.0.1:5556 orders.eu --journal var/orders --keep --curve server.key "
        "--allow mirror.key.pub",
    ],
}
# A mirror is promoted once, and keys are never overwritten: these have a directory of their own each time.
ONCE = ("mirrors", "security")
SEEN = {
    "console": ["console at http://127.0.0.1:8350/"],
    "console 2": ["console at http://127.0.0.1:8350/"],
    "counters": ["statsd-aware"],
    "exchange": ['"data": "{\\\\"number\\\\":17}"'],
    "lan": ["orders.eu one", "orders.eu two", "2 published"],
    "last_value": ['"data": "1.08"', "complete"],
    "mirrors": ["role +mirror", "publisher now, in epoch"],
    "mirrors 2": ["role +mirror"],
    "security": ["secret key: publisher.key", "^hello"],
    "shop 2": ['billed {"number":17}', 'seen {"number":17} lost 0'],
    "webhooks 2": ["secret +whsec_", "state +pending"],
}


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """The name of each block of a page, `security` or `shop 2`, and its lines."""
    found = []
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
        lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        found.append((page.stem if number == 1 else f"{page.stem} {number}", lines))
    return found


def runs(line: str) -> bool:
    return line.split(maxsplit=1)[0] not in NOT_RUN


def is_run(lines: list[str]) -> bool:
    return any(runs(line) and not line.startswith("export ") for line in lines)


@pytest.fixture
def network() -> Iterator[int]:
    """A network with the interface and addresses of the pages; the process that holds it."""
    if os.geteuid() != 0 or not all(shutil.which(each) for each in ("unshare", "nsenter", "ip", "curl")):
        pytest.skip("needs root, unshare, ip and curl, for the addresses that the pages name")
    made = "ip link set lo up && ip link add eth0 type veth peer name far && ip link set far up && ip link set eth0 up"
    made += "".join(f" && ip addr add 10.0.0.{n}/24 dev eth0" for n in (5, 1, 2))
    holder = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", f"{made} && echo up && exec sleep 900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "up":
            pytest.skip("cannot make a network namespace")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


class Shell:
    """Runs lines in a directory and a network, those that serve in the background."""

    def __init__(self, directory: Path, network: int) -> None:
        self.directory = directory
        self._inside = ["nsenter", "-t", str(network), "-n", "sh", "-c"]
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BROKERLESS_PRESENCE": str(directory / "presence"),
            "PYTHONUNBUFFERED": "1",
        }
        self._running: list[subprocess.Popen[str]] = []
        self._logs: list[Path] = []

    def said(self) -> str:
        """All that was printed by all lines."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def run(self, line: str, deadline_s: float = 120.0) -> None:
        """Run a line to its end, which must be good, or until it serves."""
        if line.startswith("export "):
            done = subprocess.run(
                ["sh", "-c", f"{line} && env -0"], env=self._environment, capture_output=True, check=True
            )
            self._environment = dict(each.split("=", 1) for each in done.stdout.decode().split("\0") if each)
            return
        ready = next((words for begin, words in SERVE.items() if line.startswith(begin + " ")), None)
        log = self.directory / f"log-{len(self._logs)}"
        self._logs.append(log)
        with log.open("w") as out:
            # A loop has no program to become.
            program = line if line.startswith("for ") else f"exec {line}"
            made = subprocess.Popen(
                [*self._inside, program],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._running.append(made)
        until = time.monotonic() + deadline_s
        while made.poll() is None and (ready is None or ready not in log.read_text()):
            assert time.monotonic() < until, f"{line}: {log.read_text()}"
            time.sleep(0.02)
        if made.poll() is not None:
            assert made.returncode == 0, f"{line}: ended with {made.returncode}: {log.read_text()}"

    def type(self, text: str) -> None:
        """What a person types into every command that reads."""
        for each in self._running:
            if each.poll() is None:
                assert each.stdin is not None
                each.stdin.write(text)
                each.stdin.flush()

    def close(self) -> None:
        """Ctrl-C for what still runs: it ends in order."""
        codes = {}
        for each in reversed(self._running):
            if each.poll() is None:
                each.send_signal(signal.SIGINT)
                try:
                    codes[" ".join(map(str, each.args[len(self._inside) :]))] = each.wait(60)  # type: ignore[index]
                finally:
                    each.kill()
            each.communicate()
        said = self.said()
        # A program of the reader's own, `python audit.py`, has no handler for Ctrl-C.
        ends = {line: (0, -signal.SIGINT if "exec python" in line else 130) for line in codes}
        assert not [line for line, code in codes.items() if code not in ends[line]], (codes, said)
        assert said.count("Traceback") == said.count("KeyboardInterrupt"), said


RUN = [(page, name, lines) for page in sorted(PAGES) for name, lines in blocks(page) if is_run(lines)]


def test_every_block_that_runs_shows_something() -> None:
    """No block is run for nothing."""
    assert set(SEEN) == {name for _, name, _ in RUN}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "name", "lines"), RUN, ids=[name for _, name, _ in RUN])
def test_a_block_runs_as_printed(
    page: Path, name: str, lines: list[str], tmp_path: Path, network: int
) -> None:
    """Each line, in order; what it leads to can be seen; Ctrl-C ends all. And again in the same directory."""
    for again in range(2):
        directory = tmp_path / str(again) if name in ONCE else tmp_path
        directory.mkdir(exist_ok=True)
        for file, text in (("prices.py", PRICES), ("mirrored.py", MIRRORED), *FILE.findall(page.read_text())):
            (directory / file).write_text(text)
        shell = Shell(directory, network)
        try:
            for line in BEFORE.get(name, []):
                if not (again and "keys new" in line):
                    shell.run(line)
            for line in filter(runs, lines):
                shell.run(line)
            until = time.monotonic() + 60
            while missing := [each for each in SEEN[name] if not re.search(each, shell.said(), re.MULTILINE)]:
                assert time.monotonic() < until, (missing, shell.said())
                shell.type("hello\n")
                if not lines[-1].startswith(tuple(SERVE)):
                    shell.run(lines[-1])  # a person looks again
                time.sleep(0.1)
        finally:
            shell.close()


def test_what_is_not_run_names_what_there_is() -> None:
    """Extras of the package, files of this repository, and variables that the compose file wants."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    compose = (ROOT / "deploy" / "compose.yaml").read_text()
    seen = 0
    for page in PAGES:
        for _, lines in blocks(page):
            for line in lines:
                if runs(line):
                    continue
                seen += 1
                for extras in re.findall(r"brokerless\[([\w,]+)\]", line):
                    assert set(extras.split(",")) <= set(project["optional-dependencies"]), line
                for file in re.findall(r"(?:-f|-k) (\S+)", line):
                    assert (ROOT / file).exists(), line
                if "compose" in line:
                    wanted = set(re.findall(r"\$\{(\w+):\?", compose))
                    given = set(re.findall(r"^export (\w+)=", "\n".join(lines), re.MULTILINE))
                    assert wanted == given, f"{page.name}: {line} needs {wanted - given}"
    assert seen > 8
    assert yaml.safe_load(compose)["services"]
