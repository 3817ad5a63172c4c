"""The journal's interface, and what both kinds share: numbering, staging, retention, registered cursors.

One lock guards a journal. `stage` is the hot path of every publisher, so it does the least that makes an event
accepted: number it, remember it (on disk: in memory that outlives the process), and return.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic, time_ns
from time import time as wall_clock

from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalFull, UsageError
from brokerless.core.event import (
    MAX_NESTED_BYTES,
    MAX_TIME,
    MIN_TIME,
    Receipt,
    check_data,
    check_source,
    check_time,
    check_topic,
)
from brokerless.core.frame import Frame, encode_frame
from brokerless.core.headfile import stage_prefix
from brokerless.core.journal_kind import JournalKind
from brokerless.core.journal_types import (
    EVENT_OVERHEAD_BYTES,
    FRAME_TARGET_BYTES,
    Chunk,
    JournalCounters,
    OnFull,
    Retention,
    Topic,
    check_batch,
    check_label,
    check_position,
    cuts,
)
from brokerless.core.run import Run
from brokerless.core.token_lock import TokenLock


class Journal(JournalKind):
    """What a producer remembers so that it can send again. See MemoryJournal and DiskJournal.

    Set `on_frame` to be called with every frame as it becomes readable, in order, under the journal's lock:
    this is how a publisher sends live exactly what was stored. It must not call the journal, nor raise: what
    it raises reaches the caller of `append` or `flush`, although the events are accepted.
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
        if not 0 < max_event_bytes <= MAX_NESTED_BYTES:
            raise ConfigError("max_event_bytes", f"must be 1 to {MAX_NESTED_BYTES}")
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
        # What ages are counted by: on disk they must mean something to the next process.
        self._clock: Callable[[], float] = wall_clock
        self._waiting = 0
        self._advances = 0
        self._closed = False
        self._source = ""
        self._epoch = 0
        self._topics: dict[str, Topic] = {}
        # [oldest, written) can be read; [written, next) is staged.
        self._oldest = 0
        self._written = 0
        self._next = 0
        self._batch = 0
        self._batch_bytes = FRAME_TARGET_BYTES
        # Makes one staged event as durable as the journal is; False if it does not fit. None in memory.
        self._keeper: Callable[[int, int, bytes, bytes], bool] | None = None
        # Forgets what the keeper kept, when it is stored; or only what it kept from an offset on.
        self._forget: Callable[[], None] | None = None
        self._rewind: Callable[[int], None] | None = None
        self._index: list[int] = []
        self._times: list[int] = []
        self._datas: list[bytes] = []
        self._contents: list[str] = []
        self._keys: list[str] = []
        self._staged_topics: list[tuple[str, int]] = []
        self._staged_bytes = self._stage_room = 0
        self._extras = False
        self._run = Run()

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
        if self._run.topic is not None:
            self.sent()  # ends the run
        return self._staged_bytes

    def sent(self) -> dict[str, int]:
        """For each topic of this epoch the seq that the next event will have: what the producer says it sent."""
        self._lock.acquire()
        try:
            self._run.end(self)
            return {name: topic.next_seq for name, topic in self._topics.items()}
        finally:
            self._give(None)

    # -- appending ----------------------------------------------------------------------------------

    def bind(self, source: str) -> None:
        """Name the source. A journal belongs to one source: another name raises ConfigError."""
        check_source(source)
        self._lock.acquire()
        try:
            self._check_open()
            if self._source and self._source != source:
                raise ConfigError("source", f"{self._name} belongs to {self._source!r}, not to {source!r}")
            if not self._source:
                self._source = source
                self._bound()
        finally:
            self._give(None)

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
        except BaseException:  # taken, and then a signal handler raised: see TokenLock
            self._give(None)
            raise
        try:
            if self._run.topic is not None:
                self._run.end(self)
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
            elif type(time) is not int or not MIN_TIME <= time <= MAX_TIME:
                return self._stage_slowly(topic, data, content_type, key, time)
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
        except TypeError:
            self._unstage()
            check_topic(topic)  # one that cannot be hashed
            raise
        except BaseException:
            self._unstage()
            raise
        finally:
            self._give(None)

    def _stage_slowly(
        self, topic: str, data: bytes, content_type: str, key: str, time: int | None
    ) -> Receipt:
        """`stage` for every case: makes room, begins batches, keeps content types and keys."""
        self._check_open()
        data = check_data(data, self.max_event_bytes)
        if content_type or key:
            check_label("content_type", content_type)
            check_label("key", key)
        stamp = time_ns() // 1000 if time is None else check_time(time)
        state = self._topics.get(topic) or self._new_topic(topic)
        size = len(data) + EVENT_OVERHEAD_BYTES
        if size > self._batch_bytes:
            return self._append(topic, [data], content_type, [key] if key else None, [stamp])
        if self._staged_bytes + size > self._stage_room:
            self._flush()
            self._admit(size, 1)
            room = self._batch_bytes
            if self.on_full != "evict" and self._cursors():
                room = min(room, self._free_bytes())
            elif self.retention.max_events:
                # As with bytes: a batch is a small part of the ring. Each event counts at least its overhead.
                room = min(room, self.retention.max_events // 16 * EVENT_OVERHEAD_BYTES)
            self._stage_room = max(size, room)
        if self._keeper is not None:
            prefix = stage_prefix(topic, content_type, key) if content_type or key else state.prefix
            if not self._keeper(self._written, stamp, prefix, data):
                self._flush()
                if not self._keeper(self._written, stamp, prefix, data):
                    raise InvalidEvent("data", f"has {len(data)} bytes, more than the staging area holds")
                self._stage_room = self._batch_bytes
        return self._stage_into(state, data, content_type, key, stamp)

    def _stage_into(self, state: Topic, data: bytes, content_type: str, key: str, time: int) -> Receipt:
        """Put an event that has its room into the batch."""
        if state.batch != self._batch:
            state.batch = self._batch
            state.index = len(self._staged_topics)
            self._staged_topics.append((state.name, state.next_seq))
            self._staged_bytes += len(state.prefix)
        if content_type or key or self._extras:
            self._add_extras(content_type, key)
            # Labels count too (a character has up to 4 bytes), or a batch of them could outgrow a frame.
            self._staged_bytes += 4 * (len(content_type) + len(key))
        self._index.append(state.index)
        self._times.append(time)
        self._datas.append(data)
        self._staged_bytes += len(data) + EVENT_OVERHEAD_BYTES
        receipt = Receipt(self._epoch, self._next, state.next_seq)
        self._next += 1
        state.next_seq += 1
        return receipt

    def _unstage(self) -> None:
        """After an error or an interrupt (Ctrl-C) anywhere in `stage`: leave only what was numbered."""
        if self._closed:
            return
        n = self._next - self._written
        del self._index[n:], self._times[n:], self._datas[n:], self._contents[n:], self._keys[n:]
        if self._staged_topics:
            name, first = self._staged_topics[-1]
            if self._topics[name].next_seq == first:
                self._topics[name].batch = -1
                del self._staged_topics[-1]
        if self._rewind is not None:
            self._rewind(self._next)

    def flush(self) -> Frame | None:
        """Make everything staged readable, as one frame. On JournalError it stays staged, and accepted."""
        self._lock.acquire()
        try:
            return self._flush()
        finally:
            self._give(None)

    def _flush(self) -> Frame | None:
        self._run.end(self)
        if not self._datas:
            return None
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
        end = frame.next_offset
        self._write([frame])
        # No call until the state fits what is stored: between calls no interrupt (Ctrl-C) gets in.
        self._written = end
        self._index, self._times, self._datas = [], [], []
        self._contents, self._keys, self._staged_topics = [], [], []
        self._staged_bytes = self._stage_room = 0
        self._extras = False
        self._batch += 1
        if self._forget is not None:
            self._forget()
        self._announce([frame])
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
        times: Sequence[int] | int | None = None,
    ) -> Receipt:
        """Accept many events of one topic and make them readable; all or none. One time may stand for all.

        Returns the receipt of the first, with `count`. Large lists become several frames.
        """
        checked, times = check_batch(datas, content_type, keys, times, self.max_event_bytes)
        self._lock.acquire()
        try:
            return self._append(topic, checked, content_type, keys, times)
        finally:
            self._give(None)

    def _append(
        self,
        topic: str,
        datas: list[bytes],
        content_type: str,
        keys: Sequence[str] | None,
        times: Sequence[int] | int | None,
    ) -> Receipt:
        self._check_open()
        if not isinstance(topic, str):
            check_topic(topic)
        state = self._topics.get(topic) or self._new_topic(topic)
        n = len(datas)
        self._flush()
        if times is None:
            times = time_ns() // 1000
        same = times.to_bytes(8, "little", signed=True) if isinstance(times, int) else b""
        first, seq = self._next, state.next_seq
        frames = [
            encode_frame(
                self._source,
                self._epoch,
                first + lo,
                topics=[(topic, seq + lo)],
                topic_index=None,
                times=same * (hi - lo) if isinstance(times, int) else times[lo:hi],
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
        # As in `_flush`: no call until the state fits what is stored.
        state.next_seq += n
        self._written = self._next = first + n
        self._announce(frames)
        return Receipt(self._epoch, first, seq, n)

    def _new_topic(self, topic: str) -> Topic:
        self._check_open()
        if not self._source:
            raise UsageError(f"{self._name} has no source yet: call bind(source) first")
        check_topic(topic)
        if len(self._topics) >= self.max_topics:
            raise InvalidEvent(
                "topic", f"would be number {self.max_topics + 1}; raise max_topics if that is meant"
            )
        state = self._topics[topic] = Topic(topic)
        return state

    def _add_extras(self, content_type: str, key: str) -> None:
        """The first event with a content type or key in a batch gives the ones before it their empty ones."""
        if not self._extras:
            blank = [""] * len(self._datas)
            self._contents, self._keys, self._extras = blank, blank[:], True
        self._contents.append(content_type)
        self._keys.append(key)

    def _stage_again(self, topic: str, data: bytes, content_type: str, key: str, time: int) -> None:
        """Stage what an earlier process had accepted: neither the bounds of today nor a full ring refuse it."""
        state = self._topics.get(topic)
        if state is None:
            state = self._topics[topic] = Topic(topic)
        self._stage_into(state, data, content_type, key, time)

    def _announce(self, frames: list[Frame]) -> None:
        """Count frames that have become readable, wake readers and tell the publisher."""
        counters = self.counters
        for frame in frames:
            counters.appended += frame.count
            counters.frames += 1
            counters.bytes += len(frame.raw)
        self._notify()
        if self.on_frame is not None:
            for frame in frames:
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
        try:
            check_source(name)
        except InvalidEvent as error:
            raise ConfigError("name", error.problem) from None
        if offset is not None:
            check_position(offset)
        self._lock.acquire()
        try:
            self._check_open()
            known = self._cursors()
            if name not in known:
                self._set_cursor(name, self._oldest if offset is None else offset)
            return self._cursors()[name]
        finally:
            self._give(None)

    def advance(self, name: str, offset: int) -> None:
        """`name` has had everything before `offset`. Moving back is allowed (a replay was asked for)."""
        check_position(offset)
        self._lock.acquire()
        try:
            self._check_open()
            if name not in self._cursors():
                raise UsageError(f"{name!r} is not registered with {self._name}")
            self._set_cursor(name, offset)
            self._advances += 1
        finally:
            self._give(None)
        self._notify()

    def unregister(self, name: str) -> None:
        """Stop protecting what `name` has not had; unknown names are ignored."""
        self._lock.acquire()
        try:
            self._check_open()
            self._drop_cursor(name)
            self._advances += 1
        finally:
            self._give(None)
        self._notify()

    def registered(self) -> dict[str, int]:
        """Positions of all registered cursors."""
        self._lock.acquire()
        try:
            return dict(self._cursors())
        finally:
            self._give(None)

    def _admit(self, size: int, events: int, *, force: bool = False) -> None:
        """Make room for `size` more bytes, or raise JournalFull as `on_full` says.

        `force` is for events that were accepted already: it drops what may be dropped and never raises.
        """
        limit = self.retention.max_bytes
        if limit and size > limit and not force:
            raise InvalidEvent("data", f"has {size} bytes encoded, but {self._name} holds at most {limit}")
        if self.retention.max_events and events > self.retention.max_events:
            problem = f"has {events} events, but {self._name} holds at most {self.retention.max_events}"
            raise InvalidEvent("data", problem)
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
                if left > 0:
                    self._wait_for_room(left)
                    self._check_open()  # it may have been closed meanwhile
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
        self._give(None)
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
            before = self._expired(self._clock() - self.retention.max_age_s)
            if before is not None:
                self._try_drop(before)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._name)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
