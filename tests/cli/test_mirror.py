"""`brokerless mirror`: a copy on another host, and its promotion from a shell."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import DiskJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import ClientKeys, FileLease, Mirror, Publisher, ServerKeys, Subscriber
from brokerless.losstest.harness.ports import Ports
from tests.command import run_here

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
    assert not copy.exists()  # looking for it makes nothing
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
    assert process.returncode == 0


def test_an_address_that_cannot_be_served_is_named_as_it_was_given(tmp_path: Path) -> None:
    """It is `--serve` or `--advertise` then, not the publisher's ADDRESS; and the journal is free again."""
    with Publisher("tcp://127.0.0.1:*", source="s") as pub:
        run = ("mirror", "run", "tcp://127.0.0.1:1", "--journal", tmp_path / "b")
        for options, said in [
            (("--serve", pub.address), f"brokerless: --serve: cannot listen at {pub.address}"),
            (("--serve", "nonsense"), "brokerless: --serve: 'nonsense' is not "),
            (
                ("--serve", "tcp://127.0.0.1:*", "--advertise", "nonsense"),
                "brokerless: --advertise: 'nonsense' is not ",
            ),
        ]:
            done = run_here(*run, *options)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(said), done.stderr
        with pytest.raises(ConfigError, match=r"^advertise: "):
            Mirror("tcp://127.0.0.1:1", journal=tmp_path / "c", serve="tcp://127.0.0.1:*", advertise="x")
        DiskJournal(tmp_path / "c").close()


def test_a_mirror_with_keys(tmp_path: Path, ports: Ports) -> None:
    """It is run, looked at and promoted; whoever has no key is told so."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    for name in ("server", "friend"):
        assert brokerless("keys", "new", tmp_path / name).returncode == 0
    server, friend = tmp_path / "server", tmp_path / "friend"
    ours = ClientKeys.load(friend, server)
    pub = Publisher(
        a, source="s", journal=tmp_path / "a", mirrors=[b], curve=ServerKeys.load(server), mirror_keys=ours
    )
    command = [str(BROKERLESS), "mirror", "run", a, "--serve", b, "--journal", str(tmp_path / "copy")]
    assert brokerless(*command[1:], "--curve", server).returncode == 2
    keys = ["--curve", str(server), "--client-key", str(friend), "--allow", str(friend) + ".pub"]
    with pub, subprocess.Popen([*command, *keys], stdout=subprocess.DEVNULL) as process:
        try:
            pub.publish("t", b"x", wait="mirrored", timeout=60)
            status = ("mirror", "status", b, "--timeout", "2")
            nobody = brokerless(*status)
            assert (nobody.returncode, "needs CURVE keys" in nobody.stderr) == (1, True)
            said = brokerless(*status, "--curve", friend, "--server-key", str(server) + ".pub", "--json")
            assert json.loads(said.stdout)["next"] == 1
            pub.close()
            done = brokerless("mirror", "promote", tmp_path / "copy")
            assert done.returncode == 0, done.stderr
            with Subscriber(b, start="oldest", curve=ours) as sub:
                assert sub.receive(60) is not None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def test_a_mirror_takes_over_with_a_lease(tmp_path: Path, ports: Ports) -> None:
    """Without a person: when the publisher is gone, its lease is free."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    lease = tmp_path / "lease"
    pub = Publisher(a, source="s", journal=DiskJournal(tmp_path / "a"), mirrors=[b], lease=FileLease(lease))
    command = [str(BROKERLESS), "mirror", "run", a, "--serve", b, "--journal", str(tmp_path / "b")]
    with pub, subprocess.Popen([*command, "--lease", str(lease)], stdout=subprocess.DEVNULL) as process:
        try:
            pub.publish("t", b"x", wait="mirrored", timeout=60)
            pub.close()
            with Subscriber(a, start="oldest") as sub:
                sub._failovers[a]._learn([b])
                assert sub.receive(60) is not None
                wait(lambda: sub.receive(0.1) is None and not sub._sources[0].protocol.at_copy)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
