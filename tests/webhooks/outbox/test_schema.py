"""An outbox that an older version wrote is brought up to date when it is opened, with all that is in it."""

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from brokerless.webhooks import Dispatcher
from brokerless.webhooks.outbox.database import Params, Row, SqliteSession
from brokerless.webhooks.outbox.schema import FORMAT, SHARDS
from brokerless.webhooks.outbox.store import Store

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]
OPERATIONAL = ("state", "reason", "allowed_rate", "failing_since", "verify_tries")


def to_format_3(db: sqlite3.Connection) -> None:
    """Without the index by which a tenant's endpoints are counted."""
    db.execute("DROP INDEX outbox_endpoints_tenant")
    db.execute("UPDATE outbox_meta SET v = '3' WHERE k = 'format'")


def to_format_2(db: sqlite3.Connection) -> None:
    """Without the catalogue and the trace context of events."""
    to_format_3(db)
    db.execute("DROP TABLE outbox_event_types")
    db.execute("ALTER TABLE outbox_events DROP COLUMN trace")
    db.execute("UPDATE outbox_meta SET v = '2' WHERE k = 'format'")


def to_format_1(db: sqlite3.Connection) -> None:
    """An endpoint was one document, and one process delivered."""
    to_format_2(db)
    for row in db.execute(f"SELECT id, doc, {', '.join(OPERATIONAL)} FROM outbox_endpoints").fetchall():
        document = msgspec.json.decode(row[1]) | dict(zip(OPERATIONAL, row[2:], strict=True))
        db.execute(
            "UPDATE outbox_endpoints SET doc = ? WHERE id = ?",
            (msgspec.json.encode(document).decode(), row[0]),
        )
    for column in (*OPERATIONAL, "version"):
        db.execute(f"ALTER TABLE outbox_endpoints DROP COLUMN {column}")
    for table in ("outbox_members", "outbox_shards", "outbox_notes"):
        db.execute(f"DROP TABLE {table}")
    db.execute("UPDATE outbox_meta SET v = '1' WHERE k = 'format'")


@pytest.mark.parametrize("age", [to_format_1, to_format_2, to_format_3])
async def test_older_outboxes_go_on(
    tmp_path: Path,
    targets: Targets,
    make_config: Any,
    eventually: Eventually,
    age: Callable[[sqlite3.Connection], None],
) -> None:
    """Endpoints keep their state, pending deliveries arrive, and what is new works; opening it again is fine."""
    target = await targets(lambda _got, _number: 500)
    path = tmp_path / "outbox.sqlite"
    async with Dispatcher(path, config=make_config()) as dispatcher:
        endpoint, secret = await dispatcher.add_endpoint(target.url, ["a"])
        off, _ = await dispatcher.add_endpoint(target.url, ["b"])
        await dispatcher.disable_endpoint(off.id)
        await dispatcher.publish("a", b"1")
        await eventually(lambda: target.got)
    with sqlite3.connect(path) as db:
        age(db)
    db.close()
    target.answer = lambda _got, _number: 200
    for turn in range(2):
        async with Dispatcher(path, config=make_config()) as dispatcher:
            await eventually(lambda turn=turn: target.bodies.count("1") >= 2 + turn)
            assert (await dispatcher.endpoint(endpoint.id)).secrets[0].key == secret
            assert (await dispatcher.endpoint(off.id)).state == "disabled"
            assert len(dispatcher.deliverer.shards) == SHARDS
            await dispatcher.set_event_type("a", schema={"type": "integer"}, validate=True)
            await dispatcher.publish("a", b"1")
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT v FROM outbox_meta WHERE k = 'format'").fetchone() == (str(FORMAT),)
        assert db.execute("SELECT count(*) FROM outbox_shards").fetchone() == (SHARDS,)
    db.close()


class Plans(SqliteSession):
    """Asks SQLite how it would read, and keeps what it says."""

    def execute(self, sql: str, params: Params = ()) -> list[Row]:
        """The plan instead of the rows."""
        self.said = super().execute("EXPLAIN QUERY PLAN " + sql, params)
        return self.said


async def test_endpoints_are_counted_without_reading_them(tmp_path: Path, make_config: Any) -> None:
    """The limit of a tenant costs a look at an index, not at the settings of its 10,000 endpoints."""
    path = tmp_path / "outbox.sqlite"
    async with Dispatcher(path, config=make_config()):
        pass
    session = Plans(str(path), synchronous="off", read_only=True)
    try:
        Store(session).count_endpoints("default")
        (plan,) = (row[-1] for row in session.said)
        assert "INDEX outbox_endpoints_tenant (tenant=?)" in plan
    finally:
        session.close()
