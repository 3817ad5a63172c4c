"""Leases of the operator: held by one at a time, given back by a death, and what a promotion waits for."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from brokerless.core.errors import UsageError
from brokerless.core.runtime.clock import elapsed_s
from brokerless.direct import FileLease, Mirror, Publisher, Worker
from brokerless.losstest.harness.ports import Ports

from .conftest import eventually

HOLDER = """
import sys, time
from brokerless.direct import FileLease
lease = FileLease(sys.argv[1])
print(lease.acquire(), flush=True)
time.sleep(600)
"""


def test_a_lease_is_one_processes_until_it_dies(tmp_path: Path) -> None:
    """Killed without a word: the next one has it."""
    path = tmp_path / "lease"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        lease = FileLease(path)
        assert not lease.acquire()
        assert not lease.holds()
        holder.kill()
    eventually(lease.acquire)
    assert lease.holds()
    path.unlink()  # whoever recreates it can lock it
    assert not lease.holds()
    lease.release()


def test_a_mirror_takes_over_with_the_lease_and_not_before(tmp_path: Path, ports: Ports) -> None:
    """While the publisher has it, nothing happens; when it is gone, the mirror publishes, and the old one cannot."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    path = tmp_path / "lease"
    pub = Publisher(a, source="s", journal=tmp_path / "a", mirrors=[b], lease=FileLease(path))
    with Mirror(a, journal=tmp_path / "b", serve=b) as mirror:
        pub.publish("t", b"1", wait="mirrored", timeout=30)
        assert mirror.promote_when(FileLease(path), timeout=0.1) is None
        eventually(lambda: pub._mirrored.may_dispatch(elapsed_s()))
        pub.close()
        new = mirror.promote_when(FileLease(path), timeout=30)
        assert new is not None
        with new:
            assert new.publish("t", b"2").offset == 1
            with pytest.raises(UsageError, match="lease"):
                Publisher(a, source="s", journal=tmp_path / "a", mirrors=[b], lease=FileLease(path))


def test_a_publisher_whose_lease_is_gone_gives_its_groups_nothing(tmp_path: Path) -> None:
    """What cannot be shown to be held is not held."""
    path = tmp_path / "lease"
    with Publisher("tcp://127.0.0.1:*", source="s", journal=tmp_path / "a", lease=FileLease(path)) as pub:
        assert pub._mirrored.may_dispatch(elapsed_s())
        with suppress(OSError):
            os.unlink(path)
        eventually(lambda: not pub._mirrored.may_dispatch(elapsed_s()))


def test_a_machine_that_slept_dispatches_nothing_before_it_has_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is suspended for longer than the lease, and `time.monotonic` does not know: the lease counts as over
    at once, and until it was shown to be held."""
    with Publisher(
        "tcp://127.0.0.1:*", source="s", journal=tmp_path / "a", lease=FileLease(tmp_path / "l")
    ) as pub:
        lease = pub._mirrored._lease
        assert isinstance(lease, FileLease)
        released, holds = threading.Event(), lease.holds
        monkeypatch.setattr(lease, "holds", lambda: released.wait(20) and holds())
        eventually(lambda: pub._mirrored.may_dispatch(elapsed_s()))
        real = time.clock_gettime
        monkeypatch.setattr(
            time, "clock_gettime", lambda clock: real(clock) + (60 if clock == time.CLOCK_BOOTTIME else 0)
        )
        with Worker(pub.address, group="g", announce=False) as worker:
            pub.publish("t", b"x")
            while "g" not in pub.groups():
                assert worker.receive(0.1) is None
            assert worker.receive(0.2) is None
            released.set()
            assert worker.receive(20) is not None
