"""What was accepted and what became of it, when nobody wanted an event or its endpoint was switched off."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from brokerless.webhooks import DeliveryQuery, Dispatcher, EndpointChanges, EventQuery, PayloadFilter

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def test_every_event_is_accounted_for(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Two delivered, three that nobody wanted, two while the endpoint was disabled: seven events, both sums hold."""
    target, dispatcher = await targets(), await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["wanted"])
    for _ in range(2):
        await dispatcher.publish("wanted", b"1")
    for _ in range(3):
        await dispatcher.publish("other", b"2")
    await eventually(lambda: dispatcher.counters.delivered == 2)
    await dispatcher.disable_endpoint(endpoint.id)
    for _ in range(2):
        await dispatcher.publish("wanted", b"3")
    account = await dispatcher.account()
    assert (account.events, account.matched, account.unmatched, account.unrouted) == (7, 4, 3, 0)
    assert (account.accepted, account.delivered, account.lost) == (4, 2, {"skipped": 2})
    assert account.balanced
    assert len(await dispatcher.deliveries(DeliveryQuery(state="skipped"))) == 2
    await dispatcher.enable_endpoint(endpoint.id)
    assert (await dispatcher.replay(endpoint.id, 0, dry_run=True)).deliveries == 2
    assert (await dispatcher.replay(endpoint.id, 0)).deliveries == 2
    await eventually(lambda: target.bodies.count("3") == 2)


async def test_filters_decide_beside_topics(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Only events whose data meets all conditions are delivered; the others are unmatched."""
    target, dispatcher = await targets(), await dispatchers()
    filters = [PayloadFilter(path="$.total", minimum=10), PayloadFilter(path="$.country", equals="DE")]
    await dispatcher.add_endpoint(target.url, ["order.*"], filters=filters)
    bodies = [b'{"total":12,"country":"DE"}', b'{"total":9,"country":"DE"}', b'{"total":12}', b"not json"]
    made = [(await dispatcher.publish("order.paid", body)).deliveries for body in bodies]
    assert made == [1, 0, 0, 0]
    await eventually(lambda: target.got)
    assert (await dispatcher.account()).unmatched == 3


async def test_lists_and_ids_show_nothing_of_others(targets: Targets, dispatchers: Dispatchers) -> None:
    """Between two of a tenant's events others publish a hundred: neither ids nor ce-sequence nor lists tell."""
    target, dispatcher = await targets(), await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"], tenant="mine")
    await dispatcher.add_endpoint(target.url, ["**"], tenant="theirs")
    first = await dispatcher.publish("t", b"1", tenant="mine")
    for _ in range(100):
        await dispatcher.publish("t", b"x", tenant="theirs")
    second = await dispatcher.publish("t", b"2", tenant="mine")
    events = await dispatcher.events(EventQuery(tenant="mine"))
    assert [event.id for event in events] == [second.id, first.id]
    deliveries = await dispatcher.deliveries(DeliveryQuery(tenant="mine"))
    assert [delivery.event for delivery in deliveries] == [second.id, first.id]
    for delivery in deliveries:
        # Made of two ids that are random but for the time.
        assert delivery.id == f"{delivery.event}.{delivery.endpoint}"
    page = await dispatcher.deliveries(DeliveryQuery(tenant="mine", limit=1, after=deliveries[0].id))
    assert [delivery.event for delivery in page] == [first.id]


async def test_a_pending_delivery_is_sent_now(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A delivery that waits for its next attempt in hours is sent at once when somebody asks for it."""
    from brokerless.webhooks import Schedule

    answers = {"status": 500}
    target = await targets(lambda _got, _n: answers["status"])
    for fifo in (False, True):
        dispatcher = await dispatchers(schedule=Schedule(delays_s=(10_000.0,) * 3))
        endpoint, _ = await dispatcher.add_endpoint(target.url, [f"t{fifo}"], fifo=fifo)
        answers["status"] = 500
        await dispatcher.publish(f"t{fifo}", b"x")
        await eventually(lambda d=dispatcher: d.counters.failures == 1)
        answers["status"] = 200

        async def attempted(d: Dispatcher = dispatcher, e: str = endpoint.id) -> bool:
            (found,) = await d.deliveries(DeliveryQuery(endpoint=e))
            return found.attempts == 1

        await eventually(attempted)
        (delivery,) = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id))
        assert (await dispatcher.retry(delivery.id)).state == "pending"
        await eventually(lambda d=dispatcher: d.counters.delivered == 1)
        await dispatcher.stop()


async def test_changes_are_checked(dispatchers: Dispatchers) -> None:
    """What is wrong with a change is told, with the field's name, and nothing changes."""
    from brokerless.core.errors import ConfigError

    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint("https://example.com/", ["**"])
    for changes, field in (
        (EndpointChanges(rate=-1), "rate"),
        (EndpointChanges(topics=["a b"]), "topics"),
        (EndpointChanges(filters=[PayloadFilter(path="$.a")]), "filters"),
    ):
        with pytest.raises(ConfigError) as caught:
            await dispatcher.update_endpoint(endpoint.id, changes)
        assert caught.value.field == field
        assert "regex" not in caught.value.problem
    assert await dispatcher.endpoint(endpoint.id) == endpoint
