"""A journal that went back within its epoch, as a rolled-back machine with its memory does: both sides say so."""

import logging
from pathlib import Path

import pytest

from brokerless.core import Cursor, DiskJournal, MemoryJournal, Position
from brokerless.direct import Publisher, Subscriber
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.server import ControlServer


def test_a_subscriber_that_has_had_more_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its position is beyond the end: it gets all that there is, and the log and a counter tell."""
    cursor = tmp_path / "cursor"
    journal = DiskJournal(tmp_path / "journal", fsync="never")
    with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub:
        pub.publish_many("t", [b"%d" % i for i in range(10)])
        Cursor(cursor).save({"p": Position(journal.epoch, 50)})
        with caplog.at_level(logging.ERROR), Subscriber(pub.address, cursor=cursor) as sub:
            got = [event.data for _, event in zip(range(10), sub.events(60), strict=False)]
            assert got == [b"%d" % i for i in range(10)]
            assert sub.counters.rolled_back == 1
            pub.publish("t", b"next")
            event = sub.receive(60)
            assert event is not None
            assert event.data == b"next"
        assert "restored from an older copy" in caplog.text


@pytest.mark.parametrize("durable", ["", "d"])
def test_a_publisher_hears_of_what_it_does_not_have(durable: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client names a position beyond the journal's end, in the same epoch: counted each time, logged once."""
    journal = MemoryJournal(source="p")
    journal.append_many("t", [b"x"] * 10)
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    server = ControlServer(journal, coordinator, instance=1, live="5", beat_s=1.0, begin=0, replay=True)
    server.receive(b"peer", messages.encode(messages.Hello(messages.VERSION, "c", durable=durable)), 0.0)
    word = messages.Advance(journal.epoch, 50) if durable else messages.Ready(journal.epoch, 50)
    for _ in range(3):
        server.receive(b"peer", messages.encode(word), 0.0)
    assert server.counters.ahead == 3
    assert len([record for record in caplog.records if "restored from an older copy" in record.message]) == 1
    assert all(position <= journal.next for position in journal.registered().values())
    # Of another epoch it means nothing.
    server.receive(b"peer", messages.encode(messages.Ready(journal.epoch + 1, 90)), 0.0)
    assert server.counters.ahead == 3
