"""`brokerless pub`, `sub` and `keys` as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.direct import Publisher, Subscriber
from brokerless.losstest.harness.ports import Ports
from tests.command import run_here

DEADLINE = 60.0


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from brokerless.cli.main import main; main()", *map(str, args)]


def begin(*args: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def address(ports: Ports) -> str:
    return f"tcp://127.0.0.1:{ports.take()}"


def test_lines_of_stdin_arrive_as_json_with_a_ledger_line(address: str) -> None:
    """pub sends each line of stdin, sub prints JSON and ends with what the ledger says."""
    pub = begin("pub", address, "orders.eu", "-", "--key", "k", "--timeout", 30)
    reader = begin("sub", address, "orders.", "--from", "oldest", "--json", "--count", 3)
    out, errors = pub.communicate("one\ntwo\n\n", timeout=DEADLINE)
    assert pub.returncode == 0, errors
    assert "3 events accepted" in errors
    printed, said = reader.communicate(timeout=DEADLINE)
    assert [json.loads(line)["data"] for line in printed.splitlines()] == ["one", "two", ""]
    assert json.loads(printed.splitlines()[0])["topic"] == "orders.eu"
    assert said.splitlines()[-1].startswith("3 delivered, 0 lost")
    assert reader.returncode == 0
    assert out == ""


def test_a_journal_serves_groups_later(address: str, tmp_path: Path) -> None:
    """Events published to a journal with nobody there are worked off by a group afterwards."""
    journal = tmp_path / "journal"
    for word in ("a", "b"):
        assert run_here("pub", address, "t", word, "--journal", journal, "--timeout", 0.1).returncode == 0
    pub = begin("pub", address, "t", "c", "--journal", journal, "--keep")
    done = run_here("sub", address, "--group", "g", "--count", 3)
    assert done.stdout.split() == ["a", "b", "c"]
    assert "3 delivered, 0 of them redelivered" in done.stderr
    pub.send_signal(signal.SIGINT)
    _, errors = pub.communicate(timeout=DEADLINE)
    assert pub.returncode == 0, errors


def test_nobody_there(address: str) -> None:
    """Without a journal and without a subscriber pub fails and says so; sub ends by its timeout and fails, too."""
    failed = run_here("pub", address, "t", "x", "--timeout", 0.2)
    assert failed.returncode == 1
    assert "nobody came" in failed.stderr
    silent = run_here("sub", address, "--timeout", 0.3)
    assert silent.returncode == 1
    assert "no publisher is connected" in silent.stderr
    assert run_here("sub", address, "--timeout", 0.3, "--count", 1).returncode == 1


def test_what_is_kept_waits_for_nobody(address: str) -> None:
    """`--keep` serves from memory as well: who comes later has it, so there is no one to wait for."""
    pub = begin("pub", address, "t", "x", "--keep")
    done = run_here("sub", address, "--from", "oldest", "--count", 1)
    assert done.stdout == "x\n", done.stderr
    pub.send_signal(signal.SIGTERM)
    _, errors = pub.communicate(timeout=DEADLINE)
    assert pub.returncode == 0, errors
    assert "1 events accepted" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_input_and_not_the_delivery(address: str, tmp_path: Path, number: int) -> None:
    """What was read is accepted and said; the exit code tells that the input was cut short."""
    pub = begin("pub", address, "t", "--journal", tmp_path / "j")
    assert pub.stdin is not None
    assert pub.stderr is not None
    assert pub.stderr.readline().startswith("publishing")
    pub.stdin.write("one\n")
    pub.stdin.flush()
    with Subscriber(address, start="oldest") as sub:
        assert sub.receive(DEADLINE).data == b"one"
        pub.send_signal(number)
        errors = pub.stderr.read()
    assert pub.wait(DEADLINE) == 128 + number, errors
    assert "1 events accepted" in errors
    pub.communicate()


@pytest.mark.parametrize(("given", "start"), [("0", 0), ("5", 5), ("oldest", 0)])
def test_loss_is_in_the_exit_code(given: str, start: int) -> None:
    """sub ends with 3 when the publisher no longer has what was asked for, names the range and counts it.

    `--from oldest` asks for all there was: what was evicted before the first join counts, too.
    """
    with Publisher(
        "tcp://127.0.0.1:*", source="s", journal=MemoryJournal(retention=Retention(max_events=10))
    ) as publisher:
        for number in range(100):
            publisher.publish("t", b"%d" % number)
        publisher.flush()
        done = run_here("sub", publisher.address, "--from", given, "--count", 10)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == [str(number) for number in range(90, 100)]
    assert f"lost: offsets {start} to 89 of s ({90 - start} events, evicted)" in done.stderr
    assert f"10 delivered, {90 - start} lost ({90 - start} evicted)" in done.stderr


def test_any_bytes_may_be_given_as_data(tmp_path: Path) -> None:
    """Also those that are not text."""
    args = [
        os.fsencode(arg)
        for arg in command("pub", f"ipc://{tmp_path}/a", "t", "DATA", "--journal", tmp_path / "j")
    ]
    args[args.index(b"DATA")] = b"\xff\n"
    done = subprocess.run([*args, b"--timeout", b"0.1"], capture_output=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    with DiskJournal(tmp_path / "j", source="shell") as journal:
        assert journal.read(0).frames[0].datas() == [b"\xff\n"]


def test_an_output_that_is_full() -> None:
    """It says so, and ends with 1."""
    with Publisher("tcp://127.0.0.1:*", source="s", journal=MemoryJournal()) as publisher:
        publisher.publish("t", b"x")
        args = command("sub", publisher.address, "--from", "oldest", "--count", 1)
        with open("/dev/full", "w") as full:
            done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "brokerless: the output cannot be written: no space left"
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_with_the_ledger(address: str) -> None:
    """An interrupted sub prints its ledger line and ends with 130."""
    sub = begin("sub", address)
    assert sub.stderr is not None
    assert sub.stderr.readline().startswith("following")
    sub.send_signal(signal.SIGINT)
    _, errors = sub.communicate(timeout=DEADLINE)
    assert sub.returncode == 130
    assert "0 delivered, 0 lost" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "args",
    [
        ("sub", "nonsense"),
        ("sub", "tcp://127.0.0.1:1", "--from", "latest"),
        ("sub", "tcp://127.0.0.1:1", "--curve", "x"),
        ("sub", "tcp://127.0.0.1:1", "--group", "g", "--cursor", "c"),
        ("sub", "tcp://127.0.0.1:1", "--count=-1"),
        ("pub", "tcp://127.0.0.1:1", "t", "x", "--timeout=-1"),
        ("pub", "tcp://127.0.0.1:99999", "t", "x"),
        ("pub", "tcp://127.0.0.1:1"),
        ("keys", "show", "/nowhere"),
    ],
)
def test_wrong_arguments_end_with_2(args: tuple[str, ...]) -> None:
    """Every mistake is one line or a short box on stderr and exit code 2, never a traceback."""
    done = run_here(*args)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert not done.stdout


def test_keys_encrypt(address: str, tmp_path: Path) -> None:
    """Keys made by the command let one client in and keep another out."""
    for name in ("server", "friend", "stranger"):
        made = run_here("keys", "new", tmp_path / name)
        assert made.returncode == 0, made.stderr
    assert run_here("keys", "new", tmp_path / "server").returncode == 2
    assert len(run_here("keys", "show", tmp_path / "server.pub").stdout.strip()) == 40
    pub = begin(
        *("pub", address, "t", "secret", "--keep", "--journal", tmp_path / "j"),
        *("--curve", tmp_path / "server", "--allow", tmp_path / "friend.pub"),
    )
    keys = ("--server-key", tmp_path / "server.pub", "--from", "oldest")
    friend = run_here("sub", address, "--curve", tmp_path / "friend", *keys, "--count", 1)
    assert friend.stdout == "secret\n"
    stranger = run_here("sub", address, "--curve", tmp_path / "stranger", *keys, "--timeout", 1)
    assert stranger.stdout == ""
    pub.send_signal(signal.SIGINT)
    pub.communicate(timeout=DEADLINE)


@pytest.mark.parametrize("group", [[], ["--group", "g"]])
def test_nobody_answered_is_no_success(address: str, group: list[str]) -> None:
    """`sub --timeout` where nobody listens: exit code 1, and the reason."""
    done = run_here("sub", address, "--timeout", "6", *group)
    assert done.returncode == 1
    assert "nobody listens there" in done.stderr


def test_errors_name_the_option_that_was_typed() -> None:
    """The user wrote --from, and hears of --from, not of a Python argument."""
    done = run_here("sub", "tcp://127.0.0.1:1", "--from", "yesterday")
    assert done.returncode == 2
    assert "--from: must be" in done.stderr
    done = run_here("sub", "tcp://127.0.0.1:1", "--count", "-1")
    assert "--count: must be" in done.stderr
