"""The collector: takes frames from any number of inputs and appends each event to the spool exactly once.

**Producers are faster than the collector**: nothing is queued here. An input's thread returns from `accept` when the
frame is in the spool, so each transport's own rule holds (a direct subscriber replays later, a group's worker gives no
credit, a webhook waits for its answer). If Spark is slower than the collector, the spool grows to `max_bytes` and then
evicts, and Spark reports the exact range.

**The collector crashes**: what was acknowledged is in the spool. What was not is delivered again, and the part of it
that was already appended is recognised. Inputs resume from what the spool holds.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import msgspec

from brokerless.core import DiskJournal, Frame, Ledger, Lost, Position, Reason, Retention
from brokerless.core.errors import Closed, ConfigError, Fault, JournalError
from brokerless.core.event import MAX_NESTED_BYTES
from brokerless.core.loss_log import LossLog
from brokerless.core.presence import Announcement, announce, journal_state, ledger_state
from brokerless.core.runtime.files import atomic_write
from brokerless.core.runtime.process import raise_file_limit
from brokerless.direct import Publisher
from brokerless.spark_collector.collector.config import CollectorConfig
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.collector.inputs.base import Ack
from brokerless.spark_collector.collector.inputs.factory import all_inputs
from brokerless.spark_collector.collector.seen import SeenOffsets
from brokerless.spark_collector.collector.spool import (
    NESTED,
    LedgerNote,
    is_nested,
    note_frame,
    sent_frame,
    spool_topic,
    unnest,
)
from brokerless.spark_collector.source.schema import KIND_EVENT, KIND_LEDGER, KIND_SENT
from brokerless.spark_collector.source.selection import frame_times
from brokerless.spark_collector.tier.uploader import TierUploader, load_seen

log = logging.getLogger(__name__)
# Larger frames are divided. One that holds a single event of the largest size still fits into the spool.
_MAX_NESTED = 15 * 1024 * 1024
# Holds back the spool's retention until the remote tier has what it would drop.
_TIER_CURSOR = "remote-tier"
# Sockets, pipes and event descriptors of one subscriber with its ZeroMQ context, measured; with some to spare.
_DESCRIPTORS_PER_INPUT = 16
_DESCRIPTORS_OWN = 128


class _SentState(msgspec.Struct):
    """The last recorded sent counts of one (source, epoch)."""

    seqs: dict[str, int] = {}
    recorded_at: int = 0  # the time of the newest record
    still_true_at: int = 0  # they were repeated unchanged at this time
    provisional: set[str] = set()  # topics that were recorded before all their events had been received


class Collector:
    """Runs the inputs of a configuration into its spool. Use as a context manager, or `start` and `close`."""

    def __init__(self, config: CollectorConfig) -> None:
        """Open the spool and find out what it holds.

        Raises JournalError, JournalLocked or ConfigError.
        """
        self.inputs = all_inputs(config)  # first: a wrong address leaves no spool behind
        self.config = config
        self.counters = CollectorCounters()
        self._loss_log = LossLog("brokerless.collector")
        self._presence: Announcement | None = None
        self._server: Publisher | None = None
        self.ledger = Ledger()
        self.name = config.name
        self.fsync = config.spool.fsync
        spool = config.spool
        retention = Retention(max_bytes=spool.max_bytes, max_age_s=spool.max_age_s)
        # Syncing is done here, not by the journal: acknowledgements are given right after it.
        fsync: Literal["batch", "never"] = "batch" if spool.fsync == "batch" else "never"
        self.spool = DiskJournal(
            spool.path,
            source=config.name,
            retention=retention,
            fsync=fsync,
            max_event_bytes=MAX_NESTED_BYTES,
            on_full="reject" if spool.remote is not None else "evict",
        )
        self.lock = threading.Lock()  # guards spool, seen, ledger and the dictionaries below
        self._acks: list[Ack] = []
        self._ack_lock = threading.Lock()
        self._durable = 0  # everything before this offset is synced
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.path = self.spool.path
        self._state = os.path.join(self.spool.path, "collector.state")
        self._last_time: dict[tuple[str, int], tuple[int, int]] = {}
        self._sent: dict[tuple[str, int], _SentState] = {}
        self._complete: dict[tuple[str, int], int] = {}
        self._topics: dict[tuple[str, int], set[str]] = {}
        self.started = time.time()
        try:
            self.seen = self._restore()
            self.uploader = self._make_uploader()
        except BaseException:
            self.spool.close()
            raise

    # ---- starting --------------------------------------------------------------------------------------

    def _restore(self) -> SeenOffsets:
        """What was saved, plus what the spool holds after that; all of the spool if the saved state is unusable."""
        found = None
        try:
            with open(self._state, "rb") as file:
                raw = file.read()
            found = SeenOffsets.restore(raw, self._identity(), self.spool.epochs())
            if found is None:
                log.warning("%s cannot be used; the spool is read from its beginning", self._state)
        except FileNotFoundError:
            pass
        seen, at = found or (self._inherited(), self.spool.oldest)
        at = max(at, self.spool.oldest)
        while at < self.spool.next:
            chunk = self.spool.read(at, max_bytes=8 * 1024 * 1024)
            for outer in chunk.frames:
                if is_nested(outer):
                    for item in unnest(outer, at, outer.next_offset):
                        if item.kind == KIND_EVENT:
                            seen.add(item.frame)
            if chunk.next <= at:
                break
            at = chunk.next
        return seen

    def _inherited(self) -> SeenOffsets:
        """What the collector that wrote the remote tier before had seen, if this one takes it over."""
        remote = self.config.spool.remote
        if remote is None or not remote.take_over:
            return SeenOffsets()
        return load_seen(remote.url, remote.storage_options) or SeenOffsets()

    def _snapshot(self, name: str) -> tuple[int, bytes]:
        """The spool's end, and what was seen up to it."""
        with self.lock:
            return self.spool.next, self.seen.snapshot(name, 0, 0)

    def _make_uploader(self) -> TierUploader | None:
        remote = self.config.spool.remote
        if remote is None:
            self.spool.unregister(_TIER_CURSOR)  # if it had one: nobody will advance it any more
            return None
        self.spool.register(_TIER_CURSOR)
        return TierUploader(
            self.spool.path,
            remote.url,
            counters=self.counters,
            close_after_s=remote.close_after_s,
            part_bytes=remote.part_bytes,
            storage_options=remote.storage_options,
            on_uploaded=lambda offset: self.spool.advance(_TIER_CURSOR, offset),
            snapshot=self._snapshot,
            take_over=remote.take_over,
            durable=(lambda: self._durable) if self.config.spool.fsync == "interval" else None,
        )

    def _identity(self) -> str:
        return f"{self.config.name}:{self.spool.epochs()[0]}"

    @property
    def address(self) -> str:
        """Where the spool can be read while it is written (`spool.serve`); empty if it is not served."""
        return self._server.address if self._server is not None else ""

    def start(self) -> "Collector":
        """Start the inputs and the thread that syncs, acknowledges and saves.

        Raises ConfigError if the process may not open enough files for so many inputs, or `serve` cannot be bound.
        """
        # ZeroMQ aborts the process when it runs out of them.
        wanted = _DESCRIPTORS_OWN + _DESCRIPTORS_PER_INPUT * len(self.inputs)
        limit = raise_file_limit(wanted)
        if 0 <= limit < wanted:
            raise ConfigError(
                "input",
                f"so many inputs need {wanted} open files, and the limit is {limit}: raise it (ulimit -Hn)",
            )
        if self.config.spool.serve:
            # Closes the spool if the address cannot be bound.
            self._server = Publisher(
                self.config.spool.serve, source=self.config.name, journal=self.spool, announce=False
            )
        syncer = threading.Thread(target=self._sync_loop, name=f"collector {self.config.name}", daemon=True)
        self._threads.append(syncer)
        syncer.start()
        try:
            if self.uploader is not None:
                self.uploader.start()
            for each in self.inputs:
                each.start(self)
        except BaseException:
            self.close()
            raise
        self._presence = announce("collector", self.config.name, [self.spool.path], self._announced)
        return self

    def _announced(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        with self.lock:
            accounting = ledger_state(self.ledger)
        return {
            **journal_state(self.spool),
            **accounting,
            "counters": self.counters.snapshot(),
            "inputs": [msgspec.to_builtins(each.status) for each in self.inputs],
        }

    # ---- what inputs call ------------------------------------------------------------------------------

    def accept(
        self,
        transport: str,
        frames: Sequence[Frame],
        ack: Ack | None = None,
        *,
        received: int | None = None,
        complete: bool = False,
    ) -> int:
        """Append what is new of these frames; returns the number of new events.

        `ack` is called from some thread when they are as durable as configured, also if all of them were there
        before. `complete` says that the input wanted everything from the beginning of each epoch, so what is
        missing at the beginning is loss. `received` is in µs (default: now). Raises JournalError or JournalFull:
        then nothing was appended and `ack` is not called.
        """
        now = time.time_ns() // 1000 if received is None else received
        with self.lock:
            if self._closed:
                raise Closed("collector")
            fresh = [part for frame in frames for part in self.seen.fresh(frame)]
            if fresh:
                self._note_new_epochs(transport, fresh, now, complete)
                self._append(transport, KIND_EVENT, fresh, now)
            counters = self.counters
            new = 0
            for frame in fresh:
                self.seen.add(frame)
                self.ledger.observe_frame(frame)
                new += frame.count
                counters.bytes += len(frame.raw)
                self._look_at_times(frame, now)
                topics = self._topics.setdefault((frame.source, frame.epoch), set())
                topics.update(topic for topic, _, _ in frame.topics)
            counters.frames += len(fresh)
            counters.events += new
            counters.duplicates += sum(f.count for f in frames) - new
            counters.forgotten = self.seen.forgotten
        if ack is not None:
            self._acknowledge(ack)
        return new

    def sent_counts(self, transport: str, source: str, epoch: int, offset: int, seqs: dict[str, int]) -> None:
        """Record a producer's statement: its next offset is `offset` and its next seqs are `seqs`.

        Its time is that of the producer's last event if that is known (nothing sent later is earlier than that),
        else now. Only topics whose count changed are recorded, so an idle producer costs nothing.
        """
        now = time.time_ns() // 1000
        with self.lock:
            if self._closed:
                return
            end, last = self._last_time.get((source, epoch), (-1, 0))
            # Counts that are ahead of the offset speak of events that are still on their way.
            exact = end == offset and sum(seqs.values()) <= offset
            at = last + 1 if exact else max(now, last + 1)
            state = self._sent.setdefault((source, epoch), _SentState())
            changed = {topic: seq for topic, seq in seqs.items() if state.seqs.get(topic) != seq}
            # Counts of events that were still on their way had to be dated by our own clock: now they can be exact.
            corrected = {t: seqs[t] for t in state.provisional & seqs.keys()} if exact else {}
            new = changed | corrected
            if not new:
                state.still_true_at = max(state.still_true_at, at)
                return
            frames = []
            # What was sent since is younger than the last time at which the old counts were still true.
            old = {topic: state.seqs[topic] for topic in changed if topic in state.seqs}
            if old and state.recorded_at < state.still_true_at < at:
                frames.append(sent_frame(source, epoch, offset, state.still_true_at, old))
            frames.append(sent_frame(source, epoch, offset, at, new))
            self._append(transport, KIND_SENT, frames, now)
            state.seqs |= changed
            state.provisional = state.provisional - new.keys() if exact else state.provisional | new.keys()
            state.recorded_at = state.still_true_at = at
            for topic, next_seq in changed.items():
                self.ledger.sent(source, epoch, topic, next_seq)
            self.counters.sent_counts += 1

    def all_received(self, transport: str, source: str, epoch: int, offset: int) -> None:
        """Record that everything before `offset` was received and nothing more was sent."""
        with self.lock:
            if self._complete.get((source, epoch)) == offset:
                return
            self._complete[(source, epoch)] = offset
            topics = self._topics.get((source, epoch), set())
            seqs = {topic: self.ledger.next(source, epoch, topic) or 0 for topic in topics}
        self.sent_counts(transport, source, epoch, offset, seqs)

    def _note_new_epochs(self, transport: str, frames: list[Frame], now: int, complete: bool) -> None:
        """Note the epochs of which this collector should have everything: seqs count from 0 in every topic.

        Those are the epochs that an input follows from the beginning, and every new epoch of a source that was
        followed before.
        """
        new = [frame for frame in frames if not self.seen.knows(frame.source, frame.epoch)]
        for (source, epoch), frame in {(f.source, f.epoch): f for f in reversed(new)}.items():
            if complete or frame.first_offset == 0 or self.seen.knows(source):
                # Nothing of the epoch is older than its first event; without that, nothing is known of the time.
                at = frame_times(frame)[0] if frame.first_offset == 0 else 0
                self._note_begin(transport, source, epoch, at, now)

    def _note_begin(self, transport: str, source: str, epoch: int, at: int, now: int) -> None:
        data = msgspec.json.encode(LedgerNote("begin", 0))
        self._append(transport, KIND_LEDGER, [note_frame(source, epoch, "", 0, at, data)], now)
        self.counters.notes += 1

    def lost(self, transport: str, lost: Lost) -> None:
        """Record that an input says that these events will not come."""
        now = time.time_ns() // 1000
        note = msgspec.json.encode(LedgerNote("lost", lost.first, lost.last, str(lost.reason)))
        with self.lock:
            if self._closed:
                return
            if not self.seen.knows(lost.source, lost.epoch) and lost.topic is None:
                self._note_begin(transport, lost.source, lost.epoch, 0, now)  # evicted before the first join
            frame = note_frame(lost.source, lost.epoch, lost.topic or "", lost.first, now, note)
            self._append(transport, KIND_LEDGER, [frame], now)
            self.counters.notes += 1
            if lost.topic is None:
                self.seen.skip(lost.source, lost.epoch, lost.first, lost.last)
                self.ledger.lose(lost.source, lost.epoch, lost.count, Reason(lost.reason))
            else:
                self.ledger.declare(lost.source, lost.epoch, lost.topic, lost.first, lost.last, lost.reason)
            self.counters.lost += lost.count
            self._loss_log(lost)

    def positions(self) -> dict[str, Position]:
        """The position after the newest spooled event, per source."""
        with self.lock:
            return self.seen.positions()

    def resume(self, source: str, epochs: list[tuple[int, int]], end: int) -> int:
        """The first offset of a journal that is not in the spool."""
        with self.lock:
            return self.seen.resume(source, epochs, end)

    def _append(self, transport: str, kind: str, frames: list[Frame], now: int) -> None:
        datas = [part.raw for frame in frames for part in _fitting(frame)]
        try:
            self.spool.append_many(spool_topic(transport, kind), datas, NESTED, times=[now] * len(datas))
        except Fault:
            self.counters.refused += 1
            raise

    def _look_at_times(self, frame: Frame, now: int) -> None:
        times = frame_times(frame)
        newest = max(times)
        if newest > now:
            self.counters.ahead += sum(t > now for t in times)
        self._last_time[(frame.source, frame.epoch)] = (frame.next_offset, newest)

    # ---- durability ------------------------------------------------------------------------------------

    def _acknowledge(self, ack: Ack) -> None:
        if self.config.spool.fsync == "interval":
            with self._ack_lock:
                self._acks.append(ack)
        else:
            ack()

    def _sync_loop(self) -> None:
        """Sync and acknowledge at the interval, save the state now and then."""
        saved = time.monotonic()
        while not self._stop.wait(self.config.spool.sync_interval_s):
            try:
                self.flush()
                if time.monotonic() - saved >= self.config.save_every_s:
                    self.save()
                    saved = time.monotonic()
            except Fault as error:
                # Not acknowledged, so it comes again; the operator sees it in the status and in the log.
                self.counters.refused += 1
                log.error("collector %s: %s", self.config.name, error)

    def flush(self) -> None:
        """Sync what was appended (if configured) and give the acknowledgements that waited for it."""
        with self._ack_lock:
            due, self._acks = self._acks, []
        if self.config.spool.fsync == "interval":
            end = self.spool.next
            try:
                self.spool.sync()
                self._durable = end
            except BaseException:
                with self._ack_lock:
                    self._acks = due + self._acks
                raise
        for ack in due:
            ack()

    def save(self) -> None:
        """Write what was seen, so that a start after a crash reads less of the spool. Raises JournalError."""
        with self.lock:
            raw = self.seen.snapshot(self._identity(), self.spool.epoch, self.spool.next)
        try:
            atomic_write(self._state, raw, sync=False)
        except OSError as error:
            problem = f"the collector's state cannot be written: {error.strerror}"
            raise JournalError(self._state, problem, errno=error.errno) from None

    # ---- ending ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the inputs, sync, acknowledge, save and close the spool. Closing twice is fine."""
        if self._closed:
            return
        if self._presence is not None:
            self._presence.close()
        for each in self.inputs:
            each.stop()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        try:
            self.flush()
            self.save()
            if self.uploader is not None:
                self.uploader.stop()
        finally:
            with self.lock:
                self._closed = True
                self._loss_log.close()
            if self._server is not None:
                self._server.close()
            self.spool.close()

    def __enter__(self) -> "Collector":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fitting(frame: Frame) -> list[Frame]:
    """The frame, or halves of it until they fit into an event of the spool."""
    if len(frame.raw) <= _MAX_NESTED or frame.count == 1:
        return [frame]
    middle = frame.first_offset + frame.count // 2
    halves = (frame.slice(frame.first_offset, middle), frame.slice(middle, frame.next_offset))
    return [part for half in halves for part in _fitting(half)]
