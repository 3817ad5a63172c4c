"""metrics/server/udp.py and speed.py: the readers give what was sent, with and without the C module."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.metrics.server.udp import BATCH, SLOT, bind_udp, bind_unix_datagram
from brokerless.metrics.speed import speed

needs_c = pytest.mark.skipif(speed is None, reason="built without the C module")


both = pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_c)])


@both
def test_readers_give_every_datagram_in_order(fast: bool) -> None:
    """Empty ones, large ones, more than a batch: all of them, then nothing."""
    bound = bind_udp("127.0.0.1:0")
    if not fast:
        bound._read_many = None
    sent = [b"", b"a:1|c", b"x" * 60_000, *(b"k:%d|c" % i for i in range(BATCH))]
    with bound.sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for payload in sent:
            sender.sendto(payload, bound.sock.getsockname())
        first, cut = bound.read()
        second, _ = bound.read()
        assert (first + second, cut, len(first)) == (sent, 0, BATCH)
        assert bound.read() == ([], 0)


@both
def test_a_datagram_that_was_cut_short_loses_its_last_line(fast: bool, tmp_path: Path) -> None:
    """Half a line may read as a smaller number; what stands before it is whole."""
    path = str(tmp_path / "socket")
    bound = bind_unix_datagram(path)
    if not fast:
        bound._read_many = None
    with bound.sock, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"aa:1|c\n" + b"b" * SLOT + b":12345|c", path)
        sender.sendto(b"c" * SLOT + b":1|c", path)
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
