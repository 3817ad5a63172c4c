"""`brokerless mcast sub` and `serve` as a user ends them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core import DiskJournal
from brokerless.multicast import Publisher, Subscriber
from tests.multicast.groups import new_group

DEADLINE = 60.0


def begin(*args: object, stdin: int | None = None) -> "subprocess.Popen[str]":
    """`brokerless mcast …` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from brokerless.cli.main import main; main()", "mcast", *map(str, args)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: "subprocess.Popen[str]", events: int) -> list[str]:
    """So many lines of what it prints."""
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(events)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_between_two_events(tmp_path: Path, number: signal.Signals) -> None:
    """The accounting and the cursor have what was printed, the exit code names the signal, the rest comes next time."""
    group = new_group()
    with Publisher(group, "T") as pub:
        pub.publish_many("t", [b"%d" % i for i in range(50)])
        sub = begin("sub", group, "--cursor", tmp_path / "c")
        assert printed(sub, 50) == [f"t {i}" for i in range(50)]
        sub.send_signal(number)
        out, said = sub.communicate(timeout=DEADLINE)
        assert (out, sub.returncode) == ("", 128 + number)
        assert "50 delivered, 0 lost" in said
        pub.publish("t", b"50")
        sub = begin("sub", group, "--cursor", tmp_path / "c", "--count", 1)
        out, said = sub.communicate(timeout=DEADLINE)
        assert (out, sub.returncode) == ("t 50\n", 0)
        assert "51 delivered, 0 lost" in said


def test_count_leaves_the_rest_of_a_batch(tmp_path: Path) -> None:
    """--count ends in the middle of a batch: what was not printed comes next time."""
    group = new_group()
    with Publisher(group, "T") as pub:
        pub.publish_many("t", [b"%d" % i for i in range(10)])
        for first in (0, 5):
            sub = begin("sub", group, "--cursor", tmp_path / "c", "--count", 5)
            out, said = sub.communicate(timeout=DEADLINE)
            assert out.splitlines() == [f"t {i}" for i in range(first, first + 5)]
            assert sub.returncode == 0
            assert f"{first + 5} delivered, 0 lost" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_how_serving_ends(tmp_path: Path, number: signal.Signals) -> None:
    """It says what it counted, and that is no failure."""
    with DiskJournal(tmp_path / "j"):
        serve = begin("serve", tmp_path / "j", "T")
        assert printed(serve, 1)[0].startswith("serving T")
        serve.send_signal(number)
        _, said = serve.communicate(timeout=DEADLINE)
    assert (said, serve.returncode) == ("no requests\n", 0)


def test_a_signal_ends_a_publisher_that_waits_for_its_rate() -> None:
    """One event in 10,000 s: the signal ends the session at once, not when the next event is due."""
    group = new_group()
    pub = begin("pub", group, "CLI", "t", "--rate", 0.0001, "--linger", 0, stdin=subprocess.PIPE)
    assert pub.stdin is not None
    with Subscriber(group, "CLI", start="oldest") as sub:
        pub.stdin.write("one\ntwo\n")
        pub.stdin.flush()
        assert sub.receive(DEADLINE).data == b"one"  # type: ignore[union-attr]
        pub.send_signal(signal.SIGTERM)
        assert pub.wait(DEADLINE) == 128 + signal.SIGTERM
    pub.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_session_of_a_publisher(number: signal.Signals) -> None:
    """Lines that were read are published, the end is sent, subscribers see it, and the exit code tells the signal."""
    group = new_group()
    sub = begin("sub", group, "--from", "oldest", "--until-end")
    pub = begin("pub", group, "T", "t", stdin=subprocess.PIPE)
    assert pub.stdin is not None
    pub.stdin.write("one\ntwo\n")
    pub.stdin.flush()
    assert printed(sub, 2) == ["t one", "t two"]
    pub.send_signal(number)
    assert pub.wait(DEADLINE) == 128 + number
    assert pub.stderr is not None
    assert "2 published" in pub.stderr.read()
    pub.stdin.close()
    pub.stderr.close()
    _, said = sub.communicate(timeout=DEADLINE)
    assert sub.returncode == 0, said


def test_a_wrong_session_is_told_with_those_that_were_heard() -> None:
    """Nothing comes of a session that nobody sends: the message names what was heard, and the exit code is 1."""
    group = new_group()
    with Publisher(group, "RIGHT") as pub:
        sub = begin("sub", group, "--session", "WRONG", "--timeout", 3)
        _, said = sub.communicate(timeout=DEADLINE)
        assert pub.session in said
        assert sub.returncode == 1
        assert "Traceback" not in said


def test_a_request_server_alone_has_everything_for_a_late_joiner(tmp_path: Path) -> None:
    """`serve` on the journal that a publisher left, and `sub --from oldest`: all of it, exit code 0."""
    group = new_group()
    with Publisher(group, "T", journal=tmp_path / "j") as pub:
        pub.publish_many("t", [b"%d" % i for i in range(20)])
    serve = begin("serve", tmp_path / "j", "T")
    try:
        address = printed(serve, 1)[0].rpartition(" ")[2]
        sub = begin("sub", group, "--from", "oldest", "--request-server", address, "--count", 20)
        out, said = sub.communicate(timeout=DEADLINE)
        assert out.splitlines() == [f"t {i}" for i in range(20)], said
        assert sub.returncode == 0
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=DEADLINE)
