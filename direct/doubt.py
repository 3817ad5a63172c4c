"""Deliveries that came back without a word of their worker, without I/O: did a handler have them, or not?

A lease was over, a worker vanished, or the publisher is new. It counts as an attempt until the worker tells that it
had not begun. Who had the last attempt is not given up at once: its worker has the length of a lease to tell, or to
acknowledge.
"""

from collections.abc import Callable, Iterator

from brokerless.core import IntervalSet


class Doubts:
    """What may have been an attempt."""

    def __init__(self) -> None:
        self._open = IntervalSet()
        # Those that would be dead; first without a time, because nobody has said what time it is.
        self._new: set[int] = set()
        self._limbo: dict[int, float] = {}

    def add(self, offset: int, *, last: bool = False) -> None:
        """An attempt may have been made; with `last` there will be no other."""
        self._open.add(offset, offset)
        if last:
            self._new.add(offset)

    def __contains__(self, offset: int) -> bool:
        return offset in self._limbo or offset in self._new

    def __iter__(self) -> Iterator[int]:
        """Those that had their last attempt."""
        return iter([*self._limbo, *self._new])

    def settle(self, first: int, last: int) -> None:
        """These are done: nothing to doubt any more."""
        self._open.remove(first, last)

    def dispel(self, first: int, last: int, besides: IntervalSet) -> list[tuple[int, bool]]:
        """No handler had these, `besides` excepted: which were in doubt, and whether on their last attempt."""
        dispelled = []
        for a, b in self._open.overlap(first, last):
            for c, d in besides.missing(a, b):
                self._open.remove(c, d)
                for offset in range(c, d + 1):
                    dispelled.append((offset, offset in self))
                    self._limbo.pop(offset, None)
                    self._new.discard(offset)
        return dispelled

    def next_deadline(self) -> float:
        """When `judge` must be called."""
        if self._new:
            return 0.0
        return next(iter(self._limbo.values()), float("inf"))

    def judge(self, now: float, lease_s: float, is_settled: Callable[[int], bool]) -> list[int]:
        """Those about which nothing was heard for the length of a lease: they are dead."""
        for offset in sorted(self._new):
            self._limbo[offset] = now + lease_s
        self._new.clear()
        dead = []
        while self._limbo:
            offset, due = next(iter(self._limbo.items()))
            settled = is_settled(offset)
            if due > now and not settled:
                break
            del self._limbo[offset]
            if not settled:
                dead.append(offset)
        return dead
