"""What the protocols of subscribers and workers have in common: states, names, and how to take a publisher's words."""

import enum
import logging
from typing import Protocol

from brokerless.core import Reason

log = logging.getLogger(__name__)
# A conversation that lasted so long was one: if it ends, the publisher is greeted at once.
SETTLED_S = 1.0
# What is shown of a publisher's own words.
MAX_TEXT = 1000
# Greetings without an answer after which a publisher of the same name at another address takes its place.
_AWAY = 3


class State(enum.Enum):
    """Where the conversation is."""

    JOINING = "joining"
    FOLLOWING = "following"
    REFUSED = "refused"
    CLOSED = "closed"


# Everything that may happen to the state; `Follower._become` refuses anything else.
TRANSITIONS = {
    State.JOINING: {State.FOLLOWING, State.REFUSED, State.CLOSED},
    State.FOLLOWING: {State.JOINING, State.FOLLOWING, State.REFUSED, State.CLOSED},
    State.REFUSED: {State.CLOSED},
    State.CLOSED: set[State](),
}


class _Holder(Protocol):
    """What is asked about a follower."""

    address: str
    state: State
    greetings: int  # sent since the last answer


class Names:
    """Which follower of a subscriber has the publisher of each name.

    Two that publish under one name would share one position and one set of books, so only one is followed. One that
    was restarted at another of the addresses gets its turn when the old one has not answered for a while.
    """

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._warned: set[tuple[str, str]] = set()

    def claim(self, name: str, follower: _Holder) -> bool:
        """Whether this follower may have the publisher of this name; it gives up any other."""
        holder = self._holders.get(name, follower)
        waits = holder.state is State.JOINING and holder.greetings < _AWAY
        if holder is not follower and (waits or holder.state is State.FOLLOWING):
            if (holder.address, follower.address) not in self._warned:
                self._warned.add((holder.address, follower.address))
                log.warning(
                    "%s and %s both publish as %r; only the first is followed",
                    holder.address,
                    follower.address,
                    name,
                )
            return False
        for old in [other for other, holder in self._holders.items() if holder is follower and other != name]:
            del self._holders[old]
        self._holders[name] = follower
        return True


def reason_of(text: str) -> Reason:
    """The reason that a publisher names, as far as we know it."""
    try:
        return Reason(text)
    except ValueError:
        return Reason.UNATTRIBUTED
