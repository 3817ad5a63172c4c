"""Which events the spool holds, so that none is appended twice; pure.

Per (source, epoch) this keeps the intervals of offsets that were appended. An in-order stream is one interval.
The state is saved from time to time together with the spool offset it refers to. What was appended after that is
read again from the spool itself, so the state is right after `kill -9` at any instant.
"""

import msgspec

from brokerless.core import Frame, IntervalSet, Position

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


class SeenOffsets:
    """The offsets that are in the spool. Not thread-safe: the collector's lock guards it."""

    def __init__(self, max_intervals: int = MAX_INTERVALS) -> None:
        self._held: dict[Key, IntervalSet] = {}
        self._sources: set[str] = set()
        self._max = max_intervals
        self.forgotten = 0

    def fresh(self, frame: Frame) -> list[Frame]:
        """The parts of a frame that are not in the spool yet: all of it, slices of it, or nothing."""
        held = self._held.get((frame.source, frame.epoch))
        first, last = frame.first_offset, frame.next_offset - 1
        if held is None or not held or first > held.last:
            return [frame]
        return [frame.slice(a, b + 1) for a, b in held.missing(first, last)]

    def add(self, frame: Frame) -> None:
        """Record that a frame was appended."""
        held = self._intervals(frame.source, frame.epoch)
        held.add(frame.first_offset, frame.next_offset - 1)
        if len(held) > self._max:
            lowest = list(held)[: self._max // 10]
            held.remove(held.first, lowest[-1][1])
            self.forgotten += len(lowest)

    def _intervals(self, source: str, epoch: int) -> IntervalSet:
        held = self._held.get((source, epoch))
        if held is None:
            held = self._held[(source, epoch)] = IntervalSet()
            self._sources.add(source)
        return held

    def has(self, source: str, epoch: int, offset: int) -> bool:
        """Whether this event is in the spool."""
        return (source, epoch) in self._held and offset in self._held[(source, epoch)]

    def skip(self, source: str, epoch: int, first: int, last: int) -> None:
        """Record offsets that will never come (declared lost), so that a resume does not wait for them."""
        self._intervals(source, epoch).add(first, last)

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

    def knows(self, source: str, epoch: int | None = None) -> bool:
        """Whether there is anything of this source (and epoch)."""
        return source in self._sources if epoch is None else (source, epoch) in self._held

    def positions(self) -> dict[str, Position]:
        """The position after the newest event, per source."""
        newest: dict[str, Position] = {}
        for (source, epoch), held in self._held.items():
            if held and (source not in newest or epoch > newest[source].epoch):
                newest[source] = Position(epoch, held.last + 1)
        return newest

    def snapshot(self, spool: str, spool_epoch: int, spool_next: int) -> bytes:
        """The state as bytes, valid for the spool up to `spool_next`."""
        intervals = [(s, e, list(held)) for (s, e), held in self._held.items()]
        return msgspec.msgpack.encode(_Saved(1, spool, spool_epoch, spool_next, intervals))

    @classmethod
    def restore(
        cls, raw: bytes, spool: str, epochs: list[tuple[int, int]]
    ) -> tuple["SeenOffsets", int] | None:
        """The state and the spool offset from which to read on.

        None if it is damaged, of another spool, or of a part of this spool that was cut off. The spool must then
        be read from its beginning.
        """
        try:
            saved = msgspec.msgpack.decode(raw, type=_Saved)
        except msgspec.MsgspecError:
            return None
        cut = any(first < saved.spool_next for epoch, first in epochs if epoch > saved.spool_epoch)
        if saved.version != 1 or saved.spool != spool or cut:
            return None
        seen = cls()
        for source, epoch, intervals in saved.intervals:
            seen._held[(source, epoch)] = IntervalSet(intervals)
            seen._sources.add(source)
        return seen, saved.spool_next
