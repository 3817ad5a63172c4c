"""Ranges of a publisher's journal, asked for over its address."""

import pytest

from brokerless.core import Frame, MemoryJournal
from brokerless.core.errors import PeerError
from brokerless.direct import Publisher, ReplayClient


def test_a_range_is_replayed(address: str) -> None:
    """What the journal holds can be asked for by offset, over every transport, without following the stream."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        for first in range(0, 300, 100):
            pub.publish_many("t", [b"%d" % i for i in range(first, first + 100)])
        client = ReplayClient(pub.address)
        try:
            welcome = client.welcome(20.0)
            assert welcome is not None
            assert (welcome.source, welcome.oldest, welcome.next) == ("p", 0, 300)
            client.ask(welcome.epoch, 150)
            chunk = client.answer(20.0)
            assert chunk is not None
            events = [event for raw in chunk.frames for event in Frame.parse(raw).events()]
            assert [int(event.data) for event in events] == list(range(100, 300))
            assert (chunk.next, chunk.gone) == (300, [])
            client.ask(welcome.epoch + 1, 0)
            with pytest.raises(PeerError, match="epoch"):
                client.answer(20.0)
        finally:
            client.close()
        assert pub.subscribers == 0


def test_nobody_there() -> None:
    """A publisher that is away is no error: the answer is None when the time is over."""
    client = ReplayClient("tcp://127.0.0.1:9")
    assert client.welcome(0.1) is None
    client.close()
