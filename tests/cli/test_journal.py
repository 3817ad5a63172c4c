"""`brokerless journal` and the command line around it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core import DiskJournal
from tests.command import run_here


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal with ten events."""
    with DiskJournal(tmp_path / "j", source="orders", fsync="never") as made:
        for i in range(10):
            made.append("eu" if i % 2 else "us", b"%d" % i, key="k")
    return tmp_path / "j"


def test_info_tells_what_a_journal_holds(journal: Path) -> None:
    """Source, offsets and topics, as a table and as JSON."""
    facts = json.loads(run_here("journal", "info", str(journal), "--json").stdout)
    assert (facts["source"], facts["oldest"], facts["next"]) == ("orders", 0, 10)
    assert facts["topics"] == {"eu": 5, "us": 5}
    assert "orders" in run_here("journal", "info", str(journal)).stdout


def test_dump_prints_events_as_json_lines(journal: Path) -> None:
    """From any offset, as many as wanted."""
    done = run_here("journal", "dump", str(journal), "--from", "3", "--count", "2")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(e["offset"], e["data"]) for e in events] == [(3, "3"), (4, "4")]


def test_verify_finds_damage_and_names_the_offsets(journal: Path) -> None:
    """Exit code 0 when everything is intact, 3 and the range when it is not."""
    done = run_here("journal", "verify", str(journal))
    assert (done.returncode, "intact" in done.stdout) == (0, True)
    segment = next(journal.glob("*.seg"))
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    done = run_here("journal", "verify", str(journal))
    assert done.returncode == 3
    assert "offsets 9 to 9" in done.stdout


def test_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    """A path without a journal is named; the exit code says that the argument is wrong."""
    done = run_here("journal", "info", str(tmp_path))
    assert done.returncode == 2
    assert "no journal" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_arguments_say_what_is_wrong() -> None:
    """Unknown commands and options are named, and the exit code is not 0."""
    for arguments in (["nonsense"], ["journal", "info"], ["journal", "info", "x", "--nonsense"]):
        done = run_here(*arguments)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr + done.stdout


def test_version_and_help_work() -> None:
    """The first things that a new user tries."""
    assert run_here("--version").stdout.strip() == "0.1.0"
    assert "journal" in run_here("--help").stdout


def test_a_following_dump_ends_with_ctrl_c(journal: Path) -> None:
    """Ctrl-C ends it with code 130 and no traceback."""
    command = [sys.executable, "-c", "from brokerless.cli.main import main; main()"]
    child = subprocess.Popen(
        [*command, "journal", "dump", str(journal), "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert child.stdout is not None
        for _ in range(10):
            child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert (child.returncode, "Traceback" in errors) == (130, False)


@pytest.mark.parametrize(("option", "said"), [("--from=-5", "--from"), ("--count=-1", "--count")])
def test_what_is_no_offset_or_number_is_refused(journal: Path, option: str, said: str) -> None:
    """Not taken for something that was evicted, nor for all there is."""
    done = run_here("journal", "dump", str(journal), option)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"brokerless: {said}: must be 0 or more\n"
