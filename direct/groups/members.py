"""What a group is made of: leases, members, failures, and what is kept of it.

`group.py` decides about them: `Group._expire_leases` when a lease is over.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from brokerless.core import IntervalSet, Reason
from brokerless.direct.protocol.messages import Policy


class Lease(msgspec.Struct, frozen=True):
    """Offsets `first` to `last` now belong to a worker, for the attempt-th time."""

    first: int
    last: int
    attempt: int


class GroupState(msgspec.Struct, array_like=True):
    """What must survive a crash of the publisher. Everything in [cursor, next) that is not settled comes again."""

    cursor: int
    next: int
    settled: list[tuple[int, int]] = []
    attempts: dict[int, int] = {}
    policy: Policy = Policy()
    acked: int = 0
    dead: int = 0
    lost: int = 0
    skipped: int = 0
    started: int = 0
    epoch: int = -1  # the journal's when this was stored; -1 in files of older versions
    lost_by_reason: dict[str, int] = {}
    holders: list[str] = []  # workers that held something


def clip(state: GroupState, end: int) -> GroupState:
    """The state as far as the journal goes: offsets from `end` on will be given to other events.

    Whatever was settled there stays counted as offered and settled. The rest of it is lost with the journal's tail.
    """
    settled = IntervalSet(state.settled)
    old_end = max(state.next, state.cursor, settled.last + 1 if settled else 0)
    if old_end <= end:
        return state
    first = max(state.cursor, end)
    unsettled = sum(b - a + 1 for a, b in settled.missing(first, old_end - 1)) if first < old_end else 0
    settled.remove(end, old_end)
    reasons = dict(state.lost_by_reason) or ({str(Reason.EVICTED): state.lost} if state.lost else {})
    if unsettled:
        reasons[str(Reason.PRODUCER_CRASH)] = reasons.get(str(Reason.PRODUCER_CRASH), 0) + unsettled
    return msgspec.structs.replace(
        state,
        cursor=min(state.cursor, end),
        next=min(state.next, end),
        settled=list(settled),
        attempts={offset: made for offset, made in state.attempts.items() if offset < end},
        lost=sum(reasons.values()),
        lost_by_reason=reasons,
        started=state.started - (old_end - end),
    )


class Member:
    """One worker, as its group sees it."""

    __slots__ = ("credit", "held", "leases", "name", "said", "settles", "suspended", "unread")

    def __init__(self, name: str, credit: int) -> None:
        self.name = name
        self.credit = credit
        self.held = 0
        self.said = 0  # the number of its last Settle
        self.settles = 0  # read since it joined
        # It let a lease end: nothing more for it until it is heard of again.
        self.suspended = False
        self.unread = 0  # messages on their way to it, as far as it has said
        self.leases: deque[tuple[float, IntervalSet]] = deque()

    @property
    def room(self) -> int:
        """How many more events it can take."""
        return 0 if self.suspended else self.credit - self.held

    def holds(self, offset: int) -> bool:
        """Whether it has a lease of the event."""
        return any(offset in held for _, held in self.leases)

    def hold(self, until: float, held: IntervalSet) -> None:
        """Leases are kept in the order in which they end, which is that of granting as long as all last as long."""
        at = len(self.leases)
        while at and self.leases[at - 1][0] > until:
            at -= 1
        self.leases.insert(at, (until, held))


def held_by(members: Iterable[Member]) -> IntervalSet:
    """Everything that these workers hold."""
    return IntervalSet(piece for member in members for _, held in member.leases for piece in held)


class Failures:
    """Events that were given up or lost, for those who wait for them in other threads; the coordinator empties it."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __contains__(self, offset: int) -> bool:
        return any(first <= offset <= last for first, last in self._ranges)

    def add(self, first: int, last: int) -> None:
        """To be called before it is settled: who waits must not take it for acknowledged."""
        if self._ranges and self._ranges[-1][1] == first - 1:
            self._ranges[-1] = (self._ranges[-1][0], last)
        else:
            self._ranges.append((first, last))

    def forget(self, before: int) -> None:
        """Nobody waits for those before that offset."""
        self._ranges = [(first, last) for first, last in self._ranges if last >= before]
