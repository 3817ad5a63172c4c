"""The kernel's own count of dropped datagrams, whatever an adapter says."""

import socket

from brokerless.losstest.evidence.kernel_drops import KernelDrops


def test_a_full_receive_buffer_is_counted_to_the_datagram() -> None:
    """What was sent and cannot be received is what the kernel counted; a closed socket keeps its count."""
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    drops = KernelDrops()
    with sender, receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        receiver.bind(("127.0.0.1", 0))
        before = drops.read()
        for _ in range(100):
            sender.sendto(b"x" * 200, receiver.getsockname())
        counted = drops.read() - before
        received = 0
        receiver.setblocking(False)
        try:
            while receiver.recv(300):
                received += 1
        except BlockingIOError:
            pass
        assert received > 0
        assert counted == 100 - received > 0
    assert drops.read() - before == counted
