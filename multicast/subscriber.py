"""The subscriber: events in order, each exactly once, or the word that they are lost."""

import asyncio
import functools
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from brokerless.core import Cursor, Event, Ledger, Lost, Position
from brokerless.core.errors import ConfigError
from brokerless.core.turn import Turn
from brokerless.multicast.batch import Batch, by_identity, check_topics, identity_of
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.hand import ALL_TOPICS, Hand
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
# What looking for the next thing can give instead of a time to wait.
_FOUND = -1.0
_OVER = -2.0


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

    One thread (or task) at a time may use it; `stop()` and `close()` may be called from any, and by handlers of
    signals. A handler that raises (Ctrl-C) loses nothing that can be repaired: what was not handed out yet is handed
    out when the subscriber is used again, or comes again after the next start.
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
        self._ready: deque[Batch | Lost] = deque()
        self._told: Lost | None = None  # the last that `on_loss` was called for
        self._hand = Hand(self._ledger, self.positions)
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
        self._turn = Turn()
        # Held while the helper is to help. Not an Event: those lock themselves up when a signal's handler sets one.
        self._halt = threading.Lock()
        self._halt.acquire()
        self._helper = threading.Thread(target=self._help, name="brokerless-multicast", daemon=True)
        self._helper.start()

    # -- receiving ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events one by one; ends when none has come for `timeout` seconds, or when stopped or closed."""
        # The lists' own iterators do the work; what is left of one stays in our hand if the caller breaks off.
        return itertools.chain.from_iterable(self._opened(timeout))

    def _opened(self, timeout: float | None) -> Iterator[Iterator[Event]]:
        while self._fetch(timeout) and self._hand.open():
            yield self._hand.pending

    def batches(self, timeout: float | None = None) -> Iterator[Batch]:
        """Whole batches, each with at least one event; ends like `events`."""
        while self._fetch(timeout, whole=True) and (batch := self._hand.give()) is not None:
            yield batch

    def items(self, timeout: float | None = None) -> Iterator[Batch | Lost]:
        """Batches, and `Lost` in its place between them; ends like `events`."""
        while self._fetch(timeout, whole=True, lost=True) and (item := self._item()) is not None:
            yield item

    def receive(self, timeout: float | None = None) -> Event | None:
        """One event, or None when `timeout` seconds are over or the subscriber was stopped or closed."""
        while True:
            for event in self._hand.pending:
                return event
            if not (self._fetch(timeout) and self._hand.open()):
                return None

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self.aevents():
            yield event

    async def aevents(self, timeout: float | None = None) -> AsyncIterator[Event]:  # noqa: ASYNC109
        """`events` for asyncio. A cancelled wait loses nothing."""
        while True:
            for event in self._hand.pending:
                yield event
            if not (await self._afetch(timeout) and self._hand.open()):
                return

    async def abatches(self, timeout: float | None = None) -> AsyncIterator[Batch]:  # noqa: ASYNC109
        """`batches` for asyncio."""
        while await self._afetch(timeout, whole=True) and (batch := self._hand.give()) is not None:
            yield batch

    async def aitems(self, timeout: float | None = None) -> AsyncIterator[Batch | Lost]:  # noqa: ASYNC109
        """`items` for asyncio."""
        while await self._afetch(timeout, whole=True, lost=True) and (item := self._item()) is not None:
            yield item

    async def areceive(self, timeout: float | None = None) -> Event | None:  # noqa: ASYNC109
        """`receive` for asyncio."""
        while True:
            for event in self._hand.pending:
                return event
            if not (await self._afetch(timeout) and self._hand.open()):
                return None

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the stream was heard: what is sent after this arrives, or is known to be lost."""
        deadline = time.monotonic() + timeout
        while self._receiver.session is None and time.monotonic() < deadline and not self._hand.stopped:
            self._turn.run(self._step)
            if self._receiver.session is None:
                self._wait(min(0.05, max(0.0, deadline - time.monotonic())))
        return self._receiver.session is not None

    # A wait can be cancelled, and a signal's handler can raise whenever a function is entered, a call of C code has
    # returned or a loop goes round. So every change of state from here on is either made between two such points, or
    # made again when it was not finished. What a step of the engine was interrupted in is repaired there.

    def _fetch(self, timeout: float | None, *, whole: bool = False, lost: bool = False) -> bool:
        """Make the next batch the current one; False when the time is over or there will be nothing more.

        `whole`: it will be handed out as one. `lost`: if the next thing is a loss, leave it in `_ready`.
        """
        run = self._turn.run
        if run(self._at_hand, whole, lost):
            return True  # without a look at the clock: this is the way of every batch while many come
        deadline = None if timeout is None else time.monotonic() + timeout
        while (seconds := run(self._look, deadline, whole, lost)) >= 0:
            if seconds:
                self._waiting = True
                try:
                    self._wait(seconds)
                finally:
                    self._waiting = False
        return seconds == _FOUND

    async def _afetch(self, timeout: float | None, *, whole: bool = False, lost: bool = False) -> bool:  # noqa: ASYNC109
        run = self._turn.run
        deadline = None if timeout is None else time.monotonic() + timeout
        if (seconds := run(self._look, deadline, whole, lost)) == _FOUND:
            await asyncio.sleep(0)  # other tasks live here, too
        while seconds >= 0:
            self._waiting = True
            try:
                await _readable(self._engine.fds, seconds)
            finally:
                self._waiting = False
            self._engine.quiet()
            seconds = run(self._look, deadline, whole, lost)
        return seconds == _FOUND

    def _look(self, deadline: float | None, whole: bool, lost: bool) -> float:
        """Look for the next thing: _FOUND, _OVER, or how long to wait before looking again."""
        if self._at_hand(whole, lost):
            return _FOUND
        if self._hand.stopped:
            return _OVER
        moved, due_s = self._step()
        if self._take(lost):
            return _FOUND
        if moved:
            return 0.0
        if self._stop_at_end and self._receiver.complete and not self._engine.queue:
            return _OVER
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return _OVER
        self._commit_if_due()
        wait_s = _LOOK_S if due_s is None else min(_LOOK_S, due_s)
        return wait_s if deadline is None else min(wait_s, deadline - now)

    def _step(self) -> tuple[bool, float | None]:
        """Read the sockets once: whether something came, and in how many seconds to look again."""
        self._asked_at = time.monotonic()
        with self._engine.lock:
            return self._engine.step(), self._engine.wait_s()

    def _help(self) -> None:
        """In a thread of its own: do what `_step` does while the application is busy with other things."""
        wait = self._engine.poller()
        while not self._halt.acquire(timeout=_AWAY_S):
            while not (self._waiting or self._hand.stopped) and time.monotonic() - self._asked_at > _AWAY_S:
                with self._engine.lock:
                    moved = self._engine.step()
                if moved:
                    self._engine.wake()
                elif self._engine.full:
                    break  # nothing to do until the application takes something
                else:
                    wait(_AWAY_S)

    # -- handing out -------------------------------------------------------------------------------------

    def _at_hand(self, whole: bool, lost: bool) -> bool:
        """What the application had is dealt with; whether there is something to be handed out now."""
        hand = self._hand
        if hand.batch is not None and hand.given:
            if hand.whole or not hand.left():
                hand.finish()
                if self._cursor is not None:
                    self._commit_if_due()
            else:
                hand.advance()
                if whole and not hand.stopped:
                    hand.split()
        return self._take(lost) if hand.batch is None else not hand.stopped

    def _item(self) -> Batch | Lost | None:
        """Hand out the batch in hand, or else the loss that is next; None if stopped meanwhile."""
        if self._hand.stopped or self._hand.batch is not None:
            return self._hand.give()
        lost = self._ready[0]
        del self._ready[0]
        return lost

    def _take(self, lost: bool) -> bool:
        """Go through what has arrived, up to the next batch (or loss) for the application."""
        ready, hand = self._ready, self._hand
        while not hand.stopped:
            if not ready and not self._unpack():
                return False
            item = ready[0]
            if isinstance(item, Batch):
                nothing = self.topics != () and not len(item)
                hand.take(item, nothing)
                ready.popleft()
                if not nothing:
                    return True
                hand.finish()
            elif item is not self._told:
                self._tell(item)
            elif lost:
                return True
            else:
                del ready[0]
        return False

    # -- from sequences to events ------------------------------------------------------------------------

    def _unpack(self) -> bool:
        """Turn the next thing that the engine has into batches or a loss; False if it has nothing."""
        queue = self._engine.queue
        if not queue:
            return False
        (session, payload), size = queue[0]
        items: list[Batch | Lost]
        if isinstance(payload, Missing):
            source, epoch = self._identity(session)
            items = [Lost(source, epoch, None, payload.first - 1, payload.last - 1, payload.reason)]
        else:
            items = self._batches(session, payload)
        self._engine.out_bytes += size
        self._ready += items
        queue.popleft()
        return True

    def _batches(self, session: bytes, columns: Columns) -> list[Batch | Lost]:
        name, foreign = _names(session)
        batches: list[Batch | Lost] = []
        for part in by_identity(columns, name, foreign):
            identity = identity_of(part, name, foreign)
            if self._known.get(session) != identity:
                self._know(session, identity)
            batches.append(Batch(part, name, foreign, identity, self.topics))
        return batches

    def _tell(self, lost: Lost) -> None:
        """Enter a loss into the books and tell the application, once."""
        source, epoch = lost.source, lost.epoch
        self._ledger.expect(source, epoch, ALL_TOPICS, lost.first)
        self._ledger.declare(source, epoch, ALL_TOPICS, lost.first, lost.last, lost.reason)
        self._hand.move_to(source, Position(epoch, lost.last + 1))
        if not self.losses or self.losses[-1] is not lost:
            self.losses.append(lost)
        try:
            if self.on_loss is not None:
                self.on_loss(lost)
        finally:
            self._told = lost

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
            for source, position in list(self.positions.items()):
                ours = len(name) <= 6 and wire_session(name, position.epoch) == session
                if ours or (source == foreign and position.epoch == 0):
                    self._known[session] = (source, position.epoch)
                    return position.offset + 1
        return LIVE if self._start == "live" else OLDEST

    # -- positions and books -----------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The books, including every event handed out so far, and as sent what the stream was heard to be."""
        return self._turn.inside(self._up_to_date)

    def _up_to_date(self) -> Ledger:
        self._hand.enter()
        session = self._receiver.session
        if session is not None and session in self._known:
            source, epoch = self._known[session]
            if self._ledger.next(source, epoch, ALL_TOPICS) is not None:
                self._ledger.sent(source, epoch, ALL_TOPICS, self._receiver.highest - 1)
        return self._ledger

    def commit(self) -> None:
        """Everything handed out so far is dealt with: save positions and ledger now. Raises JournalError."""
        self._turn.inside(self._commit)

    def _commit(self) -> None:
        self._hand.advance()
        self._save()

    def _commit_if_due(self) -> None:
        if self._hand.dirty and self._cursor is not None and time.monotonic() >= self._commit_at:
            self._save()

    def _save(self) -> None:
        self._commit_at = time.monotonic() + self._commit_every_s
        if self._cursor is not None:
            self._cursor.save(self.positions, self._ledger.snapshot())
        self._hand.dirty = False

    # -- state and end -----------------------------------------------------------------------------------

    @property
    def session(self) -> str | None:
        """The session that is followed, as it is on the wire; None before anything was heard."""
        session = self._receiver.session
        return None if session is None else session.decode("ascii", "replace").rstrip()

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """What is missing right now, as offsets (first, last)."""
        return self._turn.inside(self._gaps)

    def _gaps(self) -> list[tuple[int, int]]:
        with self._engine.lock:
            return [(first - 1, last - 1) for first, last in self._receiver.gaps]

    @property
    def pending_missing(self) -> int:
        """Messages counted as missing that are neither repaired nor lost yet."""
        return self._turn.inside(self._open_missing)

    def _open_missing(self) -> int:
        with self._engine.lock:
            return self._receiver.open_missing

    def count_drops(self) -> int:
        """What the kernel dropped so far, read from it now."""
        self._turn.inside(self._engine.count_drops)
        return self.counters.kernel_drops

    def stop(self) -> None:
        """End the iteration after the event (or batch) in hand; what has arrived already stays for the next start.

        For handlers of signals, `signal.signal(signal.SIGTERM, lambda *_: sub.stop())`, and for other threads. Unlike
        an exception it does not break off what the application does with the event in hand.
        """
        self._hand.stop()
        self._engine.wake()

    def close(self) -> None:
        """Leave the group; saves the cursor. Ends iterations in other threads. Closing twice is fine.

        What was handed out counts as dealt with, unless the `with` block ends with an exception: then the last event
        (or batch) does not, and comes again after the next start.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        self.stop()
        self._turn.close(functools.partial(self._end, failed=failed))

    def _end(self, *, failed: bool) -> None:
        try:
            self._hand.advance(but_last=failed)
            if self._hand.dirty:
                self._save()
        finally:
            self._halt.release()
            self._helper.join(10)
            self._engine.close()

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


@functools.lru_cache(maxsize=16)
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
