"""The positions that subscribers report: which are still waited for, and which is the slowest. Pure."""

import threading
from collections import OrderedDict
from typing import NamedTuple

from brokerless.multicast.wire.status import LEAVING, Requester

# A subscriber tells its position every 25 s: one that has missed two turns is gone.
FORGET_AFTER_S = 60.0


class Position(NamedTuple):
    """The next sequence that a subscriber expects, the next that its application takes, its tag, when it said so."""

    expected: int
    taken: int
    tag: int
    at: float


class Positions:
    """The positions of at most `max_requesters` subscribers; the one not heard of for longest is forgotten first."""

    def __init__(self, max_requesters: int) -> None:
        self._max = max_requesters
        self._known: OrderedDict[int, Position] = OrderedDict()
        self._lock = threading.Lock()  # the server's thread writes, the publisher's read

    def __len__(self) -> int:
        return len(self._known)

    def update(self, who: Requester, taken: int, now: float) -> None:
        """A subscriber (that has proven its address) told where it and its application are, or that it leaves."""
        self.expire(now)
        with self._lock:
            if who.expected == LEAVING:
                self._known.pop(who.requester, None)
                return
            if who.requester not in self._known and len(self._known) >= self._max:
                self._known.popitem(last=False)
            self._known[who.requester] = Position(who.expected, taken, who.tag, now)
            self._known.move_to_end(who.requester)

    def expire(self, now: float, after_s: float = FORGET_AFTER_S) -> None:
        """Forget those that were not heard of for so long."""
        with self._lock:
            while self._known and next(iter(self._known.values())).at < now - after_s:
                self._known.popitem(last=False)

    def known(self) -> dict[int, Position]:
        """All of them, by requester; the one not heard of for longest is first."""
        with self._lock:
            return dict(self._known)

    def replace(self, known: dict[int, Position]) -> None:
        """Take over what another process knows."""
        with self._lock:
            self._known = OrderedDict(known)

    def _all(self) -> list[Position]:
        with self._lock:
            return list(self._known.values())

    def behind(self, next_sequence: int) -> int:
        """How many have not got everything before that sequence."""
        return sum(position.expected < next_sequence for position in self._all())

    def slowest(self, now: float, *, tag: int | None = None, timeout_s: float) -> int | None:
        """How far the slowest application is, of those (with that tag) that were heard within `timeout_s`."""
        return min(
            (
                position.taken
                for position in self._all()
                if now - position.at <= timeout_s and (tag is None or position.tag == tag)
            ),
            default=None,
        )
