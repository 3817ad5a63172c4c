"""The states of an endpoint: one table, and every path of the API and the library goes by it."""

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, get_args

import httpx
import pytest

from brokerless.webhooks import Conflict, Dispatcher, EndpointChanges, registration_app
from brokerless.webhooks.admin.states import TRANSITIONS, Action, step
from brokerless.webhooks.models import EndpointState

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
STATES = get_args(EndpointState)


def test_nothing_but_agreement_makes_a_pending_endpoint_active() -> None:
    """However actions follow each other, a URL that never agreed is never active."""
    reached, known = {"pending"}, set[str]()
    while reached - known:
        state = (reached - known).pop()
        known.add(state)
        for action in set(Action) - {Action.AGREE}:
            following = TRANSITIONS.get((state, action))  # type: ignore[call-overload]
            if following is not None:
                reached.add(following)
    assert reached == {"pending", "disabled_pending"}


@pytest.mark.parametrize(("state", "action"), list(product(STATES, Action)))
def test_what_is_not_in_the_table_is_a_conflict(state: EndpointState, action: Action) -> None:
    """Every pair of state and action leads where the table says, or raises."""
    if (state, action) in TRANSITIONS:
        assert step(state, action) == TRANSITIONS[state, action]
    else:
        with pytest.raises(Conflict):
            step(state, action)


async def reach(dispatcher: Dispatcher, target: Any, state: str) -> str:
    """An endpoint in that state; returns its id. The target agrees only where that is needed."""
    target.agree = state in {"active", "disabled"}
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    if state in {"disabled", "disabled_pending"}:
        await dispatcher.update_endpoint(endpoint.id, EndpointChanges(enabled=False))
    target.agree = False
    assert (await dispatcher.endpoint(endpoint.id)).state == state
    return endpoint.id


PATHS: dict[str, tuple[Action, Callable[[Dispatcher, str, str], Awaitable[Any]]]] = {
    "PATCH enabled=true": (
        Action.ENABLE,
        lambda d, e, _u: d.update_endpoint(e, EndpointChanges(enabled=True)),
    ),
    "PATCH enabled=false": (
        Action.DISABLE,
        lambda d, e, _u: d.update_endpoint(e, EndpointChanges(enabled=False)),
    ),
    "enable": (Action.ENABLE, lambda d, e, _u: d.enable_endpoint(e)),
    "disable": (Action.DISABLE, lambda d, e, _u: d.disable_endpoint(e)),
    "PATCH url": (Action.MOVE, lambda d, e, u: d.update_endpoint(e, EndpointChanges(url=u + "/new"))),
}


@pytest.mark.parametrize(("state", "path"), list(product(STATES, PATHS)))
async def test_every_path_goes_by_the_table(
    targets: Targets, dispatchers: Dispatchers, state: EndpointState, path: str
) -> None:
    """What the library and the API offer changes the state as the table says, and to nothing else."""
    target = await targets()
    target.agree = False
    target.answer = lambda _got, _n: (200, {"WebHook-Allowed-Origin": "*"}) if target.agree else 403
    dispatcher = await dispatchers(verification="handshake")
    endpoint_id = await reach(dispatcher, target, state)
    action, call = PATHS[path]
    expected = TRANSITIONS.get((state, action))
    if expected is None:
        with pytest.raises(Conflict):
            await call(dispatcher, endpoint_id, target.url)
        expected = state
    else:
        await call(dispatcher, endpoint_id, target.url)
    assert (await dispatcher.endpoint(endpoint_id)).state == expected
    # A new URL together with enabled goes the same two steps.
    if expected == "disabled_pending":
        await dispatcher.update_endpoint(endpoint_id, EndpointChanges(url=target.url + "/x", enabled=True))
        assert (await dispatcher.endpoint(endpoint_id)).state == "pending"


async def test_a_new_url_with_enabled_false_does_not_skip_the_check(
    targets: Targets, dispatchers: Dispatchers
) -> None:
    """The bypass that was there: disable with a new URL, then enable, ends in pending and delivers nothing."""
    target = await targets(lambda _got, _n: 403)
    dispatcher = await dispatchers(verification="handshake")
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.update_endpoint(endpoint.id, EndpointChanges(enabled=False, url=target.url + "/b"))
    assert (await dispatcher.enable_endpoint(endpoint.id)).state == "pending"
    assert (await dispatcher.publish("t", b"x")).deliveries == 0
    assert {got.method for got in target.got} == {"OPTIONS"}


async def settle(dispatcher: Dispatcher, endpoint_id: str, target: Any, *, agree: bool) -> None:
    """Let the owner answer to /verify."""
    target.agree = agree
    await dispatcher.verify_endpoint(endpoint_id)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("agree", [True, False])
async def test_what_the_owner_answers_goes_by_the_table(
    targets: Targets, dispatchers: Dispatchers, state: EndpointState, agree: bool
) -> None:
    """Agreement makes a pending endpoint active; an endpoint in any other state is not even asked."""
    target = await targets()
    target.answer = lambda _got, _n: (200, {"WebHook-Allowed-Origin": "*"}) if target.agree else 403
    dispatcher = await dispatchers(verification="handshake")
    endpoint_id = await reach(dispatcher, target, state)
    asked = len(target.got)
    await settle(dispatcher, endpoint_id, target, agree=agree)
    found = (await dispatcher.endpoint(endpoint_id)).state
    assert found == TRANSITIONS.get((state, Action.AGREE if agree else Action.REFUSE), state)
    assert (len(target.got) > asked) == (state == "pending")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("gone", [True, False])
async def test_what_deliveries_say_goes_by_the_table(
    targets: Targets, dispatchers: Dispatchers, state: EndpointState, gone: bool
) -> None:
    """A 410 or failing for too long disables an active endpoint; one that comes late changes nothing else."""
    target = await targets()
    target.answer = lambda _got, _n: (200, {"WebHook-Allowed-Origin": "*"}) if target.agree else 403
    dispatcher = await dispatchers(verification="handshake")
    endpoint_id = await reach(dispatcher, target, state)
    await dispatcher._endpoints._disable(endpoint_id, "test", gone)
    assert (await dispatcher.endpoint(endpoint_id)).state == TRANSITIONS.get((state, Action.FAIL), state)


@pytest.mark.parametrize(
    ("state", "request_"), list(product(STATES, ("enable", "disable", "patch on", "patch off")))
)
async def test_the_api_goes_by_the_table(
    targets: Targets, dispatchers: Dispatchers, state: EndpointState, request_: str
) -> None:
    """The same over HTTP: 200 and the state of the table, or 409 and no change."""
    target = await targets()
    target.answer = lambda _got, _n: (200, {"WebHook-Allowed-Origin": "*"}) if target.agree else 403
    dispatcher = await dispatchers(verification="handshake")
    endpoint_id = await reach(dispatcher, target, state)
    action = Action.ENABLE if request_ in {"enable", "patch on"} else Action.DISABLE
    expected = TRANSITIONS.get((state, action))
    transport = httpx.ASGITransport(registration_app(dispatcher, auth={"t" * 20: "default"}))
    headers = {"Authorization": "Bearer " + "t" * 20}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
        if request_.startswith("patch"):
            body = {"enabled": action is Action.ENABLE}
            answer = await http.patch(f"/endpoints/{endpoint_id}", json=body)
        else:
            answer = await http.post(f"/endpoints/{endpoint_id}/{request_}")
    assert answer.status_code == (409 if expected is None else 200)
    assert (await dispatcher.endpoint(endpoint_id)).state == (expected or state)
