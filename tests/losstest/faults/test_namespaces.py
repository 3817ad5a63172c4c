"""A network of a run's own: who listens in it, and how many bytes it has carried."""

import os
import socket
import subprocess
import sys

import pytest

from brokerless.losstest.faults import namespaces
from brokerless.losstest.harness.ports import Ports

APART = """
import socket, sys
from brokerless.losstest.faults import namespaces
namespaces.unshare("net")
namespaces.loopback_up()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("127.0.0.1", 0))
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("ready", flush=True)
for _ in sys.stdin:
    sender.sendto(bytes(100), receiver.getsockname())
    print(len(receiver.recv(200)), flush=True)
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_who_listens(ports: Ports, address: str) -> None:
    """On this address or on all, over IPv4 or as IPv6 writes it; nobody before and after, nor on another address."""
    port, here = ports.take(), os.getpid()
    assert not namespaces.listens(here, "127.0.0.1", port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, dualstack_ipv6=family == socket.AF_INET6):
        assert namespaces.listens(here, "127.0.0.1", port)
        everywhere = address in ("0.0.0.0", "::")
        assert namespaces.listens(here, "127.0.0.2", port) == everywhere
    assert not namespaces.listens(here, "127.0.0.1", port)


def test_a_network_apart_counts_its_own_bytes(ports: Ports) -> None:
    """Ten datagrams of 100 bytes are 1,280 with their headers; what the rest of the machine sends is not among them."""
    if not namespaces.network_possible():
        pytest.skip("needs root, and a kernel with network namespaces")
    port = ports.take()
    words = [sys.executable, "-c", APART, str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as apart:
        assert apart.stdin is not None
        assert apart.stdout is not None
        assert apart.stdout.readline() == "ready\n"
        assert namespaces.listens(apart.pid, "127.0.0.1", port)
        assert not namespaces.listens(os.getpid(), "127.0.0.1", port)
        assert namespaces.carried_bytes(apart.pid) == 0
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass  # outside: the same port, and bytes that are not counted
        for _ in range(10):
            apart.stdin.write("\n")
            apart.stdin.flush()
            assert apart.stdout.readline() == "100\n"
        assert namespaces.carried_bytes(apart.pid) == 10 * (20 + 8 + 100)
        apart.stdin.close()
