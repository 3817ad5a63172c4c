"""The tables of the outbox, in both dialects. They may live in the application's own database."""

import msgspec

from brokerless.webhooks.errors import OutboxError
from brokerless.webhooks.models import Endpoint
from brokerless.webhooks.outbox.database import Session

FORMAT = 4
# Endpoints are spread over so many shards by their id; a shard has one delivering process at a time.
SHARDS = 32

# {serial}: a number that rises and is never reused; {blob}, {big}: the dialect's types.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS outbox_meta (k TEXT PRIMARY KEY, v TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS outbox_members (owner TEXT PRIMARY KEY, until {big} NOT NULL)",
    "CREATE TABLE IF NOT EXISTS outbox_shards (shard INTEGER PRIMARY KEY, owner TEXT NOT NULL, "
    "until {big} NOT NULL)",
    # Settings are `doc`; what deliveries and verification record has columns of its own. `version` is the outbox's
    # generation when settings or state changed last. A deleted endpoint stays as a row with an empty `doc` for a while.
    "CREATE TABLE IF NOT EXISTS outbox_endpoints (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, doc TEXT NOT NULL, "
    "state TEXT NOT NULL, reason TEXT NOT NULL, allowed_rate {double} NOT NULL, failing_since {big}, "
    "verify_tries INTEGER NOT NULL, version {big} NOT NULL)",
    # A tenant's endpoints are counted at every registration, and listed, without reading their settings.
    "CREATE INDEX IF NOT EXISTS outbox_endpoints_tenant ON outbox_endpoints (tenant, id) WHERE doc <> ''",
    "CREATE TABLE IF NOT EXISTS outbox_events (n {serial}, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, "
    "topic TEXT NOT NULL, time {big} NOT NULL, data {blob} NOT NULL, content_type TEXT NOT NULL, "
    "routed INTEGER NOT NULL, trace TEXT NOT NULL DEFAULT '')",
    # routed: 0: not routed yet, 1: has deliveries, 2: matched nobody. trace: the context of the span that published it.
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
    # The catalogue of topics; `version` and an empty `doc` mean the same as with endpoints.
    "CREATE TABLE IF NOT EXISTS outbox_event_types (topic TEXT PRIMARY KEY, doc TEXT NOT NULL, version {big} NOT NULL)",
    # Messages between processes where the database has none of its own (SQLite).
    "CREATE TABLE IF NOT EXISTS outbox_notes (n {serial}, at {big} NOT NULL, text TEXT NOT NULL)",
)
# From format 1, where an endpoint was one document.
_FROM_1 = (
    "ALTER TABLE outbox_endpoints ADD COLUMN state TEXT NOT NULL DEFAULT 'pending'",
    "ALTER TABLE outbox_endpoints ADD COLUMN reason TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE outbox_endpoints ADD COLUMN allowed_rate {double} NOT NULL DEFAULT 0",
    "ALTER TABLE outbox_endpoints ADD COLUMN failing_since {big}",
    "ALTER TABLE outbox_endpoints ADD COLUMN verify_tries INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE outbox_endpoints ADD COLUMN version {big} NOT NULL DEFAULT 0",
)
# From format 2; after format 3 there is only an index more, which the tables above bring.
_FROM_2 = ("ALTER TABLE outbox_events ADD COLUMN trace TEXT NOT NULL DEFAULT ''",)
# Only needed to find the oldest of all; an index that costs at every insert, so only those pay who evict.
EVICT_INDEX = "CREATE INDEX IF NOT EXISTS outbox_deliveries_oldest ON outbox_deliveries (n) WHERE state = 0"

_TYPES = {
    "sqlite": {
        "serial": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "rowid": "INTEGER PRIMARY KEY",
        "blob": "BLOB",
        "big": "INTEGER",
        "double": "REAL",
    },
    "postgres": {
        "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "rowid": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "blob": "BYTEA",
        "big": "BIGINT",
        "double": "DOUBLE PRECISION",
    },
}


def create(session: Session, *, evict: bool = False) -> None:
    """Make the tables if they are not there; OutboxError if they are of a newer version."""
    session.begin()
    try:
        if session.kind == "postgres":
            # Two processes that start together would both create; the second waits here.
            session.execute("SELECT pg_advisory_xact_lock(7310562091)")
        session.execute(_TABLES[0])
        found = session.execute("SELECT v FROM outbox_meta WHERE k = 'format'")
        known = int(found[0][0]) if found else 0
        if known > FORMAT:
            raise OutboxError(
                session.name, f"was written by a newer version (format {known}, this one knows {FORMAT})"
            )
        if known < FORMAT:
            _create(session, known)
        if evict:
            session.execute(EVICT_INDEX)
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _create(session: Session, known: int) -> None:
    types = _TYPES[session.kind]
    for statement in _TABLES:
        session.execute(statement.format(**types))
    if known < 2:
        for shard in range(SHARDS):
            session.execute("INSERT INTO outbox_shards (shard, owner, until) VALUES (?, '', 0)", (shard,))
    if known == 0:
        session.execute("INSERT INTO outbox_meta (k, v) VALUES ('format', ?)", (str(FORMAT),))
        session.execute("INSERT INTO outbox_meta (k, v) VALUES ('generation', '1')")
        session.execute("INSERT INTO outbox_meta (k, v) VALUES ('pending', '0')")
        return
    if known == 1:
        for statement in _FROM_1:
            session.execute(statement.format(**types))
        _split_endpoints(session)
    if known < 3:
        for statement in _FROM_2:
            session.execute(statement.format(**types))
    session.execute("UPDATE outbox_meta SET v = ? WHERE k = 'format'", (str(FORMAT),))


def _split_endpoints(session: Session) -> None:
    """What deliveries record about an endpoint gets columns of its own."""
    for endpoint_id, doc in session.execute("SELECT id, doc FROM outbox_endpoints"):
        endpoint = msgspec.json.decode(doc, type=Endpoint)
        session.execute(
            "UPDATE outbox_endpoints SET state = ?, reason = ?, allowed_rate = ?, failing_since = ?, "
            "verify_tries = ?, version = 1 WHERE id = ?",
            (
                endpoint.state,
                endpoint.reason,
                endpoint.allowed_rate,
                endpoint.failing_since,
                endpoint.verify_tries,
                endpoint_id,
            ),
        )
    session.execute("UPDATE outbox_meta SET v = '1' WHERE k = 'generation'")
