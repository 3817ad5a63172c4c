"""The subscriber: every event of its topics, in order, from as many publishers as it is told."""

import asyncio
import functools
import itertools
import os
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal

import msgspec

from brokerless.core import Cursor, Event, Ledger, Lost, Position
from brokerless.core.errors import Closed, ConfigError, PeerError
from brokerless.direct import address as addresses
from brokerless.direct import wire
from brokerless.direct.batch import Batch, Filter, check_topics
from brokerless.direct.books import Books, Started, load_kept
from brokerless.direct.driver import Driver
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import Follower
from brokerless.direct.resume import check_start, make_directory, open_marks
from brokerless.direct.settings import Settings, SubscriberCounters
from brokerless.direct.sockets import LIVE_QUEUE, check_live_queue
from brokerless.direct.state import Names, State

# A crash repeats at most this much; a save costs about 50 µs.
COMMIT_EVERY_S = 1.0
# The last losses are kept for whoever looks; all of them are in the ledger.
_LOSSES_KEPT = 1000
# What looking for the next batch can give instead of a time to wait.
_FOUND = -1.0
_OVER = -2.0


class _Source:
    """One publisher: its protocol, its books."""

    __slots__ = ("books", "follower")

    def __init__(self, follower: Follower, books: Books) -> None:
        self.follower = follower
        self.books = books


class Subscriber:
    """Follows one or many publishers.

        for event in sub: …              events, one by one; ends when the subscriber is closed
        for batch in sub.batches(): …    whole batches; `batch.events`, `batch.datas`
        sub.receive(timeout=1)           one event, or None
        async for event in sub: …        the same from asyncio, as are `abatches()` and `areceive()`

    Joining late, reconnecting, repairing gaps and catching up need no code. An event counts as dealt with when
    the next one is asked for; `commit()` says so earlier. Positions are saved every `commit_every_s` and on
    closing, so a crash repeats at most that much, and loses nothing.

    Loss is told in order: `on_loss(lost)` is called before the first event after the hole (it may commit, stop or
    close, but not receive or wait), `losses` has the last ones, `ledger` has the books.

    One thread (or task) at a time may use it; `stop()` and `close()` may be called from any, and by handlers of
    signals. A handler that raises (Ctrl-C) loses nothing: what was not handed out yet is handed out when the
    subscriber is used again, or comes again after the next start.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        topics: Sequence[str] = (),
        start: Literal["live", "oldest", "cursor"] | int | None = None,
        cursor: str | os.PathLike[str] | None = None,
        durable: str = "",
        on_loss: Callable[[Lost], None] | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
        live_queue: int = LIVE_QUEUE,
        curve: ClientKeys | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Connect in the background; a publisher need not be there yet.

        `topics` are prefixes; none means all. `start`: "live" (default), "oldest", an offset, or "cursor" (the
        default if `cursor` or `durable` is given): where the file `cursor`, or the publisher for the name
        `durable`, says that we were; the first time at the oldest. `durable` also makes the publisher's journal
        keep what we have not committed, as its `on_full` says. `live_queue` is how many frames wait for us here
        before newer ones are dropped and asked for again.
        """
        texts = [address] if isinstance(address, str) else list(address)
        if not texts:
            raise ConfigError("address", "give at least one")
        self._start = check_start(start, cursor is not None or bool(durable))
        self._cursor = Cursor(cursor) if cursor is not None else None
        if self._start == "cursor" and self._cursor is None and not durable:
            raise ConfigError(
                "start", '"cursor" needs a file (cursor=…) or a name kept by the publisher (durable=…)'
            )
        if durable:
            wire.check_name("durable", durable)
        self.topics = check_topics(topics, wire.MAX_TOPICS)
        check_live_queue(live_queue)
        self.on_loss = on_loss
        self.losses: deque[Lost] = deque(maxlen=_LOSSES_KEPT)
        self.counters = SubscriberCounters()
        if self._cursor is not None:
            make_directory(self._cursor.path)
        saved = self._cursor.load() if self._cursor is not None else None
        self.positions: dict[str, Position] = dict(saved.positions) if saved is not None else {}
        restored = self._start == "cursor" and saved is not None and saved.ledger
        self._ledger = Ledger.restore(saved.ledger) if restored and saved is not None else Ledger()
        self._kept = load_kept(saved.extra) if restored and saved is not None else {}
        # Beside the cursor: how far events were handed out, whether or not that was committed.
        self._marks = open_marks(self._cursor.path) if self._cursor is not None else None
        self._handed_before = dict(self._marks.positions) if self._marks is not None else {}
        self._commit_every_s = commit_every_s
        self._commit_at = time.monotonic() + commit_every_s
        self._dirty = False
        self._durable = durable
        self._closed = False
        self._stopped = False
        # The batch that the application has, or gets next: a signal's handler may raise between the two.
        self._current: tuple[_Source, Batch] | None = None
        self._given = (
            False  # the application has it: all of it (`_whole`), or the events that `_pending` gave
        )
        self._whole = False
        self._pending: Iterator[Event] = iter(())
        self._withheld: list[Event] = []  # what `_pending` had not given when `stop` came: for the next start
        self._driver = Driver(live_queue=live_queue)
        self._sources: list[_Source] = []
        self._names = Names()
        try:
            for text in texts:
                self._add(text, curve, settings)
        except BaseException:
            self._driver.close()
            if self._marks is not None:
                self._marks.close()
            raise
        self._turns = itertools.cycle(self._sources)

    def _add(self, text: str, curve: ClientKeys | None, settings: Settings | None) -> None:
        parsed = addresses.parse(text)
        hello = wire.Hello(
            wire.VERSION,
            secrets.token_hex(16),
            durable=self._durable,
            start=self._start if isinstance(self._start, str) else "",
            policy=wire.Policy(topics=self.topics),
        )
        follower = Follower(
            hello,
            start=self._start,
            positions=self.positions,
            counters=self.counters,
            random=random.random,
            now=time.monotonic(),
            settings=settings,
            address=text,
            names=self._names,
        )
        self._driver.add(parsed, follower, curve)
        self._sources.append(_Source(follower, Books(self._ledger, Filter(self.topics), self._kept)))

    # ---- receiving -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events one by one; ends when none has come for `timeout` seconds, or when closed."""
        # The lists' own iterators do the work; what is left of one stays in `_pending` if the caller breaks off.
        return itertools.chain.from_iterable(self._opened(timeout))

    def _opened(self, timeout: float | None) -> Iterator[Iterator[Event]]:
        yield self._pending
        while self._fetch(timeout):
            self._open()
            yield self._pending

    def batches(self, timeout: float | None = None) -> Iterator[Batch]:
        """Whole batches, each with at least one event; ends like `events`."""
        self._split()
        while self._fetch(timeout):
            assert self._current is not None
            if self._stopped:
                return
            self._given = self._whole = True
            yield self._current[1]
            self._split()  # receive() may have opened another

    def receive(self, timeout: float | None = None) -> Event | None:
        """One event, or None when `timeout` seconds are over or the subscriber was stopped."""
        while True:
            for event in self._pending:
                return event
            if not self._fetch(timeout):
                return None
            self._open()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self.aevents():
            yield event

    async def aevents(self, timeout: float | None = None) -> AsyncIterator[Event]:  # noqa: ASYNC109 - as in the synchronous ones
        """`events` for asyncio. A cancelled wait loses nothing."""
        while True:
            for event in self._pending:
                yield event
            if not await self._afetch(timeout):
                return
            self._open()

    async def abatches(self, timeout: float | None = None) -> AsyncIterator[Batch]:  # noqa: ASYNC109 - as in the synchronous ones
        """`batches` for asyncio."""
        self._split()
        while await self._afetch(timeout):
            assert self._current is not None
            if self._stopped:
                return
            self._given = self._whole = True
            yield self._current[1]
            self._split()  # receive() may have opened another

    async def areceive(self, timeout: float | None = None) -> Event | None:  # noqa: ASYNC109 - as in the synchronous ones
        """`receive` for asyncio."""
        while True:
            for event in self._pending:
                return event
            if not await self._afetch(timeout):
                return None
            self._open()

    # A wait can be cancelled, and a signal's handler can raise whenever a function is entered, a call has returned
    # or a loop goes round. So every change of state from here on is either made between two such points, or made
    # again when it was not finished.

    def _fetch(self, timeout: float | None) -> bool:
        """Make the next batch the current one; False when the time is over or the subscriber stopped or closed."""
        run = self._driver.run
        deadline = None if timeout is None else time.monotonic() + timeout
        while (seconds := run(self._look, deadline)) >= 0:
            if run(self._wait, seconds):
                return not self._closed
        return seconds == _FOUND and not self._closed

    async def _afetch(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - as in the synchronous ones
        run = self._driver.run
        deadline = None if timeout is None else time.monotonic() + timeout
        if (seconds := run(self._look, deadline)) == _FOUND:
            await asyncio.sleep(0)  # other tasks live here, too
        while seconds >= 0:
            await self._driver.wait_async(seconds)
            seconds = run(self._look, deadline)
        return seconds == _FOUND and not self._closed

    def _look(self, deadline: float | None) -> float:
        """Look for the next batch: _FOUND, _OVER, or how long to wait before looking again."""
        if self._at_hand():
            return _FOUND
        if self._stopped:
            return _OVER
        try:
            seconds = self._driver.step(deadline)
        except Closed:
            return _OVER
        if self._take():
            return _FOUND
        if seconds < 0:
            return _OVER
        self._commit_if_due()
        return seconds

    def _wait(self, seconds: float) -> bool:
        self._driver.wait(seconds)
        return self._take()

    def _at_hand(self) -> bool:
        """The batch in hand is dealt with, if the application had it; whether there is something to be given now."""
        if self._current is not None:
            if not self._given:
                return not self._stopped
            if self._left() and not self._stopped:
                return True  # of a batch that another iteration, or receive(), has opened
            if self._left():
                self._advance(self._handed_out())  # the rest is for the next start
                return False
            self._finish()
        self._recover()
        return self._take()

    def _open(self) -> None:
        """Give the current batch event by event, from `_pending`, or what is left of it."""
        assert self._current is not None
        pending = iter(self._current[1].events)
        if not self._given:
            self._whole = False
            self._pending = pending
            self._given = True
        if self._stopped:
            self._withheld.extend(self._pending)

    def _split(self) -> None:
        """What is left of a batch that the application took events of is a batch of its own."""
        left = self._left()
        if left and self._given and not self._stopped and self._current is not None:
            source, batch = self._current
            until = self._handed_out()
            self._advance(until)
            rest = Batch(batch.frame.slice(until, batch.next_offset), left, source.books.wanted)
            old, none, given = self._pending, iter(()), len(batch) - left
            self.counters.events += given
            self._pending = none
            self._given = False
            self._current = (source, rest)
            old.__setstate__(sys.maxsize)  # type: ignore[attr-defined]  # for an iteration that goes on with it

    def _take(self) -> bool:
        """Go through what happened up to the next batch that has something for the application."""
        if self._stopped:
            return False
        for _ in self._sources:
            source = next(self._turns)
            ready = source.follower.ready
            while ready:
                item = ready[0]
                if isinstance(item, Batch):
                    if item.count:
                        if self._marks is not None:
                            self._mark(item)
                        self._given = False
                        self._current = (source, item)
                        ready.popleft()
                        return True
                    source.books.enter(item.source, item.epoch, item.topics, item.next_offset)
                    self.positions[item.source] = Position(item.epoch, item.next_offset)
                    self._dirty = True
                    ready.popleft()
                elif isinstance(item, Lost):
                    self._lose(source, item)
                elif isinstance(item, Started):
                    self._begin(source, item)
                else:
                    source.books.sent(item)
                    ready.popleft()
        return False

    def _begin(self, source: _Source, started: Started) -> None:
        source.books.started(started)
        if started.at >= 0:
            self.positions[started.source] = Position(started.epoch, started.at)
            self._dirty = True
        source.follower.ready.popleft()

    def _recover(self) -> None:
        """If what the driver did was interrupted half-way, join anew, after what we have."""
        if not self._driver.torn:
            return
        now = time.monotonic()
        for source in self._sources:
            taken = self.positions.get(source.follower.source)
            if self._current is not None and self._current[0] is source:
                batch = self._current[1]
                taken = Position(batch.epoch, batch.next_offset)
            source.follower.recover(taken, now)
        self._driver.torn = False

    def _mark(self, batch: Batch) -> None:
        """Remember, in memory that outlives the process, that this batch is being handed out."""
        assert self._marks is not None
        name = f"{batch.source}:{batch.epoch}"
        if name not in self._marks.positions:
            for old in [n for n in self._marks.positions if n.rpartition(":")[0] == batch.source]:
                self._marks.drop(old)
        if batch.next_offset > self._marks.positions.get(name, -1):
            self._marks.set(name, batch.next_offset)

    def redelivered(self, event: Event) -> bool:
        """Whether the event may have been handed out before, by a process that ended before it committed.

        Needs a cursor file. Every repetition is told; now and then one that was not begun is told, too.
        """
        return event.offset < self._handed_before.get(f"{event.source}:{event.epoch}", -1)

    def _lose(self, source: _Source, lost: Lost) -> None:
        source.books.lost(lost)
        self.positions[lost.source] = Position(lost.epoch, lost.last + 1)
        self._dirty = True
        if not self.losses or self.losses[-1] is not lost:
            self.losses.append(lost)
        try:
            if self.on_loss is not None:
                self.on_loss(lost)
        finally:
            source.follower.ready.popleft()

    def _finish(self) -> None:
        """The current batch has been dealt with."""
        assert self._current is not None
        batch = self._current[1]
        self._enter(batch.next_offset)
        given = len(batch)
        name, position = batch.source, Position(batch.epoch, batch.next_offset)
        self.positions[name] = position
        self._dirty = True
        self.counters.events += given
        self._current = None
        self._commit_if_due()

    # ---- positions and books ---------------------------------------------------------------------------

    def _left(self) -> int:
        """How many events of the current batch the application has not been given."""
        if self._current is None:
            return 0
        if not self._given:
            return len(self._current[1])
        return 0 if self._whole else self._pending.__length_hint__() + len(self._withheld)  # type: ignore[attr-defined]

    def _handed_out(self, *, but_last: bool = False) -> int:
        """The offset up to which the application has been given the current batch, without what it got last or with."""
        assert self._current is not None
        batch = self._current[1]
        left = self._left()
        if not left and not but_last:
            return batch.next_offset
        given = 0 if self._whole else len(batch) - left - but_last
        return batch.events[given - 1].offset + 1 if given > 0 else batch.first_offset

    def _enter(self, until: int) -> None:
        """Bring the books up to an offset of the current batch."""
        assert self._current is not None
        source, batch = self._current
        first = max(batch.first_offset, source.books.entered(batch.epoch))
        if first < until:
            topics = batch.topics
            if (first, until) != (batch.first_offset, batch.next_offset):
                topics = batch.frame.slice(first, until).topics
            source.books.enter(batch.source, batch.epoch, topics, until)

    def _advance(self, until: int) -> None:
        """Everything before an offset of the current batch has been dealt with. What was so before stays so."""
        assert self._current is not None
        self._enter(until)
        batch = self._current[1]
        known = self.positions.get(batch.source)
        settled = known.offset if known is not None and known.epoch == batch.epoch else batch.first_offset
        if until > settled:
            self.positions[batch.source] = Position(batch.epoch, until)
            self._dirty = True

    @property
    def ledger(self) -> Ledger:
        """The books, including every event handed out so far."""
        if self._current is not None:
            self._enter(self._handed_out())
        return self._ledger

    def commit(self) -> None:
        """Everything handed out so far is dealt with: save positions and ledger now. Raises JournalError."""
        if self._current is not None:
            self._advance(self._handed_out())
        self._save()

    def _commit_if_due(self) -> None:
        if self._dirty and (self._cursor is not None or self._durable):
            now = time.monotonic()
            if now >= self._commit_at:
                self._save()

    def _save(self) -> None:
        self._commit_at = time.monotonic() + self._commit_every_s
        if self._cursor is not None:
            for source in self._sources:
                source.books.keep()
            self._cursor.save(self.positions, self._ledger.snapshot(), msgspec.msgpack.encode(self._kept))
        self._dirty = False
        if self._durable:
            for source in self._sources:
                position = self.positions.get(source.follower.source)
                if position is not None and position.epoch == source.follower.epoch:
                    source.follower.advance(position.offset)

    def reconcile(self, timeout: float = 5.0) -> bool:
        """Ask every publisher how much it sent, so that the ledger also shows a lost or pending tail.

        Whether all of them answered in time. Events that arrive meanwhile are kept for the next receive.
        """
        self._driver.run(self._recover)
        for source in self._sources:
            source.books.reconciled = -1
            source.follower.ask_sent()
        for seconds in self._driver.steps(timeout):
            if all(self._answered(source) for source in self._sources):
                return True
            self._driver.run(self._driver.wait, min(seconds, 0.1))
        for source in self._sources:
            source.follower.unanswered = 0  # an answer that was dropped is not waited for the next time
        return False

    def _answered(self, source: _Source) -> bool:
        """Whether the publisher's word has come; it may be entered before the events that precede it are read."""
        ready = source.follower.ready
        while ready and isinstance(ready[0], Started):
            self._begin(source, ready[0])  # nothing was received yet
        for item in [i for i in source.follower.ready if isinstance(i, wire.Sent)]:
            source.follower.ready.remove(item)
            source.books.sent(item, at_once=True)
        return source.books.reconciled >= 0 and not source.follower.unanswered

    def wait_joined(self, timeout: float = 10.0) -> bool:
        """Wait until every publisher is being followed and its live stream arrives; whether that is so.

        Not needed for correctness. With start="live", everything published from here on is received; without
        this call, everything published from the first receive on.
        """
        self._driver.run(self._recover)
        for seconds in self._driver.steps(timeout):
            if all(s.follower.state is State.FOLLOWING and s.follower.attached for s in self._sources):
                return True
            self._driver.run(self._driver.wait, seconds)
        return False

    @property
    def connected(self) -> int:
        """How many publishers are being followed now."""
        return sum(1 for s in self._sources if s.follower.state is State.FOLLOWING)

    @property
    def failed(self) -> dict[str, PeerError]:
        """Publishers given up, with the reason, by address; receiving raises when no other is left."""
        return dict(self._driver.failed)

    # ---- closing ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the iteration after the event (or batch) in hand; what has arrived already stays for the next start.

        For handlers of signals, `signal.signal(signal.SIGTERM, lambda *_: sub.stop())`, and for other threads. Unlike
        an exception it does not break off what the application does with the event in hand.
        """
        self._stopped = True
        # One call takes the rest from the list's own iterator, which is at work, and keeps it, whatever others do.
        self._withheld.extend(self._pending)
        self._driver.wake()

    def close(self) -> None:
        """Save positions, say goodbye, close. Ends iterations that wait in other threads."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        self._driver.close(functools.partial(self._end, failed=failed))

    def _end(self, *, failed: bool) -> None:
        self._closed = self._stopped = True
        self._withheld.extend(self._pending)
        try:
            # What is in hand counts as dealt with, unless its handler raised.
            if self._current is not None:
                self._advance(self._handed_out(but_last=failed))
            if self._dirty and (self._cursor is not None or self._durable):
                self._save()
        finally:
            for source in self._sources:
                source.follower.close()
            if self._marks is not None:
                self._marks.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)
