"""The subscriber: every event of its topics, in order, from as many publishers as it is told."""

import itertools
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from brokerless.core import Cursor, Event, Ledger, Lost, Position
from brokerless.core.consumer import COMMIT_EVERY_S, Consumer, check_start, cursor_name
from brokerless.core.discovery import Found, pattern_of
from brokerless.core.errors import ConfigError, UsageError
from brokerless.core.event import microseconds
from brokerless.core.journal.cursor_table import CursorTable
from brokerless.core.topics import TopicFilter, check_topics
from brokerless.direct.address import parse_address
from brokerless.direct.batch import Batch, StateBatch
from brokerless.direct.counters import SubscriberCounters
from brokerless.direct.io.base import LIVE_QUEUE, check_live_queue
from brokerless.direct.io.client import Discovered, Driver, FollowsPublishers
from brokerless.direct.io.failover import Failover
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import SourceOwners, State
from brokerless.direct.protocol.loss_accounting import EpochStarted, LossAccounting, Snapshot, load_accounting
from brokerless.direct.protocol.subscriber import SubscriberProtocol, SubscriberSettings


class _Source:
    """One publisher: its protocol, its accounting."""

    __slots__ = ("accounting", "protocol", "static")

    def __init__(self, protocol: SubscriberProtocol, accounting: LossAccounting, *, static: bool) -> None:
        self.protocol = protocol
        self.accounting = accounting
        self.static = static  # its address was given, not discovered


class Subscriber(FollowsPublishers, Consumer[Batch]):
    """Follows one or many publishers.

        for event in sub: …              events, one by one; ends when the subscriber is stopped or closed
        for batch in sub.batches(): …    whole batches; `batch.events`, `batch.datas`
        for item in sub.items(): …       batches and, in their place between them, `Lost`
        sub.receive(timeout=1)           one event, or None
        async for event in sub: …        the same from asyncio: `abatches()`, `aitems()`, `areceive()`

    Joining late, reconnecting, repairing gaps and catching up need no code. An event is considered processed once you
    request the next; `commit()` does that earlier. Positions are saved every `commit_every_s` and on closing, so a
    crash repeats at most that much, and loses nothing.

    Loss is reported in order: `on_loss(lost)` is called before the first event after the gap (it may commit, stop or
    close, but not receive or wait), `losses` has the last ones, `ledger` has the accounting.

    One thread (or task) at a time may use it; `stop()` and `close()` may be called from any, and by signal handlers.
    A handler that raises (Ctrl-C) loses nothing: what was not handed out yet is handed out when the subscriber is
    used again, or comes again after the next start.
    """

    _logger = "brokerless.direct.subscriber"
    counters: SubscriberCounters
    _current: _Source  # the source of the current batch or loss

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        topics: Sequence[str] = (),
        start: Literal["live", "oldest", "cursor", "snapshot"] | int | datetime | None = None,
        cursor: str | os.PathLike[str] | None = None,
        durable: str = "",
        on_loss: Callable[[Lost], None] | None = None,
        on_snapshot: Callable[[Snapshot], None] | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
        live_queue: int = LIVE_QUEUE,
        curve: ClientKeys | None = None,
        settings: SubscriberSettings | None = None,
        announce: bool = True,
        metrics: str = "",
    ) -> None:
        """Connect in the background; a publisher need not be there yet.

        `address` is one publisher's, or several. `discover:PATTERN` stands for every publisher whose source matches
        (`discover:orders-*`) and that announces itself, followed as they come, move and go; `start="live"` then means
        for a publisher that was started later: all that it published since.

        `topics` are patterns (`orders.*`, `orders.**`) and plain prefixes (`orders.`, `prefix:sensor-`), see
        `brokerless.core.topics`; none means all. `start`: "live" (default), "oldest", an offset, a datetime (the first
        event at or after it; it needs a time zone), or "cursor" (the default if `cursor` or `durable` is given): where
        the file `cursor`, or the publisher for the name `durable`, says that we were; the first time at the oldest.
        `durable` also makes the publisher's journal keep what we have not committed, as its `on_full` says.
        `live_queue` is how many frames wait for us here before newer ones are dropped and asked for again.

        `start="snapshot"`, for a publisher whose journal has `compact="key"`: first the newest event of every key,
        oldest first, then what follows. With `cursor`: from the second start on, where that says that we were, as
        long as the journal goes back so far. Whenever what we have had does not join up with what the journal has
        (we were away for too long, a new epoch), there is a snapshot again. `on_snapshot(snapshot)` is called in its
        place between events when one begins, which is when to forget what you hold of that source, and again when it
        is complete.
        `announce=False` keeps it out of `brokerless ps`; `metrics` is a host:port where this process serves `/metrics`
        for Prometheus.
        """
        texts = [address] if isinstance(address, str) else list(address)
        if not texts:
            raise ConfigError("address", "give at least one")
        patterns = [pattern for text in texts if (pattern := pattern_of(text)) is not None]
        self._start = _checked_start(start, cursor is not None or bool(durable))
        self._cursor = Cursor(cursor) if cursor is not None else None
        if self._start == "cursor" and self._cursor is None and not durable:
            raise ConfigError(
                "start", '"cursor" needs a file (cursor=…) or a name kept by the publisher (durable=…)'
            )
        if durable:
            messages.check_name("durable", durable)
            if start == "snapshot":
                raise ConfigError(
                    "durable", 'is not for start="snapshot": keep the position here, with cursor='
                )
        self.topics = check_topics(topics, messages.MAX_TOPICS)
        check_live_queue(live_queue)
        self.counters = SubscriberCounters()
        if self._cursor is not None:
            self._cursor.prepare()
        saved = self._cursor.load() if self._cursor is not None else None
        restored = self._start in ("cursor", "snapshot") and saved is not None and saved.ledger
        self.on_snapshot = on_snapshot
        self._kept = load_accounting(saved.extra) if restored and saved is not None else {}
        # Beside the cursor: how far events were handed out, whether or not that was committed.
        self._marks = _open_marks(self._cursor.path) if self._cursor is not None else None
        self._handed_before = dict(self._marks.positions) if self._marks is not None else {}
        self._durable = durable
        self._driver = Driver(live_queue=live_queue)
        self._sources: list[_Source] = []
        self._failovers: dict[str, Failover] = {}
        self._names = SourceOwners()
        super().__init__(
            section=self._driver.section,
            ledger=Ledger.restore(saved.ledger) if restored and saved is not None else Ledger(),
            positions=dict(saved.positions) if saved is not None else {},
            counters=self.counters,
            on_loss=on_loss,
            saves=self._cursor is not None or bool(durable),
            commit_every_s=commit_every_s,
        )
        self._settings = settings
        self._since = time.time()
        self._turns: Iterator[_Source] = iter(())
        try:
            for text in texts:
                if pattern_of(text) is None:
                    channel = self._driver.add(
                        parse_address(text), self._new_source(text, self._start), curve
                    )
                    self._failovers[text] = Failover(
                        self._driver, channel, curve, (saved.mirrors if saved is not None else {}).get(text)
                    )
            self._driver.failovers = list(self._failovers.values())
            if patterns:
                self._driver.discovered = Discovered(self._driver, patterns, curve, self._found)
                self._driver.discovered.update(time.monotonic())
        except BaseException:
            self._driver.close()
            if self._marks is not None:
                self._marks.close()
            raise
        self._announce(
            "direct.subscriber", durable or cursor_name(cursor), texts, enabled=announce, metrics=metrics
        )

    def _new_source(self, text: str, start: str | int, *, static: bool = True) -> SubscriberProtocol:
        """The protocol for the publisher at this address."""
        source = self._make_source(text, start, static=static)
        self._sources.append(source)
        self._turns = itertools.cycle(self._sources)
        if len(self._sources) == 1:
            self._current = source
        return source.protocol

    def _make_source(self, text: str, start: str | int, *, static: bool, sought: bool = False) -> _Source:
        hello = messages.Hello(
            messages.VERSION,
            secrets.token_hex(16),
            durable=self._durable,
            start=start if isinstance(start, str) else "",
            policy=messages.Policy(topics=self.topics),
        )
        protocol = SubscriberProtocol(
            hello,
            start=start,
            positions=self.positions,
            counters=self.counters,
            random=random.random,
            now=time.monotonic(),
            settings=self._settings,
            address=text,
            names=self._names,
            sought=sought,
        )
        accounting = LossAccounting(self._ledger, TopicFilter(self.topics), self._kept)
        return _Source(protocol, accounting, static=static)

    def _found(self, found: Found) -> SubscriberProtocol:
        """The protocol for a publisher that was found.

        One that was started after us had nobody listening in its first moments: what it published then is ours.
        """
        start = self._start
        if any(source.protocol.source == found.name for source in self._sources):
            start = start if start == "snapshot" else "cursor"  # it refused us elsewhere: go on where we were
        elif start == "live" and found.started > self._since and found.since_start >= 0:
            start = found.since_start
        return self._new_source(found.address, start, static=False)

    # ---- moving ----------------------------------------------------------------------------------------

    def seek(
        self, start: Literal["live", "oldest", "snapshot"] | int | datetime, *, source: str = ""
    ) -> None:
        """Go on elsewhere: at an offset, at the first event at or after a datetime, at the oldest, with a snapshot, or
        with what is new.

        `source` is the publisher to do that with; all of them if it is not given. What was handed out is processed,
        what has arrived and was not handed out is dropped. The ledger starts over for these sources: what is passed
        over is no loss, what comes again no duplicate. The next commit saves the new position once the publisher has
        confirmed it, which takes a round trip. Not from `on_loss` or signal handlers (UsageError).
        """
        wanted = _checked_start(start, False)
        if wanted == "cursor" or start is None:
            raise ConfigError("start", 'must be "live", "oldest", "snapshot", an offset or a datetime')
        self._section.run(self._seek, wanted, source)
        self._wake()

    def _seek(self, start: str | int, name: str) -> None:
        self._recover()
        for at, old in enumerate(self._sources):
            source = old.protocol.source
            if (name and source != name) or old.protocol.state in (State.REFUSED, State.CLOSED):
                continue
            if self._handed.batch is not None and self._handed.batch.source == source:
                self._handed.drop()
            new = self._make_source(old.protocol.address, start, static=old.static, sought=True)
            self._ledger.restart(source)
            self._kept.pop(source, None)
            self._sources[at] = new
            self._turns = itertools.cycle(self._sources)
            if self._current is old:
                self._current = new
            old.protocol.close()
            self._driver.replace(old.protocol, new.protocol)

    # ---- receiving (see Consumer) ----------------------------------------------------------------------

    def _next_queue(self) -> "deque[Batch | Lost] | None":
        if self._driver.interrupted:
            self._recover()
        for _ in self._sources:
            source = next(self._turns)
            ready = source.protocol.ready
            while ready:
                item = ready[0]
                if isinstance(item, Batch):
                    if self._marks is not None and item.count:
                        self._note_handed_out(item)
                elif isinstance(item, EpochStarted):
                    self._begin(source, item)
                    continue
                elif isinstance(item, Snapshot):
                    self._pass_edge(source, item)
                    continue
                elif not isinstance(item, Lost):
                    source.accounting.sent(item)
                    ready.popleft()
                    continue
                self._current = source
                return ready  # type: ignore[return-value]  # its first item was looked at
        return None

    def _step(self, deadline: float | None) -> float:
        return self._driver.step(deadline)

    def _wait(self, seconds: float) -> None:
        self._section.run(self._driver.wait, seconds)

    def _wait_and_take(self, seconds: float, lost: bool) -> bool:
        # Entering the section once for both: it is on the way of every event that somebody waits for.
        return self._section.run(self._wait_and_take_inside, seconds, lost)

    def _wait_and_take_inside(self, seconds: float, lost: bool) -> bool:
        self._driver.wait(seconds)
        return self._take(lost)

    async def _wait_async(self, seconds: float) -> None:
        await self._driver.wait_async(seconds)

    def _wake(self) -> None:
        self._driver.wake()

    def _begin(self, source: _Source, started: EpochStarted) -> None:
        source.accounting.started(started)
        if started.at >= 0:
            self._handed.move_to(started.source, Position(started.epoch, started.at))
        source.protocol.ready.popleft()

    def _pass_edge(self, source: _Source, edge: Snapshot) -> None:
        """A snapshot begins or is complete. Until then the position is one from which there would be another."""
        source.accounting.snapshot(edge)
        self._handed.move_to(edge.source, Position(edge.epoch, edge.at if edge.complete else 0))
        try:
            if self.on_snapshot is not None:
                self.on_snapshot(edge)
        finally:
            source.protocol.ready.popleft()

    def _recover(self) -> None:
        """If the driver was interrupted while it worked, join again, after what we have."""
        if not self._driver.interrupted:
            return
        now = time.monotonic()
        batch = self._handed.batch
        for source in self._sources:
            taken = self.positions.get(source.protocol.source)
            if batch is not None and self._current is source:
                taken = Position(batch.epoch, batch.next_offset)
            source.protocol.recover(taken, now)
        self._driver.interrupted = False

    def _note_handed_out(self, batch: Batch) -> None:
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

        Needs a cursor file. Every repetition is reported; now and then one that was not begun is reported, too.
        """
        return event.offset < self._handed_before.get(f"{event.source}:{event.epoch}", -1)

    # ---- ledger and positions --------------------------------------------------------------------------

    def _observe(self, batch: Batch, first: int, until: int, again: bool) -> None:
        accounting = self._current.accounting
        if isinstance(batch, StateBatch):
            accounting.enter_state(batch.block, until)
            return
        first = max(first, accounting.entered(batch.epoch))
        if first < until:
            topics = batch.topics
            if (first, until) != (batch.first_offset, batch.next_offset):
                topics = batch.frame.slice(first, until).topics
            accounting.enter(batch.source, batch.epoch, topics, until)

    def _observe_loss(self, lost: Lost) -> None:
        self._current.accounting.lost(lost)

    def _inside(self, work: Callable[[], None]) -> None:
        # Without the section, in which another thread may be waiting for events.
        work()

    def _write_positions(self) -> None:
        if self._cursor is not None:
            for source in self._sources:
                source.accounting.keep()
            mirrors = {text: at.places[1:] for text, at in self._failovers.items() if at.places[1:]}
            extra = msgspec.msgpack.encode(self._kept)
            self._cursor.save(self.positions, self._ledger.snapshot(), extra, mirrors)
        if self._durable:
            for source in self._sources:
                position = self.positions.get(source.protocol.source)
                if position is not None and position.epoch == source.protocol.epoch:
                    source.protocol.advance(position.offset)

    def reconcile(self, timeout: float = 5.0) -> bool:
        """Ask every publisher how much it sent, so that the ledger also shows a lost or pending tail.

        Returns whether all of them answered within `timeout` seconds. Events that arrive meanwhile are kept for the
        next receive.
        """
        self._section.run(self._ask_sent)
        done = self._wait_until(self._all_answered, timeout)
        if not done:
            self._stop_asking()
        return done

    async def areconcile(self, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 - as in `reconcile`
        """`reconcile` for asyncio."""
        self._section.run(self._ask_sent)
        done = await self._await_until(self._all_answered, timeout)
        if not done:
            self._stop_asking()
        return done

    def _ask_sent(self) -> None:
        self._recover()
        for source in self._sources:
            source.accounting.reconciled = -1
            source.protocol.ask_sent()

    def _stop_asking(self) -> None:
        for source in self._sources:
            source.protocol.unanswered = 0  # an answer that was dropped is not waited for the next time

    def _all_answered(self) -> bool:
        return all(self._answered(source) for source in self._connected_sources())

    def _answered(self, source: _Source) -> bool:
        """Whether the publisher's answer has come; it may be entered before the events that precede it are read."""
        ready = source.protocol.ready
        while ready and isinstance(ready[0], EpochStarted):
            self._begin(source, ready[0])  # nothing was received yet
        for item in [i for i in source.protocol.ready if isinstance(i, messages.Sent)]:
            source.protocol.ready.remove(item)
            source.accounting.sent(item, at_once=True)
        return source.accounting.reconciled >= 0 and not source.protocol.unanswered

    def wait_joined(self, timeout: float = 10.0) -> bool:
        """Wait until every publisher is being followed and its live stream arrives; whether that is so.

        Not needed for correctness. With start="live", everything published from here on is received; without
        this call, everything published from the first receive on.
        """
        self._section.run(self._recover)
        return self._wait_until(self._joined, timeout)

    async def await_joined(self, timeout: float = 10.0) -> bool:  # noqa: ASYNC109 - as in `wait_joined`
        """`wait_joined` for asyncio."""
        self._section.run(self._recover)
        return await self._await_until(self._joined, timeout)

    def _joined(self) -> bool:
        there = self._connected_sources()
        batch = self._handed.batch
        for source in there:
            ready = source.protocol.ready
            if batch is None or batch.source != source.protocol.source:
                while ready and isinstance(ready[0], EpochStarted):
                    self._begin(source, ready[0])  # so that a commit saves where a seek went
        return bool(there) and all(s.protocol.state is State.FOLLOWING and s.protocol.attached for s in there)

    def _connected_sources(self) -> list[_Source]:
        """All sources but discovered ones that are gone."""
        discovered = self._driver.discovered
        if discovered is None:
            return self._sources
        return [s for s in self._sources if s.static or discovered.connected(s.protocol)]

    @property
    def connected(self) -> int:
        """How many publishers are being followed now."""
        return sum(1 for s in self._sources if s.protocol.state is State.FOLLOWING)

    # ---- closing ---------------------------------------------------------------------------------------

    def _shut_down(self, finish: Callable[[], None]) -> None:
        self._driver.close(lambda: self._end(finish))

    def _end(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        finally:
            for source in self._sources:
                source.protocol.close()
            if self._marks is not None:
                self._marks.close()


def _checked_start(start: object, has_cursor: bool) -> str | int:
    """`start` as protocols have it: a datetime becomes `@` and microseconds. Raises ConfigError."""
    if isinstance(start, datetime):
        try:
            return messages.start_at(microseconds(start))
        except UsageError as error:
            raise ConfigError("start", str(error)) from None
    if start == "snapshot":
        return start
    try:
        return check_start(start, has_cursor)
    except ConfigError:
        problem = f'must be "live", "oldest", "cursor", "snapshot", an offset or a datetime, not {start!r}'
        raise ConfigError("start", problem) from None


def _open_marks(cursor: str) -> CursorTable:
    """What is kept beside a cursor's file, for one subscriber at a time. Raises ConfigError."""
    try:
        return CursorTable(f"{cursor}.marks", exclusive=True)
    except BlockingIOError:
        problem = f"{cursor} is in use by another subscriber; each needs a file of its own"
    except OSError as error:
        problem = f"{cursor}.marks beside it cannot be used: {error.strerror}"
    raise ConfigError("cursor", problem)
