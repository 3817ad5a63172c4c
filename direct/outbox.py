"""An outbox: events are written in the caller's own transaction, and a relay moves them into a journal exactly once.

    create_outbox(connection)                            once
    with connection:                                     the application's transaction, in SQLite or PostgreSQL
        connection.execute("INSERT INTO orders …")
        publish_in(connection, "orders.eu", b"…")
    with OutboxRelay(publisher, "app.db"): …             in the process that publishes

A row is deleted when its event is in the journal as durably as the journal's `fsync` says. If the relay dies in
between, it finds the row again, and its id in the journal: see `ids.py`.
"""

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from brokerless.core import Backoff, DiskJournal
from brokerless.core.errors import (
    BrokerlessError,
    Closed,
    ConfigError,
    Fault,
    InvalidEvent,
    MissingDependency,
)
from brokerless.core.event import check_data, check_headers, check_topic
from brokerless.core.journal.types import check_label
from brokerless.core.runtime.closing import Closing
from brokerless.direct.counters import RelayCounters
from brokerless.direct.publisher import Publisher

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)
# Rows moved with one sync and one delete: a sync costs milliseconds, a row some ten microseconds.
BATCH = 500
# How often an SQLite file is polled; PostgreSQL notifies, and is polled only every 20 × POLL_S.
POLL_S = 0.05
# How long transactions of the application may hold an SQLite file, and a server may take to answer.
_BUSY_S = 30.0
_CHANNEL = "brokerless_outbox"
_TABLES = (
    """CREATE TABLE IF NOT EXISTS brokerless_outbox (
        n {serial}, id TEXT NOT NULL, topic TEXT NOT NULL, data {bytes} NOT NULL, key TEXT NOT NULL,
        content_type TEXT NOT NULL, headers TEXT NOT NULL, problem TEXT)""",
    "CREATE TABLE IF NOT EXISTS brokerless_outbox_owner (one INTEGER PRIMARY KEY, source TEXT NOT NULL)",
)
_INSERT = (
    "INSERT INTO brokerless_outbox (id, topic, data, key, content_type, headers) VALUES (?, ?, ?, ?, ?, ?)"
)
_OWN = "INSERT INTO brokerless_outbox_owner (one, source) VALUES (1, ?) ON CONFLICT DO NOTHING"
_OWNER = "SELECT source FROM brokerless_outbox_owner"
_SELECT = (
    "SELECT n, id, topic, data, key, content_type, headers FROM brokerless_outbox "
    "WHERE problem IS NULL ORDER BY n LIMIT ?"
)
_DELETE = "DELETE FROM brokerless_outbox WHERE n = ?"
_REFUSE = "UPDATE brokerless_outbox SET problem = ? WHERE n = ?"


class OutboxFault(Fault):
    """The database failed, or has no outbox; what is in it stays there."""


def create_outbox(connection: "sqlite3.Connection | psycopg.Connection[Any]") -> None:
    """Make the tables of an outbox, if they are not there. Commits with the caller's transaction.

    Raises OutboxFault, or ConfigError for another kind of connection.
    """
    _connection(connection).create()


def publish_in(
    connection: "sqlite3.Connection | psycopg.Connection[Any]",
    topic: str,
    data: bytes,
    *,
    key: str = "",
    content_type: str = "",
    headers: Mapping[str, str] | None = None,
    id: str = "",
) -> str:
    """Write an event; it is published, exactly once, if and when the caller commits. Returns its id.

    `id` is a new one if it is not given; events of one id are published once, as by `publish(id=…)`.
    Raises InvalidEvent, OutboxFault if the connection has no outbox or its transaction is broken, ConfigError for
    another kind of connection.
    """
    id = check_label("id", id) or uuid.uuid4().hex
    named = json.dumps(dict(check_headers(headers)))
    row = (id, check_topic(topic), check_data(data), check_label("key", key))
    _connection(connection).insert((*row, check_label("content_type", content_type), named))
    return id


class _Database(Protocol):
    def create(self) -> None: ...
    def insert(self, row: tuple[Any, ...]) -> None: ...
    def own(self, source: str) -> str: ...
    def rows(self, most: int) -> list[tuple[Any, ...]]: ...
    def settle(self, done: list[int], refused: Mapping[int, str]) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class _Sqlite:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @contextlib.contextmanager
    def _faults(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection
        except sqlite3.Error as error:
            raise OutboxFault(f"the outbox in SQLite: {error}") from error

    def create(self) -> None:
        with self._faults() as connection:
            for table in _TABLES:
                connection.execute(table.format(serial="INTEGER PRIMARY KEY AUTOINCREMENT", bytes="BLOB"))

    def insert(self, row: tuple[Any, ...]) -> None:
        with self._faults() as connection:
            connection.execute(_INSERT, row)

    def own(self, source: str) -> str:
        with self._faults() as connection:
            if connection.execute(_OWNER).fetchone() is None:
                connection.execute(_OWN, (source,))
            return str(connection.execute(_OWNER).fetchone()[0])

    def rows(self, most: int) -> list[tuple[Any, ...]]:
        with self._faults() as connection:
            return connection.execute(_SELECT, (most,)).fetchall()

    def settle(self, done: list[int], refused: Mapping[int, str]) -> None:
        with self._faults() as connection, connection:
            # At once: a transaction that begins by reading is refused instead of waiting when others have written.
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_DELETE, [(n,) for n in done])
            connection.executemany(_REFUSE, [(problem, n) for n, problem in refused.items()])

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._connection.close()


class _Postgres:
    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection

    @contextlib.contextmanager
    def _faults(self) -> Iterator["psycopg.Connection[Any]"]:
        import psycopg

        try:
            yield self._connection
        except psycopg.Error as error:
            raise OutboxFault(f"the outbox in PostgreSQL: {str(error).strip()}") from error

    def create(self) -> None:
        with self._faults() as connection:
            # Two who create at once: without the lock one of them gets an error.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (_CHANNEL,))
            for table in _TABLES:
                connection.execute(table.format(serial="BIGSERIAL PRIMARY KEY", bytes="BYTEA"))

    def insert(self, row: tuple[Any, ...]) -> None:
        with self._faults() as connection:
            connection.execute(_INSERT.replace("?", "%s"), row)
            connection.execute(f"NOTIFY {_CHANNEL}")

    def own(self, source: str) -> str:
        with self._faults() as connection, connection.transaction():
            connection.execute(f"LISTEN {_CHANNEL}")
            connection.execute(_OWN.replace("?", "%s"), (source,))
            found = connection.execute(_OWNER).fetchone()
            assert found is not None
            return str(found[0])

    def rows(self, most: int) -> list[tuple[Any, ...]]:
        with self._faults() as connection:
            return connection.execute(_SELECT.replace("?", "%s"), (most,)).fetchall()

    def settle(self, done: list[int], refused: Mapping[int, str]) -> None:
        with self._faults() as connection, connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(_DELETE.replace("?", "%s"), [(n,) for n in done])
            if refused:
                cursor.executemany(_REFUSE.replace("?", "%s"), [(text, n) for n, text in refused.items()])

    def wait(self, seconds: float) -> None:
        with self._faults() as connection:
            for _ in connection.notifies(timeout=seconds * 20, stop_after=1):
                pass

    def close(self) -> None:
        self._connection.close()


def _connection(connection: object) -> _Database:
    if isinstance(connection, sqlite3.Connection):
        return _Sqlite(connection)
    try:
        import psycopg
    except ImportError:
        psycopg = None  # type: ignore[assignment]
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return _Postgres(connection)
    raise ConfigError(
        "connection", f"must be a sqlite3 or psycopg connection, not {type(connection).__name__}"
    )


def _open(database: str) -> _Database:
    """A connection of its own, which commits each statement that is not in a transaction. Raises OutboxFault."""
    if not database.startswith(("postgresql://", "postgres://")):
        try:
            connection = sqlite3.connect(
                database, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("SELECT 1 FROM sqlite_master").fetchall()  # opens the file
        except sqlite3.Error as error:
            raise OutboxFault(f"{database}: {error}") from error
        return _Sqlite(connection)
    try:
        import psycopg
    except ImportError:
        raise MissingDependency("psycopg", "postgres", "an outbox in PostgreSQL") from None
    try:
        return _Postgres(psycopg.connect(database, autocommit=True, connect_timeout=int(_BUSY_S)))
    except psycopg.Error as error:
        raise OutboxFault(f"PostgreSQL: {str(error).strip()}") from error


class OutboxRelay(Closing):
    """Moves what is committed in an outbox into a publisher's journal, in the order of the rows, each exactly once.

    An outbox belongs to one source: another publisher is refused, because it could not know what was published before.
    Rows that the publisher refuses (too large for it) stay, with the column `problem`; they are counted and logged.
    """

    def __init__(
        self,
        publisher: Publisher,
        database: str | os.PathLike[str],
        *,
        batch: int = BATCH,
        poll_s: float = POLL_S,
    ) -> None:
        """`database` is a file of SQLite or a postgresql:// address. Makes the tables if they are not there.

        Raises OutboxFault if the database cannot be used, ConfigError if the outbox belongs to another source, or the
        publisher's journal does not survive it.
        """
        if not isinstance(publisher.journal, DiskJournal):
            raise ConfigError("publisher", "an outbox needs a journal that survives the process: DiskJournal")
        if batch < 1 or poll_s <= 0:
            raise ConfigError("batch", "must be at least 1, and poll_s more than 0")
        self.counters = RelayCounters()
        self._publisher = publisher
        self._journal = publisher.journal
        self._where = os.fspath(database)
        self._batch = batch
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._idle_rounds = 0
        self._changed = threading.Condition()
        self._database: _Database | None = self._connect()
        self._thread = threading.Thread(target=self._run, name="brokerless outbox", daemon=True)
        self._thread.start()

    def _connect(self) -> _Database:
        database = _open(self._where)
        try:
            database.create()
            owner = database.own(self._publisher.source)
            if owner != self._publisher.source:
                raise ConfigError(
                    "publisher",
                    f"this outbox is relayed by {owner!r}, not by {self._publisher.source!r}: what that one has "
                    "published before a crash, only it knows",
                )
        except BaseException:
            database.close()
            raise
        return database

    def _run(self) -> None:
        failures, backoff = 0, Backoff(first_s=0.1, limit_s=5.0)
        while not self._stop.is_set():
            try:
                if self._database is None:
                    self._database = self._connect()
                if not self._move(self._database):
                    with self._changed:
                        self._idle_rounds += 1
                        self._changed.notify_all()
                    self._database.wait(self._poll_s)
                failures = 0
            except Closed:
                return
            except BrokerlessError as error:
                # What was published and not deleted is found again, and known by its id.
                self.counters.failures += 1
                log.error("outbox of %s: %s; trying again", self._publisher.source, error)
                if isinstance(error, OutboxFault) and self._database is not None:
                    self._database.close()
                    self._database = None
                self._stop.wait(backoff.delay_s(failures, lambda: 0.5))
                failures += 1

    def _move(self, database: _Database) -> int:
        """Move one batch; how many rows there were."""
        rows = database.rows(self._batch)
        if not rows:
            return 0
        done: list[int] = []
        refused: dict[int, str] = {}
        repeated = self._publisher.counters.repeated_ids
        for n, id, topic, data, key, content_type, headers in rows:
            try:
                named = msgspec.json.decode(headers, type=dict[str, str])
                self._publisher.publish(
                    topic, bytes(data), key=key, content_type=content_type, headers=named, id=id
                )
                done.append(n)
            except (InvalidEvent, msgspec.MsgspecError) as error:
                refused[n] = str(error)
                self.counters.refused += 1
                log.error("outbox of %s: row %d cannot be published: %s", self._publisher.source, n, error)
        if self._journal.fsync == "never":
            self._journal.flush()
        else:
            self._journal.sync()
        database.settle(done, refused)
        self.counters.moved += len(done)
        self.counters.repeated += self._publisher.counters.repeated_ids - repeated
        return len(rows)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until everything that was committed before this call is published; whether it is."""
        with self._changed:
            until = self._idle_rounds + 2  # one may have begun before this call
            return self._changed.wait_for(lambda: self._idle_rounds >= until, timeout)

    def close(self) -> None:
        """Stop after the current batch, and close the connection; the publisher stays open. Closing twice is fine."""
        self._stop.set()
        self._thread.join()
        if self._database is not None:
            self._database.close()
            self._database = None
