"""Leases that an operator gives: whoever holds one is the source's publisher. For promotion without a person.

Each is held by one process at a time, by the word of something that the operator trusts: a file system that all hosts
share, or a PostgreSQL server. The publisher takes it when it starts and shows all the time that it still has it;
a mirror waits for it (`Mirror.promote_when`).
"""

import fcntl
import os
from typing import Any, Protocol

from brokerless.core.errors import ConfigError, MissingDependency


class Lease(Protocol):
    """What a publisher holds. Not thread-safe: each object belongs to one publisher or mirror."""

    def acquire(self) -> bool:
        """Take it if nobody has it; whether it is ours now. Never waits long."""

    def holds(self) -> bool:
        """Whether it is still ours, as far as can be known now. What cannot be reached is not held."""

    def release(self) -> None:
        """Give it back; doing so twice is fine."""


class FileLease:
    """A lock on a file that all hosts share (NFSv4, CephFS, GFS2, …; on a local disk: for processes of one host).

    The file system gives it back when the process ends, or when its host is declared dead.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path` is made if it is not there. Never delete it while somebody may hold it."""
        self.path = os.fspath(path)
        self._fd = -1

    def acquire(self) -> bool:
        if self.holds():
            return True
        self.release()
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError("lease", f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._fd = fd
        return self.holds()

    def holds(self) -> bool:
        if self._fd < 0:
            return False
        try:
            mine, there = os.fstat(self._fd), os.stat(self.path)
        except OSError:
            return False
        # A file that was replaced is locked by nobody.
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PostgresLease:
    """An advisory lock of a PostgreSQL server, held as long as the connection lives.

    The server gives it back when the connection ends; let it notice dead hosts soon (`tcp_user_timeout`).
    """

    def __init__(self, conninfo: str, key: int, *, timeout_s: float = 1.0) -> None:
        """`key` is the number of the lock, one for each source; `timeout_s` bounds each question to the server."""
        self.conninfo = conninfo
        self.key = key
        self._timeout_s = timeout_s
        self._connection: Any = None

    def acquire(self) -> bool:
        if self.holds():
            return True
        self.release()
        try:
            import psycopg
        except ImportError:
            raise MissingDependency("psycopg", "postgres", "a lease in PostgreSQL") from None
        timeout_ms = max(1, round(self._timeout_s * 1000))
        try:
            connection = psycopg.connect(
                self.conninfo,
                autocommit=True,
                connect_timeout=max(2, round(self._timeout_s)),
                options=f"-c statement_timeout={timeout_ms} -c tcp_user_timeout={timeout_ms}",
                tcp_user_timeout=timeout_ms,
            )
        except psycopg.Error:
            return False
        self._connection = connection
        if self._ask("SELECT pg_try_advisory_lock(%s)", self.key):
            return True
        self.release()
        return False

    def _ask(self, question: str, *values: Any) -> Any:
        import psycopg

        try:
            row = self._connection.execute(question, values).fetchone()
        except psycopg.Error:
            return None
        return row[0] if row else None

    def holds(self) -> bool:
        if self._connection is None or self._connection.closed:
            return False
        question = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted"
        )
        return bool(self._ask(question))

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
