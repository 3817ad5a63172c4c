"""The states of an endpoint and every way from one to another. No I/O.

    pending            registered; its owner has not agreed to be called. Gets nothing.
    active             agreed (or verification is off). Gets events.
    disabled           agreed once, and switched off by request, by 410, or after failing for too long.
    disabled_pending   switched off before its (new) URL agreed: enabling it leads to pending, never to active.

Everything that changes a state calls `step`; an action that is not in the table raises Conflict and changes nothing.
`delivery/deliverer.py` decides that an endpoint has failed for too long (`_judge_endpoint`); `managers.py` switches it
off (`_disable`).
"""

from enum import StrEnum

from brokerless.webhooks.errors import Conflict
from brokerless.webhooks.models import EndpointState


class Action(StrEnum):
    """What can happen to an endpoint's state."""

    AGREE = "agree"  # the owner of the URL agreed
    REFUSE = "refuse"  # the owner did not agree
    MOVE = "move"  # a new URL that must agree
    ENABLE = "enable"
    DISABLE = "disable"
    FAIL = "fail"  # disabled by the dispatcher: 410, or failing for too long


TRANSITIONS: dict[tuple[EndpointState, Action], EndpointState] = {
    ("pending", Action.AGREE): "active",
    ("pending", Action.REFUSE): "pending",
    ("pending", Action.MOVE): "pending",
    ("pending", Action.DISABLE): "disabled_pending",
    ("active", Action.MOVE): "pending",
    ("active", Action.ENABLE): "active",
    ("active", Action.DISABLE): "disabled",
    ("active", Action.FAIL): "disabled",
    ("disabled", Action.MOVE): "disabled_pending",
    ("disabled", Action.ENABLE): "active",
    ("disabled", Action.DISABLE): "disabled",
    ("disabled_pending", Action.MOVE): "disabled_pending",
    ("disabled_pending", Action.ENABLE): "pending",
    ("disabled_pending", Action.DISABLE): "disabled_pending",
}
_PROBLEMS = {
    ("pending", Action.ENABLE): "the endpoint has not agreed yet; use /verify",
}


def step(state: EndpointState, action: Action) -> EndpointState:
    """The state after the action, or Conflict."""
    try:
        return TRANSITIONS[state, action]
    except KeyError:
        default = f"the endpoint is {shown(state)}: {action} is not possible"
        raise Conflict(_PROBLEMS.get((state, action), default)) from None


def shown(state: EndpointState) -> str:
    """The state as the API shows it: both kinds of disabled are "disabled"."""
    return "disabled" if state == "disabled_pending" else state
