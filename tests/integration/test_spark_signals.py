"""Spark commands and the signals that end them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.conftest import Until
from tests.spark_collector.spools import fill, open_spool

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]
COMMAND = [sys.executable, "-c", "from brokerless.cli.main import main; main()", "spark"]


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def start(tmp_path: Path, mark: str, *arguments: str) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, its output in files."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | {"BROKERLESS_TEST_MARK": mark},
            start_new_session=True,
        )


def test_a_followed_loss_table_and_a_signal_to_the_whole_group(tmp_path: Path, until: Until) -> None:
    """It says at once that it starts, shows its table while it runs, and ends in order, with nothing left behind."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        fill(spool, "p", 110, 90)
    mark = uuid.uuid4().hex
    options = [
        "--spool",
        str(tmp_path / "s"),
        "--ledger",
        str(tmp_path / "l"),
        "--settle",
        "0",
        "--by",
        "topic",
    ]
    process = start(tmp_path, mark, "loss", *options, "--follow", "--every", "1", "--master", "local[2]")
    try:
        until(lambda: b"starting Spark" in (tmp_path / "err").read_bytes(), 30, "a sign of life")
        until(lambda: b"duplicates" in (tmp_path / "out").read_bytes(), 500, "the table")
        assert process.poll() is None, "it goes on"
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(300)
        shown, errors = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
        assert process.returncode == 0, errors[-2000:]
        assert "Traceback" not in errors
        assert shown.count("duplicates") >= 2, "and once more at the end"
        until(lambda: marked(mark) == [], 60, "all processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_while_spark_starts_leaves_no_jvm(tmp_path: Path, until: Until) -> None:
    """Whenever it comes, everything that was started ends."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    mark = uuid.uuid4().hex
    process = start(tmp_path, mark, "query", "select count(*) from spool", "--spool", str(tmp_path / "s"))
    try:
        until(lambda: b"starting Spark" in (tmp_path / "err").read_bytes(), 30, "a sign of life")
        until(lambda: len(marked(mark)) > 1, 60, "a JVM")
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        assert process.returncode in (130, -signal.SIGINT)
        until(lambda: marked(mark) == [], 60, "all processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
