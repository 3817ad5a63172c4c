"""What every subscriber does with events that have arrived in order: hand them out, and account for them.

`HandedOut` is the state of the one batch that the application has, or gets next. `Consumer` is the base of the
subscribers of direct and multicast: it has every way to receive, `stop`, `commit` and `close`. A transport supplies
a queue of batches and losses, a step of its I/O, a wait, and how its ledger is kept.

A wait can be cancelled, and a signal handler can raise whenever a function is entered, a call of C code has returned
or a loop goes round. So every change of state here either happens between two such points, or is repeated if it
was not finished: a batch is in its queue until it is `TAKEN`, and `TAKEN` until the application has it.
"""

import asyncio
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from functools import partial
from operator import length_hint
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from brokerless.core.cursor import Position
from brokerless.core.errors import Closed, ConfigError
from brokerless.core.event import Event, Lost
from brokerless.core.exporter import Announced
from brokerless.core.ledger.ledger import Ledger
from brokerless.core.loss_log import LossLog
from brokerless.core.presence import ledger_state
from brokerless.core.runtime.serial_section import SerialSection

# A crash repeats at most this much; a save costs about 50 µs.
COMMIT_EVERY_S = 1.0
# The last losses are kept for inspection; all of them are in the ledger.
_LOSSES_KEPT = 1000
# What looking for the next batch can return instead of a time to wait.
OVER = -1.0
_FOUND = -2.0
# `wait_joined` and the like look at least this often.
_LOOK_S = 0.1


class Batch(Protocol):
    """Consecutive events of one source. `len()` and iteration cover those that match the subscriber's topics."""

    @property
    def source(self) -> str:
        """The producer's name."""

    @property
    def epoch(self) -> int:
        """The producer's epoch."""

    @property
    def first_offset(self) -> int:
        """The offset of the first event, wanted or not."""

    @property
    def next_offset(self) -> int:
        """The offset after the last event, wanted or not."""

    @property
    def events(self) -> list[Event]:
        """The events, in order; built on first use."""

    @property
    def datas(self) -> list[bytes]:
        """The data of the events, in order; cheaper than `events`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Event]: ...

    def after(self, offset: int) -> Self:
        """The part from `offset` on."""


B = TypeVar("B", bound=Batch)


class Counts(Protocol):
    """The counters that a consumer keeps itself."""

    events: int

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""


class Stage(Enum):
    """How far the current batch is.

    NOTHING ─take─▶ TAKEN ─give_whole──▶ WHOLE ──finish──▶ NOTHING
                    TAKEN ─give_singly─▶ SINGLY ─finish──▶ NOTHING
                                         SINGLY ─split───▶ TAKEN (the rest, as a batch of its own)
    """

    NOTHING = 0  # no batch
    TAKEN = 1  # out of its queue; the application does not have it yet
    WHOLE = 2  # the application has all of it
    SINGLY = 3  # the application has the events that `pending` gave


# Looking up a member of an Enum costs 75 ns in Python 3.11, and a single event takes eight look-ups: bound once here.
_NOTHING, _TAKEN, _WHOLE, _SINGLY = Stage


class HandedOut(Generic[B]):
    """The batch that the application has or gets next, and how far ledger and positions are in it."""

    def __init__(
        self,
        observe: Callable[[B, int, int, bool], None],
        positions: dict[str, Position],
        counters: Counts,
        *,
        max_sources: int | None = None,
    ) -> None:
        """`observe(batch, first, until, again)` enters these offsets of the batch into the ledger; `again`: it was
        interrupted before, or done already. Beyond `max_sources` the oldest position is dropped."""
        self.positions = positions
        self.dirty = False  # positions changed since they were saved
        self.stopped = False
        self.stage = _NOTHING
        self.batch: B | None = None
        self.pending: Iterator[Event] = iter(())  # of the batch, if SINGLY: what the application has not got
        self._withheld: list[Event] = []  # what `pending` had when it was stopped
        self._observe = observe
        self._observed = 0  # offsets of the batch before this are in the ledger
        self._observing = False
        self._processed = 0  # offsets of the batch before this are in `positions`
        self._counters = counters
        self._max_sources = max_sources

    # ---- transitions -----------------------------------------------------------------------------------

    def take(self, queue: "deque[B | Lost]") -> bool:
        """Take the first batch of the queue; False if the application wants none of it, and it is finished."""
        batch: B = queue[0]  # type: ignore[assignment]  # the caller looked
        count = len(batch)
        stage = _TAKEN if count else _WHOLE
        first = batch.first_offset
        self._observed = self._processed = first
        self.stage = stage
        self.batch = batch
        queue.popleft()
        if not count:
            self.finish()
        return count > 0

    def give_singly(self) -> bool:
        """Give the batch event by event, from `pending`; False if stopped."""
        assert self.batch is not None
        if self.stage is _TAKEN:
            pending = iter(self.batch.events)
            if not self.stopped:
                self.pending = pending
                self.stage = _SINGLY
        if self.stopped:
            self._withhold()
        return not self.stopped

    def give_whole(self) -> B | None:
        """Give the batch as a whole; None if stopped."""
        if self.stopped:
            return None
        self.stage = _WHOLE
        return self.batch

    def split(self) -> None:
        """Make what is left of a batch that was given singly a batch of its own, not given yet."""
        batch = self.batch
        assert batch is not None
        given = len(batch) - self.left()
        until = self.reach()
        rest = batch if until == batch.first_offset else batch.after(until)  # all of it, if none was given
        old, empty = self.pending, iter(())
        self._counters.events += given
        self._observed = self._processed = until
        self.pending = empty
        self.stage = _TAKEN
        self.batch = rest
        deque(old, maxlen=0)  # an iteration that still has this iterator finds its end

    def finish(self) -> None:
        """The application has processed the whole batch."""
        batch = self.batch
        assert batch is not None
        given = len(batch)
        following = batch.next_offset
        self._enter(batch, following)
        self.move_to(batch.source, Position(batch.epoch, following))
        self._counters.events += given
        self.stage = _NOTHING
        self.batch = None

    def drop(self) -> None:
        """What was given of the batch is processed, and the rest is not given any more."""
        batch = self.batch
        if batch is None:
            return
        given = len(batch) - self.left()
        self.advance()
        old, empty = self.pending, iter(())
        self._counters.events += given
        self._withheld.clear()
        self.pending = empty
        self.stage = _NOTHING
        self.batch = None
        deque(old, maxlen=0)  # an iteration that still has this iterator finds its end

    def stop(self) -> None:
        """Give nothing more: an iteration over `pending` ends. From any thread, and from signal handlers."""
        self.stopped = True
        self._withhold()

    def _withhold(self) -> None:
        # One call takes the rest from the iterator and keeps it, whatever other threads do.
        self._withheld.extend(self.pending)

    # ---- how far it is ---------------------------------------------------------------------------------

    def left(self) -> int:
        """How many events of the batch the application has not been given."""
        if self.stage is _SINGLY:
            return length_hint(self.pending) + len(self._withheld)
        return len(self.batch) if self.stage is _TAKEN and self.batch is not None else 0

    def reach(self, *, but_last: bool = False) -> int:
        """The offset up to which the application has the batch; `but_last`: without what it was given last."""
        batch = self.batch
        assert batch is not None
        left = self.left()
        if not left and not but_last:
            return batch.next_offset
        given = 0 if self.stage is _WHOLE else len(batch) - left - but_last
        return batch.events[given - 1].offset + 1 if given > 0 else batch.first_offset

    def advance(self, *, but_last: bool = False) -> None:
        """What was given of the batch is processed. What was processed before stays so."""
        batch = self.batch
        if batch is None:
            return
        until = self.reach(but_last=but_last)
        self._enter(batch, until)
        if until > self._processed:
            self.move_to(batch.source, Position(batch.epoch, until))
            self._processed = until

    def enter(self) -> None:
        """Bring the ledger up to what was given; the position stays where it is."""
        if self.batch is not None:
            self._enter(self.batch, self.reach())

    def _enter(self, batch: B, until: int) -> None:
        if self._observed >= until:
            return
        again, self._observing = self._observing, True
        self._observe(batch, self._observed, until, again)
        self._observed = until
        self._observing = False

    def move_to(self, source: str, position: Position) -> None:
        """Everything of this source before that position is processed."""
        positions = self.positions
        if self._max_sources is not None and source not in positions and len(positions) >= self._max_sources:
            del positions[next(iter(positions))]
        positions[source] = position
        self.dirty = True


class Consumer(Announced, ABC, Generic[B]):
    """The base of subscribers: receiving in every way, stopping, committing, closing.

    A subclass calls `__init__` when its I/O is open and implements the abstract methods.
    """

    topics: tuple[str, ...]
    counters: Counts
    _logger: ClassVar[str]  # where losses are logged while there is no `on_loss`

    def __init__(
        self,
        *,
        section: SerialSection,
        ledger: Ledger,
        positions: dict[str, Position],
        counters: Counts,
        on_loss: Callable[[Lost], None] | None,
        saves: bool,
        commit_every_s: float,
        max_sources: int | None = None,
    ) -> None:
        """`saves`: whether there is something to save positions to."""
        self.on_loss = on_loss
        self._loss_log = LossLog(self._logger)
        self.losses: deque[Lost] = deque(maxlen=_LOSSES_KEPT)
        self.positions = positions
        self._ledger = ledger
        self._section = section
        self._handed = HandedOut(self._observe, positions, counters, max_sources=max_sources)
        self._loss: Lost | None = None  # reported, and not handed out by `items` yet
        self._saves = saves
        self._commit_every_s = commit_every_s
        self._commit_at = time.monotonic() + commit_every_s

    def _state(self) -> dict[str, Any]:
        """What it announces. Called in another thread: what changes meanwhile is announced a second later."""
        return {
            **ledger_state(self._ledger),
            "counters": self.counters.snapshot(),
            "positions": {source: [at.epoch, at.offset] for source, at in list(self.positions.items())},
            "losses": [
                [lost.source, lost.first, lost.last, str(lost.reason)] for lost in list(self.losses)[-20:]
            ],
            "topics": list(self.topics),
        }

    # ---- what a transport supplies ---------------------------------------------------------------------

    @abstractmethod
    def _next_queue(self) -> "deque[B | Lost] | None":
        """The queue whose first item is next for the application; None if nothing has arrived."""

    @abstractmethod
    def _step(self, deadline: float | None) -> float:
        """Read and send once. Returns the seconds to wait before the next step, or OVER: the deadline has come or
        there will be nothing more. Raises Closed."""

    @abstractmethod
    def _wait(self, seconds: float) -> None:
        """Wait until something may have arrived, `_wake`, or so many seconds."""

    @abstractmethod
    async def _wait_async(self, seconds: float) -> None:
        """`_wait` for asyncio."""

    @abstractmethod
    def _wake(self) -> None:
        """End a wait. From any thread, and from signal handlers."""

    @abstractmethod
    def _observe(self, batch: B, first: int, until: int, again: bool) -> None:
        """Enter these offsets of a batch into the ledger; `again`: this was interrupted before, or done already."""

    @abstractmethod
    def _observe_loss(self, lost: Lost) -> None:
        """Enter a loss into the ledger; more than once if that was interrupted."""

    @abstractmethod
    def _write_positions(self) -> None:
        """Save positions and ledger. Raises JournalError."""

    @abstractmethod
    def _shut_down(self, finish: Callable[[], None]) -> None:
        """When nothing else is running: call `finish`, then close the I/O. Once, however often it is called."""

    # ---- receiving -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events one by one; ends when none has come for `timeout` seconds, or when stopped or closed."""
        # The lists' own iterators do the work; what is left of one stays in `pending` if the caller breaks off.
        return itertools.chain.from_iterable(self._opened(timeout))

    def _opened(self, timeout: float | None) -> Iterator[Iterator[Event]]:
        while self._fetch(timeout) and self._handed.give_singly():
            yield self._handed.pending

    def batches(self, timeout: float | None = None) -> Iterator[B]:
        """Whole batches, each with at least one event; ends like `events`."""
        while self._fetch(timeout, whole=True) and (batch := self._handed.give_whole()) is not None:
            yield batch

    def items(self, timeout: float | None = None) -> Iterator[B | Lost]:
        """Batches, and `Lost` in its place between them; ends like `events`."""
        while self._fetch(timeout, whole=True, lost=True) and (item := self._item()) is not None:
            yield item

    def receive(self, timeout: float | None = None) -> Event | None:
        """One event, or None when `timeout` seconds are over or the subscriber was stopped or closed."""
        while True:
            for event in self._handed.pending:
                return event
            if not (self._fetch(timeout) and self._handed.give_singly()):
                return None

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self.aevents():
            yield event

    async def aevents(self, timeout: float | None = None) -> AsyncIterator[Event]:  # noqa: ASYNC109 - as in `events`
        """`events` for asyncio. A cancelled wait loses nothing."""
        while True:
            for event in self._handed.pending:
                yield event
            if not (await self._afetch(timeout) and self._handed.give_singly()):
                return

    async def abatches(self, timeout: float | None = None) -> AsyncIterator[B]:  # noqa: ASYNC109 - as in `batches`
        """`batches` for asyncio."""
        while await self._afetch(timeout, whole=True) and (batch := self._handed.give_whole()) is not None:
            yield batch

    async def aitems(self, timeout: float | None = None) -> AsyncIterator[B | Lost]:  # noqa: ASYNC109 - as in `items`
        """`items` for asyncio."""
        while await self._afetch(timeout, whole=True, lost=True) and (item := self._item()) is not None:
            yield item

    async def areceive(self, timeout: float | None = None) -> Event | None:  # noqa: ASYNC109 - as in `receive`
        """`receive` for asyncio."""
        while True:
            for event in self._handed.pending:
                return event
            if not (await self._afetch(timeout) and self._handed.give_singly()):
                return None

    def _fetch(self, timeout: float | None, *, whole: bool = False, lost: bool = False) -> bool:
        """Make the next batch the current one; False when the time is over or there will be nothing more.

        `whole`: it will be handed out as one. `lost`: a loss counts as well, and is left in `_loss`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        run = self._section.run
        seconds = run(self._take_next, deadline, whole, lost)
        while seconds >= 0:
            if self._saves and self._commit_due():
                run(self._save)
            if self._wait_and_take(seconds, lost):
                return True
            seconds = run(self._look, deadline, lost)
        return seconds == _FOUND

    async def _afetch(self, timeout: float | None, *, whole: bool = False, lost: bool = False) -> bool:  # noqa: ASYNC109
        run = self._section.run
        if run(self._settle, whole) and self._saves and self._commit_due():
            await asyncio.to_thread(run, self._save)
        if run(self._ready, lost):
            await asyncio.sleep(0)  # other tasks need the loop, too
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        if (seconds := run(self._look, deadline, lost)) == _FOUND:
            await asyncio.sleep(0)
        while seconds >= 0:
            if self._saves and self._commit_due():
                await asyncio.to_thread(run, self._save)
            await self._wait_async(seconds)
            seconds = run(self._look, deadline, lost)
        return seconds == _FOUND

    def _take_next(self, deadline: float | None, whole: bool, lost: bool) -> float:
        """Settle, and return what `_look` does; without a step while more is there, as when many arrive."""
        if self._settle(whole) and self._saves and self._commit_due():
            self._save()
        return _FOUND if self._ready(lost) else self._look(deadline, lost)

    def _wait_and_take(self, seconds: float, lost: bool) -> bool:
        """Wait, and take what has come; whether there was something."""
        self._wait(seconds)
        return self._section.run(self._take, lost)

    def _settle(self, whole: bool) -> bool:
        """What the application had is processed, because it asks for more; whether that finished a batch."""
        handed = self._handed
        stage = handed.stage
        if stage is _WHOLE or (stage is _SINGLY and not handed.left()):
            handed.finish()
            return True
        if stage is _SINGLY:
            handed.advance()
            if whole and not handed.stopped:
                handed.split()
        return False

    def _ready(self, lost: bool) -> bool:
        """Whether something can be handed out now."""
        if self._handed.stage is not _NOTHING:
            return not self._handed.stopped
        if lost and self._loss is not None:
            return True
        return self._take(lost)

    def _take(self, lost: bool) -> bool:
        """Go through what has arrived, up to the next batch (or loss) for the application."""
        handed = self._handed
        while not handed.stopped and (queue := self._next_queue()) is not None:
            item = queue[0]
            if type(item) is not Lost:  # isinstance() takes far longer for a Struct
                if handed.take(queue):
                    return True
            else:
                self._report_loss(queue, item)
                if lost:
                    return True
        return False

    def _look(self, deadline: float | None, lost: bool) -> float:
        """Look for the next batch: _FOUND, OVER, or how long to wait before looking again."""
        if self._handed.stopped:
            return OVER
        try:
            seconds = self._step(deadline)
        except Closed:
            return OVER
        return _FOUND if self._take(lost) else seconds

    def _item(self) -> B | Lost | None:
        """Hand out the loss that is next, or else the current batch; None if stopped."""
        if self._handed.stopped or self._handed.stage is not _NOTHING:
            return self._handed.give_whole()
        lost, self._loss = self._loss, None
        return lost

    def _report_loss(self, queue: "deque[B | Lost]", lost: Lost) -> None:
        """Enter a loss into the ledger and tell the application, once."""
        self._observe_loss(lost)
        self._handed.move_to(lost.source, Position(lost.epoch, lost.last + 1))
        if not self.losses or self.losses[-1] is not lost:
            self.losses.append(lost)
        try:
            (self.on_loss or self._loss_log)(lost)
        finally:
            self._loss = lost
            queue.popleft()

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Read and send until the condition holds; whether it does. Events are kept for the next receive."""
        deadline = time.monotonic() + timeout
        while (seconds := self._section.run(self._step, deadline)) >= 0:
            if condition():
                return True
            self._wait(min(seconds, _LOOK_S))
        return condition()

    async def _await_until(self, condition: Callable[[], bool], timeout: float) -> bool:  # noqa: ASYNC109
        """`_wait_until` for asyncio."""
        deadline = time.monotonic() + timeout
        while (seconds := self._section.run(self._step, deadline)) >= 0:
            if condition():
                return True
            await self._wait_async(min(seconds, _LOOK_S))
        return condition()

    # ---- ledger and positions --------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The ledger, including every event handed out so far."""
        self._inside(self._update_ledger)
        return self._ledger

    def _update_ledger(self) -> None:
        self._handed.enter()

    def commit(self) -> None:
        """Everything handed out so far is processed: save positions and ledger now. Raises JournalError."""
        self._inside(self._commit)

    async def acommit(self) -> None:
        """`commit` for asyncio: the file is written in another thread."""
        await asyncio.to_thread(self._section.run, self._commit)

    def _inside(self, work: Callable[[], None]) -> None:
        """Run it while nothing else uses this subscriber."""
        self._section.inside(work)

    def _commit(self) -> None:
        self._handed.advance()
        self._save()

    def _commit_due(self) -> bool:
        return self._handed.dirty and time.monotonic() >= self._commit_at

    def _save(self) -> None:
        self._commit_at = time.monotonic() + self._commit_every_s
        self._write_positions()
        self._handed.dirty = False

    # ---- end -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the iteration after the current event (or batch); what has arrived already stays for the next start.

        For signal handlers, `signal.signal(signal.SIGTERM, lambda *_: sub.stop())`, and for other threads. Unlike
        an exception it does not interrupt what the application does with the current event.
        """
        self._handed.stop()
        self._wake()

    def close(self) -> None:
        """Save positions and close. Ends iterations in other threads. Closing twice is fine.

        What was handed out counts as processed, unless the `with` block ends with an exception: then the last event
        (or batch) does not, and comes again after the next start.
        """
        self._close(failed=False)

    async def aclose(self) -> None:
        """`close` for asyncio: in another thread, so that the loop goes on."""
        await asyncio.to_thread(self._close, failed=False)

    def _close(self, *, failed: bool) -> None:
        self.stop()
        self._shut_down(partial(self._finish_up, failed=failed))
        self._withdraw()

    def _finish_up(self, *, failed: bool) -> None:
        self._handed.advance(but_last=failed)
        self._loss_log.close()
        if self._saves and self._handed.dirty:
            self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._close, failed=kind is not None)


def cursor_name(cursor: str | os.PathLike[str] | None) -> str:
    """What a subscriber is announced as: the name of its cursor file, without folder and suffix."""
    return os.path.splitext(os.path.basename(os.fspath(cursor)))[0] if cursor is not None else ""


def check_start(start: Any, has_cursor: bool) -> str | int:
    """`start` as it was given, or its default: "cursor" if there is one, else "live". Raises ConfigError."""
    if start is None:
        return "cursor" if has_cursor else "live"
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 1 << 63:
        return start
    if start in ("live", "oldest", "cursor"):
        return str(start)
    raise ConfigError("start", f'must be "live", "oldest", "cursor" or an offset, not {start!r}')
