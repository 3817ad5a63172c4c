"""Which ids a receiver has had, on disk, for as long as senders may repeat them.

With a journal the index is only a faster copy: every event in the journal carries its id as `key`, and the index knows
up to which offset it has read them. After a crash it reads the rest, so the two cannot disagree.
"""

import sqlite3
import time
from collections.abc import Iterable, Sequence

from brokerless.core import Journal
from brokerless.core.journal.reader import chunks_from
from brokerless.webhooks.errors import OutboxError

# Senders repeat for three days by the usual schedule, and operators replay within a week.
KEEP_S = 7 * 86400.0
_FORGET_EVERY_S = 600.0


class IdIndex:
    """Not thread-safe: one thread at a time uses it."""

    def __init__(self, path: str = ":memory:", *, keep_s: float = KEEP_S) -> None:
        self.path = path
        self.keep_s = keep_s
        self._forgot_at = 0.0
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL").fetchall()
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS seen (id TEXT PRIMARY KEY, at INTEGER) WITHOUT ROWID"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS seen_at ON seen (at)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS place (one INTEGER PRIMARY KEY, epoch INTEGER, offset INTEGER)"
            )
        except sqlite3.Error as error:
            raise OutboxError(path, f"the index of ids cannot be used: {error}") from error

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that were added before."""
        found: set[str] = set()
        for start in range(0, len(ids), 500):
            piece = ids[start : start + 500]
            marks = ",".join("?" * len(piece))
            rows = self._db.execute(f"SELECT id FROM seen WHERE id IN ({marks})", piece)  # noqa: S608 (marks only)
            found.update(row[0] for row in rows)
        return found

    def add(self, ids: Iterable[str], place: tuple[int, int] | None = None) -> None:
        """Remember the ids, and the journal's (epoch, offset) that they reach up to, together or not at all."""
        now = int(time.time())
        self._db.execute("BEGIN")
        try:
            self._db.executemany("INSERT OR IGNORE INTO seen (id, at) VALUES (?, ?)", [(i, now) for i in ids])
            if place is not None:
                self._db.execute("INSERT OR REPLACE INTO place (one, epoch, offset) VALUES (1, ?, ?)", place)
            if now - self._forgot_at > _FORGET_EVERY_S:
                self._forgot_at = now
                self._db.execute("DELETE FROM seen WHERE at < ?", (now - self.keep_s,))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._db.execute("ROLLBACK")
            raise OutboxError(self.path, f"the index of ids cannot be written: {error}") from error

    def catch_up(self, journal: Journal) -> int:
        """Read the ids of events that the journal has and the index has not; returns how many events."""
        row = self._db.execute("SELECT epoch, offset FROM place WHERE one = 1").fetchone()
        same = row is not None and row[0] == journal.epoch and row[1] >= journal.oldest
        offset = row[1] if same else journal.oldest
        count = 0
        for start, chunk in chunks_from(journal, offset):
            if chunk.next > start:
                keys = [e.key for f in chunk.frames for e in f.events() if e.key and e.offset >= start]
                count += chunk.next - start
                self.add(keys, (journal.epoch, chunk.next))
        return count

    def close(self) -> None:
        """Close the file."""
        self._db.close()
