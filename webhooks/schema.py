"""The tables of the outbox, in both dialects. They may live in the application's own database."""

from brokerless.webhooks.database import Session
from brokerless.webhooks.errors import OutboxError

FORMAT = 1

# {serial}: a number that rises and is never reused; {blob}, {big}: the dialect's types.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS outbox_meta (k TEXT PRIMARY KEY, v TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS outbox_leader (one INTEGER PRIMARY KEY, "
    "owner TEXT NOT NULL, until {big} NOT NULL)",
    "CREATE TABLE IF NOT EXISTS outbox_endpoints (id TEXT PRIMARY KEY, "
    "tenant TEXT NOT NULL, doc TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS outbox_events (n {serial}, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, "
    "topic TEXT NOT NULL, time {big} NOT NULL, data {blob} NOT NULL, content_type TEXT NOT NULL, "
    "routed INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS outbox_events_new ON outbox_events (n) WHERE routed = 0",
    # `due` is what a lane sorts by: the time of the next attempt, or 0 in FIFO lanes, where only n counts.
    "CREATE TABLE IF NOT EXISTS outbox_deliveries (n {rowid}, event {big} NOT NULL, endpoint TEXT NOT NULL, "
    "state INTEGER NOT NULL, due {big} NOT NULL, attempts INTEGER NOT NULL, created {big} NOT NULL, "
    "finished {big}, status INTEGER, log TEXT NOT NULL)",
    # One delivery per event and endpoint, whatever routes, replays or crashes.
    "CREATE UNIQUE INDEX IF NOT EXISTS outbox_deliveries_once ON outbox_deliveries (event, endpoint)",
    "CREATE INDEX IF NOT EXISTS outbox_deliveries_due "
    "ON outbox_deliveries (endpoint, due, n) WHERE state = 0",
    "CREATE INDEX IF NOT EXISTS outbox_deliveries_list ON outbox_deliveries (endpoint, n)",
    "CREATE TABLE IF NOT EXISTS outbox_idempotency (tenant TEXT NOT NULL, "
    "k TEXT NOT NULL, event {big} NOT NULL, "
    "event_id TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (tenant, k))",
    "CREATE INDEX IF NOT EXISTS outbox_idempotency_event ON outbox_idempotency (event)",
)
# Only needed to find the oldest of all; an index that costs at every insert, so only those pay who evict.
EVICT_INDEX = "CREATE INDEX IF NOT EXISTS outbox_deliveries_oldest ON outbox_deliveries (n) WHERE state = 0"

_TYPES = {
    "sqlite": {
        "serial": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "rowid": "INTEGER PRIMARY KEY",
        "blob": "BLOB",
        "big": "INTEGER",
    },
    "postgres": {
        "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "rowid": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "blob": "BYTEA",
        "big": "BIGINT",
    },
}


def create(session: Session, *, evict: bool = False) -> None:
    """Make the tables if they are not there; OutboxError if they are of a newer version."""
    session.begin()
    try:
        if session.kind == "postgres":
            # Two processes that start together would both create; the second waits here.
            session.execute("SELECT pg_advisory_xact_lock(7310562091)")
        for statement in _TABLES:
            session.execute(statement.format(**_TYPES[session.kind]))
        if evict:
            session.execute(EVICT_INDEX)
        found = session.execute("SELECT v FROM outbox_meta WHERE k = 'format'")
        if not found:
            session.execute("INSERT INTO outbox_meta (k, v) VALUES ('format', ?)", (str(FORMAT),))
            session.execute("INSERT INTO outbox_meta (k, v) VALUES ('generation', '0')")
            session.execute("INSERT INTO outbox_meta (k, v) VALUES ('pending', '0')")
        elif int(found[0][0]) > FORMAT:
            raise OutboxError(
                session.name,
                f"was written by a newer version (format {found[0][0]}, this one knows {FORMAT})",
            )
        session.commit()
    except BaseException:
        session.rollback()
        raise
