"""Processes of the outbox campaigns: an application that writes rows, a relay, and one that publishes with ids."""

import contextlib
import random
import sqlite3
import sys
from typing import Any

from brokerless.core import DiskJournal
from brokerless.direct import OutboxRelay, Publisher, create_outbox, publish_in


def open_database(where: str) -> Any:
    """A connection whose transactions begin by themselves, in SQLite or PostgreSQL."""
    if where.startswith("postgresql://"):
        import psycopg

        return psycopg.connect(where)
    connection = sqlite3.connect(where, timeout=30.0)
    connection.execute("PRAGMA journal_mode = WAL")
    return connection


def application(where: str, seed: str, rows: str) -> None:
    """Write orders, each with its event, some of them rolled back; go on after the last one that is committed."""
    chance = random.Random(seed)
    connection = open_database(where)
    create_outbox(connection)
    connection.execute("CREATE TABLE IF NOT EXISTS orders (n INTEGER PRIMARY KEY)")
    connection.commit()
    (last,) = connection.execute("SELECT COALESCE(MAX(n), -1) FROM orders").fetchone()
    connection.rollback()
    mark = "%s" if where.startswith("postgresql://") else "?"
    print("ready", flush=True)
    for n in range(last + 1, int(rows)):
        while True:
            connection.execute(f"INSERT INTO orders VALUES ({mark})", (n,))
            publish_in(connection, f"orders.{n % 3}", b"%d" % n)
            if chance.random() < 0.2:
                connection.rollback()  # and once more
                continue
            connection.commit()
            break


def relay(where: str, journal: str) -> None:
    """Move rows until killed, with other events in between; a line on stdin asks to end when all is moved."""
    with (
        Publisher("tcp://127.0.0.1:*", source="shop", journal=DiskJournal(journal)) as publisher,
        OutboxRelay(publisher, where, batch=20, poll_s=0.005) as moved,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        assert moved.drain(60)
        assert not moved.counters.refused


def ids(journal: str, seed: str, many: str) -> None:
    """Publish numbers with their ids, and some of the last ones again, from where the journal says that we were."""
    chance = random.Random(seed)
    with Publisher("tcp://127.0.0.1:*", source="ids", journal=DiskJournal(journal)) as publisher:
        print("ready", flush=True)
        at = max(0, publisher.journal.next - chance.randrange(50))
        for n in range(at, int(many)):
            again = max(0, n - chance.randrange(200))
            publisher.publish("t", b"%d" % again, id=str(again))
            publisher.publish("t", b"%d" % n, id=str(n), key="k" if n % 2 else "")
            if chance.random() < 0.01:
                publisher.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        {"application": application, "relay": relay, "ids": ids}[sys.argv[1]](*sys.argv[2:])
