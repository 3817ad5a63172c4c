"""Reading one datagram and many of them."""

import select
import socket

import pytest

from brokerless.core.runtime.datagrams import DatagramReceiver, Io, probe_gso, send_segmented


@pytest.mark.parametrize("io", ["auto", "mmsg", "plain"])
def test_one_datagram_or_batch_is_what_receive_gives(io: Io) -> None:
    """`receive_one` gives the same bytes and sizes as `receive`, one at a time, and nothing when there is nothing."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbound,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
    ):
        inbound.bind(("127.0.0.1", 0))
        inbound.setblocking(False)
        out.connect(inbound.getsockname())
        reader = DatagramReceiver(inbound, io)
        assert list(reader.receive_one()) == []
        for data in (b"one", b"", b"x" * 60_000):
            out.send(data)
            select.select([inbound], [], [], 5)
            assert [(bytes(got), size) for got, size in reader.receive_one()] == [(data, len(data) or 1)]
        if reader.io_mode == "gso" and probe_gso(out):
            send_segmented(out, b"ab" * 500, 100)
            select.select([inbound], [], [], 5)
            ((got, size),) = reader.receive_one()
            assert (bytes(got), size) == (b"ab" * 500, 100)
        assert list(reader.receive_one()) == []
