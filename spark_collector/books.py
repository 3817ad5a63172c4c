"""What the collector has in its spool, so that nothing gets in twice; pure.

Per (source, epoch) the intervals of offsets that were appended. In-order streams are one interval each. The
books are saved from time to time with the spool offset that they speak of; what was appended after that is
read again from the spool itself, so that they are right after `kill -9` at any instant.
"""

import msgspec

from brokerless.core import Frame, IntervalSet
from brokerless.core.errors import UsageError

# A worker of a group gets every n-th event, so its intervals do not join. 100,000 of them are some 10 MB;
# beyond that the lowest are forgotten, which only matters if they are delivered once more.
MAX_INTERVALS = 100_000

Key = tuple[str, int]


class _Saved(msgspec.Struct, array_like=True):
    version: int
    spool: str
    spool_epoch: int
    spool_next: int
    intervals: list[tuple[str, int, list[tuple[int, int]]]]


class Books:
    """The offsets that are in the spool. Not thread-safe: the collector's lock guards it."""

    def __init__(self, max_intervals: int = MAX_INTERVALS) -> None:
        self._held: dict[Key, IntervalSet] = {}
        self._max = max_intervals
        self.forgotten = 0

    def fresh(self, frame: Frame) -> list[Frame]:
        """The parts of a frame that are not in the spool yet: itself, pieces of it, or nothing."""
        held = self._held.get((frame.source, frame.epoch))
        first, last = frame.first_offset, frame.next_offset - 1
        if held is None or not held or first > held.last:
            return [frame]
        return [frame.slice(a, b + 1) for a, b in held.missing(first, last)]

    def add(self, frame: Frame) -> None:
        """It is in the spool now."""
        key = (frame.source, frame.epoch)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = IntervalSet()
        held.add(frame.first_offset, frame.next_offset - 1)
        if len(held) > self._max:
            lowest = list(held)[: self._max // 10]
            held.remove(held.first, lowest[-1][1])
            self.forgotten += len(lowest)

    def has(self, source: str, epoch: int, offset: int) -> bool:
        """Whether this event is in the spool."""
        return (source, epoch) in self._held and offset in self._held[(source, epoch)]

    def settle(self, source: str, epoch: int, first: int, last: int) -> None:
        """Offsets that will never come (declared lost): do not wait for them when resuming."""
        self._held.setdefault((source, epoch), IntervalSet()).add(first, last)

    def resume(self, source: str, epochs: list[tuple[int, int]], end: int) -> int:
        """The first offset of a journal (with these epochs, up to `end`) that is not in the spool."""
        for n, (epoch, first) in enumerate(epochs):
            stop = epochs[n + 1][1] if n + 1 < len(epochs) else end
            held = self._held.get((source, epoch))
            if held is None:
                if stop > first:
                    return first
                continue
            holes = held.missing(first, stop - 1)
            if holes:
                return holes[0][0]
        return end

    def sources(self) -> list[str]:
        """All sources that have events in the spool."""
        return sorted({source for source, _ in self._held})

    def knows(self, source: str, epoch: int | None = None) -> bool:
        """Whether there is anything of this source (and epoch)."""
        if epoch is not None:
            return (source, epoch) in self._held
        return any(s == source for s, _ in self._held)

    def highest(self, source: str) -> tuple[int, int] | None:
        """`(epoch, next offset)` of the newest event of a source; None if there is none."""
        epochs = [(epoch, held.last + 1) for (s, epoch), held in self._held.items() if s == source and held]
        return max(epochs, default=None)

    def snapshot(self, spool: str, spool_epoch: int, spool_next: int) -> bytes:
        """The books as bytes, valid for the spool up to `spool_next`."""
        intervals = [(s, e, list(held)) for (s, e), held in self._held.items()]
        return msgspec.msgpack.encode(_Saved(1, spool, spool_epoch, spool_next, intervals))

    @classmethod
    def restore(cls, raw: bytes, spool: str, epochs: list[tuple[int, int]]) -> tuple["Books", int] | None:
        """The books and the spool offset from which to read on; None if they are of another spool or of a
        part
        of this one that was cut off (the spool must then be read from its beginning). Raises UsageError.
        """
        try:
            saved = msgspec.msgpack.decode(raw, type=_Saved)
        except msgspec.MsgspecError as error:
            raise UsageError(f"the collector's books are damaged: {error}") from None
        cut = any(first < saved.spool_next for epoch, first in epochs if epoch > saved.spool_epoch)
        if saved.version != 1 or saved.spool != spool or cut:
            return None
        books = cls()
        for source, epoch, intervals in saved.intervals:
            books._held[(source, epoch)] = IntervalSet(intervals)
        return books, saved.spool_next
