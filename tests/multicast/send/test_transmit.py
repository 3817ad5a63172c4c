"""Fast ways of moving packets, and falling back from them."""

import errno
import socket

import pytest

from brokerless.core import MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import DatagramReceiver
from brokerless.multicast.counters import PublisherCounters
from brokerless.multicast.send.transmit import Transmitter
from brokerless.multicast.sockets import parse_address, receiving_socket, sending_socket
from brokerless.multicast.wire.packing import GsoBatch, pack_frame


class NoOffload(socket.socket):
    """A socket as a network card without segmentation offload makes it: GSO batches are refused."""

    def sendmsg(self, *arguments: object) -> int:  # type: ignore[override]
        raise OSError(errno.EIO, "no offload here")


def batches(count: int) -> list[GsoBatch]:
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"%04d" % i * 25 for i in range(count)])
    return list(pack_frame(b"T000000001", "src", journal.read(0).frames[0], 1400))


def received(sock: socket.socket, count: int) -> list[bytes]:
    reader = DatagramReceiver(sock, "auto")
    packets: list[bytes] = []
    sock.settimeout(5)
    while len(packets) < count:
        arrivals = reader.receive()
        for data, size in arrivals:
            packets += [bytes(data[i : i + size]) for i in range(0, len(data), size)]
        if not arrivals:
            sock.recv(1, socket.MSG_PEEK)
    return packets


@pytest.mark.parametrize("io", ["auto", "gso", "mmsg", "plain"])
def test_a_card_without_offload_is_noticed_and_nothing_is_lost(group: str, io: str) -> None:
    """The first GSO batch that is refused goes the slower way, as does everything after it."""
    address = parse_address(group, "group", multicast=True)
    inbox = receiving_socket(address, "127.0.0.1")
    made = sending_socket(address, "127.0.0.1", 0)
    outbox = NoOffload(fileno=made.detach())
    try:
        counters = PublisherCounters()
        transmitter = Transmitter(outbox, io, counters)  # type: ignore[arg-type]
        sent = batches(1000)
        expected = [bytes(packet) for batch in sent for packet in batch.split()]
        transmitter.send(sent)
        assert received(inbox, len(expected)) == expected
        assert counters.offload_off == (1 if io in ("auto", "gso") else 0)
        assert transmitter.io_mode == {"auto": "mmsg", "gso": "plain"}.get(io, io)
        assert counters.packets == len(expected)
        assert counters.send_errors == 0
    finally:
        inbox.close()
        outbox.close()


def test_gso_batches_and_single_packets_keep_their_order(group: str) -> None:
    """What is sent after a GSO batch arrives after it, whichever way each of them goes."""
    address = parse_address(group, "group", multicast=True)
    inbox, outbox = receiving_socket(address, "127.0.0.1"), sending_socket(address, "127.0.0.1", 0)
    try:
        some = batches(500)
        mixed = [
            GsoBatch(b"first", 5, 1),
            *some[:1],
            GsoBatch(b"second", 6, 1),
            GsoBatch(b"x" * 900, 900, 1),
            *some[1:],
        ]
        Transmitter(outbox, "auto", PublisherCounters()).send(mixed)
        expected = [bytes(packet) for batch in mixed for packet in batch.split()]
        assert received(inbox, len(expected)) == expected
    finally:
        inbox.close()
        outbox.close()


def test_what_the_kernel_refuses_is_counted(group: str) -> None:
    """A datagram that is too large is counted as an error, and the ones behind it are sent."""
    address = parse_address(group, "group", multicast=True)
    inbox, outbox = receiving_socket(address, "127.0.0.1"), sending_socket(address, "127.0.0.1", 0)
    try:
        for io in ("mmsg", "plain"):
            counters = PublisherCounters()
            packets = [
                GsoBatch(b"before", 6, 1),
                GsoBatch(b"x" * 70_000, 70_000, 1),
                GsoBatch(b"behind", 6, 1),
            ]
            Transmitter(outbox, io, counters).send(packets)  # type: ignore[arg-type]
            assert counters.send_errors == 1
            assert received(inbox, 2) == [b"before", b"behind"]
    finally:
        inbox.close()
        outbox.close()


def test_an_unknown_way_is_refused(group: str) -> None:
    """A typing error is an error."""
    with pytest.raises(ConfigError):
        DatagramReceiver(socket.socket(), "quick")  # type: ignore[arg-type]
