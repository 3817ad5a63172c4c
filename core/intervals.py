"""Sets of integers kept as sorted, disjoint, closed intervals: what sequence tracking is made of."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of integers as intervals `(first, last)`, both inclusive.

    Adding at the end is constant time; anything else is a binary search plus the cost of moving the tail
    of a list. `len()` is the number of intervals, which is what memory depends on; `total` is the number
    of integers.

    `add` and `remove` call nothing while they change the lists, so a signal's handler that raises comes before or
    after: never in the middle.
    """

    __slots__ = ("_firsts", "_lasts", "total")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.total = 0
        for first, last in intervals:
            self.add(first, last)

    def __len__(self) -> int:
        return len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._firsts, value) - 1
        return i >= 0 and value <= self._lasts[i]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._firsts == other._firsts and self._lasts == other._lasts

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        shown = ", ".join(f"{a}–{b}" if a != b else str(a) for a, b in list(self)[:8])
        return f"IntervalSet({shown}{', …' if len(self) > 8 else ''})"

    @property
    def first(self) -> int:
        """The smallest integer. Raises IndexError when empty."""
        return self._firsts[0]

    @property
    def last(self) -> int:
        """The largest integer. Raises IndexError when empty."""
        return self._lasts[-1]

    def add(self, first: int, last: int) -> int:
        """Add all integers from `first` to `last`; return how many of them were new."""
        firsts, lasts = self._firsts, self._lasts
        if last < first:
            return 0
        if lasts and first == lasts[-1] + 1:  # in order: nothing to search for
            lasts[-1] = last
            self.total += last - first + 1
            return last - first + 1
        if not lasts or first > lasts[-1] + 1:
            firsts += (first,)
            lasts += (last,)
            self.total += last - first + 1
            return last - first + 1
        lo = bisect_left(lasts, first - 1)
        hi = bisect_right(firsts, last + 1)
        if lo == hi:
            firsts[lo:lo] = (first,)
            lasts[lo:lo] = (last,)
            self.total += last - first + 1
            return last - first + 1
        had = sum(lasts[i] - firsts[i] + 1 for i in range(lo, hi))
        new_first, new_last = min(first, firsts[lo]), max(last, lasts[hi - 1])
        firsts[lo:hi] = [new_first]
        lasts[lo:hi] = [new_last]
        added = new_last - new_first + 1 - had
        self.total += added
        return added

    def remove(self, first: int, last: int) -> int:
        """Remove all integers from `first` to `last`; return how many of them were there."""
        firsts, lasts = self._firsts, self._lasts
        lo = bisect_left(lasts, first)
        hi = bisect_right(firsts, last)
        if lo >= hi or last < first:
            return 0
        had = sum(lasts[i] - firsts[i] + 1 for i in range(lo, hi))
        keep: list[tuple[int, int]] = []
        if firsts[lo] < first:
            keep.append((firsts[lo], first - 1))
        if lasts[hi - 1] > last:
            keep.append((last + 1, lasts[hi - 1]))
        removed = had - sum(b - a + 1 for a, b in keep)
        kept_firsts, kept_lasts = [a for a, _ in keep], [b for _, b in keep]
        firsts[lo:hi] = kept_firsts
        lasts[lo:hi] = kept_lasts
        self.total -= removed
        return removed

    def overlap(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of the set that lie within `first` to `last`."""
        lo = bisect_left(self._lasts, first)
        hi = bisect_right(self._firsts, last)
        return [(max(first, self._firsts[i]), min(last, self._lasts[i])) for i in range(lo, hi)]

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of `first` to `last` that are not in the set."""
        holes = []
        at = first
        for a, b in self.overlap(first, last):
            if a > at:
                holes.append((at, a - 1))
            at = b + 1
        if at <= last:
            holes.append((at, last))
        return holes

    def pop_lowest(self, n: int = 1) -> list[tuple[int, int]]:
        """Remove and return the `n` lowest intervals (fewer if there are fewer)."""
        popped = list(zip(self._firsts[:n], self._lasts[:n], strict=True))
        del self._firsts[:n], self._lasts[:n]
        self.total -= sum(last - first + 1 for first, last in popped)
        return popped

    def copy(self) -> "IntervalSet":
        """An independent copy."""
        other = IntervalSet()
        other._firsts = self._firsts.copy()
        other._lasts = self._lasts.copy()
        other.total = self.total
        return other
