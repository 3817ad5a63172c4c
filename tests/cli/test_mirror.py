"""`brokerless mirror`: a copy on another host, and its promotion from a shell."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from brokerless.core import DiskJournal
from brokerless.direct import Publisher, Subscriber
from brokerless.losstest.harness.ports import Ports

BROKERLESS = Path(sys.executable).with_name("brokerless")


def brokerless(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(BROKERLESS), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_mirror_is_run_looked_at_and_promoted(tmp_path: Path, ports: Ports) -> None:
    """Refused while nobody runs it; then run, status, promote: the process goes on as the publisher."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    copy = tmp_path / "copy"
    assert brokerless("mirror", "promote", copy).returncode == 1
    pub = Publisher(a, source="s", journal=DiskJournal(tmp_path / "a"), mirrors=[b])
    command = [str(BROKERLESS), "mirror", "run", a, "--serve", b, "--journal", str(copy), "--json"]
    with pub, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            pub.publish_many("t", [b"x"] * 5, wait="mirrored", timeout=60)
            said = json.loads(brokerless("mirror", "status", b, "--json").stdout)
            assert (said["role"], said["next"], said["mirrors"]) == ("mirror", 5, [b])
            pub.close()
            done = brokerless("mirror", "promote", copy, "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["offset"] == 5
            said = json.loads(brokerless("mirror", "status", b, "--json").stdout)
            assert (said["role"], said["next"]) == ("publisher", 5)
            with Subscriber(b, start="oldest") as sub:
                assert [sub.receive(60).offset for _ in range(5)] == list(range(5))
        finally:
            process.send_signal(signal.SIGTERM)
            text, _ = process.communicate(timeout=60)
    assert json.loads(text)["next"] == 5
    assert process.returncode == 143
