"""Delivery from a real outbox to real sockets: what each answer leads to, and that the books balance."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from brokerless.core.errors import Closed, ConfigError, InvalidEvent, UsageError
from brokerless.webhooks import (
    BlockingDispatcher,
    Conflict,
    DeliveryQuery,
    Dispatcher,
    DispatcherConfig,
    NotFound,
    OutboxError,
    OutboxFull,
    Schedule,
    publish_in,
    verify,
)
from brokerless.webhooks.cloudevents import from_headers, from_json, from_json_batch

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def delivered(dispatcher: Dispatcher, count: int, eventually: Eventually) -> None:
    async def reached() -> bool:
        return (await dispatcher.account()).delivered >= count

    await eventually(reached, f"{count} delivered")
    assert (await dispatcher.account()).balanced


async def test_delivers_signed_cloud_event(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """An event arrives once, with its body, a signature that the published library accepts, and
    CloudEvents headers.
    """
    target, dispatcher = await targets(), await dispatchers()
    _, secret = await dispatcher.add_endpoint(target.url, ["order.*"], headers={"X-Own": "1"})
    published = await dispatcher.publish("order.paid", b'{"a":1}')
    assert published.deliveries == 1
    assert (await dispatcher.publish("other.topic", b"{}")).deliveries == 0
    await delivered(dispatcher, 1, eventually)
    (got,) = target.got
    assert got.headers["webhook-id"] == published.id
    assert got.headers["x-own"] == "1"
    assert Webhook(secret).verify(got.body, got.headers) == {"a": 1}
    event = from_headers(got.headers, got.body)
    assert (event.id, event.source, event.type) == (published.id, "test", "order.paid")
    assert event.extensions["sequence"] == str(published.n)


async def test_structured_and_batch(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """An endpoint chooses structured or batch form; both are signed and valid CloudEvents with the same
    ids.
    """
    structured, batch = await targets(), await targets()
    dispatcher = await dispatchers(batch_events=10)
    _, secret = await dispatcher.add_endpoint(structured.url, ["**"], mode="structured", signature="v1a")
    await dispatcher.add_endpoint(batch.url, ["**"], mode="batch", concurrency=1)
    published = await asyncio.gather(*(dispatcher.publish("t", b"%d" % n) for n in range(30)))
    ids = {p.id for p in published}
    await delivered(dispatcher, 60, eventually)
    assert {from_json(got.body).id for got in structured.got} == ids
    for got in structured.got:
        verify(got.headers, got.body, secret)
    events = [event for got in batch.got for event in from_json_batch(got.body)]
    assert {event.id for event in events} == ids
    assert 3 <= len(batch.got) < 30


async def test_retries_with_same_id(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """After failures the same webhook-id comes again, and the attempts are listed with status and excerpt."""
    target = await targets(lambda _got, number: [500, 404, 302][number - 1] if number < 4 else 204)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    published = await dispatcher.publish("t", b"x", content_type="text/plain")
    await delivered(dispatcher, 1, eventually)
    assert {got.headers["webhook-id"] for got in target.got} == {published.id}
    (listed,) = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id))
    assert [attempt.status for attempt in listed.log] == [500, 404, 302, 204]
    assert (listed.attempts, listed.state, listed.log[0].excerpt) == (4, "delivered", "ok")
    assert dispatcher.counters.failures == 3


async def test_redirect_is_not_followed(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A redirect is a failure: its target, here an address that would even be allowed, gets nothing."""
    inner = await targets()
    outer = await targets(lambda _got, _number: (307, {"Location": inner.url}))
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(0.01,)))
    await dispatcher.add_endpoint(outer.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: dispatcher.counters.gave_up == 1)
    assert (len(outer.got), len(inner.got)) == (2, 0)


async def test_gone_disables_and_tells(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """410 disables the endpoint, gives up what is pending, and publishes an event of its own about it."""
    gone, watcher = await targets(lambda _got, _number: 410), await targets()
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(gone.url, ["t"], concurrency=1)
    await dispatcher.add_endpoint(watcher.url, ["brokerless.**"])
    await asyncio.gather(*(dispatcher.publish("t", b"x") for _ in range(20)))
    await eventually(lambda: watcher.got)
    assert watcher.got[0].headers["ce-type"] == "brokerless.endpoint.disabled"
    assert endpoint.id in watcher.bodies[0]
    found = await dispatcher.endpoint(endpoint.id)
    assert (found.state, "410" in found.reason) == ("disabled", True)
    await eventually(lambda: _settled(dispatcher))
    account = await dispatcher.account()
    assert (account.balanced, account.lost, account.pending) == (True, {"gave_up": 20}, 0)
    assert dispatcher.counters.gave_up == 20
    assert (await dispatcher.publish("t", b"x")).deliveries == 0
    assert dispatcher.counters.skipped == 1


async def _settled(dispatcher: Dispatcher) -> bool:
    return (await dispatcher.account()).pending == 0


async def test_unsupported_media_is_a_dead_letter(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """415 ends a delivery at once; it stays and can be retried by hand, with the same id."""
    target = await targets(lambda _got, number: 415 if number == 1 else 200)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: dispatcher.counters.gave_up == 1)
    (dead,) = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id, state="gave_up"))
    await dispatcher.retry(dead.id)
    await delivered(dispatcher, 1, eventually)
    assert len({got.headers["webhook-id"] for got in target.got}) == 1
    with pytest.raises(NotFound):
        await dispatcher.retry(10**9)


async def test_slow_down_pauses_the_lane(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """429 with Retry-After pauses the whole lane for that time, and no other lane."""
    busy = await targets(lambda _got, number: (429, {"Retry-After": "1"}) if number == 1 else 200)
    other = await targets()
    dispatcher = await dispatchers()
    await dispatcher.add_endpoint(busy.url, ["**"], concurrency=1)
    await dispatcher.add_endpoint(other.url, ["**"])
    await dispatcher.publish("t", b"1")
    await eventually(lambda: busy.got)
    await asyncio.gather(*(dispatcher.publish("t", b"x") for _ in range(5)))
    await eventually(lambda: len(other.got) == 6)
    await delivered(dispatcher, 12, eventually)
    assert busy.got[1].at - busy.got[0].at >= 0.99


async def test_fifo_waits_for_the_failed_one(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """In a FIFO lane later events wait while one is retried: successes come in the order of publishing."""
    fails = {"3": 2, "7": 1, "8": 3}
    taken: list[str] = []

    def answer(got: Any, _number: int) -> int:
        body = got.body.decode()
        if fails.get(body, 0):
            fails[body] -= 1
            return 500
        taken.append(body)
        return 200

    target, dispatcher = await targets(answer), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"], fifo=True)
    for number in range(12):
        await dispatcher.publish("t", b"%d" % number)
    await delivered(dispatcher, 12, eventually)
    assert taken == [str(number) for number in range(12)]
    assert target.bodies.index("4") > max(i for i, body in enumerate(target.bodies) if body == "3")


async def test_fifo_order_survives_a_restart(
    tmp_path: Path, targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A FIFO backlog that is larger than the lane's memory is delivered in order, also by the next
    process.
    """
    broken = True
    target = await targets(lambda _got, _number: 500 if broken else 200)
    first = await dispatchers()
    await first.add_endpoint(target.url, ["**"], fifo=True)
    await asyncio.gather(*(first.publish("t", b"%d" % number) for number in range(300)))
    await eventually(lambda: target.got)
    await first.stop()
    broken = False
    target.got.clear()
    second = await dispatchers()
    await delivered(second, 300, eventually)
    order = {p.event: p.id for p in await second.deliveries(DeliveryQuery(limit=500))}
    assert sorted(order.values()) == list(order.values())[::-1]
    assert target.bodies == [str(number) for number in range(300)]


async def test_disabled_after_failing_long(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """An endpoint that fails for the stated time is disabled; what it missed can be replayed when it is
    back.
    """
    broken = True
    target = await targets(lambda _got, _number: 500 if broken else 200)
    dispatcher = await dispatchers(disable_after_s=0.2)
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"1")

    async def disabled() -> bool:
        return (await dispatcher.endpoint(endpoint.id)).state == "disabled"

    await eventually(disabled)
    assert (await dispatcher.publish("t", b"2")).deliveries == 0
    with pytest.raises(Conflict):
        await dispatcher.replay(endpoint.id, 0)
    broken = False
    await dispatcher.enable_endpoint(endpoint.id)
    await delivered(dispatcher, 1, eventually)
    assert await dispatcher.replay(endpoint.id, 0, only="all") == 2
    await delivered(dispatcher, 2, eventually)
    await eventually(lambda: target.bodies.count("1") >= 2 and "2" in target.bodies)


async def test_gives_up_and_replays(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """After the schedule comes the dead letter; replay by time range sends exactly those of the range
    again.
    """
    broken = True
    target = await targets(lambda _got, _number: 500 if broken else 200)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(0.01, 0.01)))
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"early")
    await eventually(lambda: dispatcher.counters.gave_up == 1)
    between = time.time_ns() // 1000
    await dispatcher.publish("t", b"late")
    await eventually(lambda: dispatcher.counters.gave_up == 2)
    assert (await dispatcher.account()).lost == {"gave_up": 2}
    broken = False
    target.got.clear()
    assert await dispatcher.replay(endpoint.id, between) == 1
    await delivered(dispatcher, 1, eventually)
    assert target.bodies == ["late"]
    assert await dispatcher.replay(endpoint.id, 0, between) == 1
    await delivered(dispatcher, 2, eventually)
    with pytest.raises(ConfigError):
        await dispatcher.replay(endpoint.id, 0, only="some")


async def test_rotation_signs_with_both_keys(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """After rotating, receivers with the old and with the new secret both verify; after the overlap only
    the new.
    """
    target = await targets()
    dispatcher = await dispatchers(rotation_overlap_s=0.5)
    endpoint, old = await dispatcher.add_endpoint(target.url, ["**"])
    _, new = await dispatcher.rotate_secret(endpoint.id)
    await dispatcher.publish("t", b"1")
    await delivered(dispatcher, 1, eventually)
    for secret in (old, new):
        verify(target.got[0].headers, b"1", secret)

    async def forgotten() -> bool:
        await dispatcher.publish("t", b"x")
        return " " not in target.got[-1].headers["webhook-signature"]

    await eventually(forgotten)
    verify(target.got[-1].headers, target.got[-1].body, new)


async def test_hung_endpoint_stops_nobody(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """While one endpoint hangs (and holds all its slots), healthy ones get everything."""
    hung = await targets(lambda _got, _number: lambda _writer: asyncio.sleep(60))
    healthy = [await targets() for _ in range(5)]
    dispatcher = await dispatchers(max_in_flight=12)
    for target in [hung, *healthy]:
        await dispatcher.add_endpoint(target.url, ["**"], concurrency=4)
    for number in range(40):
        await dispatcher.publish("t", b"%d" % number)
    await delivered(dispatcher, 200, eventually)
    for target in healthy:
        assert len(target.got) == 40
    account = await dispatcher.account()
    assert (account.pending, account.delivered) == (40, 200)


async def test_drip_and_flood_end(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """A dripping head ends at the total deadline; an endless 200 body is cut at the cap and counts as
    delivered.
    """

    async def drip(writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while sent < 500_000_000:
            writer.write(b"z" * 65536)
            sent += 65536
            await writer.drain()

    dripping, flooding = await targets(lambda _g, _n: drip), await targets(lambda _g, _n: flood)
    dispatcher = await dispatchers(attempt_timeout_s=0.5, schedule=Schedule(delays_s=()))
    slow, _ = await dispatcher.add_endpoint(dripping.url, ["a"])
    wide, _ = await dispatcher.add_endpoint(flooding.url, ["b"])
    await dispatcher.publish("a", b"x")
    await dispatcher.publish("b", b"x")
    await delivered(dispatcher, 1, eventually)
    await eventually(lambda: dispatcher.counters.gave_up == 1)
    (listed,) = await dispatcher.deliveries(DeliveryQuery(endpoint=slow.id))
    assert (listed.log[0].status, listed.log[0].error) == (None, "timeout")
    (listed,) = await dispatcher.deliveries(DeliveryQuery(endpoint=wide.id))
    assert (listed.state, len(listed.log[0].excerpt)) == ("delivered", 512)
    assert sent < 50_000_000


# ── full ─────────────────────────────────────────────────────────────────────


async def _stuffed(
    targets: Targets, dispatchers: Dispatchers, **changes: Any
) -> tuple[Any, Dispatcher, dict[str, bool]]:
    gate = {"open": False}
    target = await targets(lambda _got, _number: 200 if gate["open"] else 500)
    dispatcher = await dispatchers(max_pending=10, schedule=Schedule(delays_s=(0.05,) * 1000), **changes)
    await dispatcher.add_endpoint(target.url, ["**"], concurrency=1)
    for number in range(10):
        await dispatcher.publish("t", b"%d" % number)
    return target, dispatcher, gate


async def test_full_rejects(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """on_full="reject": the event is refused with numbers, and nothing that was accepted suffers."""
    target, dispatcher, gate = await _stuffed(targets, dispatchers)
    with pytest.raises(OutboxFull) as caught:
        await dispatcher.publish("t", b"no")
    assert (caught.value.pending, caught.value.max_pending) == (10, 10)
    assert dispatcher.counters.rejected == 1
    gate["open"] = True
    await delivered(dispatcher, 10, eventually)
    assert "no" not in target.bodies
    await dispatcher.publish("t", b"yes")
    await delivered(dispatcher, 11, eventually)


async def test_full_blocks(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """on_full="block": publish waits for room, and is refused when the time is up."""
    _, dispatcher, gate = await _stuffed(targets, dispatchers, on_full="block", block_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(OutboxFull):
        await dispatcher.publish("t", b"no")
    assert time.monotonic() - started >= 0.29
    waiting = asyncio.create_task(dispatcher.publish("t", b"yes"))
    gate["open"] = True
    assert (await waiting).deliveries == 1
    await delivered(dispatcher, 11, eventually)


async def test_full_evicts(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """on_full="evict": the oldest undelivered make room, are counted as lost, and can be replayed."""
    target, dispatcher, gate = await _stuffed(targets, dispatchers, on_full="evict")
    (endpoint,) = await dispatcher.endpoints()
    await asyncio.gather(*(dispatcher.publish("t", b"new%d" % number) for number in range(25)))
    account = await dispatcher.account()
    assert (account.balanced, account.lost, account.pending) == (True, {"evicted": 25}, 10)
    assert dispatcher.counters.evicted == 25
    gate["open"] = True
    await delivered(dispatcher, 10, eventually)
    assert {f"new{number}" for number in range(15, 25)} <= set(target.bodies)
    assert await dispatcher.replay(endpoint.id, 0) == 25
    await delivered(dispatcher, 35, eventually)


async def test_one_dead_endpoint_cannot_fill_the_outbox(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Beyond its share an endpoint loses its own oldest, counted; others and the producer are not held up."""
    dead, alive = await targets(lambda _got, _number: 500), await targets()
    dispatcher = await dispatchers(max_pending=100, max_pending_per_endpoint=10)
    slow, _ = await dispatcher.add_endpoint(dead.url, ["**"])
    await dispatcher.add_endpoint(alive.url, ["**"])
    for number in range(60):
        await dispatcher.publish("t", b"%d" % number)
    await delivered(dispatcher, 60, eventually)
    assert len(await dispatcher.deliveries(DeliveryQuery(endpoint=slow.id, state="evicted"))) == 50
    account = await dispatcher.account()
    assert (account.balanced, account.pending) == (True, 10)


async def test_disk_full_is_an_error_and_harms_nothing(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """When SQLite cannot grow, publish raises and says so; afterwards everything accepted is delivered."""
    target, dispatcher = await targets(), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"before")
    pages = await dispatcher.outbox.call_async(
        lambda store: int(store.session.execute("PRAGMA page_count")[0][0])
    )
    session_limit = await dispatcher.outbox.call_async(
        lambda store: int(store.session.execute(f"PRAGMA max_page_count={pages + 2}")[0][0])
    )
    assert session_limit == pages + 2
    with pytest.raises(OutboxError, match="full"):
        for _ in range(50):
            await dispatcher.publish("t", b"x" * 2000)
    assert dispatcher.counters.write_failures >= 1
    await dispatcher.outbox.call_async(lambda store: store.session.execute("PRAGMA max_page_count=1000000"))
    await dispatcher.publish("t", b"after")
    accepted = dispatcher.counters.published
    await delivered(dispatcher, accepted, eventually)
    assert {"before", "after"} <= set(target.bodies)


# ── transactions and processes ───────────────────────────────────────────────


async def test_callers_transaction(
    tmp_path: Path, targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """With connection= an event commits and rolls back with the caller's own rows, in the caller's own
    database.
    """
    target, dispatcher = await targets(), await dispatchers(tmp_path / "app.sqlite")
    await dispatcher.add_endpoint(target.url, ["**"])
    own = sqlite3.connect(tmp_path / "app.sqlite", timeout=30)
    own.execute("CREATE TABLE orders (n INTEGER)")
    own.execute("INSERT INTO orders VALUES (1)")
    await dispatcher.publish("t", b"committed", connection=own)
    own.commit()
    own.execute("INSERT INTO orders VALUES (2)")
    dispatcher.publish_sync("t", b"rolled back", connection=own)
    own.rollback()
    publish_in(own, "t", b"second")
    own.commit()
    await delivered(dispatcher, 2, eventually)
    assert sorted(target.bodies) == ["committed", "second"]
    assert own.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    own.close()


async def test_callers_transaction_respects_the_bound(
    tmp_path: Path, targets: Targets, dispatchers: Dispatchers
) -> None:
    """A full outbox refuses events of callers' transactions too, instead of blocking with the lock held."""
    _, dispatcher, _ = await _stuffed(targets, dispatchers, on_full="block")
    own = sqlite3.connect(tmp_path / "outbox.sqlite", timeout=30)
    with pytest.raises(OutboxFull):
        await dispatcher.publish("t", b"no", connection=own)
    own.close()
    with pytest.raises(UsageError):
        await dispatcher.publish("t", b"no", connection=own, idempotency_key="k")
    with pytest.raises(ConfigError):
        await dispatcher.publish("t", b"no", connection=object())
    with pytest.raises(OutboxError):
        publish_in(sqlite3.connect(":memory:"), "t", b"no")


async def test_standby_publishes_and_takes_over(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Two dispatchers on one outbox: one delivers, both publish, and the other takes over when the first
    stops.
    """
    target = await targets()
    first, second = await dispatchers(), await dispatchers()
    assert (first.delivering, second.delivering) == (True, False)
    await second.add_endpoint(target.url, ["**"])
    assert (await second.publish("t", b"by the standby")).deliveries is None
    await delivered(second, 1, eventually)
    await first.stop()
    await eventually(lambda: second.delivering)
    await second.publish("t", b"after")
    await delivered(second, 2, eventually)
    assert sorted(target.bodies) == ["after", "by the standby"]


async def test_standby_manages_too(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Retry, replay and enable asked of a standby are carried out by the process that delivers."""
    answers = {"status": 415}
    target = await targets(lambda _got, _number: answers["status"])
    active, standby = await dispatchers(), await dispatchers()
    endpoint, _ = await standby.add_endpoint(target.url, ["**"])
    await standby.publish("t", b"1")
    await standby.publish("t", b"2")
    await eventually(lambda: active.counters.gave_up == 2)
    answers["status"] = 200
    dead = await standby.deliveries(DeliveryQuery(endpoint=endpoint.id))
    await standby.retry(dead[0].id)
    await delivered(standby, 1, eventually)
    assert await standby.replay(endpoint.id, 0) == 1
    await delivered(standby, 2, eventually)
    await standby.update_endpoint(endpoint.id, {"enabled": False})
    assert (await standby.publish("t", b"3")).deliveries is None
    await eventually(lambda: active.counters.skipped == 1)
    await standby.enable_endpoint(endpoint.id)
    assert await standby.replay(endpoint.id, 0, only="all") == 3
    await delivered(standby, 3, eventually)
    assert {"1", "2", "3"} == set(target.bodies)


async def test_bound_of_a_standby_follows_deliveries(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A standby that publishes more than the bound in total is not refused while the other delivers."""
    target = await targets()
    active, standby = await dispatchers(max_pending=20), await dispatchers(max_pending=20)
    await active.add_endpoint(target.url, ["**"])
    for number in range(100):
        await standby.publish("t", b"%d" % number)
        if number % 10 == 9:
            await delivered(active, number + 1, eventually)
    assert active.outbox.accept.total == 0


async def test_lost_lease_stops_delivering(dispatchers: Dispatchers, eventually: Eventually) -> None:
    """A process whose lease another took (it slept too long) notices and stands by."""
    first = await dispatchers(lease_s=0.3)
    await first.outbox.call_async(
        lambda store: store.lead("other|1|1|1", 2**60, instead_of=first.outbox.owner)
    )
    await eventually(lambda: not first.delivering)


async def test_idempotency(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """The same key with the same event is accepted once, also at the same moment; with another it is a
    conflict.
    """
    target, dispatcher = await targets(), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"])
    results = await asyncio.gather(*(dispatcher.publish("t", b"1", idempotency_key="k") for _ in range(10)))
    assert len({result.id for result in results}) == 1
    assert sum(result.duplicate for result in results) == 9
    with pytest.raises(Conflict):
        await dispatcher.publish("t", b"2", idempotency_key="k")
    other = await dispatcher.publish("t", b"2", idempotency_key="k", tenant="other")
    assert not other.duplicate
    await delivered(dispatcher, 1, eventually)
    assert target.bodies == ["1"]


async def test_deleting_withdraws(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """Deleting an endpoint withdraws what is pending for it; the books say so."""
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    for _ in range(5):
        await dispatcher.publish("t", b"x")
    await dispatcher.remove_endpoint(endpoint.id)
    await eventually(lambda: dispatcher.outbox.accept.total == 0)
    account = await dispatcher.account()
    assert (account.balanced, account.withdrawn, dispatcher.counters.withdrawn) == (True, 5, 5)
    with pytest.raises(NotFound):
        await dispatcher.endpoint(endpoint.id)


async def test_old_rows_are_forgotten(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Finished events older than retain_s are deleted, with their deliveries and keys; pending ones stay."""
    gate = {"open": True}
    target = await targets(lambda _got, _number: 200 if gate["open"] else 500)
    dispatcher = await dispatchers(retain_s=0.1)
    await dispatcher.add_endpoint(target.url, ["**"])
    await asyncio.gather(*(dispatcher.publish("t", b"x", idempotency_key=str(n)) for n in range(20)))
    await delivered(dispatcher, 20, eventually)
    gate["open"] = False
    kept = await dispatcher.publish("t", b"kept")
    await asyncio.sleep(0.2)
    await dispatcher._upkeep._sweep()
    assert (await dispatcher.account()).accepted == 1
    assert (await dispatcher.event(kept.id)).data == b"kept"
    assert not (await dispatcher.publish("t", b"x", idempotency_key="1")).duplicate


def _publish_after_fork(dispatcher: Dispatcher, answer: int) -> None:
    import os

    try:
        dispatcher.publish_sync("t", b"x")
    except UsageError as error:
        os.write(answer, str(error).encode())
    finally:
        os._exit(0)


async def test_fork_is_told(dispatchers: Dispatchers) -> None:
    """A dispatcher that was started before a fork refuses in the child instead of waiting for ever."""
    import os

    dispatcher = await dispatchers()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _publish_after_fork(dispatcher, write)
    os.close(write)
    text = await asyncio.to_thread(os.read, read, 1000)
    os.waitpid(pid, 0)
    os.close(read)
    assert b"fork" in text


# ── threads and misuse ───────────────────────────────────────────────────────


async def test_plain_threads(
    targets: Targets, tmp_path: Path, make_config: Any, eventually: Eventually
) -> None:
    """BlockingDispatcher serves programs without asyncio: many threads publish, everything is delivered."""
    target = await targets()

    def work() -> int:
        with BlockingDispatcher(tmp_path / "o.sqlite", config=make_config()) as dispatcher:
            dispatcher.call(dispatcher.dispatcher.add_endpoint(target.url, ["**"]))
            threads = [
                threading.Thread(target=lambda: [dispatcher.publish("t", b"x") for _ in range(20)])
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            deadline = time.monotonic() + 20
            while dispatcher.dispatcher.counters.delivered < 160 and time.monotonic() < deadline:
                time.sleep(0.01)
            return dispatcher.dispatcher.counters.delivered

    assert await asyncio.to_thread(work) == 160
    assert len(target.got) == 160


async def test_misuse_is_told(tmp_path: Path, dispatchers: Dispatchers) -> None:
    """Wrong arguments raise errors that name the field, and nothing is accepted."""
    dispatcher = await dispatchers()
    for topic, data in (
        ("", b"x"),
        ("brokerless.x", b"x"),
        ("t\n", b"x"),
        ("t", "text"),
        ("t", b"x" * 2**21),
    ):
        with pytest.raises(InvalidEvent):
            await dispatcher.publish(topic, data)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        await dispatcher.publish("t", b"x", tenant="no spaces")
    for bad in (
        {"url": "http://10.0.0.1/"},
        {"topics": []},
        {"concurrency": 0},
        {"rate": -1},
        {"headers": {"Host": "x"}},
        {"headers": {"X-A": "1\r\nX-B: 2"}},
        {"nonsense": 1},
        {"mode": "smoke signals"},
    ):
        with pytest.raises(ConfigError):
            await dispatcher.add_endpoint(**({"url": "https://example.com/", "topics": ["**"]} | bad))  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        await dispatcher.start()
    assert dispatcher.counters.published == 0
    closed = Dispatcher(tmp_path / "x.sqlite")
    with pytest.raises(Closed):
        await closed.publish("t", b"x")
    with pytest.raises(ConfigError):
        Dispatcher(tmp_path / "x.sqlite", source="not a uri")
    with pytest.raises(ConfigError):
        DispatcherConfig(max_pending=0)


async def test_unusable_outbox_is_one_clear_error(tmp_path: Path) -> None:
    """A directory, a file that is no database, or one of a newer version: OutboxError with the path."""
    (tmp_path / "text").write_text("this is not a database" * 100)
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(OutboxError, match=str(path)):
            await Dispatcher(path).start()
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as db:
        db.execute("CREATE TABLE outbox_meta (k TEXT PRIMARY KEY, v TEXT NOT NULL)")
        db.execute("INSERT INTO outbox_meta VALUES ('format', '99')")
    with pytest.raises(OutboxError, match="newer"):
        await Dispatcher(newer).start()
