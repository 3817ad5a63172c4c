"""Two databases behind one small session: SQLite and PostgreSQL. SQL is written once, with `?` for parameters.

Rows travel in multi-row statements, because each `execute` of Python's sqlite3 gives up the interpreter lock: one
statement per row makes the writer thread queue for that lock, behind a busy event loop, as often as there are rows.
"""

import os
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from brokerless.core.errors import MissingDependency
from brokerless.webhooks.errors import OutboxError
from brokerless.webhooks.outbox.vault import PLAIN, Vault

if TYPE_CHECKING:
    import psycopg

Row = tuple[Any, ...]
Params = Sequence[Any]
# Rows per statement: a few sizes, so that prepared statements are reused.
_CHUNKS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# How long a statement waits for another process's SQLite transaction before it fails.
BUSY_S = 10.0


class Session(Protocol):
    """One connection. Not thread-safe: its thread owns it."""

    name: str
    kind: str
    vault: Vault
    """Encrypts and decrypts what is secret in the rows."""

    def execute(self, sql: str, params: Params = ()) -> list[Row]:
        """Run one statement and return its rows."""

    def change(self, sql: str, params: Params = ()) -> int:
        """Run one statement and return how many rows it changed."""

    def begin(self, *, write: bool = True) -> None:
        """Start a transaction."""

    def commit(self) -> None:
        """Make it durable."""

    def rollback(self) -> None:
        """Undo it; does nothing without one. Never raises."""

    def changed(self) -> bool:
        """Whether others may have committed since the last call."""

    def last_rowids(self, count: int) -> range | None:
        """The numbers of the rows that the last INSERT made, if the database numbers them one after the
        other.
        """

    def close(self) -> None:
        """Close; never raises."""


def connect(
    target: str,
    *,
    synchronous: str = "full",
    read_only: bool = False,
    timeout_s: float = 30.0,
    vault: Vault = PLAIN,
) -> Session:
    """Open `postgresql://…`, or a file as SQLite; OutboxError if that fails."""
    session: Session
    if is_postgres(target):
        session = PostgresSession(target, timeout_s=timeout_s)
    else:
        session = SqliteSession(target, synchronous=synchronous, read_only=read_only)
    session.vault = vault
    return session


def chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows in pieces of the fixed sizes."""
    start, left = 0, len(rows)
    for size in _CHUNKS:
        while left >= size:
            yield rows[start : start + size]
            start += size
            left -= size


def values(columns: int, count: int) -> str:
    """`(?,?),(?,?),…`"""
    row = "(" + ",".join("?" * columns) + ")"
    return ",".join([row] * count)


class SqliteSession:
    """A file. WAL, so that readers never wait; one writer at a time, ours being one thread."""

    kind = "sqlite"
    vault = PLAIN

    def __init__(self, path: str, *, synchronous: str, read_only: bool) -> None:
        self.name = path
        self._version = -1
        with self._mapped():
            if not read_only and not Path(path).exists():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                # It holds signing secrets: nobody else may read it.
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=512
            )
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL").fetchall()
                self._db.execute(f"PRAGMA synchronous={synchronous}")
                # Checkpoints move pages from the log to the file; fewer, larger ones cost less.
                self._db.execute("PRAGMA wal_autocheckpoint=4000")
            self._db.execute("PRAGMA cache_size=-16384")
            self._db.execute("PRAGMA temp_store=MEMORY")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OutboxError(self.name, str(error)) from error
        except OSError as error:
            raise OutboxError(self.name, error.strerror or str(error)) from error

    def execute(self, sql: str, params: Params = ()) -> list[Row]:
        try:
            return self._db.execute(sql, params).fetchall()
        except sqlite3.Error as error:
            raise OutboxError(self.name, str(error)) from error

    def change(self, sql: str, params: Params = ()) -> int:
        try:
            return self._db.execute(sql, params).rowcount
        except sqlite3.Error as error:
            raise OutboxError(self.name, str(error)) from error

    def begin(self, *, write: bool = True) -> None:
        self.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            # SQLite may have rolled back by itself (disk full, I/O error).
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def changed(self) -> bool:
        """`data_version` moves when another connection commits; reading it costs microseconds."""
        version: int = self.execute("PRAGMA data_version")[0][0]
        moved, self._version = version != self._version, version
        return moved

    def last_rowids(self, count: int) -> range | None:
        # The write lock is ours from BEGIN IMMEDIATE on, so one INSERT's rows are numbered without holes.
        last: int = self.execute("SELECT last_insert_rowid()")[0][0]
        return range(last - count + 1, last + 1)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()


class PostgresSession:
    """A PostgreSQL connection; after an error it connects again at the next `begin`.

    Every statement has a deadline on this side too, because a server that hangs does not keep its own.
    """

    kind = "postgres"
    vault = PLAIN

    def __init__(self, url: str, *, timeout_s: float) -> None:
        try:
            import psycopg
        except ImportError:
            raise MissingDependency("psycopg", "postgres", "an outbox in PostgreSQL") from None
        self._psycopg = psycopg
        self._transient = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
        self._url = url
        self._timeout_s = timeout_s
        self.name = display_name(url)
        self._sql: dict[str, str] = {}
        self._db: psycopg.Connection[Row] | None = None
        self._connect()

    def _connect(self) -> "psycopg.Connection[Row]":
        if self._db is None or self._db.closed:
            try:
                self._db = connect_postgres(self._url, self._timeout_s)
            except (self._psycopg.Error, TimeoutError, ValueError) as error:
                raise self._error(error) from None
        return self._db

    def _error(self, error: BaseException) -> OutboxError:
        """The error in our terms, without the password."""
        text = redact(str(error).strip() or type(error).__name__, self._url)
        return OutboxError(self.name, text, transient=isinstance(error, self._transient))

    def _cursor(self, sql: str, params: Params) -> "psycopg.Cursor[Row]":
        translated = self._sql.get(sql)
        if translated is None:
            translated = self._sql[sql] = sql.replace("?", "%s")
        db = self._connect()
        try:
            return db.execute(translated, params)
        except self._psycopg.Error as error:
            raise self._error(error) from None
        except TimeoutError as error:
            # The state of the connection is unknown: the server ends the transaction when it is closed.
            db.close()
            raise self._error(error) from None

    def execute(self, sql: str, params: Params = ()) -> list[Row]:
        cursor = self._cursor(sql, params)
        return cursor.fetchall() if cursor.description else []

    def change(self, sql: str, params: Params = ()) -> int:
        return self._cursor(sql, params).rowcount

    def begin(self, *, write: bool = True) -> None:
        self.execute("BEGIN")

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        if self._db is None or self._db.closed:
            return
        try:
            self._db.execute("ROLLBACK")
        except (self._psycopg.Error, TimeoutError):
            self._db.close()

    def changed(self) -> bool:
        return True

    def last_rowids(self, count: int) -> range | None:
        return None  # sequences may have holes: rows are asked for with RETURNING

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


def connect_postgres(url: str, timeout_s: float) -> "psycopg.Connection[Row]":
    """A connection in autocommit mode whose statements take at most `timeout_s`, whether the server answers or not."""
    import psycopg

    class Connection(psycopg.Connection[Row]):
        def wait(self, gen: Any, *rest: Any, **options: Any) -> Any:
            return super().wait(_limited(gen, time.monotonic() + timeout_s, timeout_s), *rest, **options)

    opened = Connection.connect(url, autocommit=True, connect_timeout=max(2, round(timeout_s)))
    limit_ms = int(timeout_s * 1000)
    # The second for a process that is stopped or cut off inside a transaction: its locks would hold up all others.
    opened.execute(
        f"SET statement_timeout = {limit_ms}; SET idle_in_transaction_session_timeout = {limit_ms}"
    )
    return opened


def _limited(steps: Any, until: float, timeout_s: float) -> Generator[Any, Any, Any]:
    """The steps of a psycopg operation; TimeoutError when it takes longer than that."""
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                steps.close()
                raise TimeoutError(f"the database did not answer within {timeout_s:g} s")
            wanted = steps.send(ready)
    except StopIteration as done:
        return done.value


def is_postgres(target: str) -> bool:
    """Whether the outbox is a PostgreSQL database rather than a file."""
    return target.startswith(("postgresql://", "postgres://"))


def display_name(target: str) -> str:
    """The outbox for people: a file's path, or the host and name of a database, never its password."""
    if not is_postgres(target):
        return target
    parts = urlsplit(target)
    options = dict(parse_qsl(parts.query))
    where = parts.netloc.rpartition("@")[2] or options.get("host", "")
    return f"{parts.scheme}://{where}/{parts.path.lstrip('/') or options.get('dbname', '')}"


def redact(text: str, target: str) -> str:
    """The text without the passwords of a database's address, as they are and as they are encoded."""
    if not is_postgres(target):
        return text
    parts = urlsplit(target)
    passwords = {
        parts.netloc.rpartition("@")[0].partition(":")[2],
        dict(parse_qsl(parts.query)).get("password", ""),
    }
    for password in sorted(filter(None, passwords | {unquote(p) for p in passwords}), key=len, reverse=True):
        text = text.replace(password, "***").replace(quote(password, safe=""), "***")
    return text
