"""A journal in memory: a bounded ring of frames that dies with the process."""

import time
from bisect import bisect_left, bisect_right
from datetime import datetime

from brokerless.core.errors import Evicted
from brokerless.core.event import MAX_EVENT_BYTES, Event, microseconds
from brokerless.core.frame import Frame
from brokerless.core.journal.base import Journal
from brokerless.core.journal.epoch import new_epoch
from brokerless.core.journal.key_state import MemoryState
from brokerless.core.journal.reader import first_at
from brokerless.core.journal.segment import first_time
from brokerless.core.journal.staging import EVENT_OVERHEAD_BYTES
from brokerless.core.journal.types import Chunk, Compact, OnFull, Retention, check_compact

# What Aeron gives a stream's retransmit buffer by default, too; some 500,000 events of 100 bytes.
DEFAULT_RETENTION = Retention(max_bytes=64 * 1024 * 1024)


class MemoryJournal(Journal):
    """Survives a consumer that is away for as long as the ring is large; a crash of the producer loses it all.

    Question 1 (producer faster than consumer): `on_full` decides, as in every journal. Question 2: a crashed
    producer loses what its consumers have not had, and the next one has a new epoch, so they see that.
    """

    def __init__(
        self,
        *,
        retention: Retention = DEFAULT_RETENTION,
        on_full: OnFull = "evict",
        block_timeout_s: float = 30.0,
        max_event_bytes: int = MAX_EVENT_BYTES,
        max_topics: int = 100_000,
        source: str | None = None,
        compact: Compact = "",
    ) -> None:
        """`compact="key"`: keep the newest event of every key when its frame is dropped; see `state`."""
        check_compact(compact)
        super().__init__(
            retention=retention,
            on_full=on_full,
            block_timeout_s=block_timeout_s,
            max_event_bytes=max_event_bytes,
            max_topics=max_topics,
        )
        # Parallel lists from `_head` on: a deque could not be searched by offset.
        self._frames: list[Frame | None] = []
        self._firsts: list[int] = []
        self._stamps: list[float] = []
        self._head = 0
        self._held_bytes = 0
        # By topic and key, in the order of offsets: dicts keep the order of insertion.
        self._newest: dict[tuple[str, str], Event] | None = {} if compact else None
        self._clock = time.monotonic  # a ring that dies with the process need not care when clocks are set
        self._positions: dict[str, int] = {}
        self._may_keep = on_full == "evict" and not retention.max_events and not retention.max_age_s
        if retention.max_bytes:
            # A batch must be a small part of the ring, or dropping one frame would drop most of it.
            self._batch_bytes = min(self._batch_bytes, max(1, retention.max_bytes // 16))
        if source is not None:
            self.bind(source)

    @property
    def _name(self) -> str:
        return f"MemoryJournal({self._source!r})"

    @property
    def held_bytes(self) -> int:
        """Bytes of encoded frames in the ring, and of those that will be."""
        return self._held_bytes + self._stage.kept_bytes

    def _bound(self) -> None:
        self._stage.epoch = new_epoch()

    def _renew_epoch(self, epoch: int = 0) -> None:
        self._stage.epoch, self._stage.topics = epoch or new_epoch(), {}
        self._stage.batch = self._begin_batch(self._stage.batch.next)

    def _free_bytes(self) -> int:
        free = self._batch_bytes
        if self.retention.max_bytes:
            free = min(free, self.retention.max_bytes - self._held_bytes)
        if self.retention.max_events:
            free = min(free, (self.retention.max_events - self._held_events()) * EVENT_OVERHEAD_BYTES)
        return free

    def _held_events(self) -> int:
        return self._stage.batch.next - self._oldest

    def _write(self, frames: list[Frame]) -> None:
        had, held = len(self._frames), self._held_bytes
        try:
            now = self._clock()
            for frame in frames:
                self._frames.append(frame)
                self._firsts.append(frame.first_offset)
                self._stamps.append(now)
                self._held_bytes += len(frame.raw)
        except BaseException:  # an interrupt: all or none
            del self._frames[had:], self._firsts[had:], self._stamps[had:]
            self._held_bytes = held
            raise

    def _must_drop(self, size: int, events: int) -> int | None:
        r = self.retention
        if self._head == len(self._frames):
            return None
        too_many = r.max_events and self._held_events() + events > r.max_events
        if too_many or (r.max_bytes and self._held_bytes + self._stage.batch.bytes + size > r.max_bytes):
            frame = self._frames[self._head]
            assert frame is not None
            return frame.next_offset
        return None

    def _expired(self, before_s: float) -> int | None:
        at = bisect_right(self._stamps, before_s, lo=self._head)
        if at == self._head:
            return None
        frame = self._frames[at - 1]
        assert frame is not None
        return frame.next_offset

    def _drop_oldest(self, before: int) -> int:
        had = self._oldest
        while self._head < len(self._frames):
            frame = self._frames[self._head]
            assert frame is not None
            if frame.next_offset > before:
                break
            end, size = frame.next_offset, len(frame.raw)
            if self._newest is not None:
                _apply(frame, self._newest)
            self._oldest = end
            self._held_bytes -= size
            self._frames[self._head] = None
            self._head += 1
        if self._head > 1024 and self._head * 2 > len(self._frames):
            del self._frames[: self._head], self._firsts[: self._head], self._stamps[: self._head]
            self._head = 0
        return self._oldest - had

    def state_end(self) -> int:
        return self.oldest if self._newest is not None else -1

    def state(self) -> MemoryState:
        if self._newest is None:
            super().state()
        assert self._newest is not None
        self._lock.acquire()
        try:
            self._settle()
            end, newest = self._oldest, self._newest.copy()
            half = (len(self._frames) - self._head) // 2
            frames = self._frames[self._head : self._head + half]
        finally:
            self._give(None)
        # As of the middle: what follows is not dropped before whoever asks has had all of it.
        for frame in frames:
            assert frame is not None
            _apply(frame, newest)
            end = frame.next_offset
        return MemoryState(end, list(newest.values()))

    def read(self, offset: int, *, max_bytes: int = 1024 * 1024) -> Chunk:
        self._lock.acquire()
        try:
            self._settle()
            if offset < self._oldest:
                raise Evicted(offset, self._oldest)
            at = bisect_right(self._firsts, offset, lo=self._head) - 1
            frames: list[Frame] = []
            size = 0
            if offset < self._stage.batch.first:
                for i in range(at, len(self._frames)):  # no slice: the ring may have many frames
                    frame = self._frames[i]
                    assert frame is not None
                    if frames and size + len(frame.raw) > max_bytes:
                        break
                    frames.append(frame)
                    size += len(frame.raw)
                    if size >= max_bytes:
                        break
            # Frames remember their decoded columns: readers get their own, so that the ring stays in its bound.
            own = [Frame(frame.raw, frame.header) for frame in frames]
            return Chunk(own, [], own[-1].next_offset if own else offset)
        finally:
            self._give(None)

    def offset_at(self, time: int | datetime) -> int:
        wanted = microseconds(time)
        self.flush()
        self._lock.acquire()
        try:
            self._settle()
            frames = [frame for frame in self._frames[self._head :] if frame is not None]
        finally:
            self._give(None)
        # Frames of the ring must not remember their columns: look at copies.
        at = bisect_left(frames, wanted, key=lambda frame: first_time(Frame(frame.raw, frame.header))) - 1
        return first_at(self, frames[max(0, at)].first_offset, wanted) if frames else self.next

    def _cursors(self) -> dict[str, int]:
        return self._positions

    def _set_cursor(self, name: str, offset: int) -> None:
        self._positions[name] = offset

    def _drop_cursor(self, name: str) -> None:
        self._positions.pop(name, None)

    def close(self) -> None:
        self._lock.acquire()
        try:
            if self._closed:
                return
            self._loss_log.close()
            self._flush()
            self._closed = True
            self._stop_staging()
        finally:
            self._give(None)
        self._notify()


def _apply(frame: Frame, newest: dict[tuple[str, str], Event]) -> None:
    """Bring the newest event of every key up to date with a frame."""
    for event in Frame(frame.raw, frame.header).events():
        if event.key:
            newest.pop((event.topic, event.key), None)
            if event.data:
                newest[event.topic, event.key] = event
