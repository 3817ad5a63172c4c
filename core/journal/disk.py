"""A journal on disk: append-only segment files that survive `kill -9`, and a power cut as far as they are synced."""

import contextlib
import errno
import logging
import os
import threading
import time as _time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from brokerless.core.errors import Closed, ConfigError, JournalError, JournalLocked, UsageError
from brokerless.core.event import MAX_EVENT_BYTES, check_source
from brokerless.core.frame import Frame
from brokerless.core.journal.base import Journal
from brokerless.core.journal.cursor_table import CursorTable
from brokerless.core.journal.epoch import next_epoch, next_term
from brokerless.core.journal.head_file import FIRST_SEGMENT, LAST_SEGMENT, NEXT, STAGE_BYTES, HeadFile
from brokerless.core.journal.key_state import (
    StateFile,
    StateWriter,
    compact,
    list_states,
    newest_state,
    remove_unfinished,
)
from brokerless.core.journal.meta import META, Meta, load_meta, save_meta
from brokerless.core.journal.reader import HEAD, JournalReader, list_segments
from brokerless.core.journal.recovery import Recovered, recover
from brokerless.core.journal.segment import (
    INDEX_EVERY_BYTES,
    SALT_BYTES,
    Snapshot,
    encode_header,
    index_entry,
    index_name,
    segment_name,
)
from brokerless.core.journal.staging import EVENT_OVERHEAD_BYTES
from brokerless.core.journal.truncate import truncate_segments
from brokerless.core.journal.types import Chunk, Compact, OnFull, Retention, check_compact, new_topic
from brokerless.core.journal.witness import Witness
from brokerless.core.runtime import fork as forks
from brokerless.core.runtime.clock import elapsed_s
from brokerless.core.runtime.files import (
    FileLocked,
    lock_file,
    make_directories,
    remove_leftovers,
    sync_directory,
    sync_file,
    write_all,
)
from brokerless.core.runtime.process import boot_id

log = logging.getLogger(__name__)
Fsync = Literal["never", "interval", "batch"]

# Room for an outage of hours at a few thousand events a second; Kafka keeps a week, NATS everything.
DEFAULT_RETENTION = Retention(max_bytes=1024 * 1024 * 1024)
# Kafka's segments have 1 GiB; smaller ones make retention finer, and 64 MiB still are few files.
SEGMENT_BYTES = 64 * 1024 * 1024
MIN_SEGMENT_BYTES = 16 * 1024
# What one pass of compaction reads at most, because it remembers the keys in it: some 50 MB for 500,000 of them.
_COMPACT_BYTES = 64 * 1024 * 1024


class _Sealed(msgspec.Struct):
    """What the writer knows of a segment that it no longer appends to."""

    number: int
    size: int
    written_s: float


class DiskJournal(Journal):
    """Everything that was accepted survives the process, and its consumers can be away for as long as it keeps.

    `fsync` says what else is survived. `"never"`: a killed process, not a power cut. `"interval"`: a power cut
    loses at most the last `sync_interval_s`. `"batch"`: a power cut loses nothing, every append waits for the
    disk. Question 1 (producer faster than consumer): `on_full`. Question 2: nothing is lost by a crash of
    either side, until retention has passed a consumer, and then the journal says so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        source: str | None = None,
        retention: Retention = DEFAULT_RETENTION,
        on_full: OnFull = "evict",
        block_timeout_s: float = 30.0,
        fsync: Fsync = "interval",
        sync_interval_s: float = 1.0,
        segment_bytes: int = 0,
        max_event_bytes: int = MAX_EVENT_BYTES,
        max_topics: int = 100_000,
        compact: Compact | None = None,
    ) -> None:
        """Open or make the journal at `path`; one process at a time.

        `compact="key"`: the newest event of every topic and key is kept when retention drops its segment, unless it has
        no data; see `state`. The journal remembers that: None leaves it as it is, "" ends it and removes what was kept.
        Raises ConfigError, JournalLocked, JournalError.
        """
        super().__init__(
            retention=retention,
            on_full=on_full,
            block_timeout_s=block_timeout_s,
            max_event_bytes=max_event_bytes,
            max_topics=max_topics,
        )
        if fsync not in ("never", "interval", "batch"):
            raise ConfigError("fsync", f"must be never, interval or batch, not {fsync!r}")
        if sync_interval_s <= 0:
            raise ConfigError("sync_interval_s", "must be more than 0")
        if compact is not None:
            check_compact(compact)
        self.path = os.fspath(path)
        self.fsync = fsync
        self.segment_bytes = segment_bytes or _segment_bytes(retention)
        # Half of the staging area, because topics and keys are not counted. Synced batches are not staged.
        self._batch_bytes = 0 if fsync == "batch" else STAGE_BYTES // 2
        if retention.max_bytes:
            self._batch_bytes = min(self._batch_bytes, retention.max_bytes // 16)
        self._fd = -1
        self._index_fd = -1
        # Why nothing more is accepted, once the disk has failed to sync.
        self._failed_sync = ""
        # Python 3.11 finds what is only in the class slowly, and every write looks for these.
        self._closed, self._refusal = False, None
        # Ages must mean something to the next process, but a clock that is set must not expire everything: the wall
        # clock of the opening, and from there what has really passed (sleep of the machine included).
        begun = _time.time() - elapsed_s()
        self._clock = lambda: begun + elapsed_s()
        self._owner = os.getpid()
        self._dirty = False
        self._moved = False  # a cursor, since they were synced
        # Segments that were left without a sync (fsync="never"), and whether there are new names in the directory.
        self._unsynced: list[int] = []
        self._new_names = False
        self._sync_lock = threading.Lock()
        # What was kept of dropped events, and the thread that keeps ahead of retention. Held while compacting; whoever
        # also takes the journal's lock takes that one first.
        self._wanted_compact = compact
        self._state: StateFile | None = None
        self._state_lock = threading.Lock()
        self._compactor: threading.Thread | None = None
        self._sealed_one = threading.Event()
        self._syncer: threading.Thread | None = None
        self._stop = threading.Event()
        self.sync_interval_s = sync_interval_s
        self._make_directory()
        self._lock_fd = _lock(self.path)
        try:
            self._open(source)
        except OSError as error:
            self._release()
            raise JournalError(self.path, f"cannot be opened: {error.strerror}", errno=error.errno) from None
        except BaseException:
            self._release()
            raise
        forks.remember(self)
        if fsync == "interval":
            self._syncer = threading.Thread(
                target=self._sync_regularly, name=f"sync {self.path}", daemon=True
            )
            self._syncer.start()
        if self._meta.compact:
            self._start_compactor()

    @property
    def _name(self) -> str:
        return self.path

    # -- opening ------------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        try:
            make_directories(self.path, sync=self.fsync != "never")
        except FileExistsError:
            raise JournalError(
                self.path, "is a file, a journal needs a directory of its own", errno=errno.EEXIST
            ) from None
        except OSError as error:
            problem = f"the directory cannot be made: {error.strerror}"
            raise JournalError(self.path, problem, errno=error.errno) from None

    def _open(self, source: str | None) -> None:
        remove_leftovers(os.path.join(self.path, META))
        meta = load_meta(self.path)
        fresh = meta is None
        if meta is None:
            if list_segments(self.path):
                raise JournalError(self.path, "has segments but no meta.json; it cannot be read without it")
            meta = Meta(salt=os.urandom(4).hex())
        self._meta = meta
        self._salt = bytes.fromhex(meta.salt)
        self._head = HeadFile(os.path.join(self.path, HEAD), create=True)
        self._cursor_table = CursorTable(os.path.join(self.path, "cursors"))
        if fresh:
            self._head.set(NEXT, 0)
        self._sealed = [_Sealed(n, *self._stat(n)) for n in list_segments(self.path)]
        self._sealed_bytes = sum(s.size for s in self._sealed)
        self._witness = Witness(self.path, meta.salt)
        testimony = self._witness.testimony()
        self._load_state()
        compacted = self._state.end if self._state is not None else 0
        numbers = [s.number for s in self._sealed]
        state = recover(self.path, meta, self._head, numbers, testimony, compacted)
        self.recovered: Recovered = state.report
        self._source, self._stage.epoch = meta.source, meta.epoch
        self._stage.batch = self._stage.begin(state.next)
        self._stage.topics = {name: new_topic(name, seq) for name, seq in state.topics.items()}
        if state.report.epoch_raised and meta.epochs and not meta.replica:
            self._begin_epoch()
        if state.report.epoch_raised or fresh:
            # What a cursor had beyond the end is lost, and those offsets are given to other events now.
            for name, position in list(self._cursor_table.positions.items()):
                if position > state.next:
                    self._cursor_table.set(name, state.next)
        meta.boot_id, meta.clean, meta.synced, meta.instance = boot_id(), False, False, os.urandom(16).hex()
        self._witness.begin(meta.instance, state.next)
        save_meta(self.path, meta, sync=self.fsync != "never")
        self._reader: JournalReader | None = None
        if self._sealed and state.append_to == self._sealed[-1].number:
            self._reopen(self._sealed.pop(), state.append_at, state.append_first)
            self._sealed_bytes = sum(s.size for s in self._sealed)
        else:
            self._roll()
        self._head.set(FIRST_SEGMENT, self._sealed[0].number if self._sealed else self._number)
        self._head.set(NEXT, self._stage.batch.next)
        self._reader = JournalReader(self.path)
        self._oldest = min(self._reader.oldest, self._stage.batch.next)
        self._check_state()
        if meta.replica and self._state is not None and self._state.end == state.next:
            self._drop_oldest(state.next)  # it was adopted, and perhaps no more than that
        if source is not None:
            self.bind(source)
        for time, topic, content_type, key, data, headers in state.staged:
            self._stage_again(topic, data, content_type, key, time, headers)
        self._flush()
        self._head.clear_staged()
        self._stage.attach(self._head)

    # -- the newest event of every key: see key_state.py ------------------------------------------------

    def _load_state(self) -> None:
        meta, wanted = self._meta, self._wanted_compact
        self._had_compact = bool(meta.compact)
        if wanted is not None and wanted != meta.compact:
            meta.compact = wanted
        if self._state is not None:
            self._state.close()
        self._state = newest_state(self.path, self._salt) if meta.compact else None
        remove_unfinished(self.path)
        keep = self._state.path if self._state is not None else ""
        for path in list_states(self.path):
            if path != keep:
                os.unlink(path)

    def _check_state(self) -> None:
        """A state must reach as far as the segments that are gone; otherwise begin one without what is not known."""
        if not self._meta.compact:
            return
        state = self._state
        if state is not None and state.complete and state.end >= self._oldest:
            return
        if self._had_compact and self._oldest:
            self.counters.compaction_damaged += 1
            log.error(
                "journal %s: what was kept of events before offset %d is %s: keys that did not change since are gone",
                self.path,
                self._oldest,
                "missing" if state is None else "damaged" if not state.complete else f"older, of {state.end}",
            )
        if state is not None and not state.complete and state.end >= self._oldest:
            return  # what can be read of it is served, and the rest is named as lost
        self._replace_state(self._begin_state(self._oldest))

    def _begin_state(self, end: int) -> StateFile:
        return StateWriter(self.path, self._salt, sync=self.fsync != "never").finish(end)

    def _replace_state(self, new: StateFile) -> None:
        old, self._state = self._state, new
        if old is not None:
            old.close()
            if old.path != new.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old.path)

    def state_end(self) -> int:
        state = self._state
        return state.end if state is not None else -1

    def state(self) -> StateFile:
        self._check_open()
        for _ in range(8):  # it may be replaced while we open it
            state = self._state
            if state is None:
                break
            try:
                return StateFile(state.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = f"its state cannot be read: {error.strerror}"
                raise JournalError(self.path, problem, errno=error.errno) from None
        super().state()
        raise AssertionError

    def _compact_to(self, bounds: list[tuple[int, int]], stopped: Callable[[], bool]) -> None:
        """Bring the state up to the last of these: ends of segments, with their sizes. Raises OSError, JournalError."""
        with self._state_lock:
            at = 0
            while at < len(bounds) and not stopped():
                state, size = self._state, 0
                if state is None:
                    return
                while at < len(bounds) and (
                    bounds[at][0] <= state.end or size + bounds[at][1] <= _COMPACT_BYTES or not size
                ):
                    end, more = bounds[at]
                    size += more if end > state.end else 0
                    at += 1
                if end <= state.end:
                    return
                sync = self.fsync != "never"
                done = compact(self.path, self._salt, state, state.end, end, sync=sync, stopped=stopped)
                if done is None:
                    return
                self._replace_state(done.state)
                self.counters.compactions += 1
                if done.damaged:
                    self.counters.compaction_damaged += done.damaged
                    log.error(
                        "journal %s: %d frames before offset %d are damaged: their keys keep an older value, or none",
                        self.path,
                        done.damaged,
                        end,
                    )

    def _bounds(self, before: int) -> list[tuple[int, int]]:
        """Where sealed segments end, as far as that is not beyond an offset, with their sizes."""
        found = [(self._begins(which + 1), sealed.size) for which, sealed in enumerate(self._sealed)]
        return [bound for bound in found if bound[0] <= before]

    def _carry(self, before: int) -> None:
        """Segments before that offset are about to be dropped. Raises JournalError."""
        bounds = self._bounds(before)
        if self._state is not None and bounds and bounds[-1][0] > self._state.end:
            # And half of what is there, so that not every segment needs a state of its own.
            bounds = self._bounds(self._stage.batch.first)[: max(len(bounds), len(self._sealed) // 2)]
            try:
                self._compact_to(bounds, lambda: False)
            except OSError as error:
                self.counters.failed += 1
                problem = f"cannot keep the newest event of every key: {error.strerror}; {self._accepted()}"
                raise JournalError(self.path, problem, errno=error.errno) from None

    def compact_by_key(self) -> None:
        """From here on keep the newest event of every key, as if opened with `compact="key"`. Raises JournalError."""
        self._lock.acquire()
        try:
            self._check_writable()
            if self._meta.compact:
                return
            self._meta.compact = "key"
            try:
                self._replace_state(self._begin_state(self._oldest))
            except OSError as error:
                self._meta.compact = ""
                problem = f"cannot keep the newest event of every key: {error.strerror}"
                raise JournalError(self.path, problem, errno=error.errno) from None
            self._keep_meta()
            self._start_compactor()
        finally:
            self._give(None)

    def _start_compactor(self) -> None:
        self._compactor = threading.Thread(
            target=self._compact_ahead, name=f"compact {self.path}", daemon=True
        )
        # Not before the next segment: what a power cut took may come back from a mirror.
        self._sealed_one.clear()
        self._compactor.start()

    def _compact_ahead(self) -> None:
        """Compact sealed segments before retention needs it, so that no producer waits and a snapshot is near the end.

        The state is rewritten each time, so only when as much has come as it has: what is written at most doubles.
        """
        while self._sealed_one.wait() and not self._stop.is_set():
            self._sealed_one.clear()
            self._lock.acquire()
            try:
                state = self._state
                if self._closed or state is None:
                    return
                bounds = self._bounds(self._stage.batch.first)
                held = self._sealed_bytes
            finally:
                self._give(None)
            waiting = sum(size for end, size in bounds if end > state.end)
            if not waiting or waiting < min(state.size, held / 2):
                continue
            try:
                self._compact_to(bounds, self._stop.is_set)
            except (OSError, JournalError) as error:  # retention tries again, and tells its caller
                self.counters.failed += 1
                log.error("journal %s: cannot keep the newest event of every key: %s", self.path, error)
            except Closed:
                return

    def _stat(self, number: int) -> tuple[int, float]:
        found = os.stat(os.path.join(self.path, segment_name(number)))
        return found.st_size, found.st_mtime

    def _begin_epoch(self) -> None:
        """Offsets go on, seqs start over: nobody can take the new events for old ones."""
        self._stage.epoch = next_epoch(self._meta.epoch)
        self._meta.epochs.append((self._stage.epoch, self._stage.batch.next))
        self._stage.topics = {}

    def _bound(self) -> None:
        self._meta.source = self._source
        self._begin_epoch()
        try:
            save_meta(self.path, self._meta, sync=self.fsync != "never")
        except OSError as error:
            self._meta.source = self._source = ""
            self._meta.epochs.pop()
            problem = f"cannot be bound to its source: {error.strerror}"
            raise JournalError(self.path, problem, errno=error.errno) from None

    def epochs(self) -> list[tuple[int, int]]:
        """`(epoch, first offset)` of all epochs of this journal, oldest first."""
        self._lock.acquire()
        try:
            return list(self._meta.epochs)
        finally:
            self._give(None)

    def bind(self, source: str) -> None:
        """Name the source. A journal belongs to one source: another name raises ConfigError."""
        if self._meta.replica:
            problem = "is a mirror's copy: its source has another writer, which uses the same offsets"
            raise UsageError(
                f"{self.path} {problem}; `brokerless mirror promote` makes it the source's journal"
            )
        super().bind(source)

    # -- copies of another writer's journal: see brokerless.direct.mirror --------------------------------

    @property
    def replica(self) -> bool:
        """Whether it is a copy of a journal that another writer has."""
        return self._meta.replica

    def begin_copy(self, source: str) -> None:
        """From here on this is a copy of the journal of `source`: only `append_frames` adds to it.

        Raises ConfigError if it belongs to another source, JournalError.
        """
        source = check_source(source)
        self._lock.acquire()
        try:
            self._check_writable()
            self._flush()
            if self._source and self._source != source:
                raise ConfigError("source", f"{self.path} belongs to {self._source!r}, not to {source!r}")
            self._source = self._meta.source = source
            self._meta.replica = True
            self._keep_meta()
            self._stop_staging()
        finally:
            self._give(None)

    def append_frames(self, frames: Sequence[Frame], epochs: Sequence[tuple[int, int]] = ()) -> None:
        """Append frames as the source's writer made them, all or none: same epochs, offsets and seqs.

        What lies between the end and the first of them stays a hole. `epochs` has what is known of the source's, as
        `epochs()` has it. Raises UsageError if this is no copy or a frame does not follow, JournalError.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            end = self._stage.batch.next
            for frame in frames:
                if not self._meta.replica or frame.source != self._source or frame.first_offset < end:
                    raise UsageError(f"{frame!r} does not follow offset {end} of {self.path}")
                end = frame.next_offset
            at = 0
            while at < len(frames):
                first, stop = frames[at], at + 1
                while stop < len(frames) and _joined(frames[stop - 1], frames[stop]):
                    stop += 1
                self._append_run(first, frames[at:stop], epochs)
                at = stop
            self._adopt(epochs, self._stage.batch.next)
        finally:
            self._give(None)

    def state_writer(self) -> StateWriter:
        """For the state of the source's writer, which `adopt_state` takes over. Raises JournalError."""
        try:
            return StateWriter(self.path, self._salt, sync=self.fsync != "never")
        except OSError as error:
            raise JournalError(
                self.path, f"cannot write a state: {error.strerror}", errno=error.errno
            ) from None

    def adopt_state(self, writer: StateWriter, end: int, epochs: Sequence[tuple[int, int]] = ()) -> None:
        """Take over the writer's state as of an offset beyond the end, and go on there; what was here is dropped.

        Raises UsageError if this is no compacting copy or has more, JournalError.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            if not self._meta.replica or self._state is None or end < self._stage.batch.next:
                raise UsageError(f"{self.path} cannot start over at {end}")
            with self._state_lock:
                self._replace_state(writer.finish(end))
            self._stage.batch = self._stage.begin(end)
            self._adopt(epochs, end)
            self._roll()
            self._head.set(NEXT, end)
            self._witness.advance(end)
            self._drop_oldest(end)
        except OSError as error:
            raise JournalError(
                self.path, f"cannot keep a state: {error.strerror}", errno=error.errno
            ) from None
        finally:
            writer.abandon()
            self._give(None)

    def _append_run(self, first: Frame, frames: Sequence[Frame], epochs: Sequence[tuple[int, int]]) -> None:
        """Frames of one epoch with nothing between them."""
        if first.first_offset > self._stage.batch.next:
            empty = self._oldest == self._stage.batch.next
            self._stage.batch = self._stage.begin(first.first_offset)
            self._adopt(epochs, first.first_offset)
            self._roll()
            if empty:
                self._drop_oldest(first.first_offset)
        if first.epoch != self._stage.epoch:
            self._adopt([*epochs, (first.epoch, first.first_offset)], first.first_offset)
        self._admit(sum(len(frame.raw) for frame in frames), 0, force=True)
        following = self._stage.begin(frames[-1].next_offset)
        self._write(list(frames))
        topics = self._stage.topics
        for frame in frames:
            for topic, seq, count in frame.topics:
                known = topics.get(topic)
                if known is None:
                    topics[topic] = new_topic(topic, seq + count)
                else:
                    known.next_seq = seq + count
        self._stage.batch = following
        self._announce(list(frames))

    def _adopt(self, epochs: Sequence[tuple[int, int]], until: int) -> None:
        """Epochs of the writer that began at or before `until` are ours as well."""
        known = {epoch for epoch, _ in self._meta.epochs}
        last = self._meta.epochs[-1][1] if self._meta.epochs else 0
        new = [(epoch, at) for epoch, at in epochs if epoch not in known and last <= at <= until]
        new = list(dict(new).items())
        if new and self._meta.replica:
            self._meta.epochs = [*self._meta.epochs, *new]
            self._stage.epoch, self._stage.topics = new[-1][0], {}
            self._keep_meta()

    def promote(self, epoch: int = 0) -> int:
        """From here on this copy is the source's journal, in an epoch above all others, which is returned.

        `epoch` is one that `next_term` gave for it. Raises JournalError.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            self._flush()
            self._meta.replica = False
            self._renew_epoch(epoch if epoch > self._meta.epoch else next_term(self._meta.epoch))
            return self._stage.epoch
        finally:
            self._give(None)

    def _renew_epoch(self, epoch: int = 0) -> None:
        end = self._stage.batch.next
        self._stage.epoch = epoch or next_epoch(self._meta.epoch)
        self._meta.epochs = [*self._meta.epochs, (self._stage.epoch, end)]
        self._stage.topics = {}
        self._keep_meta(sync=True)
        self._clip_cursors(end)
        self._roll()
        self._stage.batch = self._begin_batch(end)

    @property
    def uncertain_from(self) -> int:
        """What others have of the last epoch with events from this offset on, this journal has lost, or never had."""
        gone = self.recovered.gone[-1:]
        end = self.next
        # What a state is made of was not lost.
        return max(gone[0][0], self.state_end()) if gone and gone[0][1] + 1 == end else end

    @property
    def last_epoch(self) -> int:
        """The newest epoch in which there are events, or may have been."""
        epochs = self._meta.epochs
        if len(epochs) > 1 and self.recovered.epoch_raised and epochs[-1][1] == self.next:
            return epochs[-2][0]
        return self.epoch

    def restore(self, chunks: Iterable[Sequence[Frame]]) -> int:
        """Append what a copy of this journal kept of `last_epoch` from `uncertain_from` on, and begin a new epoch.

        Only when nothing was appended since it was opened. Returns how many events were appended. Raises UsageError for
        frames that do not follow, JournalError; what was appended before stays.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            self._flush()
            epoch, start = self.last_epoch, self.uncertain_from
            if start < self._stage.batch.next:
                with self._state_lock:
                    self._truncate(start)  # what follows is a hole
            raised = self._meta.epochs[-1][0]
            self._meta.epochs = [(e, at) for e, at in self._meta.epochs if e <= epoch]
            self._stage.epoch = epoch
            try:
                for frames in chunks:
                    for frame in frames:
                        wrong = (frame.source, frame.epoch) != (self._source, epoch)
                        if wrong or frame.first_offset != self._stage.batch.next:
                            raise UsageError(f"{frame!r} does not follow offset {self._stage.batch.next}")
                        self._append_run(frame, [frame], ())
            finally:
                self._renew_epoch(next_epoch(max(raised, epoch)))
            return self._stage.batch.next - start
        finally:
            self._give(None)

    def truncate(self, offset: int) -> None:
        """Drop what a copy has from `offset` on: its writer was replaced, and those offsets went to other events.

        Readers in other processes must be reopened. Raises UsageError if this is no copy, JournalError.
        """
        self._lock.acquire()
        try:
            self._check_writable()
            if not self._meta.replica or not self._oldest <= offset <= self._stage.batch.next:
                raise UsageError(f"{self.path} cannot be cut at {offset}")
            with self._state_lock:
                if self._state is not None and offset < self._state.end:
                    raise UsageError(
                        f"{self.path} cannot be cut at {offset}: its keys were compacted up to {self._state.end}; "
                        "use an empty directory"
                    )
                self._truncate(offset)
        except OSError as error:
            raise JournalError(self.path, f"cannot be cut: {error.strerror}", errno=error.errno) from None
        finally:
            self._give(None)

    def _truncate(self, offset: int) -> None:
        self._stage.detach()
        for fd in (self._fd, self._index_fd):
            os.close(fd)
        self._fd = self._index_fd = -1
        self._meta.epochs = [(epoch, at) for epoch, at in self._meta.epochs if at < offset or not at]
        truncate_segments(self.path, self._salt, offset)
        self._head.set(NEXT, offset)
        self._head.clear_staged()
        self._keep_meta(sync=True)
        self._clip_cursors(offset)
        for part in (self._reader, self._head, self._cursor_table, self._witness):
            if part is not None:
                part.close()
        self._open(None)

    def _clip_cursors(self, end: int) -> None:
        for name, position in list(self._cursor_table.positions.items()):
            if position > end:
                self._cursor_table.set(name, end)

    def _keep_meta(self, *, sync: bool = False) -> None:
        try:
            save_meta(self.path, self._meta, sync=sync or self.fsync != "never")
        except OSError as error:
            raise JournalError(
                self.path, f"{META} cannot be written: {error.strerror}", errno=error.errno
            ) from None

    # -- segments -----------------------------------------------------------------------------------

    def _reopen(self, last: _Sealed, at: int, begun: int) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._number = last.number
        self._fd = os.open(os.path.join(self.path, segment_name(last.number)), flags)
        os.ftruncate(self._fd, at)
        os.lseek(self._fd, at, os.SEEK_SET)
        self._index_fd = os.open(
            os.path.join(self.path, index_name(last.number)), flags | os.O_APPEND | os.O_CREAT, 0o644
        )
        self._position = self._indexed = at
        self._begun_offset, self._begun_s = begun, last.written_s
        self._head.set(LAST_SEGMENT, self._number)

    def _roll(self) -> None:
        """Begin the next segment. Its file appears under its name only with a complete header.

        Raises JournalError, and then the current one is still good. Nothing may fail once the name is there:
        a reader may have gone on to the new segment.
        """
        try:
            self._roll_over()
        except OSError as error:
            self.counters.failed += 1
            problem = f"cannot begin a segment: {error.strerror}; {self._accepted()}"
            raise JournalError(self.path, problem, errno=error.errno) from None

    def _roll_over(self) -> None:
        number = self._number + 1 if self._fd >= 0 else (self._sealed[-1].number + 1 if self._sealed else 1)
        topics = {name: topic.next_seq for name, topic in self._stage.topics.items()}
        topics.update(
            self._stage.batch.topics()
        )  # staged events come after this header, perhaps after a crash
        header = encode_header(
            self._salt, number, self._stage.batch.first, Snapshot(self._stage.epoch, topics)
        )
        path = os.path.join(self.path, segment_name(number))
        index_fd = -1
        if self._fd >= 0 and self.fsync != "never":
            self._fdatasync(self._fd)
        fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, header)
            index_fd = os.open(
                os.path.join(self.path, index_name(number)),
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC,
                0o644,
            )
            os.rename(path + ".new", path)
        except BaseException:
            os.close(fd)
            if index_fd >= 0:
                os.close(index_fd)
            raise
        now, size = self._clock(), len(header)
        old = (self._fd, self._index_fd) if self._fd >= 0 else ()
        if old:
            self._sealed = [*self._sealed, _Sealed(self._number, self._position, now)]
            self._sealed_bytes += self._position
            if self.fsync == "never":
                self._unsynced = [*self._unsynced, self._number]
        self._number, self._fd, self._index_fd = number, fd, index_fd
        self._position = self._indexed = size
        self._begun_offset, self._begun_s = self._stage.batch.first, now
        self._new_names = True
        self._head.set(LAST_SEGMENT, number)
        for done in old:
            os.close(done)
        self._sealed_one.set()

    def _accepted(self) -> str:
        """What a failed write means for the caller's events."""
        staged = len(self._stage.batch)
        if staged:
            return f"the {staged} events staged before stay accepted and are written later, nothing else was accepted"
        return "nothing of this call was accepted"

    def _write(self, frames: list[Frame]) -> None:
        self._check_writable()
        if self._is_segment_full():
            self._roll()  # only between calls, so that undoing one stays within one segment
        start, last = self._position, frames[-1].header
        try:
            self._dirty = True
            for frame in frames:
                if self._position - self._indexed >= INDEX_EVERY_BYTES:
                    os.write(self._index_fd, index_entry(frame.first_offset, self._position))
                    self._indexed = self._position
                raw = frame.raw
                want = SALT_BYTES + len(raw)
                done = os.writev(self._fd, (self._salt, raw))
                if done < want:  # the disk filled up in the middle: the next call says so
                    write_all(self._fd, memoryview(self._salt + raw)[done:])
                self._position += want
            if self.fsync != "never" and self._new_names:
                sync_directory(self.path)
                self._new_names = False
            if self.fsync == "batch":
                self._fdatasync(self._fd)
                if self._moved:
                    self._sync_cursors()
            # The last call, and its last step: an interrupt comes before it and is undone, or after all of it.
            self._head.set(NEXT, last.first_offset + last.count)
        except OSError as error:
            self._undo(start)
            self.counters.failed += 1
            problem = f"cannot write: {error.strerror}; {self._accepted()}"
            raise JournalError(self.path, problem, errno=error.errno) from None
        except BaseException:
            self._undo(start)
            raise

    def _announce(self, frames: list[Frame]) -> None:
        self._witness.advance(self._stage.batch.first)  # before anybody has them
        super()._announce(frames)

    def _is_segment_full(self) -> bool:
        """Whether to begin a new segment: an eighth of whatever retention counts, as whole segments are dropped."""
        r = self.retention
        held = self._stage.batch.first - self._begun_offset
        return held > 0 and bool(
            self._position >= self.segment_bytes
            or (r.max_events and held >= r.max_events // 8)
            or (r.max_age_s and self._clock() - self._begun_s >= r.max_age_s / 8)
        )

    def _fdatasync(self, fd: int) -> None:
        """Wait for the disk. Raises OSError, and then nothing more is accepted.

        Linux tells of a failed write-back once and then takes the pages for clean: a second call would succeed and
        mean nothing.
        """
        try:
            os.fdatasync(fd)
        except OSError as error:
            self._failed_sync = error.strerror or "I/O error"
            self._stage.batch.room = 0  # the next event asks whether the journal can be written
            raise

    def _check_writable(self) -> None:
        if not self._closed and not self._failed_sync and self._refusal is None:
            return
        super()._check_writable()
        raise JournalError(
            self.path,
            f"the disk failed to sync ({self._failed_sync}): what was accepted since the last sync may not "
            "survive a power cut; nothing more is accepted until the journal is reopened",
            errno=errno.EIO,
        )

    def _check_open(self) -> None:
        if self._closed and os.getpid() != self._owner:
            raise Closed(f"journal {self.path}, which belongs to process {self._owner}, in a fork of it")
        super()._check_open()

    def leave_to_parent(self) -> None:
        """In a forked child: the files, their lock and the mapped memory are the parent's."""
        super().leave_to_parent()
        self._release()

    def _undo(self, position: int) -> None:
        """Cut off what a failed write left. If even that fails, the next write goes over it.

        Readers stop at the announced offset and do not look at it; opening cuts it.
        """
        self._position = position
        self._indexed = min(self._indexed, position)
        with contextlib.suppress(OSError):
            os.lseek(self._fd, position, os.SEEK_SET)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, position)

    # -- retention ----------------------------------------------------------------------------------

    def _free_bytes(self) -> int:
        free = self._batch_bytes
        if self.retention.max_bytes:
            free = min(free, self.retention.max_bytes - self._sealed_bytes - self._position)
        if self.retention.max_events:
            held = self._stage.batch.next - self._oldest
            free = min(free, (self.retention.max_events - held) * EVENT_OVERHEAD_BYTES)
        return free

    def _must_drop(self, size: int, events: int) -> int | None:
        r = self.retention
        too_many = r.max_events and self._stage.batch.next - self._oldest + events > r.max_events
        held = self._sealed_bytes + self._position + self._stage.batch.bytes
        too_large = r.max_bytes and held + size > r.max_bytes
        if not too_many and not too_large:
            return None
        if self._sealed:
            return self._begins(1)
        # A single segment holds everything: close it, so that it can be dropped on its own.
        if self._stage.batch.first == self._oldest:
            return None
        self._roll()
        return self._begins(1)

    def _begins(self, which: int) -> int:
        """First offset of the sealed segment at that place or, if nothing in it is intact, of a later one."""
        assert self._reader is not None
        for sealed in self._sealed[which:]:
            first = self._reader._first_of(sealed.number)
            if first is not None:
                return first
        return self._begun_offset

    def _expired(self, before_s: float) -> int | None:
        expired = 0
        while expired < len(self._sealed) and self._sealed[expired].written_s < before_s:
            expired += 1
        return self._begins(expired) if expired else None

    def _drop_oldest(self, before: int) -> int:
        had = self._oldest
        if self._meta.compact:
            self._carry(before)
        while self._sealed:
            following = self._begins(1)
            if following > before:
                break
            gone = self._sealed.pop(0)
            self._sealed_bytes -= gone.size
            # Readers look at the head first: move it before the file disappears.
            self._head.set(FIRST_SEGMENT, self._sealed[0].number if self._sealed else self._number)
            for name in (segment_name(gone.number), index_name(gone.number)):
                try:
                    os.unlink(os.path.join(self.path, name))
                except FileNotFoundError:
                    pass
                except OSError as error:
                    problem = f"cannot delete {name}: {error.strerror}"
                    raise JournalError(self.path, problem, errno=error.errno) from None
            self._oldest = following
        return self._oldest - had

    # -- cursors, reading, closing --------------------------------------------------------------------

    def _cursors(self) -> dict[str, int]:
        return self._cursor_table.positions

    def _set_cursor(self, name: str, offset: int) -> None:
        new = name not in self._cursor_table.positions
        try:
            self._cursor_table.set(name, offset)
            self._moved = self._dirty = True
            if new and self.fsync != "never":
                # What a forgotten name protects could be evicted; a position that goes back only repeats events.
                self._sync_cursors()
                sync_directory(self.path)
        except OSError as error:
            problem = f"no room for the cursor {name!r}: {error.strerror}"
            raise JournalError(self.path, problem, errno=error.errno) from None

    def _drop_cursor(self, name: str) -> None:
        self._cursor_table.drop(name)
        self._moved = self._dirty = True

    def _sync_cursors(self) -> None:
        self._moved = False
        self._cursor_table.sync()

    def read(self, offset: int, *, max_bytes: int = 1024 * 1024) -> Chunk:
        self._check_open()
        assert self._reader is not None
        return self._reader.read(offset, max_bytes=max_bytes)

    def offset_at(self, time: int | datetime) -> int:
        self.flush()
        self._check_open()
        assert self._reader is not None
        return self._reader.offset_at(time)

    def sync(self) -> None:
        """Flush, and wait until everything accepted so far would survive a power cut. Raises JournalError."""
        try:
            with self._sync_lock:  # who comes second waits: the first may not have its data yet
                self._sync()
        except OSError as error:
            raise JournalError(self.path, f"cannot sync: {error.strerror}", errno=error.errno) from None

    def _sync(self) -> None:
        self._lock.acquire()
        try:
            self._check_open()
            self._flush()
            if not self._dirty:
                return
            fd = os.dup(self._fd)
            unsynced, new_names = self._unsynced, self._new_names
            self._dirty, self._unsynced, self._new_names = False, [], False
        finally:
            self._give(None)
        # Without the lock: the producer goes on meanwhile.
        try:
            for number in unsynced:
                sync_file(os.path.join(self.path, segment_name(number)))
            self._fdatasync(fd)
            if new_names:
                sync_directory(self.path)
            self._sync_cursors()
        except BaseException:
            self._dirty, self._unsynced = True, unsynced + self._unsynced
            self._new_names |= new_names
            raise
        finally:
            os.close(fd)

    def _sync_regularly(self) -> None:
        while not self._stop.wait(self.sync_interval_s):
            try:
                self.sync()
            except Closed:
                return
            except (
                Exception
            ):  # whatever it is (on_frame is called from here, too), the next interval tries again
                self.counters.failed += 1

    def close(self) -> None:
        self._stop.set()
        self._sealed_one.set()
        if self._compactor is not None and self._compactor is not threading.current_thread():
            self._compactor.join()
        if self._syncer is not None and self._syncer is not threading.current_thread():
            self._syncer.join()
        self._lock.acquire()
        try:
            if self._closed:
                return
            self._loss_log.close()
            try:
                self._flush()
                if self.fsync != "never":
                    self._fdatasync(self._fd)
                    self._sync_cursors()
                self._meta.clean, self._meta.synced = True, self.fsync != "never"
                save_meta(self.path, self._meta, sync=self.fsync != "never")
            except OSError as error:
                raise JournalError(self.path, f"cannot close: {error.strerror}", errno=error.errno) from None
            finally:
                self._closed = True
                self._stop_staging()
                self._release()
        finally:
            self._give(None)
            self._notify()

    def _release(self) -> None:
        forks.forget(self)
        self._stage.detach()
        for name in ("_fd", "_index_fd", "_lock_fd"):
            fd = getattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)
        for part in ("_reader", "_head", "_cursor_table", "_witness", "_state"):
            found = getattr(self, part, None)
            if found is not None:
                found.close()


def as_journal(journal: Journal | str | os.PathLike[str], field: str = "journal") -> Journal:
    """The journal itself, or a DiskJournal at that path. Raises ConfigError for anything else, JournalError."""
    if isinstance(journal, Journal):
        return journal
    if isinstance(journal, (str, os.PathLike)) and os.fspath(journal):
        return DiskJournal(journal)
    raise ConfigError(field, f"must be a MemoryJournal, a DiskJournal or a path, not {journal!r}")


@contextlib.contextmanager
def closed_on_error(journal: object) -> Iterator[None]:
    """Who is given a journal for good closes it also when beginning fails: its lock would stay, and nobody else may be
    able to close it. One that somebody else uses already stays open.
    """
    try:
        yield
    except BaseException:
        if isinstance(journal, Journal) and journal.on_frame is None:
            journal.close()
        raise


def _joined(before: Frame, after: Frame) -> bool:
    return before.next_offset == after.first_offset and before.epoch == after.epoch


def _segment_bytes(retention: Retention) -> int:
    """Segments of an eighth of the bound, so that dropping one keeps most of the journal."""
    if not retention.max_bytes:
        return SEGMENT_BYTES
    return max(MIN_SEGMENT_BYTES, min(SEGMENT_BYTES, retention.max_bytes // 8))


def _lock(path: str) -> int:
    """Take the writer's lock."""
    try:
        return lock_file(os.path.join(path, "lock"), holder=str(os.getpid()))
    except FileLocked as error:
        holder = f"process {error.holder}" if error.holder else "another process"
        raise JournalLocked(path, holder) from None
    except OSError as error:
        problem = f"is not writable: {error.strerror}"
        raise JournalError(path, problem, errno=error.errno) from None
