"""How often each event that a group has not settled was delivered, as far as it is not simply once."""

from collections.abc import Iterator

from brokerless.core import IntervalSet


class Attempts:
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
