"""Writing an event inside the caller's own transaction: it commits and rolls back with the caller's rows."""

import sqlite3
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.event import check_data
from brokerless.webhooks.catalogue import Catalogue
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.errors import OutboxError, OutboxFull
from brokerless.webhooks.models import EventType, Published
from brokerless.webhooks.outbox.accept import RETRY_AFTER_S
from brokerless.webhooks.outbox.identity import event_id
from brokerless.webhooks.outbox.store import CHANNEL
from brokerless.webhooks.rules import check_content_type, check_tenant
from brokerless.webhooks.topics import check_publish_topic

if TYPE_CHECKING:
    import psycopg

_PENDING = "SELECT v FROM outbox_meta WHERE k = 'pending'"
_TYPE = "SELECT doc FROM outbox_event_types WHERE topic = ?"
_INSERT = (
    "INSERT INTO outbox_events (id, tenant, topic, time, data, content_type, trace, routed) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, 0) RETURNING n"
)

# Sent by PostgreSQL when the caller commits.
_NOTIFY = f"SELECT pg_notify('{CHANNEL}', 'new')"


def publish_in(
    connection: "sqlite3.Connection | psycopg.Connection[Any]",
    topic: str,
    data: bytes,
    *,
    tenant: str = "default",
    content_type: str = "application/json",
    max_pending: int = DispatcherConfig().max_pending,
    trace: str = "",
) -> Published:
    """Write the event; it is accepted when the caller commits, and delivered by whoever runs the dispatcher.

    The bound is checked against the number that a dispatcher wrote last. OutboxFull if it is reached; OutboxError if
    the connection has no outbox or its transaction is broken; InvalidEvent if the data does not fit the schema that the
    catalogue has for the topic. `trace` is the trace context that attempts continue.
    """
    row = _row(topic, data, tenant, content_type, trace)
    if isinstance(connection, sqlite3.Connection):
        try:
            _check_schema(connection.execute(_TYPE, (topic,)).fetchall(), topic, data, content_type)
            _check_room(connection.execute(_PENDING).fetchall(), max_pending)
            (number,) = connection.execute(_INSERT, row).fetchone()
        except sqlite3.Error as error:
            raise OutboxError("of the caller's connection", str(error)) from error
        return Published(row[0], number, None)
    try:
        import psycopg
    except ImportError:
        psycopg = None  # type: ignore[assignment]
    if psycopg is None or not isinstance(connection, psycopg.Connection):
        raise ConfigError(
            "connection", f"must be a sqlite3 or psycopg connection, not {type(connection).__name__}"
        )
    try:
        types = connection.execute(_TYPE.replace("?", "%s"), (topic,)).fetchall()
        _check_schema(types, topic, data, content_type)
        _check_room(connection.execute(_PENDING).fetchall(), max_pending)
        found = connection.execute(_INSERT.replace("?", "%s"), row).fetchone()
        connection.execute(_NOTIFY)
    except psycopg.Error as error:
        raise OutboxError("of the caller's connection", str(error).strip()) from error
    assert found is not None
    return Published(row[0], found[0], None)


async def publish_in_async(
    connection: Any,
    topic: str,
    data: bytes,
    *,
    tenant: str = "default",
    content_type: str = "application/json",
    max_pending: int = DispatcherConfig().max_pending,
    trace: str = "",
) -> Published:
    """The same for a `psycopg.AsyncConnection`; the other kinds are passed on to `publish_in`."""
    try:
        import psycopg
    except ImportError:
        psycopg = None  # type: ignore[assignment]
    if psycopg is None or not isinstance(connection, psycopg.AsyncConnection):
        return publish_in(
            connection,
            topic,
            data,
            tenant=tenant,
            content_type=content_type,
            max_pending=max_pending,
            trace=trace,
        )
    row = _row(topic, data, tenant, content_type, trace)
    try:
        types = await (await connection.execute(_TYPE.replace("?", "%s"), (topic,))).fetchall()
        _check_schema(types, topic, data, content_type)
        _check_room(await (await connection.execute(_PENDING)).fetchall(), max_pending)
        found = await (await connection.execute(_INSERT.replace("?", "%s"), row)).fetchone()
        await connection.execute(_NOTIFY)
    except psycopg.Error as error:
        raise OutboxError("of the caller's connection", str(error).strip()) from error
    assert found is not None
    return Published(row[0], found[0], None)


def _row(
    topic: str, data: bytes, tenant: str, content_type: str, trace: str
) -> tuple[str, str, str, int, bytes, str, str]:
    now = time.time_ns() // 1000
    limit = DispatcherConfig().max_event_bytes
    check_tenant(tenant)
    check_content_type(content_type)
    checked = check_data(data, limit)
    return event_id(now), tenant, check_publish_topic(topic), now, checked, content_type, trace


def _check_schema(rows: list[Any], topic: str, data: bytes, content_type: str) -> None:
    if rows and rows[0][0]:
        _catalogue(topic, rows[0][0]).check(topic, data, content_type)


@lru_cache(maxsize=256)
def _catalogue(topic: str, doc: str) -> Catalogue:
    """The catalogue of one topic, so that a schema is compiled once and not for every event."""
    found = Catalogue()
    found.update({topic: msgspec.json.decode(doc, type=EventType)})
    return found


def _check_room(rows: list[Any], max_pending: int) -> None:
    pending = int(rows[0][0]) if rows else 0
    if pending >= max_pending:
        raise OutboxFull(pending, max_pending, RETRY_AFTER_S)
