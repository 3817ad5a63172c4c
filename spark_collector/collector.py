"""The collector: takes frames from any number of inputs and appends each event to the spool exactly once.

Question 1, producers are faster: the inputs' own rules hold (a direct subscriber replays later, a group's
worker
gives no credit, a webhook waits for its answer), because nothing is queued here: an input's thread returns
from
`accept` when the frame is in the spool. If Spark is slower than the collector, the spool grows to `max_bytes`
and then evicts, and Spark reports the exact range.
Question 2, the collector crashes: what was acknowledged is in the spool; what was not comes again, and what
of it
was appended already is recognised. Its inputs go on from what the spool holds.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from brokerless.core import DiskJournal, Frame, Ledger, Lost, Retention
from brokerless.core.errors import Closed, Fault, JournalError, UsageError
from brokerless.core.event import MAX_NESTED_BYTES
from brokerless.core.files import atomic_write
from brokerless.core.frame import PREFIX_BYTES
from brokerless.spark_collector.books import Books
from brokerless.spark_collector.config import CollectorConfig, DirectIn, JournalIn, MulticastIn, WebhooksIn
from brokerless.spark_collector.counters import CollectorCounters
from brokerless.spark_collector.jobs.ledger import LedgerNote
from brokerless.spark_collector.schema import KIND_EVENT, KIND_LEDGER, KIND_SENT
from brokerless.spark_collector.spool import NESTED, is_nested, note_frame, spool_topic, unnest, words_frame

log = logging.getLogger(__name__)
# Larger frames are divided. One that holds a single event of the largest size still fits into the spool.
_MAX_NESTED = 15 * 1024 * 1024
Ack = Callable[[], None]


class InputStatus(msgspec.Struct):
    """What one input says of itself.

    `behind` are events known to exist and not in the spool, -1 if unknown.
    """

    name: str
    transport: str
    connected: bool = False
    behind: int = -1
    events: int = 0
    error: str = ""


class CollectorInput(Protocol):
    """What feeds a collector: a thread of its own between `start` and `stop`."""

    status: InputStatus

    def start(self, collector: "Collector") -> None:
        """Begin; returns at once."""
        ...

    def stop(self) -> None:
        """End, and join the thread; what was accepted is acknowledged or comes again."""
        ...


class _Times(msgspec.Struct, array_like=True):
    """The first two columns of a frame: the rest is skipped, not decoded."""

    topic_index: bytes
    times: bytes


_decode_times = msgspec.msgpack.Decoder(_Times).decode


class Collector:
    """Runs the inputs of a configuration into its spool. Use as a context manager, or `start` and `close`."""

    def __init__(self, config: CollectorConfig) -> None:
        """Open the spool and bring the books up to date.

        Raises JournalError, JournalLocked or ConfigError.
        """
        self.config = config
        self.counters = CollectorCounters()
        self.ledger = Ledger()
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
        )
        self.lock = threading.Lock()  # guards spool, books and ledger
        self._acks: list[Ack] = []
        self._ack_lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._state = os.path.join(self.spool.path, "collector.state")
        self._last_time: dict[tuple[str, int], tuple[int, int]] = {}
        self._said: dict[tuple[str, int], int] = {}
        self.started = time.time()
        try:
            self.books = self._restore()
            self.inputs = [made for i in config.input for made in make_inputs(i)]
        except BaseException:
            self.spool.close()
            raise

    # ---- starting --------------------------------------------------------------------------------------

    def _restore(self) -> Books:
        """The books as saved, plus what the spool holds after that."""
        found = None
        try:
            with open(self._state, "rb") as file:
                raw = file.read()
            found = Books.restore(raw, self._identity(), self.spool.epochs())
        except FileNotFoundError:
            pass
        books, at = found or (Books(), self.spool.oldest)
        at = max(at, self.spool.oldest)
        while at < self.spool.next:
            chunk = self.spool.read(at, max_bytes=8 * 1024 * 1024)
            for outer in chunk.frames:
                if is_nested(outer):
                    for item in unnest(outer, at, outer.next_offset):
                        if item.kind == KIND_EVENT:
                            books.add(item.frame)
            if chunk.next <= at:
                break
            at = chunk.next
        return books

    def _identity(self) -> str:
        return f"{self.config.name}:{self.spool.epochs()[0]}"

    def start(self) -> "Collector":
        """Start the inputs and the thread that syncs, acknowledges and saves."""
        keeper = threading.Thread(target=self._keep, name=f"collector {self.config.name}", daemon=True)
        self._threads.append(keeper)
        keeper.start()
        try:
            for each in self.inputs:
                each.start(self)
        except BaseException:
            self.close()
            raise
        return self

    # ---- what inputs call ------------------------------------------------------------------------------

    def accept(
        self, transport: str, frames: Sequence[Frame], ack: Ack | None = None, received: int | None = None
    ) -> int:
        """Append what is new of these frames; returns how many events that were.

        `ack` is called from some thread when they are as durable as configured, and also if all of them had
        been
        there before. Raises JournalError or JournalFull: then nothing was appended and `ack` is not called.
        """
        now = time.time_ns() // 1000 if received is None else received
        with self.lock:
            if self._closed:
                raise Closed("collector")
            fresh = [part for frame in frames for part in self.books.fresh(frame)]
            if fresh:
                self._greet(transport, fresh, now)
                self._append(transport, KIND_EVENT, fresh, now)
            counters = self.counters
            new = 0
            for frame in fresh:
                self.books.add(frame)
                self.ledger.observe_frame(frame)
                new += frame.count
                counters.bytes += len(frame.raw)
                self._look_at_times(frame, now)
            counters.frames += len(fresh)
            counters.events += new
            counters.duplicates += sum(f.count for f in frames) - new
            counters.forgotten = self.books.forgotten
        if ack is not None:
            self._acknowledge(ack)
        return new

    def word(self, transport: str, source: str, epoch: int, offset: int, seqs: dict[str, int]) -> None:
        """A producer said that its next offset is `offset` and its next seqs are `seqs`.

        Its time is that of its last event if that is known (nothing sent later is earlier than that), else
        now.
        """
        if not seqs:
            return
        now = time.time_ns() // 1000
        with self.lock:
            if self._closed:
                return
            end, last = self._last_time.get((source, epoch), (-1, 0))
            at = min(now, last + 1) if end == offset else now
            self._append(transport, KIND_SENT, [words_frame(source, epoch, offset, at, seqs)], now)
            for topic, next_seq in seqs.items():
                self.ledger.sent(source, epoch, topic, next_seq)
            self.counters.words += 1

    def repeat_words(self, transport: str, source: str, epoch: int, offset: int) -> None:
        """Everything before `offset` was received and no more was sent: say so, if that is news."""
        if self._said.get((source, epoch)) == offset:
            return
        self._said[(source, epoch)] = offset
        with self.lock:
            streams = [(e, t) for s, e, t in self.ledger.streams() if s == source and e == epoch]
            seqs = {t: self.ledger.next(source, e, t) or 0 for e, t in streams}
        self.word(transport, source, epoch, offset, seqs)

    def _greet(self, transport: str, frames: list[Frame], now: int) -> None:
        """Note the epochs of which this collector has everything: sequence numbers count from 0 in every
        topic.

        That is so from offset 0 on, and for every new epoch of a source that was followed before.
        """
        new = [frame for frame in frames if not self.books.knows(frame.source, frame.epoch)]
        for (source, epoch), frame in {(f.source, f.epoch): f for f in reversed(new)}.items():
            if frame.first_offset == 0 or self.books.knows(source):
                data = msgspec.json.encode(LedgerNote("begin", 0))
                self._append(transport, KIND_LEDGER, [note_frame(source, epoch, "", 0, now, data)], now)
                self.counters.notes += 1

    def lost(self, transport: str, lost: Lost) -> None:
        """An input says that these events will not come."""
        with self.lock:
            if lost.topic is None:
                self.books.settle(lost.source, lost.epoch, lost.first, lost.last)
            else:
                self.ledger.declare(lost.source, lost.epoch, lost.topic, lost.first, lost.last, lost.reason)
            self.counters.lost += lost.count
        note = LedgerNote("lost", lost.first, lost.last, str(lost.reason))
        self._note(transport, lost.source, lost.epoch, lost.topic or "", note)

    def _note(self, transport: str, source: str, epoch: int, topic: str, note: LedgerNote) -> None:
        now = time.time_ns() // 1000
        frame = note_frame(source, epoch, topic, note.first, now, msgspec.json.encode(note))
        with self.lock:
            if not self._closed:
                self._append(transport, KIND_LEDGER, [frame], now)
                self.counters.notes += 1

    def _append(self, transport: str, kind: str, frames: list[Frame], now: int) -> None:
        datas = [part.raw for frame in frames for part in _fitting(frame)]
        try:
            self.spool.append_many(spool_topic(transport, kind), datas, NESTED, times=[now] * len(datas))
        except Fault:
            self.counters.refused += 1
            raise

    def _look_at_times(self, frame: Frame, now: int) -> None:
        raw = frame.raw
        header_bytes = int.from_bytes(raw[4:8], "little")
        times = memoryview(_decode_times(memoryview(raw)[PREFIX_BYTES + header_bytes :]).times).cast("q")
        newest = max(times)
        if newest > now:
            self.counters.clamped += sum(t > now for t in times)
        self._last_time[(frame.source, frame.epoch)] = (frame.next_offset, min(newest, now))

    # ---- durability ------------------------------------------------------------------------------------

    def _acknowledge(self, ack: Ack) -> None:
        if self.config.spool.fsync == "interval":
            with self._ack_lock:
                self._acks.append(ack)
        else:
            ack()

    def _keep(self) -> None:
        """Sync and acknowledge at the interval, save the books now and then."""
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
            try:
                self.spool.sync()
            except BaseException:
                with self._ack_lock:
                    self._acks = due + self._acks
                raise
        for ack in due:
            ack()

    def save(self) -> None:
        """Write the books, so that a start after a crash reads less of the spool. Raises JournalError."""
        with self.lock:
            raw = self.books.snapshot(self._identity(), self.spool.epoch, self.spool.next)
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
        for each in self.inputs:
            each.stop()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        try:
            self.flush()
            self.save()
        finally:
            with self.lock:
                self._closed = True
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


def make_inputs(config: object) -> list[CollectorInput]:
    """The inputs for a configuration; transports are imported only when they are used."""
    if isinstance(config, JournalIn):
        from brokerless.spark_collector.inputs.journal import JournalInput

        return [JournalInput(config)]
    if isinstance(config, DirectIn):
        from brokerless.spark_collector.inputs.direct import DirectInput

        if config.group:
            from brokerless.spark_collector.inputs.group import GroupInput

            return [GroupInput(config)]
        return [DirectInput(address, config) for address in config.addresses]
    if isinstance(config, MulticastIn):
        from brokerless.spark_collector.inputs.multicast import MulticastInput

        return [MulticastInput(config)]
    if isinstance(config, WebhooksIn):
        from brokerless.spark_collector.inputs.webhooks import WebhooksInput

        return [WebhooksInput(config)]
    raise UsageError(f"{type(config).__name__} is not a collector's input")
