"""What a group is made of: grants, members, and what is kept of it."""

from collections import deque

import msgspec

from brokerless.core import IntervalSet
from brokerless.direct.wire import Policy


class Grant(msgspec.Struct, frozen=True):
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


class Member:
    """One worker, as its group sees it."""

    __slots__ = ("credit", "held", "leases", "name", "suspended", "unread")

    def __init__(self, name: str, credit: int) -> None:
        self.name = name
        self.credit = credit
        self.held = 0
        # It let a lease end: nothing more for it until it is heard of again.
        self.suspended = False
        self.unread = 0  # messages on their way to it, as far as it has said
        self.leases: deque[tuple[float, IntervalSet]] = deque()

    @property
    def room(self) -> int:
        """How many more events it can take."""
        return 0 if self.suspended else self.credit - self.held
