"""The reader of many datagrams gives what was sent, with and without the C module."""

import socket

import pytest

from brokerless.core.runtime.accelerated import speed
from brokerless.core.runtime.datagrams import MAX_BATCH, SLOT_BYTES, CopyingReceiver

needs_c = pytest.mark.skipif(speed is None, reason="built without the C module")
both = pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_c)])


def reader(fast: bool) -> CopyingReceiver:
    made = CopyingReceiver()
    if not fast:
        made._read = None
    return made


@both
def test_readers_give_every_datagram_in_order(fast: bool) -> None:
    """Empty ones, large ones, more than a batch: all of them, then nothing."""
    batches = reader(fast)
    sent = [b"", b"a:1|c", b"x" * 60_000, *(b"k:%d|c" % i for i in range(MAX_BATCH))]
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        for payload in sent:
            sender.sendto(payload, receiver.getsockname())
        first, cut = batches.read(receiver)
        second, _ = batches.read(receiver)
        assert (first + second, cut, len(first)) == (sent, [], MAX_BATCH)
        assert batches.read(receiver) == ([], [])


@both
def test_readers_name_what_was_cut_short(fast: bool) -> None:
    """A datagram that is larger than the buffer, between two that are whole."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        for payload in (b"a", b"b" * (SLOT_BYTES + 1), b"c"):
            theirs.send(payload)
        assert reader(fast).read(ours) == ([b"a", b"b" * SLOT_BYTES, b"c"], [1])
