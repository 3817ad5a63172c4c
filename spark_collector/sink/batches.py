"""Batches of events into a journal, each once, whatever is killed when.

A batch is first written to a file beside the journal's segments, with the offset at which it begins. From then on it
is decided: if the process dies, the next one appends what is missing, which the journal's own next offset tells. So a
batch that comes again is known by its query and number, and one that was interrupted is never in part twice.
"""

import os
import time
from collections.abc import Sequence

import msgspec

from brokerless.core import DiskJournal
from brokerless.core.errors import JournalError, JournalLocked
from brokerless.core.runtime.files import atomic_write
from brokerless.spark_collector.sink.events import SinkEvent, SinkOptions, decode_events, encode_events

_STATE = "spark_sink.json"
_PENDING = "spark_sink.pending"
# The batch of a query that has no other: it is appended whole, and need not be known again.
ONLY = -1
# A process that was told to end may still be busy with its batch.
_LOCKED_S = 20.0
# Streaming queries that are remembered; a journal has a handful.
_MAX_QUERIES = 1000


class _Pending(msgspec.Struct, frozen=True):
    query: str
    batch: int
    first: int
    count: int


class _State(msgspec.Struct):
    done: dict[str, int] = {}
    counts: dict[str, int] = {}  # events of these batches
    pending: _Pending | None = None


class BatchAppender:
    """Appends batches to an open journal, which nothing else may write while a batch is being appended."""

    def __init__(self, journal: DiskJournal) -> None:
        self._journal = journal
        self._state_path = os.path.join(journal.path, _STATE)
        self._pending_path = os.path.join(journal.path, _PENDING)
        self._state = self._load()

    def _load(self) -> _State:
        try:
            with open(self._state_path, "rb") as file:
                return msgspec.json.decode(file.read(), type=_State)
        except FileNotFoundError:
            return _State()
        except msgspec.MsgspecError as error:
            raise JournalError(
                self._state_path, f"is damaged ({error}): which batches are in the journal is not known"
            ) from None

    def append(self, messages: Sequence[bytes], query: str, batch: int) -> int:
        """Append the events of all tasks of a batch; returns how many, 0 if the batch was there already.

        Raises InvalidEvent, with nothing appended, if one of them cannot be an event; JournalFull or JournalError, and
        then the next call goes on with it; JournalError, too, for a batch of an older checkpoint than the journal's.
        """
        self.recover()
        events = list(decode_events(messages))
        if batch != ONLY and (last := self._state.done.get(query, ONLY)) >= batch:
            # Spark repeats its newest batch only, with the same rows: others must not be passed over in silence.
            known = self._state.counts.get(query, len(events))
            if last > batch or len(events) > known:
                raise JournalError(
                    self._journal.path,
                    f"batch {batch} of query {query} comes again with {len(events)} events, and the journal has batch "
                    f"{last} with {known}: the checkpoint is older than the journal. Nothing was appended; restore "
                    "both as they were at one time, or give a new checkpoint",
                )
            return 0
        if events:
            self._write(self._pending_path, encode_events(events))
            self._save(
                msgspec.structs.replace(
                    self._state, pending=_Pending(query, batch, self._journal.next, len(events))
                )
            )
            self._finish(events)
        else:
            self._remember(query, batch, 0)
        return len(events)

    def recover(self) -> None:
        """Append what is missing of a batch that was interrupted. Raises JournalError if that cannot be known."""
        pending = self._state.pending
        if pending is None:
            return
        self._journal.flush()  # what was staged when the process died counts
        there = self._journal.next - pending.first
        if not 0 <= there <= pending.count:
            raise JournalError(
                self._journal.path,
                f"batch {pending.batch} of query {pending.query} was interrupted at offset {pending.first} of "
                f"{pending.count} events, and since then somebody else has written: the next offset is "
                f"{self._journal.next}. Remove {self._pending_path} and {self._state_path} if this batch may be lost",
            )
        with open(self._pending_path, "rb") as file:
            events = list(decode_events([file.read()]))
        self._finish(events[there:])

    def _finish(self, events: Sequence[SinkEvent]) -> None:
        assert self._state.pending is not None
        for event in events:
            self._journal.stage(
                event.topic, event.data, event.content_type, event.key, event.time, event.headers or None
            )
        self._journal.flush()
        self._journal.sync()
        self._remember(self._state.pending.query, self._state.pending.batch, self._state.pending.count)

    def _remember(self, query: str, batch: int, count: int) -> None:
        """Remember that a batch is in the journal."""
        done = {key: value for key, value in self._state.done.items() if key != query}
        if batch != ONLY:
            done = dict([*done.items(), (query, batch)][-_MAX_QUERIES:])
        counts = self._state.counts | {query: count}
        self._save(_State(done, {key: counts[key] for key in done if key in counts}))
        if os.path.exists(self._pending_path):
            os.unlink(self._pending_path)

    def _save(self, state: _State) -> None:
        self._write(self._state_path, msgspec.json.encode(state))
        self._state = state

    def _write(self, path: str, data: bytes) -> None:
        try:
            atomic_write(path, data, sync=True)
        except OSError as error:
            raise JournalError(path, f"cannot be written: {error.strerror}", errno=error.errno) from None


def append_batch(options: SinkOptions, messages: Sequence[bytes], query: str, batch: int) -> int:
    """Open the journal of the options, append one batch, close it; returns how many events.

    Raises what `BatchAppender.append` raises, and JournalLocked while another process writes the journal.
    """
    with _open(options) as journal:
        return BatchAppender(journal).append(messages, query, batch)


def _open(options: SinkOptions) -> DiskJournal:
    deadline = time.monotonic() + _LOCKED_S
    while True:
        try:
            return DiskJournal(
                options.path,
                source=options.source,
                retention=options.retention,
                on_full=options.on_full,
                fsync="never",  # a batch is synced once, when it is complete
            )
        except JournalLocked:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
