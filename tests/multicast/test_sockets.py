"""Addresses, safe defaults, and what the kernel says."""

import socket
import subprocess
import sys

import pytest

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import kernel_drops
from brokerless.multicast import Publisher, SocketFault, Subscriber
from brokerless.multicast.sockets import (
    IP_MULTICAST_ALL,
    Address,
    interface_mtu,
    parse_address,
    receiving_socket,
    sending_socket,
)


def test_addresses_are_parsed_and_wrong_ones_named() -> None:
    """IPv4, IPv6 in brackets, host names; everything else is a ConfigError."""
    assert parse_address("239.1.2.3:5000", "group", multicast=True) == Address("239.1.2.3", 5000)
    assert str(parse_address("[ff15::7]:5000", "group", multicast=True)) == "[ff15::7]:5000"
    assert parse_address("localhost:1", "x").port == 1
    for text in ("239.1.2.3", "239.1.2.3:x", "239.1.2.3:70000", "10.1.1.1:5", ":5", "no.such.host.invalid:5"):
        with pytest.raises(ConfigError):
            parse_address(text, "group", multicast=True)


def test_packets_stay_here_by_default(group: str) -> None:
    """The sockets of a publisher and a subscriber without options: loopback, TTL 0, only joined groups."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        sender = pub._lines[0]._sock
        assert sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL) == 0
        raw = sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, 4)
        assert socket.inet_ntoa(raw) == "127.0.0.1"
        receiver = sub._engine._lines[0].sock
        assert receiver.getsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL) == 0
        assert receiver.getsockname()[0] == group.partition(":")[0], "bound to the group, not to any address"
        assert pub.request_server is not None
        assert pub.request_server.address.host == "127.0.0.1"


def test_kernel_drops_are_read_exactly(group: str) -> None:
    """Into a small buffer more is sent than fits: received and dropped add up to what was sent."""
    address = parse_address(group, "group", multicast=True)
    inbox = receiving_socket(address, "127.0.0.1", buffer_bytes=20_000)
    outbox = sending_socket(address, "127.0.0.1", 0)
    try:
        for _ in range(500):
            outbox.send(b"x" * 500)
        received = 0
        while True:
            try:
                inbox.recv(1000)
            except BlockingIOError:
                break
            received += 1
        assert received < 500
        assert received + kernel_drops(inbox) == 500
    finally:
        inbox.close()
        outbox.close()


UNPRIVILEGED = """
import ctypes, logging, os, sys
from brokerless.multicast import Subscriber

logging.basicConfig()
if os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER: no rights over the network
    print("cannot give up rights here")
    sys.exit()
with Subscriber(sys.argv[1], receive_buffer_bytes=1 << 30):
    pass
"""


def test_a_smaller_buffer_than_wanted_is_warned_of(group: str) -> None:
    """Without the right to exceed net.core.rmem_max one clear warning names the sysctl."""
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, group], capture_output=True, text=True, timeout=60, check=False
    )
    if done.stdout:
        pytest.skip(done.stdout.strip())
    assert "rmem_max" in done.stderr, done.stderr
    assert done.stderr.count("WARNING") == 1


def test_a_port_in_use_is_named(group: str) -> None:
    """Two publishers at one request port: the second fails with the address, and leaves nothing behind."""
    with Publisher(group, "T"), pytest.raises(SocketFault, match=str(int(group.split(":")[1]) + 1)):
        Publisher(group, "U")


def test_the_mtu_of_loopback_is_large_and_of_nothing_is_1500() -> None:
    """What goes through in one piece decides how large an answer may be."""
    assert interface_mtu("127.0.0.1", socket.AF_INET) > 10_000
    assert interface_mtu("10.99.99.99", socket.AF_INET) == 1500
