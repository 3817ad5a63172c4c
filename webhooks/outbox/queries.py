"""Reading deliveries and events for people: what the lists of the API, the CLI and the portal show."""

from heapq import merge

import msgspec

from brokerless.webhooks.errors import NotFound
from brokerless.webhooks.models import Attempt, Delivery, DeliveryState, StoredEvent
from brokerless.webhooks.outbox.database import Row, Session
from brokerless.webhooks.rules import DeliveryStateName

_DELIVERY = (
    "d.n, d.endpoint, e.id, e.topic, d.state, d.attempts, d.created, d.due, d.finished, d.status, d.log "
    "FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event"
)
_EVENT = "n, id, tenant, topic, time, data, content_type, trace FROM outbox_events"
_STATES = {state.label: int(state) for state in DeliveryState}


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which deliveries to list, newest first; `after` is the id of the last one of the page before.

    `tenant` lists those of the tenant's endpoints. Times are µs since 1970.
    """

    tenant: str | None = None
    endpoint: str | None = None
    event: str | None = None
    state: DeliveryStateName | None = None
    topic: str | None = None
    since: int | None = None
    until: int | None = None
    after: str | None = None
    limit: int = 50


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to list, newest first; `after` is the id of the last one of the page before."""

    tenant: str | None = None
    topic: str | None = None
    since: int | None = None
    until: int | None = None
    after: str | None = None
    limit: int = 50


def deliveries(session: Session, query: DeliveryQuery) -> list[Delivery]:
    """The deliveries that match, at most `limit`; NotFound if `after` is no longer kept."""
    conditions: dict[str, object] = {
        "e.id = ?": query.event,
        "e.topic = ?": query.topic,
        "d.created >= ?": query.since,
        "d.created < ?": query.until,
        "d.n < ?": None if query.after is None else _number(session, query.after),
        "d.state = ?": None if query.state is None else _STATES[query.state],
    }
    if query.tenant is None or query.endpoint is not None or query.event is not None:
        conditions |= {"d.endpoint = ?": query.endpoint, "e.tenant = ?": query.tenant}
        return [_delivery(row) for row in _select(session, conditions, query.limit)]
    # One short read of an index per endpoint, instead of sorting all deliveries of the tenant.
    owned = session.execute("SELECT id FROM outbox_endpoints WHERE tenant = ? AND doc <> ''", (query.tenant,))
    pages = [_select(session, conditions | {"d.endpoint = ?": row[0]}, query.limit) for row in owned]
    newest = merge(*pages, key=lambda row: row[0], reverse=True)
    return [_delivery(row) for row, _ in zip(newest, range(query.limit), strict=False)]


def _select(session: Session, conditions: dict[str, object], limit: int) -> list[Row]:
    used = {condition: value for condition, value in conditions.items() if value is not None}
    where = " WHERE " + " AND ".join(used) if used else ""
    return session.execute(f"SELECT {_DELIVERY}{where} ORDER BY d.n DESC LIMIT ?", [*used.values(), limit])


def _number(session: Session, delivery_id: str) -> int:
    event_id, _, endpoint = delivery_id.partition(".")
    rows = session.execute(
        "SELECT d.n FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
        "WHERE e.id = ? AND d.endpoint = ?",
        (event_id, endpoint),
    )
    if not rows:
        raise NotFound("delivery", delivery_id)
    return int(rows[0][0])


def delivery(session: Session, delivery_id: str) -> Delivery | None:
    """One delivery by its id."""
    event_id, _, endpoint = delivery_id.partition(".")
    rows = session.execute(f"SELECT {_DELIVERY} WHERE e.id = ? AND d.endpoint = ?", (event_id, endpoint))
    return _delivery(rows[0]) if rows else None


def events(session: Session, query: EventQuery) -> list[StoredEvent]:
    """The events that match, at most `limit`; NotFound if `after` is no longer kept."""
    last = None
    if query.after is not None:
        found = event(session, query.after)
        if found is None:
            raise NotFound("event", query.after)
        last = found.n
    conditions = {
        "tenant = ?": query.tenant,
        "topic = ?": query.topic,
        "time >= ?": query.since,
        "time < ?": query.until,
        "n < ?": last,
    }
    used = {condition: value for condition, value in conditions.items() if value is not None}
    where = " WHERE " + " AND ".join(used) if used else ""
    rows = session.execute(f"SELECT {_EVENT}{where} ORDER BY n DESC LIMIT ?", [*used.values(), query.limit])
    return [_event(row) for row in rows]


def event(session: Session, event_id: str) -> StoredEvent | None:
    """One event by its id, as long as it is kept."""
    rows = session.execute(f"SELECT {_EVENT} WHERE id = ?", (event_id,))
    return _event(rows[0]) if rows else None


def _event(row: Row) -> StoredEvent:
    n, found, tenant, topic, time, data, content_type, trace = row
    return StoredEvent(n, found, tenant, topic, time, bytes(data), content_type, trace)


def _delivery(row: Row) -> Delivery:
    _, endpoint, event_id, topic, state, attempts, created, due, finished, status, log = row
    return Delivery(
        id=f"{event_id}.{endpoint}",
        endpoint=endpoint,
        event=event_id,
        topic=topic,
        state=DeliveryState(state).label,
        attempts=attempts,
        created=created,
        due=due if state == DeliveryState.PENDING else None,
        finished=finished,
        status=status,
        log=_attempts(log),
    )


_decode_attempt = msgspec.json.Decoder(Attempt).decode


def _attempts(log: str) -> list[Attempt]:
    return [_decode_attempt(line) for line in log.splitlines() if line]
