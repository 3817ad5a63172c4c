"""How often each unsettled event of a group was delivered, and which of these attempts are uncertain. Without I/O."""

from collections.abc import Callable, Iterator

from brokerless.core import IntervalSet


class AttemptCounts:
    """A number for each offset, 0 for what turned out not to have been begun; and the offsets as intervals.

    An acknowledgement of a range, which may be of any size, must not cost a look at each of them.
    """

    def __init__(self, made: dict[int, int]) -> None:
        self.made = dict(made)
        self._offsets = IntervalSet((offset, offset) for offset in sorted(made))

    def __len__(self) -> int:
        return len(self.made)

    def __contains__(self, offset: int) -> bool:
        return offset in self.made

    def __iter__(self) -> Iterator[int]:
        return iter(self.made)

    def get(self, offset: int, otherwise: int) -> int:
        """The number, or what it is if there is none."""
        return self.made.get(offset, otherwise)

    def set(self, offset: int, made: int) -> int:
        """Set it; return it."""
        if offset not in self.made:
            self._offsets.add(offset, offset)
        self.made[offset] = made
        return made

    def setdefault(self, offset: int, made: int) -> int:
        """The number, which is this from now on if there was none."""
        known = self.made.get(offset)
        return self.set(offset, made) if known is None else known

    def forget(self, first: int, last: int) -> None:
        """These are settled."""
        for a, b in self._offsets.overlap(first, last):
            for offset in range(a, b + 1):
                del self.made[offset]
        self._offsets.remove(first, last)

    def delivered(self, wanted: IntervalSet) -> list[int]:
        """Those of the wanted that were delivered."""
        return [
            offset
            for first, last in both(wanted, self._offsets)
            for offset in range(first, last + 1)
            if self.made[offset]
        ]


def both(some: IntervalSet, others: IntervalSet) -> list[tuple[int, int]]:
    """What is in both sets, at the cost of the one with fewer intervals."""
    if not some or not others or some.first > others.last or others.first > some.last:
        return []
    if len(some) > len(others):
        some, others = others, some
    return [part for first, last in some for part in others.overlap(first, last)]


class UncertainAttempts:
    """What may have been an attempt."""

    def __init__(self) -> None:
        self._open = IntervalSet()
        # Those that would be dead; first without a time, because nobody has said what time it is.
        self._new: set[int] = set()
        self._last_attempts: dict[int, float] = {}

    def add(self, offset: int, *, last: bool = False) -> None:
        """An attempt may have been made; with `last` there will be no other."""
        self._open.add(offset, offset)
        if last:
            self._new.add(offset)

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, offset: int) -> bool:
        return offset in self._last_attempts or offset in self._new

    def __iter__(self) -> Iterator[int]:
        """Those that had their last attempt."""
        return iter([*self._last_attempts, *self._new])

    def settle(self, first: int, last: int) -> None:
        """These are settled: nothing is uncertain any more."""
        self._open.remove(first, last)

    def dispel(self, first: int, last: int, besides: IntervalSet) -> list[tuple[int, bool]]:
        """No handler had these, `besides` excepted: which were in doubt, and whether on their last attempt."""
        dispelled = []
        for a, b in self._open.overlap(first, last):
            for c, d in besides.missing(a, b):
                self._open.remove(c, d)
                for offset in range(c, d + 1):
                    dispelled.append((offset, offset in self))
                    self._last_attempts.pop(offset, None)
                    self._new.discard(offset)
        return dispelled

    def next_deadline(self) -> float:
        """When `judge` must be called."""
        if self._new:
            return 0.0
        return next(iter(self._last_attempts.values()), float("inf"))

    def judge(self, now: float, lease_s: float, is_settled: Callable[[int], bool]) -> list[int]:
        """Those about which nothing was heard for the length of a lease: they are dead."""
        for offset in sorted(self._new):
            self._last_attempts[offset] = now + lease_s
        self._new.clear()
        dead = []
        while self._last_attempts:
            offset, due = next(iter(self._last_attempts.items()))
            settled = is_settled(offset)
            if due > now and not settled:
                break
            del self._last_attempts[offset]
            if not settled:
                dead.append(offset)
        return dead
