"""Hostile publishers on real sockets: their clients stay well, and so do the other publishers of these clients."""

import time
from collections.abc import Callable

import zmq

from brokerless.direct.address import parse
from brokerless.direct.zmq_network import ZmqNetwork

DEADLINE = 20.0


def test_answers_that_nobody_reads_wait_with_the_sender(new_address: Callable[[str], str]) -> None:
    """A publisher that sends large messages to a client whose application is busy fills a few megabytes."""
    address = parse(new_address("ipc"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = ZmqNetwork()
    try:
        router = context.socket(zmq.ROUTER)
        router.sndhwm = 1
        router.router_mandatory = True
        router.bind(address.url)
        client = network.connect_control(address)
        deadline = time.monotonic() + DEADLINE
        while not client.send(b"hello"):
            assert time.monotonic() < deadline
        peer, _ = router.recv_multipart()
        accepted = 0
        while accepted < 100 and router.poll(300, zmq.POLLOUT):
            router.send_multipart([peer, bytes(1 << 20)], zmq.DONTWAIT)
            accepted += 1
        assert accepted < 30
        client.close()
    finally:
        context.destroy(linger=0)
        network.close()
