"""The states of an endpoint: one table, and every path of the API and the library goes by it."""

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, get_args

import pytest

from brokerless.webhooks import Conflict, Dispatcher, EndpointChanges
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
