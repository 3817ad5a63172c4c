"""Nobody can register someone else's server: an endpoint gets nothing until it agrees."""

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from brokerless.core.errors import ConfigError
from brokerless.webhooks import Conflict, Dispatcher, EndpointChanges, verify
from brokerless.webhooks.admin.maintenance import ASK_AT_ONCE

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def test_handshake(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """An endpoint that allows our origin becomes active, and its allowed rate is kept."""
    target = await targets(
        lambda got, _n: (200, {"WebHook-Allowed-Origin": "me.example", "WebHook-Allowed-Rate": "600"})
    )
    dispatcher = await dispatchers(verification="handshake", origin="me.example")
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"], rate=50)
    assert (endpoint.state, endpoint.allowed_rate) == ("active", 600)
    assert (target.got[0].method, target.got[0].headers["webhook-request-origin"]) == (
        "OPTIONS",
        "me.example",
    )
    assert target.got[0].headers["webhook-request-rate"] == "3000"
    await dispatcher.publish("t", b"x")
    await eventually(lambda: len(target.got) == 2)
    assert dispatcher.deliverer._lanes[endpoint.id].bucket.rate == 10


@pytest.mark.parametrize(
    "answer",
    [
        200,
        404,
        (200, {"WebHook-Allowed-Origin": "other.example"}),
        (200, {"WebHook-Allowed-Origin": "*", "WebHook-Allowed-Rate": "many"}),
        (302, {"Location": "http://127.0.0.1/", "WebHook-Allowed-Origin": "*"}),
    ],
)
async def test_no_agreement_no_events(targets: Targets, dispatchers: Dispatchers, answer: Any) -> None:
    """Without a valid agreement the endpoint stays pending, gets no event and no test, and says why."""
    target = await targets(lambda _got, _n: answer)
    dispatcher = await dispatchers(verification="handshake")
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    assert endpoint.state == "pending"
    assert endpoint.reason
    assert (await dispatcher.publish("t", b"x")).deliveries == 0
    for forbidden in (dispatcher.test_endpoint, dispatcher.enable_endpoint):
        with pytest.raises(Conflict):
            await forbidden(endpoint.id)
    with pytest.raises(Conflict):
        await dispatcher.update_endpoint(endpoint.id, EndpointChanges(enabled=True))
    assert {got.method for got in target.got} == {"OPTIONS"}


async def test_asked_again_until_it_agrees(targets: Targets, dispatchers: Dispatchers) -> None:
    """A pending endpoint is asked again later, and becomes active when it agrees; a new URL must agree again."""
    agree = False
    target = await targets(lambda _g, _n: (200, {"WebHook-Allowed-Origin": "*"}) if agree else 500)
    dispatcher = await dispatchers(verification="handshake")
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    assert endpoint.state == "pending"
    agree = True
    maintenance = dispatcher.maintenance
    assert maintenance.due(endpoint, endpoint.created) is None
    assert maintenance.due(endpoint, endpoint.created + 11_000_000) == endpoint.asked_since + 10_000_000
    assert maintenance.due(endpoint, endpoint.created + 2 * 86400 * 1_000_000) is None
    await maintenance.ask(endpoint.id)
    assert (await dispatcher.endpoint(endpoint.id)).state == "active"
    agree = False
    moved = await dispatcher.update_endpoint(endpoint.id, EndpointChanges(url=target.url + "/elsewhere"))
    assert moved.state == "pending"


async def test_pending_endpoints_are_asked_in_turn(
    targets: Targets, dispatchers: Dispatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are due: each is asked before one is asked twice, so that nobody's endpoints keep others waiting."""
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers(verification="handshake")
    for number in range(2 * ASK_AT_ONCE):
        await dispatcher.add_endpoint(f"{target.url}/{number}", ["**"])
    registered, real = len(target.got), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
    for _ in range(2):
        await dispatcher.maintenance.ask_pending()
    asked = [got.path for got in target.got[registered:]]
    assert len(asked) == len(set(asked)) == 2 * ASK_AT_ONCE


async def test_challenge(targets: Targets, dispatchers: Dispatchers) -> None:
    """The signed challenge must come back: a receiver that cannot read it does not agree by accident."""
    honest = True

    def answer(got: Any, _number: int) -> bytes:
        data = json.loads(got.body)["data"] if honest else {"challenge": "guess"}
        body = json.dumps(data).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    target, dispatcher = await targets(answer), await dispatchers(verification="challenge")
    endpoint, secret = await dispatcher.add_endpoint(target.url, ["**"])
    assert endpoint.state == "active"
    verify(target.got[0].headers, target.got[0].body, secret)
    honest = False
    other, _ = await dispatcher.add_endpoint(target.url, ["**"])
    assert (other.state, other.reason) == ("pending", "did not send the challenge back")


async def test_only_the_operator_switches_it_off(targets: Targets, dispatchers: Dispatchers) -> None:
    """A caller cannot register with verification "none" unless the operator configured it."""
    target, dispatcher = await targets(), await dispatchers(verification="handshake")
    with pytest.raises(ConfigError):
        await dispatcher.add_endpoint(target.url, ["**"], verification="none")
