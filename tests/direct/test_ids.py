"""Publishing with an id: accepted once, over restarts, within the window."""

import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Event, Journal, JournalReader, MemoryJournal, Retention
from brokerless.core.errors import ConfigError, InvalidEvent, JournalFull, NotAcknowledged
from brokerless.direct import Publisher
from brokerless.direct.counters import PublisherCounters
from brokerless.direct.ids import PublishedIds


def events_of(journal: Journal | JournalReader) -> list[Event]:
    """Everything that it has."""
    found: list[Event] = []
    at = journal.oldest
    while at < journal.next:
        chunk = journal.read(at)
        found += [event for frame in chunk.frames for event in frame.events() if event.offset >= at]
        at = chunk.next
    return found


def test_an_id_is_accepted_once(journal: Journal) -> None:
    """The second time its receipt is returned, whatever else is published."""
    with Publisher("inproc://ids", source="p", journal=journal) as pub:
        first = pub.publish("t", b"1", id="a", headers={"x": "y"})
        pub.publish("t", b"2")
        pub.publish_many("t", [b"3", b"4"])
        assert pub.publish("another", b"5", id="a") == first
        assert pub.publish("t", b"6", id="b").offset == 4
        assert pub.counters.repeated_ids == 1
        assert events_of(pub.journal)[0].headers == {"x": "y", "publishid": "a"}
        for wrong in ("x" * 300, "a\n", 17):
            with pytest.raises(InvalidEvent):
                pub.publish("t", b"", id=wrong)  # type: ignore[arg-type]
        with pytest.raises(NotAcknowledged):
            pub.publish("t", b"", id="a", wait="acked", timeout=0.01)
        pub.flush()
        assert [event.data for event in events_of(pub.journal)] == [b"1", b"2", b"3", b"4", b"6"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from("abcde-!"), max_size=60), st.integers(1, 8))
def test_the_window_and_restarts(tmp_path: Path, actions: list[str], window: int) -> None:
    """Among so many events an id is known again, no sooner and no later, whenever the journal is reopened.

    `-` publishes without an id, `!` restarts.
    """
    path = tempfile.mkdtemp(dir=tmp_path)
    journal = DiskJournal(path, source="p", fsync="never")
    ids = PublishedIds(journal, window, PublisherCounters())
    model: list[str] = []
    for action in actions:
        if action == "!":
            journal.close()
            journal = DiskJournal(path, source="p", fsync="never")
            ids = PublishedIds(journal, window, PublisherCounters())
        elif action == "-":
            journal.stage("t", b"")
            model.append("")
        else:
            receipt = ids.stage(action, "t", b"", "", "", 0, None)
            recent = model[-window:]
            if action in recent:
                assert receipt.offset == len(model) - 1 - model[::-1].index(action)
            else:
                assert receipt.offset == len(model)
                model.append(action)
    journal.flush()
    assert [event.headers.get("publishid", "") for event in events_of(journal)] == model
    journal.close()


def test_threads_that_publish_the_same_ids() -> None:
    """Each id is accepted once, whoever comes first."""
    with Publisher("inproc://ids", source="p", journal=MemoryJournal()) as pub:
        threads = [
            threading.Thread(target=lambda: [pub.publish("t", b"", id=str(i)) for i in range(500)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pub.flush()
        ids = [event.headers["publishid"] for event in events_of(pub.journal)]
        assert sorted(ids, key=int) == [str(i) for i in range(500)]


def test_what_was_not_accepted_can_be_tried_again() -> None:
    """A full journal refuses an id, and takes it when there is room; a window of nothing is refused."""
    journal = MemoryJournal(retention=Retention(max_events=2), on_full="reject")
    with Publisher("inproc://ids", source="p", journal=journal) as pub:
        journal.register("holds", 0)
        pub.publish("t", b"", id="a")
        pub.publish("t", b"", id="b")
        for _ in range(2):
            with pytest.raises(JournalFull):
                pub.publish("t", b"", id="c")
        journal.unregister("holds")
        assert pub.publish("t", b"", id="c").offset == 2
    with pytest.raises(ConfigError):
        Publisher("inproc://ids", source="p", id_window=0)
