"""metrics/server/udp.py and speed.py: the readers give what was sent, with and without the C module."""

import os
import socket
import subprocess
import sys

import pytest

from brokerless.metrics.server.udp import BATCH, SLOT, DatagramSocket, _Reader, bind_udp
from brokerless.metrics.speed import speed

needs_c = pytest.mark.skipif(speed is None, reason="built without the C module")


@pytest.mark.skipif(sys.platform != "linux", reason="recvmmsg")
@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_c)])
def test_readers_give_every_datagram_in_order(fast: bool) -> None:
    """Empty ones, large ones, more than a batch: all of them, then nothing."""
    bound: DatagramSocket = bind_udp("127.0.0.1:0")
    sent = [b"", b"a:1|c", b"x" * 60_000, *(b"k:%d|c" % i for i in range(BATCH))]
    with bound.sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        read = speed.Receiver(BATCH, SLOT).read if fast and speed else _Reader().read
        for payload in sent:
            sender.sendto(payload, bound.sock.getsockname())
        first, cut = read(bound.sock.fileno())
        second, _ = read(bound.sock.fileno())
        assert (first + second, cut, len(first)) == (sent, 0, BATCH)
        assert read(bound.sock.fileno()) == ([], 0)


@needs_c
def test_a_datagram_that_was_cut_short_loses_its_last_line() -> None:
    """Half a line may read as a smaller number; what stands before it is whole."""
    assert speed is not None
    bound = bind_udp("127.0.0.1:0")
    with bound.sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"aa:1|c\nbb:12345|c", bound.sock.getsockname())
        sender.sendto(b"longer-than-that:1|c", bound.sock.getsockname())
        assert speed.Receiver(4, 12).read(bound.sock.fileno()) == ([b"aa:1|c", b""], 2)


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
