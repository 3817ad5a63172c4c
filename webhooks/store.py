"""What the outbox says to its database, inside transactions that the caller begins and ends."""

# ruff: noqa: S608  (what is formatted into SQL here are column names and marks of this file, never values)

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from brokerless.webhooks.database import Row, Session, chunks, values
from brokerless.webhooks.models import (
    DeliveryState,
    Endpoint,
    Finish,
    Item,
    OutboxAccount,
    StoredEvent,
)

_EVENT = "e.n, e.id, e.tenant, e.topic, e.time, e.data, e.content_type"
# Attempts beyond this are counted but no longer listed one by one (replays of a broken endpoint).
MAX_LOGGED = 50
# Advisory locks of PostgreSQL over idempotency keys: our own class of them, and how many there are.
KEY_LOCK_CLASS = 731056209
KEY_LOCKS = 64


class Store:
    """SQL over one Session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._run = session.execute
        self._generation = ""
        self._foreign = True

    # ── who delivers ─────────────────────────────────────────────────────────

    def leader(self) -> tuple[str, int] | None:
        """Who delivers, and until when (µs) without renewing."""
        rows = self._run("SELECT owner, until FROM outbox_leader WHERE one = 1")
        return (rows[0][0], rows[0][1]) if rows else None

    def lead(self, owner: str, until: int, *, instead_of: str | None) -> bool:
        """Become (or stay) the one who delivers, if the holder still is `instead_of`."""
        if instead_of is None:
            self._run(
                "INSERT INTO outbox_leader (one, owner, until) VALUES (1, ?, ?) ON CONFLICT (one) DO NOTHING",
                (owner, until),
            )
        else:
            self._run(
                "UPDATE outbox_leader SET owner = ?, until = ? WHERE one = 1 AND owner = ?",
                (owner, until, instead_of),
            )
        found = self.leader()
        return found is not None and found[0] == owner

    def resign(self, owner: str) -> None:
        """Let the next one begin at once."""
        self._run("DELETE FROM outbox_leader WHERE one = 1 AND owner = ?", (owner,))

    # ── small facts ──────────────────────────────────────────────────────────

    def meta(self, key: str) -> str:
        """One value; empty if it was never set."""
        rows = self._run("SELECT v FROM outbox_meta WHERE k = ?", (key,))
        return str(rows[0][0]) if rows else ""

    def set_meta(self, key: str, value: str) -> None:
        """Set one value."""
        self._run(
            "INSERT INTO outbox_meta (k, v) VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v = excluded.v",
            (key, value),
        )

    # ── endpoints ────────────────────────────────────────────────────────────

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        rows = self._run("SELECT doc FROM outbox_endpoints ORDER BY id")
        return [msgspec.json.decode(row[0], type=Endpoint) for row in rows]

    def endpoint(self, endpoint_id: str) -> Endpoint | None:
        """One of them."""
        rows = self._run("SELECT doc FROM outbox_endpoints WHERE id = ?", (endpoint_id,))
        return msgspec.json.decode(rows[0][0], type=Endpoint) if rows else None

    def save_endpoint(self, endpoint: Endpoint) -> None:
        """Insert or replace; everybody who caches endpoints notices by the generation."""
        self._run(
            "INSERT INTO outbox_endpoints (id, tenant, doc) VALUES (?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET tenant = excluded.tenant, doc = excluded.doc",
            (endpoint.id, endpoint.tenant, msgspec.json.encode(endpoint).decode()),
        )
        self.announce()

    def delete_endpoint(self, endpoint_id: str, now: int) -> int:
        """Remove it; what was pending for it is withdrawn. Returns how many."""
        self._run("DELETE FROM outbox_endpoints WHERE id = ?", (endpoint_id,))
        self.announce()
        return self.end_pending(endpoint_id, DeliveryState.WITHDRAWN, now)

    def announce(self) -> None:
        """Let other processes notice that endpoints, or what is pending for them, were changed from here."""
        before = self.meta("generation")
        self._foreign = self._foreign or before != self._generation
        self._generation = str(int(before) + 1)
        self.set_meta("generation", self._generation)

    def foreign_changes(self) -> bool:
        """Whether another process announced something since the last call."""
        current = self.meta("generation")
        foreign = self._foreign or current != self._generation
        self._foreign, self._generation = False, current
        return foreign

    # ── events and deliveries: in ────────────────────────────────────────────

    def insert_events(self, rows: Sequence[Row]) -> list[int]:
        """Rows of (id, tenant, topic, time, data, content_type, routed); returns their numbers in order."""
        columns = "(id, tenant, topic, time, data, content_type, routed)"
        return self._insert(f"INSERT INTO outbox_events {columns} VALUES ", 7, rows, "id", 0)

    def insert_deliveries(self, rows: Sequence[Row]) -> list[int]:
        """Rows of (event, endpoint, state, due, attempts, created, log); returns their numbers in order."""
        columns = "(event, endpoint, state, due, attempts, created, log)"
        head = f"INSERT INTO outbox_deliveries {columns} VALUES "
        return self._insert(head, 7, rows, "event, endpoint", slice(0, 2))

    def _insert(self, head: str, width: int, rows: Sequence[Row], key: str, pick: int | slice) -> list[int]:
        numbers: list[int] = []
        for piece in chunks(rows):
            flat = [value for row in piece for value in row]
            sql = head + values(width, len(piece))
            if self.session.kind == "sqlite":
                self._run(sql, flat)
                numbers += self.session.last_rowids(len(piece)) or ()
            else:
                made = {
                    row[1] if isinstance(pick, int) else tuple(row[1:]): row[0]
                    for row in self._run(f"{sql} RETURNING n, {key}", flat)
                }
                numbers += [made[row[pick]] for row in piece]
        return numbers

    def unrouted(self, limit: int) -> list[StoredEvent]:
        """Events that others committed and nobody has routed, oldest first."""
        rows = self._run(
            f"SELECT {_EVENT} FROM outbox_events e WHERE routed = 0 ORDER BY n LIMIT ?", (limit,)
        )
        return [_event(row) for row in rows]

    def mark_routed(self, numbers: Iterable[int]) -> None:
        """These have their deliveries now."""
        for piece in chunks([(number,) for number in numbers]):
            marks = ",".join("?" * len(piece))
            self._run(f"UPDATE outbox_events SET routed = 1 WHERE n IN ({marks})", [row[0] for row in piece])

    def idempotent(self, tenant: str, key: str) -> tuple[int, str, str] | None:
        """(event number, event id, digest) that the key stands for."""
        rows = self._run(
            "SELECT event, event_id, digest FROM outbox_idempotency WHERE tenant = ? AND k = ?", (tenant, key)
        )
        return (rows[0][0], rows[0][1], rows[0][2]) if rows else None

    def lock_keys(self, keys: Iterable[tuple[str, str]]) -> None:
        """Let another process that is about to use one of these keys wait until this transaction is over.

        SQLite has one writer at a time anyway. The number of locks is bounded, because PostgreSQL's table of
        locks is; their order is fixed, so that two processes cannot wait for each other.
        """
        if self.session.kind == "postgres":
            for number in sorted({crc32(f"{tenant} {key}".encode()) % KEY_LOCKS for tenant, key in keys}):
                self._run("SELECT pg_advisory_xact_lock(?, ?)", (KEY_LOCK_CLASS, number))

    def remember(self, tenant: str, key: str, event: int, event_id: str, digest: str) -> None:
        """Keep what the key stands for, as long as the event is kept."""
        self._run(
            "INSERT INTO outbox_idempotency (tenant, k, event, event_id, digest) VALUES (?, ?, ?, ?, ?)",
            (tenant, key, event, event_id, digest),
        )

    # ── deliveries: out ──────────────────────────────────────────────────────

    def due(self, endpoint: str, now: int, limit: int) -> list[Item]:
        """The next deliveries of an endpoint that may be attempted now (FIFO ones have due 0)."""
        rows = self._run(
            f"SELECT d.n, d.attempts, {_EVENT} "
            "FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
            "WHERE d.endpoint = ? AND d.state = 0 AND d.due <= ? ORDER BY d.due, d.n LIMIT ?",
            (endpoint, now, limit),
        )
        return [Item(row[0], _event(row[2:]), row[1]) for row in rows]

    def next_due(self, endpoint: str, after: int) -> int | None:
        """When the earliest delivery that is not due at `after` will be."""
        rows = self._run(
            "SELECT min(due) FROM outbox_deliveries WHERE endpoint = ? AND state = 0 AND due > ?",
            (endpoint, after),
        )
        return rows[0][0] if rows else None

    def finish(self, results: Sequence[Finish]) -> Sequence[Finish]:
        """Record attempts; returns those that counted.

        A delivery that is no longer pending (evicted, withdrawn or given up meanwhile) stays as it is.
        """
        counted: list[Finish] = []
        start = 0
        for piece in chunks([(r.n, r.state, r.due, r.finished, r.status, r.log) for r in results]):
            changed = self.session.change(
                "UPDATE outbox_deliveries SET state = v.column2, due = v.column3, attempts = attempts + 1, "
                "finished = CAST(v.column4 AS BIGINT), status = CAST(v.column5 AS INTEGER), "
                f"log = CASE WHEN attempts < {MAX_LOGGED} THEN log || v.column6 ELSE log END "
                f"FROM (VALUES {values(6, len(piece))}) AS v "
                "WHERE outbox_deliveries.n = v.column1 AND outbox_deliveries.state = 0",
                [value for row in piece for value in row],
            )
            part = results[start : start + len(piece)]
            start += len(piece)
            counted += part if changed == len(piece) else self._recorded(part)
        return counted

    def _recorded(self, results: Sequence[Finish]) -> list[Finish]:
        """Which of them are in the rows, when not all are: state and time tell."""
        marks = ",".join("?" * len(results))
        rows = self._run(
            f"SELECT n, state, finished FROM outbox_deliveries WHERE n IN ({marks})", [r.n for r in results]
        )
        found = {row[0]: (row[1], row[2]) for row in rows}
        return [r for r in results if found.get(r.n) == (r.state, r.finished)]

    def pending(self) -> dict[str, int]:
        """How many are pending per endpoint."""
        rows = self._run("SELECT endpoint, count(*) FROM outbox_deliveries WHERE state = 0 GROUP BY endpoint")
        return {row[0]: row[1] for row in rows}

    def pending_of(self, endpoint: str) -> int:
        """How many are pending for one endpoint."""
        sql = "SELECT count(*) FROM outbox_deliveries WHERE state = 0 AND endpoint = ?"
        return int(self._run(sql, (endpoint,))[0][0])

    def end_pending(
        self, endpoint: str, state: DeliveryState, now: int, *, created_before: int | None = None
    ) -> int:
        """All that is pending for an endpoint (and older than that) gets another state; returns how many."""
        old = "" if created_before is None else " AND created < ?"
        params: list[Any] = [int(state), now, endpoint] + ([] if created_before is None else [created_before])
        sql = (
            "UPDATE outbox_deliveries SET state = ?, finished = ? "
            f"WHERE endpoint = ? AND state = 0{old} RETURNING n"
        )
        return len(self._run(sql, params))

    def evict(self, count: int, now: int, *, endpoint: str | None = None) -> list[tuple[int, str]]:
        """The oldest `count` pending deliveries (of one endpoint) become EVICTED; returns (n, endpoint) of
        them.
        """
        where = "state = 0" if endpoint is None else "state = 0 AND endpoint = ?"
        order = "n" if endpoint is None else "due, n"
        params: list[Any] = [
            int(DeliveryState.EVICTED),
            now,
            *([] if endpoint is None else [endpoint]),
            count,
        ]
        rows = self._run(
            "UPDATE outbox_deliveries SET state = ?, finished = ? WHERE n IN "
            f"(SELECT n FROM outbox_deliveries WHERE {where} ORDER BY {order} LIMIT ?) RETURNING n, endpoint",
            params,
        )
        return [(row[0], row[1]) for row in rows]

    def set_order(self, endpoint: str, due: int) -> None:
        """After `fifo` was switched: 0 for FIFO lanes, a time for others."""
        self._run("UPDATE outbox_deliveries SET due = ? WHERE endpoint = ? AND state = 0", (due, endpoint))

    # ── again ────────────────────────────────────────────────────────────────

    def reopen(self, number: int, due: int) -> bool:
        """One finished delivery becomes pending again with a fresh schedule; False if it is pending
        already.
        """
        sql = (
            "UPDATE outbox_deliveries SET state = 0, due = ?, attempts = 0, finished = NULL "
            "WHERE n = ? AND state <> 0 RETURNING n"
        )
        return bool(self._run(sql, (due, number)))

    def replay(self, endpoint: Endpoint, since: int, until: int, due: int, *, failed_only: bool) -> int:
        """Finished deliveries of events in [since, until) become pending again; returns how many."""
        states = (DeliveryState.GAVE_UP, DeliveryState.EVICTED)
        which = f"IN ({int(states[0])}, {int(states[1])})" if failed_only else "<> 0"
        rows = self._run(
            "UPDATE outbox_deliveries SET state = 0, due = ?, attempts = 0, finished = NULL WHERE n IN "
            "(SELECT d.n FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
            f"WHERE d.endpoint = ? AND d.state {which} AND e.time >= ? AND e.time < ?) RETURNING n",
            (due, endpoint.id, since, until),
        )
        return len(rows)

    def missed(
        self, endpoint: Endpoint, since: int, until: int, after: int, limit: int
    ) -> list[tuple[int, str]]:
        """(n, topic) of events in [since, until) that the endpoint has no delivery of (it was disabled, or
        new).
        """
        rows = self._run(
            "SELECT e.n, e.topic FROM outbox_events e WHERE e.n > ? AND e.tenant = ? AND e.time >= ? "
            "AND e.time < ? AND e.routed = 1 AND NOT EXISTS "
            "(SELECT 1 FROM outbox_deliveries d WHERE d.event = e.n AND d.endpoint = ?) ORDER BY e.n LIMIT ?",
            (after, endpoint.tenant, since, until, endpoint.id, limit),
        )
        return [(row[0], row[1]) for row in rows]

    # ── forgetting ───────────────────────────────────────────────────────────

    def purge(self, before: int, keep: int, after: int, limit: int) -> tuple[int, int | None]:
        """Delete finished events older than `before` or more than `keep` behind the newest, looking at `limit`
        events after number `after`.

        Returns how many were deleted and where to go on (None: all that is old has been looked at).
        """
        rows = self._run("SELECT n, time FROM outbox_events WHERE n > ? ORDER BY n LIMIT ?", (after, limit))
        newest = self._run("SELECT max(n) FROM outbox_events")[0][0] or 0
        old = [n for n, time in rows if time < before or n <= newest - keep]
        gone = 0
        for piece in chunks([(number,) for number in old]):
            marks, flat = ",".join("?" * len(piece)), [row[0] for row in piece]
            pending = f"SELECT DISTINCT event FROM outbox_deliveries WHERE event IN ({marks}) AND state = 0"
            new = f"SELECT n FROM outbox_events WHERE n IN ({marks}) AND routed = 0"
            busy = {row[0] for sql in (pending, new) for row in self._run(sql, flat)}
            for number in flat:
                if number not in busy:
                    self._run("DELETE FROM outbox_deliveries WHERE event = ?", (number,))
                    self._run("DELETE FROM outbox_idempotency WHERE event = ?", (number,))
                    self._run("DELETE FROM outbox_events WHERE n = ?", (number,))
                    gone += 1
        more = len(rows) == limit and len(old) == limit
        return gone, (old[-1] if more else None)

    # ── the books ────────────────────────────────────────────────────────────

    def account(self, tenant: str | None) -> OutboxAccount:
        """Counted from the rows."""
        where, params = ("", ()) if tenant is None else (" WHERE e.tenant = ?", (tenant,))
        rows = self._run(
            "SELECT d.state, count(*) FROM outbox_deliveries d"
            + (" JOIN outbox_events e ON e.n = d.event" + where if where else "")
            + " GROUP BY d.state",
            params,
        )
        by_state = {DeliveryState(row[0]): int(row[1]) for row in rows}
        new = self._run(
            f"SELECT count(*) FROM outbox_events e WHERE routed = 0{where.replace('WHERE', 'AND')}", params
        )
        lost = {
            state.name.lower(): by_state[state]
            for state in (DeliveryState.GAVE_UP, DeliveryState.EVICTED)
            if state in by_state
        }
        return OutboxAccount(
            accepted=sum(by_state.values()),
            delivered=by_state.get(DeliveryState.DELIVERED, 0),
            pending=by_state.get(DeliveryState.PENDING, 0),
            lost=lost,
            withdrawn=by_state.get(DeliveryState.WITHDRAWN, 0),
            unrouted=int(new[0][0]),
        )


def _event(row: Row) -> StoredEvent:
    n, event_id, tenant, topic, time, data, content_type = row
    return StoredEvent(n, event_id, tenant, topic, time, bytes(data), content_type)
