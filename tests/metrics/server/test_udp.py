"""metrics/server/udp.py and speed.py: truncated datagrams lose half a line, with and without the C module."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core.runtime.accelerated import speed
from brokerless.core.runtime.datagrams import SLOT_BYTES
from brokerless.metrics.server.udp import bind_unix_datagram

needs_c = pytest.mark.skipif(speed is None, reason="built without the C module")


both = pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_c)])


@both
def test_a_datagram_that_was_cut_short_loses_its_last_line(fast: bool, tmp_path: Path) -> None:
    """Half a line may read as a smaller number; what stands before it is whole."""
    path = str(tmp_path / "socket")
    bound = bind_unix_datagram(path)
    if not fast:
        bound._reader._read = None
    with bound.sock, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"aa:1|c\n" + b"b" * SLOT_BYTES + b":12345|c", path)
        sender.sendto(b"c" * SLOT_BYTES + b":1|c", path)
        assert bound.read() == ([b"aa:1|c", b""], 2)


def test_the_c_module_can_be_switched_off() -> None:
    """BROKERLESS_PURE=1 is for those who do not trust it, and for comparing."""
    code = "from brokerless.metrics.speed import ACCELERATED; print(ACCELERATED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BROKERLESS_PURE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False"
