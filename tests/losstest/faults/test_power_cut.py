"""Power cuts: what was synced survives, what was not may be gone; and disks that are slow."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.losstest.faults.power_cut import WatchedDisk, shim

WRITER = """
import mmap, os, sys
root = sys.argv[1]
def put(name, data, sync):
    fd = os.open(os.path.join(root, name), os.O_RDWR | os.O_CREAT)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    return fd
os.mkdir(os.path.join(root, "inner"))
fd = put("inner/synced", b"a" * 5000, True)
os.write(fd, b"b" * 5000)
put("inner/unsynced", b"c" * 5000, False)
mapped = mmap.mmap(put("mapped", b"d" * 4096, True), 4096)
mapped[:4] = b"eeee"
mapped.flush()
os.rename(os.path.join(root, "mapped"), os.path.join(root, "renamed"))
put("replaced", b"old", True)
put("new", b"new", True)
os.rename(os.path.join(root, "new"), os.path.join(root, "replaced"))
"""


@pytest.fixture(autouse=True)
def _built() -> None:
    if not shim():
        pytest.skip("the compiled part was not built")


def _run(disk: WatchedDisk, code: str) -> None:
    environment = os.environ | disk.environment | {"LD_PRELOAD": shim()}
    subprocess.run([sys.executable, "-c", code, str(disk.root)], env=environment, check=True, timeout=60)


def test_what_was_synced_survives_and_nothing_else_is_certain(tmp_path: Path) -> None:
    """Over many cuts: synced bytes are always there, unsynced ones come in every form, renames go either way."""
    disk = WatchedDisk(tmp_path / "disk", tmp_path / "durable")
    _run(disk, WRITER)
    lengths, unsynced, replaced, mapped = set(), set(), set(), set()
    for seed in range(60):
        left = tmp_path / f"left-{seed}"
        disk.build(random.Random(seed), left)
        synced = (left / "inner/synced").read_bytes()
        assert synced[:5000] == b"a" * 5000
        lengths.add(len(synced))
        unsynced.add((left / "inner/unsynced").exists())
        replaced.add((left / "replaced").read_bytes())
        for name in ("mapped", "renamed"):
            if (left / name).exists():
                mapped.add(name)
                assert (left / name).read_bytes()[:5] == b"eeeed"
    assert len(lengths) > 2
    assert unsynced == {True, False}
    assert replaced == {b"old", b"new"}
    assert mapped == {"renamed"}  # a later sync of another file in the directory took the rename along


def test_the_directory_is_replaced(tmp_path: Path) -> None:
    """After a cut the directory has what was left, all of it durable, and may be cut again."""
    disk = WatchedDisk(tmp_path / "disk", tmp_path / "durable")
    _run(disk, WRITER)
    disk.lose_power(random.Random(3))
    left = {path: path.read_bytes() for path in disk.root.rglob("*") if path.is_file()}
    disk.lose_power(random.Random(4))
    assert {path: path.read_bytes() for path in disk.root.rglob("*") if path.is_file()} == left


def test_a_slow_disk_is_slow_below_its_root_only(tmp_path: Path) -> None:
    """Each write and each sync takes the time that was set; elsewhere nothing changes."""
    disk = WatchedDisk(tmp_path / "disk", tmp_path / "durable")
    disk.slow(0.05)
    code = """
import os, sys, time
for directory, slow in ((sys.argv[1], True), (os.path.dirname(sys.argv[1]), False)):
    fd = os.open(os.path.join(directory, "file"), os.O_WRONLY | os.O_CREAT)
    begun = time.monotonic()
    os.write(fd, b"x"); os.fdatasync(fd)
    if slow:
        assert time.monotonic() - begun >= 0.1
        slow_s = time.monotonic() - begun
"""
    _run(disk, code)
