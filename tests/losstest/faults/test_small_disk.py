"""A small file system for a broker's data, filled to the last byte."""

import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.losstest.faults import small_disk

CODE = """
import os, sys
from pathlib import Path
from brokerless.losstest.faults import small_disk
where = Path(sys.argv[1])
small_disk.mount(where)
assert not list(where.iterdir())
(where / "before").write_bytes(b"kept")
assert small_disk.SIZE - (1 << 20) < small_disk.room(where) < small_disk.SIZE
small_disk.fill(where / "filler")
assert small_disk.room(where) == 0
try:
    (where / "more").write_bytes(bytes(10_000))
    raise SystemExit("there was room")
except OSError as error:
    assert error.errno == 28, error
(where / "more").unlink()
small_disk.fill(where / "filler")  # again, of a disk that is full
(where / "filler").unlink()
(where / "more").write_bytes(bytes(10_000))
print((where / "before").read_text())
"""


def test_it_takes_nothing_more_and_nobody_else_sees_it(tmp_path: Path) -> None:
    """What was there stays, a write fails as on any full disk; outside of the namespace the directory is as it was."""
    if why := small_disk.missing():
        pytest.skip(f"needs {why}")
    (tmp_path / "outside").write_text("here")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
