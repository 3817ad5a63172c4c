"""Shards that change hands, and clocks that lie: whatever is pending is attempted by somebody, and in time."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.webhooks import DeliveryQuery, Dispatcher, OutboxError, OutboxFull, Schedule
from brokerless.webhooks.outbox.database import connect
from brokerless.webhooks.outbox.schema import SHARDS, create

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]
Shift = Callable[[float], None]
HOUR = 3600


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Shift:
    """`shift(seconds)`: the wall clock is that far ahead from now on; the monotonic one is not touched."""
    real, real_ns = time.time, time.time_ns

    def move(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(seconds * 1e9))

    return move


async def attempted(dispatcher: Dispatcher, count: int) -> bool:
    """Whether so many attempts (or more) are recorded."""
    return sum(d.attempts for d in await dispatcher.deliveries(DeliveryQuery())) >= count


async def test_a_clock_set_back_while_running(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """A retry that was scheduled an hour ahead is made after its own delay."""
    target = await targets(lambda _got, number: 500 if number == 1 else 200)
    shift(HOUR)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(3.0,)))
    await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: attempted(dispatcher, 1))
    shift(0)
    assert len(target.got) == 1
    await eventually(lambda: dispatcher.counters.delivered == 1, timeout_s=30)


async def test_a_clock_that_was_ahead_between_two_looks(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """Set ahead and back before a lease is renewed: the attempt that failed meanwhile is proof enough."""
    target = await targets(lambda _got, number: 500 if number == 1 else 200)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(3.0,)), lease_s=6.0)
    await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.maintenance.renew()
    shift(HOUR)
    await dispatcher.publish("t", b"x")
    await eventually(lambda: attempted(dispatcher, 1))
    shift(0)
    await dispatcher.maintenance.renew()
    assert len(target.got) == 1
    await eventually(lambda: dispatcher.counters.delivered == 1, timeout_s=30)


async def test_a_clock_that_was_behind_between_two_looks(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """Set back and right again before a lease is renewed: nobody waits an hour for what was computed meanwhile."""
    target = await targets(lambda _got, number: 500 if number == 1 else 200)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(3.0,)), lease_s=60.0)
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.maintenance.renew()
    await dispatcher.publish("t", b"x")
    await eventually(lambda: attempted(dispatcher, 1))
    shift(-HOUR)
    deliverer = dispatcher.deliverer
    deliverer.more(endpoint.id, resume=False)

    def computed() -> bool:
        due = deliverer._lanes[endpoint.id].next_due
        return due is not None and due > time.monotonic() + HOUR / 2

    await eventually(computed, timeout_s=30)
    shift(0)
    await dispatcher.maintenance.renew()
    assert len(target.got) == 1
    await eventually(lambda: dispatcher.counters.delivered == 1, timeout_s=30)


async def test_a_clock_set_back_between_two_runs(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """The next process delivers what waited for its first attempt and for its retry; Retry-After is kept."""
    up = False
    target = await targets(lambda _got, _number: 200 if up else (503, {"Retry-After": "3"}))
    busy = await targets(lambda _got, _number: (429, {"Retry-After": "1800"}))
    shift(HOUR)
    first = await dispatchers()
    await first.add_endpoint(target.url, ["a"], concurrency=1)
    asked_to_wait, _ = await first.add_endpoint(busy.url, ["b"])
    for topic in ("a", "a", "b"):
        await first.publish(topic, b"x")
    await eventually(lambda: attempted(first, 2))
    await first.stop()
    assert len(target.got) == 1
    shift(0)
    up = True
    second = await dispatchers()
    await eventually(lambda: second.counters.delivered == 2, timeout_s=30)

    async def due_in_s() -> float:
        (found,) = await second.deliveries(DeliveryQuery(endpoint=asked_to_wait.id))
        assert found.due is not None
        return found.due / 1e6 - time.time()

    async def still_waits() -> bool:
        return 1500 < await due_in_s() <= 1801

    await eventually(still_waits, timeout_s=30)
    assert len(busy.got) == 1


async def test_leases_of_the_future_run_out(
    tmp_path: Path, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Shards of a process on another machine that died while the database's clock was ahead are taken over."""
    path = tmp_path / "outbox.sqlite"
    session = connect(str(path))
    create(session)
    session.close()
    with sqlite3.connect(path) as database:
        until = time.time_ns() // 1000 + HOUR * 1_000_000
        database.execute("UPDATE outbox_shards SET owner = 'elsewhere', until = ?", (until,))
        database.execute("INSERT INTO outbox_members (owner, until) VALUES ('elsewhere', ?)", (until,))
    database.close()
    dispatcher = await dispatchers(path, lease_s=0.3)
    assert not dispatcher.delivering
    await eventually(lambda: len(dispatcher.outbox.shards) == SHARDS, timeout_s=30)


async def test_failing_since_is_not_later_than_now(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """An endpoint that began to fail while the clock was ahead fails since the first attempt by the right clock."""
    target = await targets(lambda _got, _number: 500)
    shift(HOUR)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: attempted(dispatcher, 1))
    shift(0)

    async def right() -> bool:
        since = (await dispatcher.endpoint(endpoint.id)).failing_since
        return since is not None and since <= time.time_ns() // 1000

    await eventually(right, timeout_s=30)


async def test_a_pending_endpoint_is_asked_again(
    targets: Targets, dispatchers: Dispatchers, shift: Shift
) -> None:
    """One that was registered while the clock was ahead is asked at once, and then at growing intervals."""
    target = await targets(lambda _got, _number: 500)
    shift(HOUR)
    dispatcher = await dispatchers(verification="handshake")
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    assert endpoint.state == "pending"
    shift(0)
    assert dispatcher.maintenance.due(endpoint, time.time_ns() // 1000) is not None
    again = await dispatcher.verify_endpoint(endpoint.id)
    assert again.asked_since <= time.time_ns() // 1000
    assert dispatcher.maintenance.due(again, again.asked_since) is None


async def test_a_blocked_publish_ends_in_time(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, shift: Shift
) -> None:
    """`block_timeout_s` does not follow the wall clock."""
    target = await targets(lambda _got, _number: 500)
    shift(HOUR)
    dispatcher = await dispatchers(
        on_full="block", max_pending=1, block_timeout_s=1.0, schedule=Schedule(delays_s=(HOUR,))
    )
    await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: attempted(dispatcher, 1))
    blocked = asyncio.create_task(dispatcher.publish("t", b"y"))
    await asyncio.sleep(0)
    shift(0)
    with pytest.raises(OutboxFull):
        await asyncio.wait_for(blocked, 30)


async def give_shards(dispatcher: Dispatcher, owner: str) -> None:
    """To a process on another machine, or (empty) to nobody."""
    row = (owner, 2**60 if owner else 0)
    sql = "UPDATE outbox_shards SET owner = ?, until = ?"
    await dispatcher.outbox.call_async(lambda store: store.session.execute(sql, row))


async def test_an_event_that_comes_while_shards_are_taken(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that is accepted after the pending deliveries were counted, and before their process delivers, does not
    wait for the next one.
    """
    target, dispatcher = await targets(), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"])
    await give_shards(dispatcher, "elsewhere")
    await eventually(lambda: not dispatcher.delivering)
    count = dispatcher.maintenance._recount

    async def count_and_publish() -> dict[str, int]:
        found = await count()
        await dispatcher.publish("t", b"x")
        return found

    monkeypatch.setattr(dispatcher.maintenance, "_recount", count_and_publish)
    await give_shards(dispatcher, "")
    await eventually(lambda: target.got)


async def test_counting_that_fails_after_a_takeover_is_made_up_for(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited for a shard is attempted, and counted as recovered, also if the database failed in that moment."""
    target, dispatcher = await targets(), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"])
    await give_shards(dispatcher, "elsewhere")
    await eventually(lambda: not dispatcher.delivering)
    await dispatcher.publish("t", b"x")
    count, failed = dispatcher.maintenance._recount, []

    async def fail_once() -> dict[str, int]:
        if not failed:
            failed.append(True)
            raise OutboxError("the outbox", "is away")
        return await count()

    monkeypatch.setattr(dispatcher.maintenance, "_recount", fail_once)
    await give_shards(dispatcher, "")
    await eventually(lambda: target.got)
    assert failed
    assert dispatcher.counters.recovered == 1


async def test_what_nobody_told_of_is_delivered(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A delivery that another process added without a word (its message was lost, or it took the shard for its own)."""
    target, dispatcher = await targets(), await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"1")
    await eventually(lambda: dispatcher.counters.delivered == 1)
    with sqlite3.connect(dispatcher.outbox.target) as other:
        columns = "(event, endpoint, state, due, attempts, created, log)"
        other.execute(
            "INSERT INTO outbox_events (id, tenant, topic, time, data, content_type, trace, routed) "
            f"SELECT 'msg_{32 * '0'}', tenant, topic, time, X'32', content_type, trace, 1 FROM outbox_events"
        )
        other.execute(
            f"INSERT INTO outbox_deliveries {columns} SELECT max(n), ?, 0, 0, 0, 0, '' FROM outbox_events",
            (endpoint.id,),
        )
    await eventually(lambda: target.bodies == ["1", "2"])


async def test_a_machine_that_slept_has_no_lease(
    dispatchers: Dispatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still in a machine that sleeps; the lease ends all the same."""
    dispatcher = await dispatchers(lease_s=600.0)
    assert dispatcher.outbox.lease_valid()
    real = time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: real(clock) + (600 if clock == time.CLOCK_BOOTTIME else 0)
    )
    assert not dispatcher.outbox.lease_valid()
    await dispatcher.maintenance.renew()
    assert dispatcher.outbox.lease_valid()
