"""What the outbox says to its database, inside transactions that the caller begins and ends."""

# ruff: noqa: S608  (what is formatted into SQL here are column names and marks of this file, never values)

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from brokerless.webhooks.models import (
    LOST,
    OPERATIONAL,
    Attempt,
    AttemptResult,
    DeliveryState,
    Endpoint,
    EventType,
    Item,
    OutboxAccount,
    Secret,
    StoredEvent,
)
from brokerless.webhooks.outbox.database import Row, Session, chunks, values
from brokerless.webhooks.outbox.identity import is_gone
from brokerless.webhooks.outbox.shards import Lease, Plan, plan
from brokerless.webhooks.rules import US

_EVENT = "e.n, e.id, e.tenant, e.topic, e.time, e.data, e.content_type, e.trace"
_ENDPOINT = "id, doc, state, reason, allowed_rate, failing_since, verify_tries, version"
# Attempts beyond this are counted but no longer listed one by one (replays of a broken endpoint).
MAX_LOGGED = 50
# A clock was set back if it lost so much; less is not worth mending, and machines differ by some milliseconds anyway.
CLOCK_STEP_S = 0.5
# A lease that lies further ahead than so many of ours was written while the clock was wrong: it would block a takeover
# until the clock has caught up. Processes may differ in `lease_s` by less than this.
LONGEST_LEASE = 10
# Deliveries of an endpoint that one transaction ends (it was deleted, or is gone) or puts in order, so that others go
# on meanwhile.
END_AT_ONCE = 2000
# How an endpoint's document says that its secrets are encrypted; no text inside of it can look the same.
_SEALED = '"sealed":"'
# Advisory locks of PostgreSQL: our own class of them, how many there are for keys, and those with one purpose.
LOCK_CLASS = 731056209
KEY_LOCKS = 64
SHARD_LOCK, ROUTING_LOCK = 1000, 1001
# The channel of PostgreSQL's NOTIFY, and how long a payload may be (PostgreSQL: 8000 bytes).
CHANNEL = "brokerless_outbox"
MAX_NOTE = 7000


class _Sealed(msgspec.Struct):
    sealed: str


class _Secret(msgspec.Struct):
    """What of an endpoint is encrypted: keys, and headers that may carry passwords."""

    secrets: list[Secret]
    headers: dict[str, str]


class Store:
    """SQL over one Session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._run = session.execute
        self._postgres = session.kind == "postgres"
        self.changed_endpoints = False
        """Whether settings or states were written in this transaction."""

    def now(self) -> int:
        """µs since 1970 by the clock that all processes of this outbox share."""
        if self._postgres:
            rows = self._run("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)")
            return int(rows[0][0])
        return time.time_ns() // 1000

    def lock(self, number: int) -> None:
        """Wait until no other process has this lock, and keep it to the end of the transaction.

        SQLite has one writer at a time anyway.
        """
        if self._postgres:
            self._run("SELECT pg_advisory_xact_lock(?, ?)", (LOCK_CLASS, number))

    def try_lock(self, number: int) -> bool:
        """The same without waiting: False if another process has it."""
        if not self._postgres:
            return True
        return bool(self._run("SELECT pg_try_advisory_xact_lock(?, ?)", (LOCK_CLASS, number))[0][0])

    # ── who delivers ─────────────────────────────────────────────────────────

    def lease(
        self, owner: str, held: Collection[int], release: Collection[int], lease_us: int
    ) -> tuple[Plan, int]:
        """Renew, take and release shards; returns the plan that was carried out and how many members there are.

        `release` are shards that this process has stopped delivering for; `plan.give_up` those it should stop.
        """
        self.lock(SHARD_LOCK)
        now = self.now()
        until = now + lease_us
        longest = now + LONGEST_LEASE * lease_us
        for table in ("outbox_members", "outbox_shards"):
            self._run(f"UPDATE {table} SET until = ? WHERE until > ?", (longest, longest))
        self._run(
            "INSERT INTO outbox_members (owner, until) VALUES (?, ?) "
            "ON CONFLICT (owner) DO UPDATE SET until = excluded.until",
            (owner, until),
        )
        members = []
        for name, valid_until in self._run("SELECT owner, until FROM outbox_members"):
            if name == owner or (valid_until >= now and not is_gone(name)):
                members.append(name)
            else:
                self._run("DELETE FROM outbox_members WHERE owner = ?", (name,))
        if release:
            self._give("", 0, release, owner)
        rows = self._run("SELECT shard, owner, until FROM outbox_shards")
        decided = plan(owner, set(held) - set(release), [Lease(*row) for row in rows], members, now, is_gone)
        self._run("UPDATE outbox_shards SET until = ? WHERE owner = ?", (until, owner))
        for shard in decided.take:
            self._run("UPDATE outbox_shards SET owner = ?, until = ? WHERE shard = ?", (owner, until, shard))
        if release:
            self.note("shards")
        return decided, len(members)

    def _give(self, to: str, until: int, shards: Collection[int], owner: str) -> None:
        marks = ",".join("?" * len(shards))
        self._run(
            f"UPDATE outbox_shards SET owner = ?, until = ? WHERE owner = ? AND shard IN ({marks})",
            (to, until, owner, *shards),
        )

    def resign(self, owner: str) -> None:
        """Give up all shards, so that the next process begins at once."""
        self.lock(SHARD_LOCK)
        self._run("UPDATE outbox_shards SET owner = '', until = 0 WHERE owner = ?", (owner,))
        self._run("DELETE FROM outbox_members WHERE owner = ?", (owner,))
        self.note("shards")

    def owned(self, owner: str) -> set[int]:
        """The shards that the table says are this process's."""
        return {row[0] for row in self._run("SELECT shard FROM outbox_shards WHERE owner = ?", (owner,))}

    # ── messages to other processes ──────────────────────────────────────────

    def note(self, text: str) -> None:
        """Tell all processes of this outbox, when the transaction commits."""
        if self._postgres:
            self._run("SELECT pg_notify(?, ?)", (CHANNEL, text))
        else:
            self._run("INSERT INTO outbox_notes (at, text) VALUES (?, ?)", (self.now(), text))

    def note_endpoints(self, word: str, endpoints: Iterable[str]) -> None:
        """The same about some endpoints, in as many messages as they need."""
        line = word
        for endpoint in endpoints:
            if len(line) + len(endpoint) > MAX_NOTE:
                self.note(line)
                line = word
            line += " " + endpoint
        if line != word:
            self.note(line)

    def notes_after(self, number: int) -> list[tuple[int, str]]:
        """Messages that were written after that one (SQLite)."""
        rows = self._run("SELECT n, text FROM outbox_notes WHERE n > ? ORDER BY n", (number,))
        return [(row[0], row[1]) for row in rows]

    def last_note(self) -> int:
        """The number of the newest message."""
        return int(self._run("SELECT max(n) FROM outbox_notes")[0][0] or 0)

    def forget_notes(self, before: int) -> None:
        """Delete messages that every process has had the time to read."""
        self._run("DELETE FROM outbox_notes WHERE at < ?", (before,))

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

    def portal_key(self) -> bytes:
        """The key that signs portal links, made once per outbox."""
        made, vault = secrets.token_hex(32), self.session.vault
        self._run(
            "INSERT INTO outbox_meta (k, v) VALUES ('portal_key', ?) ON CONFLICT (k) DO NOTHING",
            (vault.seal(made.encode()) if vault.name else made,),
        )
        found = self.meta("portal_key")
        if ":" in found:
            found = vault.unseal(found, self.session.name).decode()
        return bytes.fromhex(found)

    # ── endpoints ────────────────────────────────────────────────────────────

    def generation(self) -> int:
        """Rises with every change of settings or states, in the order of their commits."""
        return int(self.meta("generation") or 0)

    def endpoints(self, *, after: int = -1) -> dict[str, Endpoint | None]:
        """Endpoints whose settings or state changed after that generation; None for those that were deleted."""
        rows = self._run(f"SELECT {_ENDPOINT} FROM outbox_endpoints WHERE version > ? ORDER BY id", (after,))
        return {row[0]: self._endpoint(row) for row in rows}

    def list_endpoints(self, tenant: str | None, after: str, limit: int | None) -> list[Endpoint]:
        """Endpoints (of a tenant) by id, after that id; at most `limit`."""
        mine, params = ("", []) if tenant is None else (" AND tenant = ?", [tenant])
        rows = self._run(
            f"SELECT {_ENDPOINT} FROM outbox_endpoints WHERE doc <> ''{mine} AND id > ? ORDER BY id LIMIT ?",
            (*params, after, 2**31 if limit is None else limit),
        )
        return [found for row in rows if (found := self._endpoint(row)) is not None]

    def oldest_pending(self, endpoints: Sequence[str]) -> dict[str, int]:
        """When the oldest delivery that waits for each of these endpoints was created; only the index is walked."""
        marks = ",".join("?" * len(endpoints))
        oldest = f"SELECT min(n) FROM outbox_deliveries WHERE endpoint IN ({marks}) AND state = 0 GROUP BY endpoint"
        rows = self._run(f"SELECT endpoint, created FROM outbox_deliveries WHERE n IN ({oldest})", endpoints)
        return {row[0]: row[1] for row in rows}

    def endpoint(self, endpoint_id: str, *, lock: bool = False) -> Endpoint | None:
        """One of them; `lock` keeps others from changing it until the end of the transaction."""
        suffix = " FOR UPDATE" if lock and self._postgres else ""
        rows = self._run(f"SELECT {_ENDPOINT} FROM outbox_endpoints WHERE id = ?{suffix}", (endpoint_id,))
        return self._endpoint(rows[0]) if rows else None

    def _endpoint(self, row: Row) -> Endpoint | None:
        _, doc, state, reason, allowed_rate, failing_since, verify_tries, _ = row
        if not doc:
            return None  # deleted
        found = msgspec.json.decode(doc, type=Endpoint)
        if _SEALED in doc:
            sealed = msgspec.json.decode(doc, type=_Sealed).sealed
            text = self.session.vault.unseal(sealed, self.session.name)
            secret = msgspec.json.decode(text, type=_Secret)
            found = msgspec.structs.replace(found, secrets=secret.secrets, headers=secret.headers)
        return msgspec.structs.replace(
            found,
            state=state,
            reason=reason,
            allowed_rate=allowed_rate,
            failing_since=failing_since,
            verify_tries=verify_tries,
        )

    def seal_anew(self, limit: int) -> int:
        """Encrypt what is plain, or encrypted with an older key, for up to `limit` endpoints; returns how many."""
        vault = self.session.vault
        if not vault.name:
            return 0
        mine = f"{_SEALED}{vault.name}:"
        rows = self._run(
            "SELECT id FROM outbox_endpoints WHERE doc <> '' AND doc NOT LIKE ? ORDER BY id LIMIT ?",
            (f"%{mine}%", limit),
        )
        for (endpoint_id,) in rows:
            found = self.endpoint(endpoint_id, lock=True)
            if found is not None:
                self.save_endpoint(found)
        if not self.meta("portal_key").startswith(vault.name + ":"):
            self.set_meta("portal_key", vault.seal(self.portal_key().hex().encode()))
        return len(rows)

    def count_endpoints(self, tenant: str) -> int:
        """How many a tenant has; no other process can add one to it before this transaction ends."""
        self.lock(KEY_LOCKS + crc32(tenant.encode()) % KEY_LOCKS)
        sql = "SELECT count(*) FROM outbox_endpoints WHERE tenant = ? AND doc <> ''"
        return int(self._run(sql, (tenant,))[0][0])

    def save_endpoint(self, endpoint: Endpoint) -> None:
        """Insert or replace settings and state; the caller has locked the row. `failing_since` has its own method."""
        settings = {
            name: value for name, value in msgspec.to_builtins(endpoint).items() if name not in OPERATIONAL
        }
        vault = self.session.vault
        if vault.name:
            secret = _Secret(endpoint.secrets, endpoint.headers)
            settings |= {"secrets": [], "headers": {}, "sealed": vault.seal(msgspec.json.encode(secret))}
        self._run(
            "INSERT INTO outbox_endpoints (id, tenant, doc, state, reason, allowed_rate, failing_since, "
            "verify_tries, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "doc = excluded.doc, state = excluded.state, reason = excluded.reason, "
            "allowed_rate = excluded.allowed_rate, failing_since = excluded.failing_since, "
            "verify_tries = excluded.verify_tries, version = excluded.version",
            (
                endpoint.id,
                endpoint.tenant,
                msgspec.json.encode(settings).decode(),
                endpoint.state,
                endpoint.reason,
                endpoint.allowed_rate,
                endpoint.failing_since,
                endpoint.verify_tries,
                self._next_generation(),
            ),
        )

    def delete_endpoint(self, endpoint_id: str, now: int) -> None:
        """Remove it: nothing is routed or delivered to it any more. `end_pending` withdraws what waits."""
        self._run(
            "UPDATE outbox_endpoints SET doc = '', reason = ?, version = ? WHERE id = ?",
            (str(now), self._next_generation(), endpoint_id),
        )

    def forget_deleted(self, before: int) -> None:
        """Delete the rows of endpoints that were deleted before that time."""
        for endpoint_id, reason in self._run("SELECT id, reason FROM outbox_endpoints WHERE doc = ''"):
            if int(reason) < before:
                self._run("DELETE FROM outbox_endpoints WHERE id = ? AND doc = ''", (endpoint_id,))

    # ── the catalogue ────────────────────────────────────────────────────────

    def event_types(self, *, after: int = -1) -> dict[str, EventType | None]:
        """Event types that changed after that generation; None for those that were removed."""
        rows = self._run(
            "SELECT topic, doc FROM outbox_event_types WHERE version > ? ORDER BY topic", (after,)
        )
        return {topic: msgspec.json.decode(doc, type=EventType) if doc else None for topic, doc in rows}

    def save_event_type(self, topic: str, found: EventType | None) -> None:
        """Insert or replace an event type, or remove it (None)."""
        self._run(
            "INSERT INTO outbox_event_types (topic, doc, version) VALUES (?, ?, ?) "
            "ON CONFLICT (topic) DO UPDATE SET doc = excluded.doc, version = excluded.version",
            (topic, "" if found is None else msgspec.json.encode(found).decode(), self._next_generation()),
        )

    def _next_generation(self) -> int:
        """The row's lock is kept to the end of the transaction, so generations are in the order of commits."""
        rows = self._run(
            "UPDATE outbox_meta SET v = CAST(CAST(v AS BIGINT) + 1 AS TEXT) WHERE k = 'generation' RETURNING v"
        )
        self.changed_endpoints = True
        self.note("changed")
        return int(rows[0][0])

    def record_failing(self, since: Sequence[tuple[str, int | None]]) -> None:
        """Since when endpoints fail (None: they work again): not a change of settings."""
        for piece in chunks(since):
            self._run(
                "UPDATE outbox_endpoints SET failing_since = CAST(v.column2 AS BIGINT) "
                f"FROM (VALUES {values(2, len(piece))}) AS v WHERE outbox_endpoints.id = v.column1",
                [value for row in piece for value in row],
            )

    # ── events and deliveries: in ────────────────────────────────────────────

    def insert_events(self, rows: Sequence[Row]) -> list[int]:
        """Rows of (id, tenant, topic, time, data, content_type, routed, trace); returns their numbers in order."""
        columns = "(id, tenant, topic, time, data, content_type, routed, trace)"
        return self._insert(f"INSERT INTO outbox_events {columns} VALUES ", 8, rows, "id", 0)

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

    def any_unrouted(self) -> bool:
        """Whether there are events that nobody has routed."""
        return bool(self._run("SELECT 1 FROM outbox_events WHERE routed = 0 LIMIT 1"))

    def mark_routed(self, numbers: Iterable[tuple[int, int]]) -> None:
        """Pairs of (event, 1: has deliveries or 2: matched nobody)."""
        for piece in chunks(list(numbers)):
            self._run(
                "UPDATE outbox_events SET routed = CAST(v.column2 AS INTEGER) "
                f"FROM (VALUES {values(2, len(piece))}) AS v WHERE outbox_events.n = v.column1",
                [value for row in piece for value in row],
            )

    def idempotent(self, tenant: str, key: str) -> tuple[int, str, str] | None:
        """(event number, event id, digest) that the key stands for."""
        rows = self._run(
            "SELECT event, event_id, digest FROM outbox_idempotency WHERE tenant = ? AND k = ?", (tenant, key)
        )
        return (rows[0][0], rows[0][1], rows[0][2]) if rows else None

    def lock_keys(self, keys: Iterable[tuple[str, str]]) -> None:
        """Let another process that is about to use one of these keys wait until this transaction is over.

        The number of locks is bounded, because PostgreSQL's table of locks is; their order is fixed, so that two
        processes cannot wait for each other.
        """
        if self._postgres:
            for number in sorted({crc32(f"{tenant} {key}".encode()) % KEY_LOCKS for tenant, key in keys}):
                self.lock(number)

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

    def stamped_ahead(
        self, endpoint: str, now: int, after: tuple[int, int], limit: int
    ) -> tuple[list[tuple[int, int, int]], tuple[int, int] | None]:
        """(n, due, what it should be) of deliveries that wait because the clock was ahead when they were scheduled,
        among `limit` that come after (due, n); and where to go on (None: those were all).

        A first attempt is due at once, a retry its own delay after `now`: the end of the last attempt tells that delay.
        """
        rows = self._run(
            "SELECT n, due, attempts, log FROM outbox_deliveries "
            "WHERE endpoint = ? AND state = 0 AND (due, n) > (?, ?) ORDER BY due, n LIMIT ?",
            (endpoint, *after, limit),
        )
        ahead = []
        for n, due, attempts, log in rows:
            scheduled = due
            if attempts and log:
                last = msgspec.json.decode(log[log.rfind("\n", 0, -1) + 1 :], type=Attempt)
                scheduled = last.at + int(last.duration_ms * 1000)
            if scheduled > now + CLOCK_STEP_S * US:
                ahead.append((n, due, now + max(0, due - scheduled)))
        return ahead, ((rows[-1][1], rows[-1][0]) if len(rows) == limit else None)

    def reschedule(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Set the time of the next attempt: (n, time until now, new time); what has changed meanwhile stays."""
        for piece in chunks(sorted(changes)):
            self._run(
                "UPDATE outbox_deliveries SET due = v.column3 "
                f"FROM (VALUES {values(3, len(piece))}) AS v "
                "WHERE outbox_deliveries.n = v.column1 AND outbox_deliveries.state = 0 "
                "AND outbox_deliveries.due = v.column2",
                [value for row in piece for value in row],
            )

    def finish(self, results: Sequence[AttemptResult]) -> Sequence[AttemptResult]:
        """Record attempts; returns those that counted.

        A delivery that is no longer pending (evicted, withdrawn or given up in the meantime) stays as it is.
        """
        counted: list[AttemptResult] = []
        start = 0
        # Always in the same order, so that two processes do not wait for each other's rows.
        results = sorted(results, key=_number)
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

    def _recorded(self, results: Sequence[AttemptResult]) -> list[AttemptResult]:
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
        """Up to END_AT_ONCE deliveries that are pending for an endpoint (and older than that) get another state.

        Returns how many; fewer than END_AT_ONCE: there are no more.
        """
        old, params = ("", []) if created_before is None else (" AND created < ?", [created_before])
        # Rows are locked by number: two processes that do so cannot wait for each other.
        lock = " FOR UPDATE" if self._postgres else ""
        chosen = (
            f"SELECT n FROM outbox_deliveries WHERE endpoint = ? AND state = 0{old} ORDER BY n LIMIT ?{lock}"
        )
        sql = f"UPDATE outbox_deliveries SET state = ?, finished = ? WHERE n IN ({chosen}) AND state = 0"
        return self.session.change(sql, [int(state), now, endpoint, *params, END_AT_ONCE])

    def evict(self, count: int, now: int, *, endpoint: str | None = None) -> list[tuple[int, str]]:
        """The oldest `count` pending deliveries (of one endpoint) become EVICTED; returns (n, endpoint) of them."""
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
            f"(SELECT n FROM outbox_deliveries WHERE {where} ORDER BY {order} LIMIT ?) AND state = 0 "
            "RETURNING n, endpoint",
            params,
        )
        return [(row[0], row[1]) for row in rows]

    def set_order(self, endpoint: str) -> int:
        """Before an endpoint becomes FIFO: up to END_AT_ONCE pending deliveries go into the order of their numbers.

        Returns how many; fewer than END_AT_ONCE: there are no more.
        """
        lock = " FOR UPDATE" if self._postgres else ""
        chosen = (
            "SELECT n FROM outbox_deliveries WHERE endpoint = ? AND state = 0 AND due > 0 "
            f"ORDER BY n LIMIT ?{lock}"
        )
        sql = f"UPDATE outbox_deliveries SET due = 0 WHERE n IN ({chosen}) AND state = 0"
        return self.session.change(sql, [endpoint, END_AT_ONCE])

    # ── again ────────────────────────────────────────────────────────────────

    def number_of(self, event_id: str, endpoint: str) -> int | None:
        """The number of the delivery that joins an event and an endpoint."""
        rows = self._run(
            "SELECT d.n FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
            "WHERE e.id = ? AND d.endpoint = ?",
            (event_id, endpoint),
        )
        return int(rows[0][0]) if rows else None

    def send_now(self, number: int, due: int) -> bool:
        """A finished delivery becomes pending with a fresh schedule, a pending one is due now.

        Returns whether it was finished.
        """
        reopened = self.session.change(
            "UPDATE outbox_deliveries SET state = 0, due = ?, attempts = 0, finished = NULL "
            "WHERE n = ? AND state <> 0",
            (due, number),
        )
        if not reopened:
            self._run("UPDATE outbox_deliveries SET due = ? WHERE n = ? AND state = 0", (due, number))
        return bool(reopened)

    def to_replay(
        self, endpoint: str, since: int, until: int, after: int, limit: int, *, failed_only: bool
    ) -> list[tuple[int, int]]:
        """(n, state) of finished deliveries of events in [since, until), by number, after that number."""
        lost = ",".join(str(int(state)) for state in LOST)
        which = f"IN ({lost})" if failed_only else "<> 0"
        rows = self._run(
            "SELECT d.n, d.state FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
            f"WHERE d.endpoint = ? AND d.n > ? AND d.state {which} AND e.time >= ? AND e.time < ? "
            "ORDER BY d.n LIMIT ?",
            (endpoint, after, since, until, limit),
        )
        return [(row[0], row[1]) for row in rows]

    def count_replay(self, endpoint: str, since: int, until: int, *, failed_only: bool) -> int:
        """How many deliveries `to_replay` would give in all."""
        lost = ",".join(str(int(state)) for state in LOST)
        which = f"IN ({lost})" if failed_only else "<> 0"
        rows = self._run(
            "SELECT count(*) FROM outbox_deliveries d JOIN outbox_events e ON e.n = d.event "
            f"WHERE d.endpoint = ? AND d.state {which} AND e.time >= ? AND e.time < ?",
            (endpoint, since, until),
        )
        return int(rows[0][0])

    def reopen(self, numbers: Sequence[int], due: int) -> int:
        """Finished deliveries become pending again with a fresh schedule; returns how many."""
        count = 0
        for piece in chunks([(number,) for number in sorted(numbers)]):
            marks = ",".join("?" * len(piece))
            count += self.session.change(
                "UPDATE outbox_deliveries SET state = 0, due = ?, attempts = 0, finished = NULL "
                f"WHERE n IN ({marks}) AND state <> 0",
                [due, *(row[0] for row in piece)],
            )
        return count

    def missed(self, endpoint: Endpoint, since: int, until: int, after: int, limit: int) -> list[StoredEvent]:
        """Events in [since, until) that the endpoint has no delivery of: it did not exist, or had not agreed."""
        rows = self._run(
            f"SELECT {_EVENT} FROM outbox_events e WHERE e.n > ? AND e.tenant = ? AND e.time >= ? "
            "AND e.time < ? AND e.routed > 0 AND NOT EXISTS "
            "(SELECT 1 FROM outbox_deliveries d WHERE d.event = e.n AND d.endpoint = ?) ORDER BY e.n LIMIT ?",
            (after, endpoint.tenant, since, until, endpoint.id, limit),
        )
        return [_event(row) for row in rows]

    # ── forgetting ───────────────────────────────────────────────────────────

    def purge(self, before: int, keep: int, after: int, limit: int) -> tuple[int, int | None]:
        """Delete finished events older than `before` or more than `keep` behind the newest, looking at `limit`
        events after number `after`.

        Returns how many were deleted and where to go on (None: all that is old has been looked at).
        """
        rows = self._run("SELECT n, time FROM outbox_events WHERE n > ? ORDER BY n LIMIT ?", (after, limit))
        newest = self._run("SELECT max(n) FROM outbox_events")[0][0] or 0
        # The newest stays, so that numbers are never given out twice.
        old = [n for n, time in rows if (time < before or n <= newest - keep) and n < newest]
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

    # ── accounting ───────────────────────────────────────────────────────────

    def account(self, tenant: str | None) -> OutboxAccount:
        """Counted from the rows."""
        join, where, params = (
            ("", "", ())
            if tenant is None
            else (" JOIN outbox_events e ON e.n = d.event", " WHERE e.tenant = ?", (tenant,))
        )
        rows = self._run(
            f"SELECT d.state, count(*) FROM outbox_deliveries d{join}{where} GROUP BY d.state", params
        )
        by_state = {DeliveryState(row[0]): int(row[1]) for row in rows}
        rows = self._run(f"SELECT e.routed, count(*) FROM outbox_events e{where} GROUP BY e.routed", params)
        by_routing = {int(row[0]): int(row[1]) for row in rows}
        return OutboxAccount(
            events=sum(by_routing.values()),
            matched=by_routing.get(1, 0),
            unmatched=by_routing.get(2, 0),
            unrouted=by_routing.get(0, 0),
            accepted=sum(by_state.values()),
            delivered=by_state.get(DeliveryState.DELIVERED, 0),
            pending=by_state.get(DeliveryState.PENDING, 0),
            lost={state.label: by_state[state] for state in LOST if state in by_state},
            withdrawn=by_state.get(DeliveryState.WITHDRAWN, 0),
        )


def _event(row: Row) -> StoredEvent:
    n, event_id, tenant, topic, time_us, data, content_type, trace = row
    return StoredEvent(n, event_id, tenant, topic, time_us, bytes(data), content_type, trace)


def _number(result: AttemptResult) -> int:
    return result.n
