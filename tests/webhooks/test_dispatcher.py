"""Delivery from a real outbox to real sockets: what each answer leads to, and that the accounting balances."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from brokerless.core.errors import ConfigError
from brokerless.webhooks import (
    Conflict,
    DeliveryQuery,
    Dispatcher,
    DispatcherConfig,
    EndpointChanges,
    NotFound,
    Schedule,
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
    stored = await dispatcher.event(published.id)
    assert event.extensions["sequence"] == str(stored.time)


async def test_structured_and_batch(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """An endpoint chooses structured or batch form; both are signed and valid CloudEvents with the same ids."""
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


async def test_dead_letters_are_told(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Deliveries that were given up are told to the tenant's own endpoint and to the operator's, once for all of a
    moment; about the telling itself nothing is told.
    """
    broken, own, operator = (
        await targets(lambda _g, _n: 500),
        await targets(),
        await targets(lambda _g, _n: 500),
    )
    dispatcher = await dispatchers(schedule=Schedule(delays_s=()), operator_tenant="ops")
    endpoint, _ = await dispatcher.add_endpoint(broken.url, ["**"], tenant="acme")
    await dispatcher.add_endpoint(own.url, ["brokerless.delivery.*"], tenant="acme")
    await dispatcher.add_endpoint(operator.url, ["brokerless.**"], tenant="ops")
    sent = [(await dispatcher.publish("order.paid", b"{}", tenant="acme")).id for _ in range(30)]
    counts = 0

    def told() -> bool:
        nonlocal counts
        counts = sum(json.loads(got.body)["count"] for got in own.got)
        return counts == 30 and len(operator.got) == len(own.got)

    await eventually(told)
    first = json.loads(own.got[0].body)
    assert own.got[0].headers["ce-type"] == "brokerless.delivery.gave_up"
    assert (first["tenant"], first["endpoint"], first["url"]) == ("acme", endpoint.id, broken.url)
    assert first["problem"] == "answered 500"
    assert set(first["events"]) <= set(sent)
    assert 0 < len(first["events"]) <= 20
    assert len(own.got) < 10

    # The operator's endpoint failed too: that is in the accounting, and no further event.
    async def settled() -> bool:
        return (await dispatcher.account("ops")).lost == {"gave_up": len(own.got)}

    await eventually(settled)
    account = await dispatcher.account("ops")
    assert (account.events, account.balanced) == (len(own.got), True)
    assert dispatcher._endpoints._gave_up == {}


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
        await dispatcher.retry("msg_nothing.ep_nothing")


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
    """A FIFO backlog that is larger than the lane's memory is delivered in order, also by the next process."""
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
    assert target.bodies == [str(number) for number in range(300)]


async def test_disabled_after_failing_long(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """An endpoint that fails for the stated time is disabled; what it missed can be replayed when it is back."""
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
    assert (await dispatcher.replay(endpoint.id, 0, only="all")).deliveries == 2
    await delivered(dispatcher, 2, eventually)
    await eventually(lambda: target.bodies.count("1") >= 2 and "2" in target.bodies)


async def test_gives_up_and_replays(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """After the schedule comes the dead letter; replay by time range sends exactly those of the range again."""
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
    assert (await dispatcher.replay(endpoint.id, between)).deliveries == 1
    await delivered(dispatcher, 1, eventually)
    assert target.bodies == ["late"]
    assert (await dispatcher.replay(endpoint.id, 0, between)).deliveries == 1
    await delivered(dispatcher, 2, eventually)
    with pytest.raises(ConfigError):
        await dispatcher.replay(endpoint.id, 0, only="some")  # type: ignore[arg-type]


async def test_rotation_signs_with_both_keys(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """After rotating, receivers with the old and with the new secret both verify; after the overlap only
    the new.
    """
    target = await targets()
    dispatcher = await dispatchers(rotation_overlap_s=3)
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
    """A dripping head ends at the total deadline; an endless 200 body is cut at the cap and counts as delivered."""

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
    dispatcher = await dispatchers(attempt_timeout_s=3, schedule=Schedule(delays_s=()))
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


async def test_switching_to_fifo_puts_a_backlog_in_order_by_steps(
    dispatchers: Dispatchers, targets: Targets, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction puts a bounded number of deliveries in order, and all arrive in the order of publishing."""
    monkeypatch.setattr("brokerless.webhooks.outbox.store.END_AT_ONCE", 10)
    monkeypatch.setattr("brokerless.webhooks.admin.managers.END_AT_ONCE", 10)
    working = False
    target = await targets(lambda _got, _number: 200 if working else 500)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(3600.0,) * 5))
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    for number in range(35):
        await dispatcher.publish("t", str(number).encode())
    await eventually(lambda: dispatcher.counters.failures == 35 and not dispatcher.deliverer.in_flight())
    await dispatcher.disable_endpoint(endpoint.id)
    target.got.clear()
    working = True
    commits = dispatcher.counters.commits
    await dispatcher.update_endpoint(endpoint.id, EndpointChanges(fifo=True))
    assert dispatcher.counters.commits - commits >= 5
    await dispatcher.enable_endpoint(endpoint.id)
    await eventually(lambda: dispatcher.counters.delivered == 35)
    assert target.bodies == [str(number) for number in range(35)]
    await dispatcher.update_endpoint(endpoint.id, EndpointChanges(fifo=False))
    await dispatcher.publish("t", b"after")
    await eventually(lambda: target.bodies[-1] == "after")


@pytest.mark.parametrize(
    ("field", "value"),
    [("on_full", "drop"), ("on_full", None), ("synchronous", "sometimes"), ("verification", "no")],
)
def test_a_choice_that_does_not_exist_is_refused(field: str, value: object) -> None:
    """When the configuration is made, with the choices that there are: not taken for one of them."""
    with pytest.raises(ConfigError, match=f"{field}: must be .* not {value!r}"):
        DispatcherConfig(**{field: value})


async def test_metrics_at_an_address_of_their_own(tmp_path: Path, make_config: Any) -> None:
    """Prometheus finds every counter there without a token; the address is free again when the dispatcher stops."""
    async with Dispatcher(tmp_path / "o.sqlite", config=make_config(), metrics="127.0.0.1:0") as dispatcher:
        await dispatcher.publish("t", b"{}")
        async with httpx.AsyncClient(trust_env=False) as http:
            text = (await http.get(dispatcher.metrics_address)).text
    found = re.search(r"^brokerless_webhooks_dispatcher_published_total\{.*\} (\d+)$", text, re.MULTILINE)
    assert found is not None
    assert found[1] == "1"
    taken = Dispatcher(tmp_path / "o.sqlite", config=make_config(), metrics="127.0.0.1:no")
    with pytest.raises(ConfigError, match="metrics"):
        await taken.start()
    async with Dispatcher(tmp_path / "o.sqlite", config=make_config()) as dispatcher:
        assert dispatcher.metrics_address == ""
