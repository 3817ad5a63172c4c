"""The subscriber: events in order, each exactly once, or a marker that they are lost."""

import functools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from brokerless.core import Cursor, Event, Ledger, Lost
from brokerless.core.consumer import COMMIT_EVERY_S, OVER, Consumer, check_start, cursor_name
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import Io
from brokerless.core.runtime.serial_section import SerialSection
from brokerless.core.topics import TopicFilter, check_topics
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.batch import Batch, LoneBatch, by_identity, identity_of
from brokerless.multicast.receive.gaps import Missing
from brokerless.multicast.receive.io import Found, Item, Stale, SubscriberOptions, open_subscriber_io
from brokerless.multicast.receive.reorder import LIVE, OLDEST
from brokerless.multicast.sockets import DEFAULT_INTERFACE, DEFAULT_RECEIVE_BUFFER
from brokerless.multicast.wire.message import Columns, Described
from brokerless.multicast.wire.moldudp64 import SESSION_BYTES, Gone, epoch_digits, session_name, wire_session
from brokerless.multicast.wire.status import Status

# The ledger's stream of a multicast source: all topics together, counted by offset.
ALL_TOPICS = ""
# More patterns than this are not a filter.
MAX_TOPICS = 1024
# What the application has not taken yet; beyond it the sockets are not read any more.
MAX_QUEUE_BYTES = 64 * 1024 * 1024
# Sources whose position is kept. A stream has one; only a forger sends more, and must not fill memory.
_MAX_SOURCES = 1024
# When the application has not asked for this long, the helper thread reads the sockets instead: well
# within the time that a default receive buffer of 8 MiB bridges.
_AWAY_S = 0.01
_NOTHING_YET: tuple[bytes, Sequence[Described | None] | None, str, str, tuple[str, int]] = (
    b"",
    None,
    "",
    "",
    ("", 0),
)
# The same while the application waits now and then: it is quick, and looking after it disturbs the events that it waits
# for. Still well within that time.
_AWAY_LATER_S = 0.03
# The longest single wait, so that closing from another thread is noticed.
_LOOK_S = 0.5


class Subscriber(Consumer[Batch]):
    """Follows one session (and those after it) of a group, or of two that carry the same: lines A and B.

        for event in sub: …              events, one by one; ends when the subscriber is stopped or closed
        for batch in sub.batches(): …    whole batches; `batch.events`, `batch.datas`
        for item in sub.items(): …       batches and, in their place between them, `Lost`
        sub.receive(timeout=1)           one event, or None
        async for event in sub: …        the same from asyncio: `abatches()`, `aitems()`, `areceive()`

    Loss is reported in order: `on_loss(lost)` is called before the first event after the gap, `losses` has the
    last ones, `ledger` has the accounting, by offset (its topic is empty: what was lost has no known topic).
    An event is considered processed once you request the next; `commit()` does that earlier.

    Question 1, the producer is faster: up to `max_queue_bytes` are kept here, then the kernel's buffer
    fills, then it drops, which is counted, noticed and repaired when there is room again. Question 2, it was
    offline: with `start="cursor"` it goes on where it was; the journal decides how much is still available.

    One thread (or task) at a time may use it; `stop()` and `close()` may be called from any, and by signal handlers.
    A handler that raises (Ctrl-C) loses nothing that can be repaired: what was not handed out yet is handed out when
    the subscriber is used again, or comes again after the next start.
    """

    _logger = "brokerless.multicast.subscriber"
    counters: SubscriberCounters

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
        on_stale: Callable[[Stale], None] | None = None,
        commit_every_s: float = COMMIT_EVERY_S,
        repair: RepairPolicy | None = None,
        tcp: bool = True,
        auth_key: bytes | None = None,
        opaque: bool = False,
        stop_at_end: bool = False,
        receive_buffer_bytes: int = DEFAULT_RECEIVE_BUFFER,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
        flow_control_tag: int = 0,
        busy_poll_s: float = 0.0,
        io: Io = "auto",
        announce: bool = True,
        metrics: str = "",
    ) -> None:
        """Join at once; a publisher need not be there yet.

        `session` is a publisher's name, or a foreign session; None takes the first that is heard. `sender`
        joins for that source address only. `request_servers` are asked for what is missing; by default the
        sender's (or this machine's) address and the port after the group's; empty: nothing is repaired.
        `topics` are patterns and plain prefixes, see `brokerless.core.topics`.
        `start`: "live" (default), "oldest", an offset, or "cursor" (the default if `cursor` names a file; the first
        time at the oldest). `opaque` does not look for events in the messages.
        `stop_at_end`: iterating ends with the session. `on_stale` is called, in whichever thread notices it, when
        nothing was heard for `RepairPolicy.stale_after_s`, and when the sender went back to lower numbers.
        `busy_poll_s` is how long a wait looks at the sockets again and again before it sleeps: a lower latency for a
        processor that is busy all that time. `flow_control_tag` (1 to 255) makes it one that a publisher with
        `FlowControl(mode="tagged")` waits for.
        `announce=False` keeps it out of `brokerless ps`; `metrics` is a host:port where this process serves `/metrics`.
        """
        self.topics = check_topics(topics, MAX_TOPICS)
        self._wanted = TopicFilter(self.topics)
        self._start = check_start(start, cursor is not None)
        if self._start == "cursor" and cursor is None:
            raise ConfigError("start", '"cursor" needs a file: cursor=…')
        self._cursor = Cursor(cursor) if cursor is not None else None
        if self._cursor is not None:
            self._cursor.prepare()
        saved = self._cursor.load() if self._cursor is not None else None
        restored = saved.ledger if saved is not None and self._start == "cursor" else b""
        self.counters = SubscriberCounters()
        super().__init__(
            section=SerialSection(),
            ledger=Ledger.restore(restored) if restored else Ledger(),
            positions=dict(saved.positions) if saved is not None else {},
            counters=self.counters,
            on_loss=on_loss,
            saves=self._cursor is not None,
            commit_every_s=commit_every_s,
            max_sources=_MAX_SOURCES,
        )
        self._stop_at_end = stop_at_end
        self.on_stale = on_stale
        self._arrived: deque[Batch | Lost] = deque()
        self._known: dict[bytes, tuple[str, int]] = {}  # session → source and epoch
        # Of the last messages of one kind: session, what they said, and what `_batches` found out from it.
        self._same = _NOTHING_YET
        options = SubscriberOptions(
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
            flow_control_tag=flow_control_tag,
            busy_poll_s=busy_poll_s,
            io=io,
        )
        self._engine = open_subscriber_io(
            options, self._where_to_begin, self.counters, random.random, on_source=self._learn
        )
        self._receiver = self._engine.receiver
        self._waiting = False
        self._asked_at = 0.0
        # Held while the helper is to help. Not an Event: those lock themselves up when a signal's handler sets one.
        self._halt = threading.Lock()
        self._halt.acquire()
        self._helper = threading.Thread(target=self._help, name="brokerless-multicast", daemon=True)
        self._helper.start()
        name = cursor_name(cursor) or session or ""
        self._announce("multicast.subscriber", name, options.groups, enabled=announce, metrics=metrics)

    # -- receiving (see Consumer) ------------------------------------------------------------------------

    def wait_joined(self, timeout: float = 10.0) -> bool:
        """Wait until the stream was heard: what is sent after this arrives, or is known to be lost."""
        self._wait_until(self._joined_or_stopped, timeout)
        return self._receiver.session is not None

    async def await_joined(self, timeout: float = 10.0) -> bool:  # noqa: ASYNC109 - as in `wait_joined`
        """`wait_joined` for asyncio."""
        await self._await_until(self._joined_or_stopped, timeout)
        return self._receiver.session is not None

    def _joined_or_stopped(self) -> bool:
        return self._receiver.session is not None or self._handed.stopped

    def _step(self, deadline: float | None) -> float:
        """Read the sockets once. What an interrupt breaks off is repaired by the engine's next step."""
        self._asked_at = now = time.monotonic()
        with self._engine.lock:
            moved, due_s = self._engine.step(), self._engine.wait_s()
        if self._engine.notices:
            self._tell_stale()
        if moved:
            return 0.0
        if self._stop_at_end and self._receiver.complete and not self._engine.queue:
            return OVER
        if deadline is not None and now >= deadline:
            return OVER
        wait_s = _LOOK_S if due_s is None else min(_LOOK_S, due_s)
        return wait_s if deadline is None else min(wait_s, deadline - now)

    def _wait(self, seconds: float) -> None:
        if seconds:
            self._waiting = True
            try:
                self._engine.wait(seconds)
            finally:
                self._waiting = False

    def _wait_and_take(self, seconds: float, lost: bool) -> bool:
        if not seconds:
            return self._section.run(self._take, lost)
        self._waiting = True
        try:
            found = self._engine.wait_next(seconds)
        finally:
            self._waiting = False
        return self._section.run(self._take_found, found, lost)

    def _take_found(self, found: Found | None, lost: bool) -> bool:
        arrived = self._arrived
        if found is not None:
            engine, same = self._engine, self._same
            with engine.lock:
                lone = engine.take(found, same[1] if found[0] == same[0] else None)
                if lone is not None:
                    self._receiver.next_in_order(1, engine.now, arrived, self._lone(*lone))
                    if len(arrived) == 1 and not self._handed.stopped:
                        return self._handed.take(arrived)
        return self._take(lost)

    def _lone(self, seq: int, time_us: int, data: bytes) -> LoneBatch:
        """The batch of an event that came alone, and is like the one before."""
        _, described, _, _, identity = self._same
        one = described[0] if described is not None else None
        assert one is not None
        following = self._receiver.expected
        events = []
        if self._wanted.everything or self._wanted(one.topic):
            source, epoch = identity
            events = [Event(source, epoch, following - 1, one.topic, seq, time_us, data, one.content_type)]
        return LoneBatch(identity, following - 1, following, events)

    async def _wait_async(self, seconds: float) -> None:
        self._waiting = True
        try:
            await self._engine.wait_async(seconds)
        finally:
            self._waiting = False

    def _wake(self) -> None:
        self._engine.wake()

    def _help(self) -> None:
        """In a thread of its own: do what `_step` does while the application is busy with other things."""
        pause_s = _AWAY_S
        while not self._halt.acquire(timeout=pause_s):
            pause_s = _AWAY_LATER_S if self._waiting else _AWAY_S
            while not (self._waiting or self._handed.stopped) and time.monotonic() - self._asked_at > _AWAY_S:
                with self._engine.lock:
                    moved = self._engine.step()
                if self._engine.notices:
                    self._tell_stale()
                if moved:
                    self._engine.wake()
                elif self._engine.full:
                    break  # nothing to do until the application takes something
                else:
                    self._engine.wait(_AWAY_S)

    def _tell_stale(self) -> None:
        """Call `on_stale`, in whichever thread noticed it, without the lock."""
        notices = self._engine.notices
        while notices:
            notice = notices.popleft()
            if self.on_stale is not None:
                self.on_stale(notice)

    # -- from sequences to events ------------------------------------------------------------------------

    def _next_queue(self) -> "deque[Batch | Lost] | None":
        arrived, queue = self._arrived, self._engine.queue
        while not arrived and queue:
            self._unpack(queue)
        return arrived or None

    def _unpack(self, queue: "deque[tuple[Item, int]]") -> None:
        """Turn the next item of the engine into batches or a loss."""
        (session, payload), size = queue[0]
        items: Sequence[Batch | Lost]
        if isinstance(payload, Missing):
            source, epoch = self._identity(session)
            items = [Lost(source, epoch, None, payload.first - 1, payload.last - 1, payload.reason)]
        else:
            items = self._batches(session, payload)
        arrived = self._arrived
        self._engine.out_bytes += size
        arrived += items
        queue.popleft()

    def _batches(self, session: bytes, columns: Columns) -> list[Batch]:
        same = self._same
        if columns.described is same[1] and session == same[0]:  # as when events come one by one
            return [Batch(columns, same[2], same[3], same[4], self._wanted)]
        name, foreign = _names(session)
        batches: list[Batch] = []
        for part in by_identity(columns, name, foreign):
            identity = identity_of(part, name, foreign)
            is_current = not identity[1] or _is_of(session, name, identity[1])
            wanted = part if is_current else self._unseen(part, identity)
            if is_current and self._known.get(session) != identity:
                self._know(session, identity)
            if wanted.datas:
                batches.append(Batch(wanted, name, foreign, identity, self._wanted))
        if is_current and len(columns.described) == 1:
            self._same = session, columns.described, name, foreign, identity
        return batches

    def _unseen(self, columns: Columns, identity: tuple[str, int]) -> Columns:
        """Of events of an epoch before that of their session, those that were not followed there already.

        A journal that is restored from a copy, or that a new epoch was begun in, has them still.
        """
        seen = self._ledger.next(*identity, ALL_TOPICS) or 0
        for batch in (self._handed.batch, *self._arrived):
            if isinstance(batch, Batch) and (batch.source, batch.epoch) == identity:
                seen = max(seen, batch.next_offset)
        skip = min(len(columns.datas), max(0, seen - (columns.first - 1)))
        self.counters.seen_before += skip
        return columns.part(skip, len(columns.datas) - skip) if skip else columns

    def _identity(self, session: bytes) -> tuple[str, int]:
        """Source and epoch of a session; before its first message (or answer) only its name is known."""
        known = self._known.get(session)
        if known is not None:
            return known
        name, foreign = _names(session)
        position = self.positions.get(name)
        if position is not None and len(name) <= 6 and wire_session(name, position.epoch) == session:
            return name, position.epoch
        for (where, payload), _ in self._engine.queue:
            if where == session and not isinstance(payload, Missing):  # what comes after the loss
                return identity_of(payload, name, foreign)
        return name, 0

    def _learn(self, answer: Gone | Status) -> None:
        if answer.session not in self._known:
            self._know(answer.session, (answer.source, answer.epoch))

    def _know(self, session: bytes, identity: tuple[str, int]) -> None:
        if session not in self._known and len(self._known) >= 64:
            self._known.clear()
        self._known[session] = identity
        self._same = _NOTHING_YET

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

    # -- ledger and positions ----------------------------------------------------------------------------

    def _observe(self, batch: Batch, first: int, until: int, again: bool) -> None:
        if again:  # then the ledger may be further than we know
            first = max(first, self._ledger.next(batch.source, batch.epoch, ALL_TOPICS) or 0)
        if first < until:
            self._ledger.observe(batch.source, batch.epoch, ALL_TOPICS, first, until - first)

    def _observe_loss(self, lost: Lost) -> None:
        self._ledger.expect(lost.source, lost.epoch, ALL_TOPICS, lost.first)
        self._ledger.declare(lost.source, lost.epoch, ALL_TOPICS, lost.first, lost.last, lost.reason)

    def _update_ledger(self) -> None:
        """Enter what was handed out, and as sent what the stream was heard to be."""
        super()._update_ledger()
        session = self._receiver.session
        if session is not None and session in self._known:
            source, epoch = self._known[session]
            if self._ledger.next(source, epoch, ALL_TOPICS) is not None:
                self._ledger.sent(source, epoch, ALL_TOPICS, self._receiver.highest - 1)

    def _write_positions(self) -> None:
        if self._cursor is not None:
            self._cursor.save(self.positions, self._ledger.snapshot())

    # -- state and end -----------------------------------------------------------------------------------

    @property
    def session(self) -> str | None:
        """The session that is followed, as it is on the wire; None before anything was heard."""
        return self._receiver.session_text

    @property
    def stale(self) -> bool:
        """No living sender has been heard for `RepairPolicy.stale_after_s`: there may be events that we do not know of.

        It ends with the next packet that comes by multicast. Meanwhile the groups are joined again, and the request
        servers are asked for the newest sequence, so that repair goes on.
        """
        return self._receiver.stale

    @property
    def silent_lines(self) -> int:
        """Lines by which nothing has come for `RepairPolicy.stale_after_s`, although others are heard.

        They are joined again and again; it ends with the next packet that comes by them.
        """
        return self._engine.silent_lines

    @property
    def sessions_heard(self) -> list[str]:
        """Sessions that were heard and are not followed."""
        return sorted(s.decode("ascii", "replace").rstrip() for s in list(self._receiver.sessions_heard))

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """What is missing right now, as offsets (first, last)."""
        return self._section.inside(self._gaps)

    def _gaps(self) -> list[tuple[int, int]]:
        with self._engine.lock:
            return [(first - 1, last - 1) for first, last in self._receiver.gaps]

    @property
    def pending_missing(self) -> int:
        """Messages counted as missing that are neither repaired nor lost yet."""
        return self._section.inside(self._open_missing)

    def _open_missing(self) -> int:
        with self._engine.lock:
            return self._receiver.open_missing

    def count_drops(self) -> int:
        """What the kernel dropped so far, read from it now."""
        self._section.inside(self._engine.count_drops)
        return self.counters.kernel_drops

    def _shut_down(self, finish: Callable[[], None]) -> None:
        self._section.close(lambda: self._end(finish))

    def _end(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        finally:
            self._halt.release()
            self._helper.join(10)
            self._engine.close()


@functools.lru_cache(maxsize=16)
def _names(session: bytes) -> tuple[str, str]:
    """What a session is called: the name that a publisher of ours gave it, and as a foreign one."""
    return session_name(session), session.decode("ascii", "replace").rstrip()


@functools.lru_cache(maxsize=16)
def _is_of(session: bytes, name: str, epoch: int) -> bool:
    """Whether this is the session of that epoch."""
    return (name + epoch_digits(epoch)).encode().ljust(SESSION_BYTES) == session
