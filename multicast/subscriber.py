"""The subscriber: events in order, each exactly once, or the word that they are lost."""

import asyncio
import os
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Literal

from brokerless.core import Cursor, Event, Ledger, Lost, Position
from brokerless.core.errors import ConfigError
from brokerless.multicast.batch import Batch, by_identity, check_topics, identity_of
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.message import Columns
from brokerless.multicast.open import Wiring, open_engine
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.protocol import Gone, session_name, wire_session
from brokerless.multicast.receiver import LIVE, OLDEST
from brokerless.multicast.repair import Missing
from brokerless.multicast.sockets import DEFAULT_INTERFACE, DEFAULT_RECEIVE_BUFFER
from brokerless.multicast.transmit import Io

# A crash repeats at most this much; a save costs about 50 µs.
COMMIT_EVERY_S = 1.0
# What the application has not taken yet; beyond it the sockets are not read any more.
MAX_QUEUE_BYTES = 64 * 1024 * 1024
# The last losses are kept for whoever looks; all of them are in the ledger.
_LOSSES_KEPT = 1000
# When the application has not asked for this long, the helper thread reads the sockets in its place: well
# within the time that a default receive buffer of 8 MiB bridges.
_AWAY_S = 0.01
# The longest single wait, so that closing from another thread is noticed.
_LOOK_S = 0.5
# Sources whose position is kept. A stream has one; only a forger sends more, and must not fill memory.
_MAX_SOURCES = 1024
# The ledger's stream of a multicast source: all topics together, counted by offset.
ALL_TOPICS = ""


class Subscriber:
    """Follows one session (and those after it) of a group, or of two that carry the same: lines A and B.

        for event in sub: …              events, one by one; ends when the subscriber is closed
        for batch in sub.batches(): …    whole batches; `batch.events`, `batch.datas`
        for item in sub.items(): …       batches and, in their place between them, `Lost`
        sub.receive(timeout=1)           one event, or None
        async for event in sub: …        the same from asyncio: `abatches()`, `aitems()`, `areceive()`

    Loss is told in order: `on_loss(lost)` is called before the first event after the hole, `losses` has the
    last ones, `ledger` has the books, by offset (the topic in it is empty: what was lost has no known topic).
    An event counts as dealt with when the next one is asked for; `commit()` says so earlier.

    Question 1, the producer is faster: up to `max_queue_bytes` are kept here, then the kernel's buffer
    fills, then it drops, which is counted, noticed and repaired when there is room again. Question 2, it was
    offline: with `start="cursor"` it goes on where it was; the journal decides how much can still be had.

    One thread (or task) at a time may use it; `close()` may be called from any.
    """

    def __init__(
        self,
        group: str | Sequence[str],
        session: str | None = None,
        *,
        interface: str | Sequence[str] = DEFAULT_INTERFACE,
        sender: str | None = None,
        request_servers: Sequence[str] | None = None,
        topics: Sequence[str] = (),
        start: Literal["live", "oldest", "cursor"] | int | None = None,
        cursor: str | os.PathLike[str] | None = None,
        on_loss: Callable[[Lost], None] | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
        repair: RepairPolicy | None = None,
        tcp: bool = True,
        auth_key: bytes | None = None,
        opaque: bool = False,
        stop_at_end: bool = False,
        receive_buffer_bytes: int = DEFAULT_RECEIVE_BUFFER,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
        io: Io = "auto",
    ) -> None:
        """Join at once; a publisher need not be there yet.

        `session` is a publisher's name, or a foreign session; None takes the first that is heard. `sender`
        joins for that source address only. `request_servers` are asked for what is missing; by default the
        sender's (or this machine's) address and the port after the group's; empty: nothing is repaired.
        `topics` are prefixes. `start`: "live" (default), "oldest", an offset, or "cursor" (the default if
        `cursor` names a file; the first time at the oldest). `opaque` does not look for events in the messages.
        `stop_at_end`: iterating ends with the session.
        """
        self.topics = check_topics(topics)
        self._start = _check_start(start, cursor is not None)
        self._cursor = Cursor(cursor) if cursor is not None else None
        saved = self._cursor.load() if self._cursor is not None else None
        self.positions: dict[str, Position] = dict(saved.positions) if saved is not None else {}
        restored = saved.ledger if saved is not None and self._start == "cursor" else b""
        self._ledger = Ledger.restore(restored) if restored else Ledger()
        self.on_loss = on_loss
        self.losses: deque[Lost] = deque(maxlen=_LOSSES_KEPT)
        self.counters = SubscriberCounters()
        self._stop_at_end = stop_at_end
        self._commit_every_s = commit_every_s
        self._commit_at = time.monotonic() + commit_every_s
        self._dirty = False
        self._closed = False
        self._ready: deque[Batch | Lost] = deque()
        self._current: Batch | None = None
        self._pending: Iterator[Event] = iter(())
        self._entered = 0  # offsets of the current batch before this are in the ledger
        self._known: dict[bytes, tuple[str, int]] = {}  # session → source and epoch
        wiring = Wiring(
            groups=[group] if isinstance(group, str) else list(group),
            interfaces=[interface] if isinstance(interface, str) else list(interface),
            sender=sender,
            request_servers=request_servers,
            session=session,
            repair=repair or RepairPolicy(),
            tcp=tcp,
            auth_key=auth_key,
            opaque=opaque,
            receive_buffer_bytes=receive_buffer_bytes,
            max_queue_bytes=max_queue_bytes,
            io=io,
        )
        self._engine = open_engine(
            wiring, self._where_to_begin, self.counters, random.random, on_gone=self._learn
        )
        self._receiver = self._engine.receiver
        self._wait = self._engine.poller()
        self._waiting = False
        self._asked_at = 0.0
        self._stop = threading.Event()
        self._helper = threading.Thread(target=self._help, name="brokerless-multicast", daemon=True)
        self._helper.start()

    # -- receiving ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events one by one; ends when none has come for `timeout` seconds, or when closed."""
        while True:
            # The list's own iterator does the work; what is left of it stays if the caller breaks off.
            yield from self._pending
            if not self._open_batch(self._fetch(timeout)):
                return

    def batches(self, timeout: float | None = None) -> Iterator[Batch]:
        """Whole batches, each with at least one event; ends like `events`."""
        for item in self.items(timeout):
            if isinstance(item, Batch):
                yield item

    def items(self, timeout: float | None = None) -> Iterator[Batch | Lost]:
        """Batches, and `Lost` in its place between them; ends like `events`."""
        while True:
            item = self._rest() or self._fetch(timeout, lost=True)
            if item is None:
                return
            yield item

    def receive(self, timeout: float | None = None) -> Event | None:
        """One event, or None when `timeout` seconds are over or the subscriber was closed."""
        return next(self.events(timeout), None)

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self.aevents():
            yield event

    async def aevents(self, timeout: float | None = None) -> AsyncIterator[Event]:  # noqa: ASYNC109
        """`events` for asyncio. A cancelled wait loses nothing."""
        while True:
            for event in self._pending:
                yield event
            if not self._open_batch(await self._afetch(timeout)):
                return

    async def abatches(self, timeout: float | None = None) -> AsyncIterator[Batch]:  # noqa: ASYNC109
        """`batches` for asyncio."""
        async for item in self.aitems(timeout):
            if isinstance(item, Batch):
                yield item

    async def aitems(self, timeout: float | None = None) -> AsyncIterator[Batch | Lost]:  # noqa: ASYNC109
        """`items` for asyncio."""
        while True:
            item = self._rest() or await self._afetch(timeout, lost=True)
            if item is None:
                return
            yield item

    async def areceive(self, timeout: float | None = None) -> Event | None:  # noqa: ASYNC109
        """`receive` for asyncio."""
        while True:
            for event in self._pending:
                return event
            if not self._open_batch(await self._afetch(timeout)):
                return None

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the stream was heard: what is sent after this arrives, or is known to be lost."""
        deadline = time.monotonic() + timeout
        while self._receiver.session is None and time.monotonic() < deadline and not self._closed:
            self._work()
            if self._receiver.session is None:
                self._wait(min(0.05, max(0.0, deadline - time.monotonic())))
        return self._receiver.session is not None

    def _open_batch(self, item: Batch | Lost | None) -> bool:
        if item is None:
            return False
        assert isinstance(item, Batch)
        self._pending = iter(item.events)
        return True

    def _rest(self) -> Batch | None:
        """What is left of a batch whose events were handed out one by one, as a batch."""
        batch = self._current
        left = 0 if batch is None else self._pending.__length_hint__()  # type: ignore[attr-defined]
        if batch is None or not left:
            return None
        self._handed_out()
        self._current = batch.after(self._entered)
        self._pending = iter(())
        return self._current

    def _fetch(self, timeout: float | None, *, lost: bool = False) -> Batch | Lost | None:
        """The next batch (or Lost, if wanted); None when the time is over or there will be nothing more."""
        self._finish()
        if self._take(lost) and not self._closed:
            return self._next()
        for wait_s in self._turns(timeout, lost):
            if wait_s is None:
                return self._next()
            self._waiting = True
            self._wait(wait_s)
            self._waiting = False
        return None

    async def _afetch(self, timeout: float | None, *, lost: bool = False) -> Batch | Lost | None:  # noqa: ASYNC109
        self._finish()
        for wait_s in self._turns(timeout, lost):
            if wait_s is None:
                await asyncio.sleep(0)  # other tasks live here, too
                return self._next()
            self._waiting = True
            try:
                await _readable(self._engine.fds, wait_s)
            finally:
                self._waiting = False
            self._engine.quiet()
        return None

    def _turns(self, timeout: float | None, lost: bool) -> Iterator[float | None]:
        """Work until something is ready (None is yielded), the time is over, or the end. Yields waits."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            if self._take(lost):
                yield None
                return
            if self._work():
                continue
            if self._stop_at_end and self._receiver.complete and not self._engine.queue:
                return
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            self._commit_if_due()
            due_s = self._engine.wait_s()
            wait_s = _LOOK_S if due_s is None else min(_LOOK_S, due_s)
            yield wait_s if deadline is None else min(wait_s, deadline - now)

    def _next(self) -> Batch | Lost:
        item = self._ready.popleft()
        if isinstance(item, Batch):
            self._current = item
            self._entered = item.first_offset
        return item

    def _work(self) -> bool:
        """Read the sockets once; True if there is something new to look at."""
        self._asked_at = time.monotonic()
        with self._engine.lock:
            return (not self._closed and self._engine.step()) or bool(self._engine.queue)

    def _help(self) -> None:
        """In a thread of its own: do what `_work` does while the application is busy with other things."""
        wait = self._engine.poller()
        while not self._stop.wait(_AWAY_S):
            while (
                not self._waiting and time.monotonic() - self._asked_at > _AWAY_S and not self._stop.is_set()
            ):
                with self._engine.lock:
                    moved = not self._closed and self._engine.step()
                if moved:
                    self._engine.wake()
                elif self._engine.full:
                    break  # nothing to do until the application takes something
                else:
                    wait(_AWAY_S)

    # -- from sequences to events ------------------------------------------------------------------------

    def _take(self, lost: bool) -> bool:
        """Turn what the receiver has ready into batches and losses; True if there is one to hand out."""
        while True:
            while self._ready and not lost and isinstance(self._ready[0], Lost):
                self._ready.popleft()  # told by `on_loss`
            if self._ready:
                return True
            item = self._engine.take()
            if item is None:
                return False
            session, payload = item
            if isinstance(payload, Missing):
                self._lose(session, payload)
            else:
                self._give(session, payload)

    def _give(self, session: bytes, columns: Columns) -> None:
        name, foreign = _names(session)
        for part in by_identity(columns, name, foreign):
            identity = identity_of(part, name, foreign)
            self._know(session, identity)
            batch = Batch(part, name, foreign, identity, self.topics)
            if not self.topics or len(batch):
                self._ready.append(batch)
            else:
                self._done(batch, batch.first_offset)

    def _lose(self, session: bytes, missing: Missing) -> None:
        source, epoch = self._identity(session)
        lost = Lost(source, epoch, None, missing.first - 1, missing.last - 1, missing.reason)
        self._ledger.expect(source, epoch, ALL_TOPICS, lost.first)
        self._ledger.declare(source, epoch, ALL_TOPICS, lost.first, lost.last, lost.reason)
        self._move_to(source, Position(epoch, lost.last + 1))
        self.losses.append(lost)
        if self.on_loss is not None:
            self.on_loss(lost)
        self._ready.append(lost)

    def _identity(self, session: bytes) -> tuple[str, int]:
        """Who sends this session; before its first message (or answer) only the name is known."""
        known = self._known.get(session)
        if known is not None:
            return known
        name = session_name(session)
        position = self.positions.get(name)
        if position is not None and len(name) <= 6 and wire_session(name, position.epoch) == session:
            return name, position.epoch
        return name, 0

    def _learn(self, answer: Gone) -> None:
        if answer.session not in self._known:
            self._know(answer.session, (answer.source, answer.epoch))

    def _know(self, session: bytes, identity: tuple[str, int]) -> None:
        if session not in self._known and len(self._known) >= 64:
            self._known.clear()
        self._known[session] = identity

    def _where_to_begin(self, session: bytes) -> int:
        """The receiver's question when it hears the first session."""
        if isinstance(self._start, int):
            return self._start + 1
        if self._start == "cursor":
            name, foreign = _names(session)
            for source, position in self.positions.items():
                ours = len(name) <= 6 and wire_session(name, position.epoch) == session
                if ours or (source == foreign and position.epoch == 0):
                    self._known[session] = (source, position.epoch)
                    return position.offset + 1
        return LIVE if self._start == "live" else OLDEST

    # -- positions and books -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """The current batch has been dealt with."""
        batch = self._current
        if batch is not None:
            self._current = None
            self._pending = iter(())
            self._done(batch, self._entered)
            self._commit_if_due()

    def _done(self, batch: Batch, entered: int) -> None:
        following = batch.next_offset
        if entered < following:
            self._ledger.observe(batch.source, batch.epoch, ALL_TOPICS, entered, following - entered)
        self._move_to(batch.source, Position(batch.epoch, following))

    def _move_to(self, source: str, position: Position) -> None:
        """Everything of this source before that position is dealt with."""
        if source not in self.positions and len(self.positions) >= _MAX_SOURCES:
            del self.positions[next(iter(self.positions))]
        self.positions[source] = position
        self._dirty = True

    def _handed_out(self) -> None:
        """Bring books and position up to the last event that the application was given."""
        batch = self._current
        if batch is None or batch._events is None:
            return
        left = self._pending.__length_hint__()  # type: ignore[attr-defined]
        given = len(batch.events) - left
        if given <= 0:
            return
        until = batch.events[given - 1].offset + 1 if left else batch.next_offset
        if until > self._entered:
            self._ledger.observe(batch.source, batch.epoch, ALL_TOPICS, self._entered, until - self._entered)
            self._entered = until
            self._move_to(batch.source, Position(batch.epoch, until))

    @property
    def ledger(self) -> Ledger:
        """The books, including every event handed out so far, and as sent what the stream was heard to be."""
        self._handed_out()
        session = self._receiver.session
        if session is not None and session in self._known:
            source, epoch = self._known[session]
            if self._ledger.next(source, epoch, ALL_TOPICS) is not None:
                self._ledger.sent(source, epoch, ALL_TOPICS, self._receiver.highest - 1)
        return self._ledger

    def commit(self) -> None:
        """Everything handed out so far is dealt with: save positions and ledger now. Raises JournalError."""
        if self._current is not None and self._current._events is None:
            self._finish()  # whole batches: the one in hand is dealt with
        self._handed_out()
        self._save()

    def _commit_if_due(self) -> None:
        if self._dirty and self._cursor is not None and time.monotonic() >= self._commit_at:
            self._save()

    def _save(self) -> None:
        self._commit_at = time.monotonic() + self._commit_every_s
        if self._cursor is not None:
            self._cursor.save(self.positions, self._ledger.snapshot())
        self._dirty = False

    # -- state and end -----------------------------------------------------------------------------------

    @property
    def session(self) -> str | None:
        """The session that is followed, as it is on the wire; None before anything was heard."""
        session = self._receiver.session
        return None if session is None else session.decode("ascii", "replace").rstrip()

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """What is missing right now, as offsets (first, last)."""
        with self._engine.lock:
            return [(first - 1, last - 1) for first, last in self._receiver.gaps]

    @property
    def pending_missing(self) -> int:
        """Messages counted as missing that are neither repaired nor lost yet."""
        with self._engine.lock:
            return self._receiver.open_missing

    def count_drops(self) -> int:
        """What the kernel dropped so far, read from it now."""
        with self._engine.lock:
            self._engine.count_drops()
        return self.counters.kernel_drops

    def close(self) -> None:
        """Leave the group; saves the cursor. Closing twice is fine.

        What was handed out counts as dealt with, but for the batch in hand if it was not iterated to its end.
        """
        with self._engine.lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        self._engine.wake()
        self._helper.join(10)
        self._handed_out()
        if self._dirty:
            self._save()
        self._engine.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@lru_cache(maxsize=16)
def _names(session: bytes) -> tuple[str, str]:
    """What a session is called: the name that a publisher of ours gave it, and as a foreign one."""
    return session_name(session), session.decode("ascii", "replace").rstrip()


def _check_start(start: object, has_cursor: bool) -> str | int:
    if start is None:
        return "cursor" if has_cursor else "live"
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return start
    if start in ("live", "oldest", "cursor"):
        if start == "cursor" and not has_cursor:
            raise ConfigError("start", '"cursor" needs a file: cursor=…')
        return str(start)
    raise ConfigError("start", f'must be "live", "oldest", "cursor" or an offset, not {start!r}')


async def _readable(fds: list[int], seconds: float) -> None:
    """Wait until one of them can be read, or so many seconds; a cancelled wait leaves nothing behind."""
    # Not `wait_for`: before Python 3.12 it can swallow a cancellation that comes at the moment of its time-out.
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def done() -> None:
        if not ready.done():
            ready.set_result(None)

    timer = loop.call_later(seconds, done)
    for fd in fds:
        loop.add_reader(fd, done)
    try:
        await ready
    finally:
        timer.cancel()
        for fd in fds:
            loop.remove_reader(fd)
