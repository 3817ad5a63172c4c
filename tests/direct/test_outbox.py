"""The outbox: in the caller's transaction, and from there into the journal, each row once."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.direct import OutboxFault, OutboxRelay, Publisher, create_outbox, publish_in

from .test_ids import events_of

DEADLINE = 30.0


@contextmanager
def application(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of the application, with its own table."""
    with closing(sqlite3.connect(path / "app.db")) as connection:
        create_outbox(connection)
        connection.execute("CREATE TABLE IF NOT EXISTS orders (n INTEGER)")
        connection.commit()
        yield connection


@contextmanager
def publisher(path: Path, **options: int) -> Iterator[Publisher]:
    journal = DiskJournal(path / "journal", max_event_bytes=options.get("max_event_bytes", 1 << 20))
    with Publisher("inproc://outbox", source="p", journal=journal) as pub:
        yield pub


def test_what_is_committed_is_published_and_what_is_rolled_back_is_not(tmp_path: Path) -> None:
    """With its key, content type and headers, in order, and the outbox is empty afterwards."""
    with (
        application(tmp_path) as app,
        publisher(tmp_path) as pub,
        OutboxRelay(pub, tmp_path / "app.db") as relay,
    ):
        for n in range(20):
            app.execute("INSERT INTO orders VALUES (?)", (n,))
            publish_in(
                app, "orders", b"%d" % n, key=f"k{n}", content_type="text/plain", headers={"h": str(n)}
            )
            app.commit() if n % 3 else app.rollback()
        publish_in(app, "orders", b"same", id="mine")
        publish_in(app, "orders", b"same", id="mine")
        app.commit()
        assert relay.drain(DEADLINE)
        committed = [n for (n,) in app.execute("SELECT n FROM orders ORDER BY n")]
        found = events_of(pub.journal)
        assert [event.data for event in found] == [*[b"%d" % n for n in committed], b"same"]
        assert found[0].key == "k1"
        assert found[0].content_type == "text/plain"
        assert found[0].headers["h"] == "1"
        assert not app.execute("SELECT * FROM brokerless_outbox").fetchall()
        assert relay.counters.moved == len(committed) + 2
        assert relay.counters.repeated == 1


def test_a_row_that_was_published_and_not_deleted(tmp_path: Path) -> None:
    """As after a crash between the two: it is known by its id, also by the next process."""
    with application(tmp_path) as app:
        id = publish_in(app, "t", b"x")
        app.commit()
        with publisher(tmp_path) as pub:
            pub.publish("t", b"x", id=id)
        with publisher(tmp_path) as pub, OutboxRelay(pub, tmp_path / "app.db") as relay:
            assert relay.drain(DEADLINE)
            assert relay.counters.repeated == 1
            assert [event.data for event in events_of(pub.journal)] == [b"x"]


def test_a_row_that_the_publisher_refuses_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """It stays in the table with its problem, and is counted."""
    with application(tmp_path) as app, publisher(tmp_path, max_event_bytes=10) as pub:
        publish_in(app, "t", b"x" * 11)
        publish_in(app, "t", b"small")
        app.commit()
        with OutboxRelay(pub, tmp_path / "app.db") as relay:
            assert relay.drain(DEADLINE)
            assert relay.counters.refused == 1
        assert [event.data for event in events_of(pub.journal)] == [b"small"]
        ((problem,),) = app.execute("SELECT problem FROM brokerless_outbox").fetchall()
        assert "limit is 10" in problem


def test_a_database_that_fails_is_tried_again(tmp_path: Path) -> None:
    """A table that is gone for a while costs nothing but time."""
    with (
        application(tmp_path) as app,
        publisher(tmp_path) as pub,
        OutboxRelay(pub, tmp_path / "app.db") as relay,
    ):
        app.execute("ALTER TABLE brokerless_outbox RENAME TO away")
        app.commit()
        while not relay.counters.failures:
            assert relay._thread.is_alive()
        app.execute("DROP TABLE IF EXISTS brokerless_outbox")
        app.execute("ALTER TABLE away RENAME TO brokerless_outbox")
        publish_in(app, "t", b"x")
        app.commit()
        assert relay.drain(DEADLINE)
        assert [event.data for event in events_of(pub.journal)] == [b"x"]


def test_an_outbox_belongs_to_one_source(tmp_path: Path) -> None:
    """Another publisher, or a journal that dies with the process, could not know what was published before."""
    with application(tmp_path), publisher(tmp_path) as pub:
        OutboxRelay(pub, tmp_path / "app.db").close()
        with (
            Publisher("inproc://other", source="q", journal=DiskJournal(tmp_path / "q")) as other,
            pytest.raises(ConfigError, match="relayed by 'p'"),
        ):
            OutboxRelay(other, tmp_path / "app.db")
        with (
            Publisher("inproc://other", source="q", journal=MemoryJournal()) as other,
            pytest.raises(ConfigError, match="DiskJournal"),
        ):
            OutboxRelay(other, tmp_path / "app.db")
        with pytest.raises(OutboxFault):
            OutboxRelay(pub, tmp_path / "no" / "such.db")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """Refused before it is in the caller's transaction."""
    with application(tmp_path) as app:
        for topic, data in (("", b""), ("t", "text")):
            with pytest.raises(InvalidEvent):
                publish_in(app, topic, data)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            publish_in("no connection", "t", b"")  # type: ignore[arg-type]
        with closing(sqlite3.connect(":memory:")) as bare, pytest.raises(OutboxFault):
            publish_in(bare, "t", b"")
