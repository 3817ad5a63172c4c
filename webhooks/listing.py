"""Reading deliveries and events for people: what the deliveries list, the CLI and `GET /events/{id}` show."""

import msgspec

from brokerless.webhooks.database import Row, Session
from brokerless.webhooks.models import Attempt, Delivery, DeliveryState, StoredEvent

_DELIVERY = (
    "d.n, d.endpoint, e.id, e.topic, d.state, d.attempts, d.created, d.due, d.finished, d.status, d.log "
    "FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event"
)


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which deliveries to list, newest first; `after` is the id of the last one of the page before."""

    endpoint: str | None = None
    event: str | None = None
    state: str | None = None
    topic: str | None = None
    since: int | None = None
    until: int | None = None
    after: int | None = None
    limit: int = 50


def deliveries(session: Session, query: DeliveryQuery) -> list[Delivery]:
    """The deliveries that match, at most `limit`."""
    conditions = {
        "d.endpoint = ?": query.endpoint,
        "e.id = ?": query.event,
        "e.topic = ?": query.topic,
        "d.created >= ?": query.since,
        "d.created < ?": query.until,
        "d.n < ?": query.after,
        "d.state = ?": None if query.state is None else int(DeliveryState[query.state.upper()]),
    }
    used = {condition: value for condition, value in conditions.items() if value is not None}
    where = " WHERE " + " AND ".join(used) if used else ""
    rows = session.execute(
        f"SELECT {_DELIVERY}{where} ORDER BY d.n DESC LIMIT ?", [*used.values(), query.limit]
    )
    return [_delivery(row) for row in rows]


def delivery(session: Session, number: int) -> Delivery | None:
    """One delivery by its id."""
    rows = session.execute(f"SELECT {_DELIVERY} WHERE d.n = ?", (number,))
    return _delivery(rows[0]) if rows else None


def event(session: Session, event_id: str) -> StoredEvent | None:
    """One event by its id, as long as it is kept."""
    rows = session.execute(
        "SELECT n, id, tenant, topic, time, data, content_type FROM outbox_events WHERE id = ?", (event_id,)
    )
    if not rows:
        return None
    n, found, tenant, topic, time, data, content_type = rows[0]
    return StoredEvent(n, found, tenant, topic, time, bytes(data), content_type)


def _delivery(row: Row) -> Delivery:
    number, endpoint, event_id, topic, state, attempts, created, due, finished, status, log = row
    return Delivery(
        id=number,
        endpoint=endpoint,
        event=event_id,
        topic=topic,
        state=DeliveryState(state).name.lower(),
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
