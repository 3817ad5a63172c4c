"""Locks of files belong to a process, and tell who holds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core.runtime.files import FileLocked, lock_file

HOLD = """
import os, sys
from brokerless.core.runtime.files import lock_file
lock_file(sys.argv[1], holder=str(os.getpid()))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """Others find who holds it; a killed holder leaves nothing behind."""
    path = str(tmp_path / "lock")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(FileLocked) as caught:
            lock_file(path, holder="me")
        assert caught.value.holder == str(child.pid)
        with pytest.raises(FileLocked) as caught:
            lock_file(path)
        assert caught.value.holder == ""
        child.kill()
    os.close(lock_file(path, holder="me"))
    assert Path(path).read_text() == "me"


def test_a_file_that_cannot_be_opened_is_no_lock(tmp_path: Path) -> None:
    """It is another error than a lock that somebody holds."""
    with pytest.raises(FileNotFoundError):
        lock_file(str(tmp_path / "none" / "lock"))
