"""Whether an answer goes to the one that asked, or to the whole group. Pure: `now` is given.

If a packet was lost behind the last switch, one subscriber needs the repair. If it was lost before that, many do, and
one repair to the group saves their requests. Which of the two is usual follows from how many ask for the same packet.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal

from brokerless.core.rate_limit import TokenBucket
from brokerless.multicast.policy import AnswerPolicy

Decision = Literal["one", "group", "nobody"]

# A request within this time after a repair for the group was sent before that repair arrived. Less than half of the
# first retry's wait.
_CROSSED_S = 0.025
# Others that lost the same packet ask within this: the longest reorder wait, plus the request's way.
_FORGET_S = 0.2
# One in so many answers goes to the asker alone although the group is usual: only then do others ask as well.
_PROBE_EVERY = 8
# The weight of one observation.
_WEIGHT = 0.25
# Requests that are remembered; in `_FORGET_S` a server in Python answers fewer.
_MAX_ASKED = 4096


class _Asked:
    """What was asked for by whom first, and whether the group has had it."""

    __slots__ = ("at", "requester", "seen_alone", "shared_at")

    def __init__(self, requester: Hashable, at: float) -> None:
        self.requester = requester
        self.at = at
        self.shared_at: float | None = None
        self.seen_alone = False  # answered alone, so that a second one that lacks it would have asked


class Sharing:
    """Decides for one session; remembers what was asked for lately."""

    def __init__(self, policy: AnswerPolicy, now: float) -> None:
        self._bucket = TokenBucket(policy.shared_bytes_s, max(65_536, policy.shared_bytes_s / 10), now)
        self._asked: OrderedDict[int, _Asked] = OrderedDict()
        self._share = 0.5  # of losses that several subscribers have in common, as far as was seen
        self._probe = 0

    def decide(self, requester: Hashable, first: int, size: int, receivers: int, now: float) -> Decision:
        """`requester` asks for what begins with sequence `first`; the answer has `size` bytes."""
        self._forget(now)
        asked = self._asked.get(first)
        if asked is None:
            asked = self._asked[first] = _Asked(requester, now)
            if len(self._asked) > _MAX_ASKED:
                self._asked.popitem(last=False)
            if receivers < 2:
                return "one"
            self._probe = (self._probe + 1) % _PROBE_EVERY
            if self._share < 0.5 or self._probe == 1:
                asked.seen_alone = True
                return "one"
        elif asked.requester != requester:
            asked.seen_alone = False
            self._share += _WEIGHT * (1 - self._share)
        if asked.shared_at is not None:
            return "nobody" if now < asked.shared_at + _CROSSED_S else "one"
        if asked.requester == requester and asked.at < now:
            return "one"  # it asks again: its answer was lost
        if not self._bucket.take(size, now):
            return "one"
        asked.shared_at = now
        return "group"

    def waiting(self, receivers: int) -> int:
        """How many of so many subscribers should wait for each other before they ask: all, or nobody (1).

        Waiting is worth its time only while losses are usually shared.
        """
        return receivers if self._share >= 0.5 else 1

    def _forget(self, now: float) -> None:
        while self._asked and (asked := next(iter(self._asked.values()))).at < now - _FORGET_S:
            self._asked.popitem(last=False)
            if asked.seen_alone:
                self._share -= _WEIGHT * self._share
