"""The outbox behind delivery: its bound, callers' transactions, several processes, forgetting, misuse."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import Closed, ConfigError, InvalidEvent, UsageError
from brokerless.webhooks import (
    BlockingDispatcher,
    Conflict,
    DeliveryQuery,
    Dispatcher,
    DispatcherConfig,
    EndpointChanges,
    NotFound,
    OutboxError,
    OutboxFull,
    Schedule,
    publish_in,
)
from brokerless.webhooks.admin import managers
from brokerless.webhooks.outbox import store as store_module
from brokerless.webhooks.outbox.schema import SHARDS

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def delivered(dispatcher: Dispatcher, count: int, eventually: Eventually) -> None:
    async def reached() -> bool:
        return (await dispatcher.account()).delivered >= count

    await eventually(reached, f"{count} delivered")
    assert (await dispatcher.account()).balanced


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
    _, dispatcher, gate = await _stuffed(targets, dispatchers, on_full="block", block_timeout_s=2)
    started = time.monotonic()
    with pytest.raises(OutboxFull):
        await dispatcher.publish("t", b"no")
    assert time.monotonic() - started >= 1.99
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
    replayed = 0
    while replayed < 25:
        # Not more at a time than the outbox may hold.
        found = await dispatcher.replay(endpoint.id, 0)
        replayed += found.deliveries
        assert found.complete == (replayed == 25)
        await delivered(dispatcher, 10 + replayed, eventually)


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
    """With connection= an event commits and rolls back with the caller's own rows, in the caller's own database."""
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


async def test_two_processes_share_the_endpoints(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Two dispatchers on one outbox: both deliver and both publish, each endpoint has one owner, and when one stops
    the other takes over all.
    """
    target = await targets()
    first, second = await dispatchers(), await dispatchers()
    await eventually(lambda: len(first.deliverer.shards) == len(second.deliverer.shards) == SHARDS // 2)
    assert not first.deliverer.shards & second.deliverer.shards
    for number in range(12):
        await (first if number % 2 else second).add_endpoint(target.url, [f"t{number}"])
    for number in range(12):
        published = await (second if number % 3 else first).publish(f"t{number}", b"%d" % number)
        assert published.deliveries == 1
    await delivered(second, 12, eventually)
    assert first.counters.delivered + second.counters.delivered == 12
    assert min(first.counters.delivered, second.counters.delivered) > 0
    await first.stop()
    await eventually(lambda: len(second.deliverer.shards) == SHARDS)
    for number in range(12):
        await second.publish(f"t{number}", b"after %d" % number)
    await delivered(second, 24, eventually)
    assert len(target.bodies) == len(set(target.bodies)) == 24


async def test_any_process_manages(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Retry, replay and enable are carried out by the process that owns the endpoint, whichever is asked."""
    answers = {"status": 415}
    target = await targets(lambda _got, _number: answers["status"])
    one, two = await dispatchers(), await dispatchers()
    await eventually(lambda: two.delivering)
    endpoint, _ = await one.add_endpoint(target.url, ["**"])
    active, standby = (one, two) if one.deliverer.owns(endpoint.id) else (two, one)
    await standby.publish("t", b"1")
    await standby.publish("t", b"2")
    await eventually(lambda: active.counters.gave_up == 2)
    answers["status"] = 200
    dead = await standby.deliveries(DeliveryQuery(endpoint=endpoint.id))
    await standby.retry(dead[0].id)
    await delivered(standby, 1, eventually)
    assert (await standby.replay(endpoint.id, 0)).deliveries == 1
    await delivered(standby, 2, eventually)
    await standby.update_endpoint(endpoint.id, EndpointChanges(enabled=False))
    assert (await standby.publish("t", b"3")).deliveries == 0
    assert standby.counters.skipped == 1
    await standby.enable_endpoint(endpoint.id)
    assert (await standby.replay(endpoint.id, 0, only="all")).deliveries == 3
    await delivered(standby, 3, eventually)
    assert {"1", "2", "3"} == set(target.bodies)


async def test_the_bound_follows_deliveries_of_another_process(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A process that publishes more than the bound in total is not refused while another delivers."""
    target = await targets()
    one, two = await dispatchers(max_pending=20), await dispatchers(max_pending=20)
    await eventually(lambda: two.delivering)
    endpoint, _ = await one.add_endpoint(target.url, ["**"])
    active, standby = (one, two) if one.deliverer.owns(endpoint.id) else (two, one)
    for number in range(60):
        await standby.publish("t", b"%d" % number)
        if number % 10 == 9:
            await delivered(active, number + 1, eventually)
            await eventually(lambda: standby.outbox.backlog.total == 0)
    await eventually(lambda: active.outbox.backlog.total == 0)


async def test_lost_lease_stops_delivering(dispatchers: Dispatchers, eventually: Eventually) -> None:
    """A process whose shards another took (it slept too long) notices and stops delivering for them."""
    first = await dispatchers(lease_s=0.3)

    def take_over(store: Any) -> None:
        store.session.execute("UPDATE outbox_shards SET owner = 'other|1|1|1', until = ?", (2**60,))

    await first.outbox.call_async(take_over)
    await eventually(lambda: not first.delivering)


async def test_idempotency(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """The same key with the same event is accepted once, also at the same moment; with another it is a conflict."""
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
    """Deleting an endpoint withdraws what is pending for it; the accounting says so."""
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    for _ in range(5):
        await dispatcher.publish("t", b"x")
    await dispatcher.remove_endpoint(endpoint.id)
    await eventually(lambda: dispatcher.outbox.backlog.total == 0)
    account = await dispatcher.account()
    assert (account.balanced, account.withdrawn, dispatcher.counters.withdrawn) == (True, 5, 5)
    with pytest.raises(NotFound):
        await dispatcher.endpoint(endpoint.id)


async def test_deleting_goes_in_bounded_steps(
    targets: Targets, dispatchers: Dispatchers, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """However much is pending for an endpoint, no transaction ends more than a bounded number; others publish
    meanwhile, and what a process that died left over is withdrawn by maintenance.
    """
    for module in (store_module, managers):
        monkeypatch.setattr(module, "END_AT_ONCE", 10)
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(3600.0,)))
    first, _ = await dispatcher.add_endpoint(target.url, ["a"])
    second, _ = await dispatcher.add_endpoint(target.url, ["b"])
    await asyncio.gather(*(dispatcher.publish(topic, b"x") for _ in range(35) for topic in "ab"))
    await eventually(lambda: dispatcher.counters.attempts == 70)
    before = dispatcher.counters.commits
    await dispatcher.remove_endpoint(first.id)
    assert dispatcher.counters.commits - before >= 4
    account = await dispatcher.account()
    assert (account.withdrawn, account.pending, account.balanced) == (35, 35, True)
    # As if the process had died after the first step of deleting.
    await dispatcher.outbox.call_async(lambda store: store.delete_endpoint(second.id, 1))
    assert (await dispatcher.account()).pending == 35
    await dispatcher.maintenance.sweep()
    account = await dispatcher.account()
    assert (account.withdrawn, account.pending, account.balanced) == (70, 0, True)
    assert dispatcher.outbox.backlog.total == 0


async def test_slow_lists_stop_no_delivery(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """While every connection for lists hangs in a query, lanes still read what they need and deliver it."""
    target = await targets()
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: dispatcher.counters.delivered == 1)
    (delivery,) = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id))
    release = threading.Event()
    slow = [asyncio.create_task(dispatcher.outbox.read(lambda _s: release.wait(60))) for _ in range(20)]
    try:
        await dispatcher.retry(delivery.id)
        await eventually(lambda: len(target.got) == 2)
        assert not any(task.done() for task in slow)
    finally:
        release.set()
    await asyncio.gather(*slow)


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
    await dispatcher.maintenance.sweep()
    assert (await dispatcher.account()).accepted == 1
    assert (await dispatcher.event(kept.id)).data == b"kept"
    assert not (await dispatcher.publish("t", b"x", idempotency_key="1")).duplicate


async def test_history_has_a_bound(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Of finished events only the newest `retain_events` are kept, however young; pending ones stay."""
    failing = {"first"}
    target = await targets(lambda got, _number: 500 if got.body.decode() in failing else 200)
    dispatcher = await dispatchers(retain_events=10)
    await dispatcher.add_endpoint(target.url, ["**"])
    first = await dispatcher.publish("t", b"first")
    events = [await dispatcher.publish("t", b"x") for _ in range(30)]
    await delivered(dispatcher, 30, eventually)
    await dispatcher.maintenance.sweep()
    assert (await dispatcher.account()).accepted == 11
    assert (await dispatcher.event(first.id)).data == b"first"
    for event in events[-10:]:
        assert (await dispatcher.event(event.id)).data == b"x"
    with pytest.raises(NotFound):
        await dispatcher.event(events[-11].id)


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
            dispatcher.add_endpoint(target.url, ["**"])
            threads = [
                threading.Thread(target=lambda: [dispatcher.publish("t", b"x") for _ in range(20)])
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            deadline = time.monotonic() + 20
            while dispatcher.counters.delivered < 160 and time.monotonic() < deadline:
                time.sleep(0.01)
            return dispatcher.counters.delivered

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
