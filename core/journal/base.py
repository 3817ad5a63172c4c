"""The journal's interface, and what both kinds share: numbering, staging, retention, registered cursors.

One lock guards a journal. `stage` is the hot path of every publisher, so it does the least that makes an event
accepted: number it, remember it (on disk: in memory that outlives the process), and return.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from time import monotonic, sleep, time_ns
from time import time as wall_clock
from typing import Self, TypeVar

from brokerless.core.errors import (
    Closed,
    ConfigError,
    Evicted,
    Fault,
    InvalidEvent,
    JournalError,
    JournalFull,
    UsageError,
)
from brokerless.core.event import (
    MAX_NESTED_BYTES,
    NO_HEADERS,
    Headers,
    Reason,
    Receipt,
    check_data,
    check_headers,
    check_source,
    check_time,
    check_topic,
    plain,
)
from brokerless.core.frame import MAX_FRAME_EVENTS, Frame, Header, build_frame
from brokerless.core.journal.head_file import stage_prefix
from brokerless.core.journal.key_state import State
from brokerless.core.journal.lock import TokenLock
from brokerless.core.journal.segment import last_time
from brokerless.core.journal.staging import EVENT_OVERHEAD_BYTES, Batch, Lane, Stage, Topic
from brokerless.core.journal.types import (
    FRAME_TARGET_BYTES,
    Chunk,
    JournalCounters,
    OnFull,
    Retention,
    check_batch,
    check_label,
    check_position,
    cuts,
    headers_bytes,
    new_topic,
    stamps,
    total_bytes,
)
from brokerless.core.loss_log import LossLog
from brokerless.core.runtime.malloc import keep_freed_buffers

# So many take some 20 µs.
_SETTLED_AT_ONCE = 16


Refusal = TypeVar("Refusal", bound=Fault)


class Journal(ABC):
    """What a producer remembers so that it can send again. See MemoryJournal and DiskJournal.

    Set `on_frame` to be called with every frame as it becomes readable, in order, under the journal's lock: this is how
    a publisher sends live exactly what was stored. It must not call the journal, nor raise: that reaches the caller of
    `append` or `flush`, although the events are accepted.
    """

    on_frame: Callable[[Frame], None] | None
    # Whether single events may wait in memory for their place: where room is made by simply dropping the oldest frames.
    _may_keep = False
    # What most never set is here: Python 3.11 finds the attributes of an object quickly while it has at most 30.
    _keeps = False  # single events may wait for their place, while nobody waits for them
    _closed = False
    _refusal: Fault | None = None

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
        keep_freed_buffers()
        self.retention = retention
        self.on_full = on_full
        self.block_timeout_s = block_timeout_s
        self.max_event_bytes = max_event_bytes
        self.max_topics = max_topics
        self.counters = JournalCounters()
        self._loss_log = LossLog("brokerless.core.journal")
        self.on_frame = None
        # Topics, their numbering, and what is accepted but not yet readable.
        self._stage = Stage(Receipt, max_event_bytes)
        self._take, self._give = self._stage.take, self._stage.give
        self._lock = TokenLock(self._take, self._give)
        # Readers that wait for events and producers that wait for room; notified only if there are any.
        self._changed = threading.Condition()
        # What ages are counted by: on disk they must mean something to the next process.
        self._clock: Callable[[], float] = wall_clock
        self._waiting = 0
        self._advances = 0
        self._source = ""
        self._oldest = 0
        self._batch_bytes = FRAME_TARGET_BYTES
        self._headers: dict[int, Headers] = {}  # of staged events, by offset
        self._placed = 0  # kept events before this offset have their place

    # -- the steps in which the kinds differ; called under the lock ----------------------------------

    @property
    @abstractmethod
    def _name(self) -> str:
        """How messages call this journal."""

    @abstractmethod
    def _bound(self) -> None:
        """The source is known now: fix the epoch."""

    @abstractmethod
    def _renew_epoch(self, epoch: int = 0) -> None:
        """Events from here on have that epoch, by default the next one; nothing is staged."""

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

    # -- what is in it ------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The producer's name; empty until bound."""
        return self._source

    @property
    def epoch(self) -> int:
        """The epoch of events appended now."""
        return self._stage.epoch

    @property
    def oldest(self) -> int:
        """The oldest offset that can be read."""
        self.settle()  # which may drop some
        return self._oldest

    @property
    def next(self) -> int:
        """The offset after the newest that can be read."""
        return self._stage.batch.first

    @property
    def staged(self) -> int:
        """Events accepted by `stage` and not yet readable."""
        return len(self._stage.batch)

    @property
    def staged_bytes(self) -> int:
        """Size of what is staged, as it counts against the bounds."""
        return self._stage.batch.bytes

    def sent(self) -> dict[str, int]:
        """For each topic of this epoch the seq that the next event will have: what the producer says it sent."""
        self._lock.acquire()
        try:
            return {name: topic.next_seq for name, topic in self._stage.topics.items()}
        finally:
            self._give(None)

    def begin_epoch(self) -> int:
        """Begin a new epoch at the next event: what others have of this one is not what this journal has.

        For a journal that went back, with its machine, behind what it had told. Returns the epoch; raises JournalError.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            self._settle()
            self._flush()
            self._renew_epoch()
            return self._stage.epoch
        finally:
            self._give(None)

    # -- appending ----------------------------------------------------------------------------------

    def bind(self, source: str) -> None:
        """Name the source. A journal belongs to one source: another name raises ConfigError."""
        source = check_source(source)
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
        self,
        topic: str,
        data: bytes,
        content_type: str = "",
        key: str = "",
        time: int | None = None,
        headers: Mapping[str, str] | None = None,
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
            receipt = None if content_type or key or headers else self._stage.put(topic, data, time)
            if receipt is None:
                # Everything unusual: a new topic, labels, no room, closed.
                receipt = self._stage_slowly(topic, data, content_type, key, time, check_headers(headers))
            return receipt
        except TypeError:
            self._stage.mend()
            check_topic(topic)  # one that cannot be hashed
            raise
        except BaseException:
            self._stage.mend()
            if headers:
                self._headers.pop(self._stage.batch.next, None)
            raise
        finally:
            self._give(None)

    def lane(
        self,
        otherwise: Callable[..., Receipt],
        flush: Callable[[int], None],
        arm: Callable[[int], None],
        send_single: Callable[[bytes], None] | None = None,
    ) -> Lane:
        """`stage` for whoever calls it very often, with a say in when to flush: see `Lane`.

        With `send_single` call `settle` now and then.
        """
        if send_single is not None:
            self.keep_singles()
        return Lane(self._stage, self._source, otherwise, flush, arm, send_single)

    def keep_singles(self) -> None:
        """Let single events that were sent wait for their place, where this journal can: call `settle` now and then."""
        self._keeps = self._may_keep
        self._stage.keeps = self._keeps and not self._waiting

    def single_steps(self) -> tuple[Callable[[str, bytes, int | None], Receipt | None], Callable[[], bool]]:
        """Two calls for who sends single events at once, without what leads to them.

        The first is `stage`, but None if it must be called instead. The second lets the one event that is staged, and
        was sent, wait for its place; False if it must be flushed.
        """
        return self._stage.offer, partial(self._stage.keep, self._source)

    def _stage_slowly(
        self, topic: str, data: bytes, content_type: str, key: str, time: int | None, headers: Headers
    ) -> Receipt:
        """`stage` for every case: makes room, begins batches, keeps content types, keys and headers."""
        self._check_writable()
        data = check_data(data, self.max_event_bytes)
        content_type, key = check_label("content_type", content_type), check_label("key", key)
        stamp = time_ns() // 1000 if time is None else check_time(time)
        topic = plain(topic)
        state = self._stage.topics.get(topic) or self._new_topic(topic)
        extra = headers_bytes(headers)
        size = len(data) + EVENT_OVERHEAD_BYTES + extra
        if size > self._batch_bytes:
            columns = [headers] if headers else None
            return self._append(topic, [data], content_type, [key] if key else None, [stamp], columns)
        if self._stage.batch.bytes + size > self._stage.batch.room:
            self._flush()
            self._admit(size, 1)
            room = self._batch_bytes
            if self.on_full != "evict" and self._cursors():
                room = min(room, self._free_bytes())
            elif self.retention.max_events:
                # As with bytes: a batch is a small part of the ring. Each event counts at least its overhead.
                room = min(room, self.retention.max_events // 16 * EVENT_OVERHEAD_BYTES)
            self._stage.batch.room = max(size, room)
        prefix = state.prefix
        if content_type or key or headers:
            prefix = stage_prefix(topic, content_type, key, headers)
        self._keep_headers(headers)
        receipt = self._stage.add(state, data, content_type, key, stamp, prefix)
        if receipt is None:
            self._headers.pop(self._stage.batch.next, None)
            self._flush()
            self._stage.batch.room = self._batch_bytes
            self._keep_headers(headers)
            receipt = self._stage.add(state, data, content_type, key, stamp, prefix)
        if extra:
            self._stage.batch.room -= extra
        if receipt is None:
            raise InvalidEvent("data", f"has {len(data)} bytes, more than the staging area holds")
        return receipt

    def _keep_headers(self, headers: Headers) -> None:
        """For the event that is staged next; whoever fails to stage it takes them back."""
        if headers:
            self._headers[self._stage.batch.next] = headers

    def flush(self) -> Frame | None:
        """Make everything staged readable, as one frame. On JournalError it stays staged, and accepted."""
        self._lock.acquire()
        try:
            frame = self._flush()
        finally:
            self._give(None)
        self._lock.give_way()
        return frame

    def settle(self) -> None:
        """Place single events that were already sent live. Readers do this first; this is for the counters.

        A few at a time: producers go first.
        """
        while self._stage.kept:
            self._lock.acquire()
            try:
                self._settle(_SETTLED_AT_ONCE)
            finally:
                self._give(None)
            sleep(0)

    def _settle(self, most: int | None = None) -> None:
        stage = self._stage
        part = stage.kept[:most]
        size = 0
        for raw, first, topic, seq in part:
            size += len(raw)
            if first >= self._placed:  # or an interrupt came before it was taken off the list
                frame = Frame(raw, Header(self._source, stage.epoch, first, 1, [(topic, seq, 1)]))
                self._admit(len(raw), 0, force=True)
                self._write([frame])
                self._placed = first + 1
                self._count([frame])
        del stage.kept[: len(part)]
        stage.kept_bytes -= size

    def _flush(self) -> Frame | None:
        if self._stage.kept:
            self._settle()
        batch = self._stage.batch
        if not len(batch):
            return None
        frame = self._encode_staged(batch)
        self._admit(len(frame.raw), 0, force=True)
        following = self._begin_batch(batch.next)
        self._write([frame])
        # One step, and no call before it: an interrupt (Ctrl-C) comes before the write or after this.
        self._stage.batch = following
        if self._headers:
            self._headers = {}
        self._announce([frame])
        return frame

    def _encode_staged(self, batch: Batch) -> Frame:
        source, epoch, first = self._source, self._stage.epoch, batch.first
        known = self._headers
        headers = [known.get(at, NO_HEADERS) for at in range(first, batch.next)] if known else None
        raw = batch.single(source, epoch) if headers is None else None
        if raw is not None:
            return Frame(raw, Header(source, epoch, first, 1, batch.table()))
        table, index, times, datas, contents, keys = batch.columns()
        labels = keys if keys is not None and any(keys) else None
        return build_frame(source, epoch, first, table, index, times, datas, contents, labels, headers)

    def _begin_batch(self, first: int) -> Batch:
        """The batch after this one. It has its room at once if a full ring simply drops its oldest frames."""
        batch = self._stage.begin(first)
        if self.on_full == "evict" and not self.retention.max_events:
            batch.room = self._batch_bytes
        return batch

    def append(
        self,
        topic: str,
        data: bytes,
        content_type: str = "",
        key: str = "",
        time: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Accept one event and make it readable (with anything staged before it)."""
        keys = [key] if key else None
        times = None if time is None else [time]
        return self.append_many(topic, [data], content_type, keys=keys, times=times, headers=headers or None)

    def append_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        content_type: str = "",
        *,
        keys: Sequence[str] | None = None,
        times: Sequence[int] | int | None = None,
        headers: Sequence[Mapping[str, str]] | Mapping[str, str] | None = None,
    ) -> Receipt:
        """Accept many events of one topic and make them readable; all or none. One time may stand for all, and so may
        one dict of headers.

        Returns the receipt of the first, with `count`. Large lists become several frames.
        """
        columns = check_batch(datas, content_type, keys, times, headers, self.max_event_bytes)
        self._lock.acquire()
        try:
            receipt = self._append(topic, *columns)
        finally:
            self._give(None)
        self._lock.give_way()
        return receipt

    def _append(
        self,
        topic: str,
        datas: list[bytes],
        content_type: str,
        keys: Sequence[str] | None,
        times: Sequence[int] | int | None,
        headers: list[Headers] | None = None,
    ) -> Receipt:
        self._check_writable()
        if type(topic) is not str:
            topic = check_topic(topic)
        state = self._stage.topics.get(topic) or self._new_topic(topic)
        n = len(datas)
        self._flush()
        first, seq = self._stage.batch.next, state.next_seq
        frames = self._encode_all(topic, first, seq, datas, stamps(n, times), content_type, keys, headers)
        size = len(frames[0].raw) if len(frames) == 1 else sum(len(frame.raw) for frame in frames)
        self._admit(size, n)
        if self._stage.batch.next != first:
            # Another producer went ahead while this one was held back for room: number again.
            return self._append(topic, datas, content_type, keys, times, headers)
        following = self._begin_batch(first + n)
        self._write(frames)
        # As in `_flush`: no call until the state fits what is stored.
        state.next_seq += n
        self._stage.batch = following
        self._announce(frames)
        return Receipt(self._stage.epoch, first, seq, n)

    def _encode_all(
        self,
        topic: str,
        first: int,
        seq: int,
        datas: list[bytes],
        stamps: bytes,
        content_type: str,
        keys: Sequence[str] | None,
        headers: list[Headers] | None,
    ) -> list[Frame]:
        """Events of one topic as frames of a good size: nearly always one."""
        source, epoch, n = self._source, self._stage.epoch, len(datas)
        contents = [content_type] if content_type else None
        small = headers is None and n <= MAX_FRAME_EVENTS and total_bytes(datas) <= FRAME_TARGET_BYTES
        parts = None if small else cuts(datas, headers)
        if parts is None:
            labels = list(keys) if keys is not None else None
            table = [(topic, seq, n)]
            return [build_frame(source, epoch, first, table, b"", stamps, datas, contents, labels, headers)]
        frames = []
        for lo, hi in parts:
            table = [(topic, seq + lo, hi - lo)]
            labels = list(keys[lo:hi]) if keys is not None else None
            extra = headers[lo:hi] if headers is not None else None
            part, at = stamps[8 * lo : 8 * hi], first + lo
            frames.append(
                build_frame(source, epoch, at, table, b"", part, datas[lo:hi], contents, labels, extra)
            )
        return frames

    def _new_topic(self, topic: str) -> Topic:
        self._check_open()
        if not self._source:
            raise UsageError(f"{self._name} has no source yet: call bind(source) first")
        check_topic(topic)
        if len(self._stage.topics) >= self.max_topics:
            raise InvalidEvent(
                "topic", f"would be number {self.max_topics + 1}; raise max_topics if that is meant"
            )
        state = self._stage.topics[topic] = new_topic(topic)
        return state

    def _stage_again(
        self, topic: str, data: bytes, content_type: str, key: str, time: int, headers: Headers
    ) -> None:
        """Stage what an earlier process had accepted: neither the bounds of today nor a full ring refuse it."""
        topics = self._stage.topics
        state = topics.get(topic)
        if state is None:
            state = topics[topic] = new_topic(topic)
        self._keep_headers(headers)
        self._stage.add(state, data, content_type, key, time, b"")

    def _count(self, frames: list[Frame]) -> None:
        counters = self.counters
        for frame in frames:
            counters.appended += frame.header.count
            counters.frames += 1
            counters.bytes += len(frame.raw)

    def _announce(self, frames: list[Frame]) -> None:
        """Count frames that have become readable, wake readers and tell the publisher."""
        self._count(frames)
        if self._waiting:
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
            self._stage.keeps = False  # whoever waits here is told at once
            try:
                self._changed.wait_for(lambda: self._closed or condition(), timeout)
            finally:
                self._waiting -= 1
                self._stage.keeps = self._keeps and not self._waiting

    # -- reading ------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, offset: int, *, max_bytes: int = 1024 * 1024) -> Chunk:
        """Frames from `offset` on, at least one if there is any; the first may begin before `offset`.

        Raises Evicted when `offset` is older than `oldest`.
        """

    def state_end(self) -> int:
        """An offset as of which the newest event of every key can be had (`state`); -1 unless this journal compacts."""
        return -1

    def state(self) -> State:
        """The newest event of every key, of the events before its `end`; close it after use. Raises UsageError."""
        raise UsageError(f'{self._name} keeps no state of its keys: it was not made with compact="key"')

    def time_before(self, offset: int) -> int:
        """When the event before that offset was published, in µs; -1 if it is not there (any more)."""
        try:
            frames = self.read(offset - 1, max_bytes=1).frames if offset > 0 else []
        except Evicted:
            return -1
        if not frames or not frames[0].first_offset < offset <= frames[0].next_offset:
            return -1
        return last_time(frames[0].slice(offset - 1, offset))

    @abstractmethod
    def offset_at(self, time: int | datetime) -> int:
        """The offset of the first event at or after a time (µs since 1970, or a datetime with a time zone).

        `oldest` if all are later, `next` if all are earlier. Assumes that times rise; see JournalReader.
        """

    def wait(self, offset: int, timeout: float) -> bool:
        """Wait until an event at `offset` can be read, or `timeout` seconds; return whether it can."""
        if self.next <= offset:
            self._wait_for(lambda: self.next > offset, timeout)
        return self.next > offset

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
        if self.retention.max_age_s:
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
        first = max(lowest, self._oldest)
        evicted = before - first
        self.counters.evicted += evicted
        self._loss_log.add(self.source, Reason.EVICTED, evicted, first, before - 1)
        self.counters.dropped += self._drop_oldest(before) - evicted
        return True

    def _expire(self) -> None:
        """Drop what is too old; a full journal may hold a producer back, an old one never does."""
        before = self._expired(self._clock() - self.retention.max_age_s)
        if before is not None:
            self._try_drop(before)

    def _stop_staging(self) -> None:
        """A batch without room: from here on every event goes the way that asks whether the journal is open."""
        self._stage.batch = self._stage.begin(self._stage.batch.next)

    def leave_to_parent(self) -> None:
        """In a forked child: nobody there would read what is accepted."""
        self._closed = True
        with contextlib.suppress(IndexError):
            self._take()  # whoever held it is a thread that is not here
        self._give(None)
        self._lock = TokenLock(self._take, self._give)
        self._stop_staging()

    def refuse(self, reason: Callable[[int], Refusal]) -> Refusal:
        """Accept nothing more: whoever appends gets what `reason` makes of the end of what was accepted. Returns that.

        What was accepted stays, and is readable; if the disk refuses the last of it, once the journal is reopened.
        """
        self._lock.acquire()
        try:
            with contextlib.suppress(JournalError):
                self._flush()
            self._refusal = fault = reason(self._stage.batch.next)
            self._stop_staging()
            return fault
        finally:
            self._give(None)

    def _check_writable(self) -> None:
        self._check_open()
        if self._refusal is not None:
            raise self._refusal

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._name)

    @abstractmethod
    def close(self) -> None:
        """Flush and release everything; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
