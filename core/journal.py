"""The journal's interface, and what both kinds share: numbering, staging, retention, registered cursors.

One lock guards a journal. `stage` is the hot path of every publisher, so it does the least that makes an event
accepted: number it, remember it (on disk: in memory that outlives the process), and return.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic, time_ns
from time import time as wall_clock

from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalFull, UsageError
from brokerless.core.event import (
    MAX_EVENT_BYTES,
    Receipt,
    check_data,
    check_source,
    check_topic,
)
from brokerless.core.frame import Frame, encode_frame
from brokerless.core.headfile import stage_prefix
from brokerless.core.journal_types import (
    EVENT_OVERHEAD_BYTES,
    FRAME_TARGET_BYTES,
    Chunk,
    JournalCounters,
    OnFull,
    Retention,
    check_label,
    cuts,
)
from brokerless.core.run import Run
from brokerless.core.token_lock import TokenLock


class _Topic:
    """Numbering of one topic, and its place in the batch that is being staged."""

    __slots__ = ("batch", "index", "name", "next_seq", "prefix")

    def __init__(self, name: str, next_seq: int = 0) -> None:
        self.name = name
        self.next_seq = next_seq
        self.batch = -1
        self.index = 0
        self.prefix = stage_prefix(name, "", "")


class Journal(ABC):
    """What a producer remembers so that it can send again. See MemoryJournal and DiskJournal.

    Set `on_frame` to be called with every frame as it becomes readable, in order, under the journal's lock:
    this is how a publisher sends live exactly what was stored.
    """

    on_frame: Callable[[Frame], None] | None

    def __init__(
        self,
        *,
        retention: Retention,
        on_full: OnFull,
        block_timeout_s: float,
        max_event_bytes: int,
        max_topics: int,
    ) -> None:
        if on_full not in ("evict", "block", "reject"):
            raise ConfigError("on_full", f"must be evict, block or reject, not {on_full!r}")
        if block_timeout_s < 0:
            raise ConfigError("block_timeout_s", "must not be negative")
        if not 0 < max_event_bytes <= MAX_EVENT_BYTES:
            raise ConfigError("max_event_bytes", f"must be 1 to {MAX_EVENT_BYTES}")
        self.retention = retention
        self.on_full = on_full
        self.block_timeout_s = block_timeout_s
        self.max_event_bytes = max_event_bytes
        self.max_topics = max_topics
        self.counters = JournalCounters()
        self.on_frame = None
        self._lock = TokenLock()
        self._take, self._give = self._lock.take, self._lock.give
        # Readers that wait for events and producers that wait for room; notified only if there are any.
        self._changed = threading.Condition()
        self._waiting = 0
        self._advances = 0
        self._closed = False
        self._source = ""
        self._epoch = 0
        self._topics: dict[str, _Topic] = {}
        # [oldest, written) can be read; [written, next) is staged.
        self._oldest = 0
        self._written = 0
        self._next = 0
        self._batch = 0
        self._batch_bytes = FRAME_TARGET_BYTES
        # Makes one staged event as durable as the journal is; False if it does not fit. None in memory.
        self._keeper: Callable[[int, int, bytes, bytes], bool] | None = None
        self._index: list[int]
        self._times: list[int]
        self._datas: list[bytes]
        self._contents: list[str]
        self._keys: list[str]
        self._staged_topics: list[tuple[str, int]]
        self._staged_bytes = self._stage_room = 0
        self._extras = False
        self._run = Run()
        self._clear_staged()

    # -- what is in it ------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The producer's name; empty until bound."""
        return self._source

    @property
    def epoch(self) -> int:
        """The epoch of events appended now."""
        return self._epoch

    @property
    def oldest(self) -> int:
        """The oldest offset that can be read."""
        return self._oldest

    @property
    def next(self) -> int:
        """The offset after the newest that can be read."""
        return self._written

    @property
    def staged(self) -> int:
        """Events accepted by `stage` and not yet readable."""
        return len(self._datas)

    @property
    def staged_bytes(self) -> int:
        """Size of what is staged, as it counts against the bounds."""
        with self._lock:
            self._end_run()
            return self._staged_bytes

    def sent(self) -> dict[str, int]:
        """For each topic of this epoch the seq that the next event will have: what the producer says it sent."""
        with self._lock:
            self._end_run()
            return {name: topic.next_seq for name, topic in self._topics.items()}

    # -- appending ----------------------------------------------------------------------------------

    def bind(self, source: str) -> None:
        """Name the source. A journal belongs to one source: another name raises ConfigError."""
        check_source(source)
        with self._lock:
            self._check_open()
            if self._source and self._source != source:
                raise ConfigError("source", f"{self._name} belongs to {self._source!r}, not to {source!r}")
            if not self._source:
                self._source = source
                self._bound()

    def stage(
        self, topic: str, data: bytes, content_type: str = "", key: str = "", time: int | None = None
    ) -> Receipt:
        """Accept one event; readers see it after `flush`. `time` is in µs, now if not given.

        Raises InvalidEvent, JournalFull or JournalError, and then the event was not accepted.
        """
        try:
            self._take()
        except IndexError:
            self._lock.acquire()
        try:
            if self._run.topic is not None:
                self._end_run()
            state = self._topics.get(topic)
            # Everything unusual goes the slow way: a new topic or batch, extras, no room, closed.
            if (
                state is None
                or state.batch != self._batch
                or type(data) is not bytes
                or content_type
                or key
                or self._extras
            ):
                return self._stage_slowly(topic, data, content_type, key, time)
            size = len(data)
            total = self._staged_bytes + size + EVENT_OVERHEAD_BYTES
            if total > self._stage_room or size > self.max_event_bytes:
                return self._stage_slowly(topic, data, content_type, key, time)
            if time is None:
                time = time_ns() // 1000
            if self._keeper is not None and not self._keeper(self._written, time, state.prefix, data):
                return self._stage_slowly(topic, data, content_type, key, time)
            self._index.append(state.index)
            self._times.append(time)
            self._datas.append(data)
            self._staged_bytes = total
            offset = self._next
            self._next = offset + 1
            seq = state.next_seq
            state.next_seq = seq + 1
            return Receipt(self._epoch, offset, seq)
        finally:
            self._give(None)

    def begin_run(self, topic: str) -> None:
        """Let small events of this topic be staged by appending only; see `run.Run`."""
        with self._lock:
            self._end_run()
            state = self._topics.get(topic)
            if state is not None and state.batch == self._batch and not self._extras:
                left = self._stage_room - self._staged_bytes
                self._run.begin(state, len(self._datas), left, self.max_event_bytes)

    def _end_run(self) -> None:
        """Count the events of a run as if each had been counted when it came."""
        state = self._run.end()
        if state is not None:
            added = self._datas[self._run.start :]
            self._index += [state.index] * len(added)
            self._next += len(added)
            state.next_seq += len(added)
            self._staged_bytes += sum(map(len, added)) + len(added) * EVENT_OVERHEAD_BYTES

    def _stage_slowly(
        self, topic: str, data: bytes, content_type: str, key: str, time: int | None
    ) -> Receipt:
        """`stage` for every case: makes room, begins batches, keeps content types and keys."""
        self._check_open()
        self._end_run()
        data = check_data(data, self.max_event_bytes)
        if content_type or key:
            check_label("content_type", content_type)
            check_label("key", key)
        state = self._topics.get(topic) or self._new_topic(topic)
        size = len(data) + EVENT_OVERHEAD_BYTES
        if size > self._batch_bytes:
            return self._append(
                topic, [data], content_type, [key] if key else None, None if time is None else [time]
            )
        if self._staged_bytes + size > self._stage_room:
            self._flush()
            self._admit(size, 1)
            room = self._batch_bytes
            if self.on_full != "evict" and self._cursors():
                room = min(room, self._free_bytes())
            self._stage_room = max(size, room)
        stamp = time_ns() // 1000 if time is None else time
        if self._keeper is not None:
            prefix = stage_prefix(topic, content_type, key) if content_type or key else state.prefix
            if not self._keeper(self._written, stamp, prefix, data):
                self._flush()
                if not self._keeper(self._written, stamp, prefix, data):
                    raise InvalidEvent("data", f"has {len(data)} bytes, more than the staging area holds")
                self._stage_room = self._batch_bytes
        if state.batch != self._batch:
            state.batch = self._batch
            state.index = len(self._staged_topics)
            self._staged_topics.append((topic, state.next_seq))
        if content_type or key or self._extras:
            self._add_extras(content_type, key)
        self._index.append(state.index)
        self._times.append(stamp)
        self._datas.append(data)
        self._staged_bytes += size
        receipt = Receipt(self._epoch, self._next, state.next_seq)
        self._next += 1
        state.next_seq += 1
        return receipt

    def flush(self) -> Frame | None:
        """Make everything staged readable, as one frame. On JournalError it stays staged, and accepted."""
        with self._lock:
            return self._flush()

    def _flush(self) -> Frame | None:
        if not self._datas:
            return None
        self._end_run()
        frame = encode_frame(
            self._source,
            self._epoch,
            self._written,
            topics=self._staged_topics,
            topic_index=self._index,
            times=self._times,
            datas=self._datas,
            content_types=self._contents if self._extras else None,
            keys=self._keys if self._extras and any(self._keys) else None,
        )
        self._admit(len(frame.raw), 0, force=True)
        self._write([frame])
        self._clear_staged()
        self._announce(frame)
        return frame

    def append(
        self, topic: str, data: bytes, content_type: str = "", key: str = "", time: int | None = None
    ) -> Receipt:
        """Accept one event and make it readable (with anything staged before it)."""
        keys = [key] if key else None
        return self.append_many(
            topic, [data], content_type, keys=keys, times=None if time is None else [time]
        )

    def append_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        content_type: str = "",
        *,
        keys: Sequence[str] | None = None,
        times: Sequence[int] | None = None,
    ) -> Receipt:
        """Accept many events of one topic and make them readable; all or none.

        Returns the receipt of the first, with `count`. Large lists become several frames.
        """
        checked = list(datas)
        if not checked:
            raise InvalidEvent("data", "append_many needs at least one event")
        try:
            # One pass in C checks that all are bytes and tells their size; a tenth of a loop's cost.
            size = len(b"".join(checked))
        except (TypeError, BufferError):
            size = -1
        if not 0 <= size <= self.max_event_bytes:
            checked = [check_data(data, self.max_event_bytes) for data in checked]
        for what, column in (("times", times), ("keys", keys)):
            if column is not None and len(column) != len(checked):
                raise InvalidEvent(what, f"has {len(column)} entries for {len(checked)} events")
        check_label("content_type", content_type)
        for key in keys or ():
            check_label("key", key)
        with self._lock:
            return self._append(topic, checked, content_type, keys, times)

    def _append(
        self,
        topic: str,
        datas: list[bytes],
        content_type: str,
        keys: Sequence[str] | None,
        times: Sequence[int] | None,
    ) -> Receipt:
        self._check_open()
        state = self._topics.get(topic) or self._new_topic(topic)
        n = len(datas)
        self._flush()
        now = (time_ns() // 1000).to_bytes(8, "little", signed=True)
        first, seq = self._next, state.next_seq
        frames = [
            encode_frame(
                self._source,
                self._epoch,
                first + lo,
                topics=[(topic, seq + lo)],
                topic_index=None,
                times=now * (hi - lo) if times is None else times[lo:hi],
                datas=datas[lo:hi],
                content_types=[content_type] if content_type else None,
                keys=list(keys[lo:hi]) if keys is not None else None,
            )
            for lo, hi in cuts(datas)
        ]
        self._admit(sum(len(f.raw) for f in frames), n)
        if self._next != first:
            # Another producer went ahead while this one was held back for room: number anew.
            return self._append(topic, datas, content_type, keys, times)
        self._write(frames)
        state.next_seq += n
        self._next += n
        for frame in frames:
            self._announce(frame)
        return Receipt(self._epoch, first, seq, n)

    def _new_topic(self, topic: str) -> _Topic:
        self._check_open()
        if not self._source:
            raise UsageError(f"{self._name} has no source yet: call bind(source) first")
        check_topic(topic)
        if len(self._topics) >= self.max_topics:
            raise InvalidEvent(
                "topic", f"would be number {self.max_topics + 1}; raise max_topics if that is meant"
            )
        state = self._topics[topic] = _Topic(topic)
        return state

    def _add_extras(self, content_type: str, key: str) -> None:
        """The first event with a content type or key in a batch gives the ones before it their empty ones."""
        if not self._extras:
            self._contents = [""] * len(self._datas)
            self._keys = [""] * len(self._datas)
            self._extras = True
        self._contents.append(content_type)
        self._keys.append(key)

    def _clear_staged(self) -> None:
        # New lists, because the frame keeps the old ones.
        self._index, self._times, self._datas = [], [], []
        self._contents, self._keys, self._staged_topics = [], [], []
        self._staged_bytes = self._stage_room = 0
        self._extras = False
        self._batch += 1
        self._run.topic = None

    def _announce(self, frame: Frame) -> None:
        """Count a frame that has become readable, wake readers and tell the publisher."""
        self._written = frame.next_offset
        counters = self.counters
        counters.appended += frame.count
        counters.frames += 1
        counters.bytes += len(frame.raw)
        self._notify()
        if self.on_frame is not None:
            self.on_frame(frame)

    def _notify(self) -> None:
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait without the journal's lock until `condition`, the end of `timeout`, or the journal is closed."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._closed or condition(), timeout)
            finally:
                self._waiting -= 1

    # -- reading ------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, offset: int, *, max_bytes: int = 1024 * 1024) -> Chunk:
        """Frames from `offset` on, at least one if there is any; the first may begin before `offset`.

        Raises Evicted when `offset` is older than `oldest`.
        """

    def wait(self, offset: int, timeout: float) -> bool:
        """Wait until an event at `offset` can be read, or `timeout` seconds; return whether it can."""
        if self._written <= offset:
            self._wait_for(lambda: self._written > offset, timeout)
        return self._written > offset

    # -- registered cursors and retention -----------------------------------------------------------

    def register(self, name: str, offset: int | None = None) -> int:
        """Protect what `name` has not had; return its position. A known name keeps its position.

        `offset` is where a new one begins (default: at the oldest event).
        """
        check_source(name)
        with self._lock:
            self._check_open()
            known = self._cursors()
            if name not in known:
                self._set_cursor(name, self._oldest if offset is None else offset)
            return self._cursors()[name]

    def advance(self, name: str, offset: int) -> None:
        """`name` has had everything before `offset`. Moving back is allowed (a replay was asked for)."""
        with self._lock:
            if name not in self._cursors():
                raise UsageError(f"{name!r} is not registered with {self._name}")
            self._set_cursor(name, offset)
            self._advances += 1
        self._notify()

    def unregister(self, name: str) -> None:
        """Stop protecting what `name` has not had; unknown names are ignored."""
        with self._lock:
            self._drop_cursor(name)
            self._advances += 1
        self._notify()

    def registered(self) -> dict[str, int]:
        """Positions of all registered cursors."""
        with self._lock:
            return dict(self._cursors())

    def _admit(self, size: int, events: int, *, force: bool = False) -> None:
        """Make room for `size` more bytes, or raise JournalFull as `on_full` says.

        `force` is for events that were accepted already: it drops what may be dropped and never raises.
        """
        limit = self.retention.max_bytes
        if limit and size > limit and not force:
            raise InvalidEvent("data", f"has {size} bytes encoded, but {self._name} holds at most {limit}")
        self._expire()
        deadline: float | None = None
        while (drop := self._must_drop(size, events)) is not None:
            if self._try_drop(drop):
                continue
            if force:
                return
            if self.on_full == "block":
                if deadline is None:
                    deadline = monotonic() + self.block_timeout_s
                    self.counters.blocked += 1
                left = deadline - monotonic()
                if left > 0 and not self._closed:
                    self._wait_for_room(left)
                    continue
            self.counters.rejected += events
            behind = self._cursors()
            raise JournalFull(
                self._name,
                max_bytes=limit,
                oldest=self._oldest,
                wanted=size,
                waiting_for=min(behind, key=behind.__getitem__),
            )

    def _wait_for_room(self, timeout: float) -> None:
        """Give the lock away until a cursor has moved: readers and other producers must not wait with us."""
        before = self._advances
        self._lock.release()
        try:
            self._wait_for(lambda: self._advances != before, timeout)
        finally:
            self._lock.acquire()

    def _try_drop(self, before: int) -> bool:
        """Drop the events before that offset, unless a registered cursor needs them and may not lose them."""
        lowest = min(self._cursors().values(), default=before)
        if lowest >= before:
            self.counters.dropped += self._drop_oldest(before)
            return True
        if self.on_full != "evict":
            return False
        evicted = before - max(lowest, self._oldest)
        self.counters.evicted += evicted
        self.counters.dropped += self._drop_oldest(before) - evicted
        return True

    def _expire(self) -> None:
        """Drop what is too old; a full journal may hold a producer back, an old one never does."""
        if self.retention.max_age_s:
            before = self._expired(wall_clock() - self.retention.max_age_s)
            if before is not None:
                self._try_drop(before)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._name)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the two kinds do differently ------------------------------------------------------------

    @property
    @abstractmethod
    def _name(self) -> str:
        """How messages call this journal."""

    @abstractmethod
    def _bound(self) -> None:
        """The source is known now: fix the epoch."""

    @abstractmethod
    def _free_bytes(self) -> int:
        """How many bytes can be staged so that they fit without dropping anything."""

    @abstractmethod
    def _write(self, frames: list[Frame]) -> None:
        """Store frames, all or none."""

    @abstractmethod
    def _must_drop(self, size: int, events: int) -> int | None:
        """The offset up to which the oldest part must go so that `size` bytes fit, or None if they do."""

    @abstractmethod
    def _expired(self, before_s: float) -> int | None:
        """The offset up to which everything was written before that time, or None."""

    @abstractmethod
    def _drop_oldest(self, before: int) -> int:
        """Drop what is before that offset; return how many events went."""

    @abstractmethod
    def _cursors(self) -> dict[str, int]: ...

    @abstractmethod
    def _set_cursor(self, name: str, offset: int) -> None: ...

    @abstractmethod
    def _drop_cursor(self, name: str) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Flush and release everything; closing twice is fine."""
