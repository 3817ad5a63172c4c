"""The publisher's side of all its groups: reads the journal, decides with `groups`, and keeps what was decided.

No sockets and no clock: deliveries are appended to `outbox`, `now` is an argument. What must survive is stored
before it is sent, so that an event that may have been delivered never comes again as if for the first time.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from brokerless.core import Counters, Event, Frame, IntervalSet, Journal, Reason
from brokerless.core.counters import count, loss
from brokerless.core.errors import Evicted, Fault, FrameError, PeerError
from brokerless.direct import deadletter, wire
from brokerless.direct.batch import Filter
from brokerless.direct.groups import Group
from brokerless.direct.membership import Grant, GroupState, Member
from brokerless.direct.store import GroupStore

# One answer to a worker: large enough to make its cost per event small, small enough to spread a backlog.
_GRANT_EVENTS = 512
# Events read ahead and sorted by key; what a busy key can hold up.
_KEYED_AHEAD = 8192
_MESSAGE_BYTES = 512 * 1024
# What a group gives out before others have their turn, and before it is known who reads it.
_RUN_BYTES = 4 * 1024 * 1024
# Dead letters written before others have their turn: a few milliseconds.
_BURIED_AT_ONCE = 256
# Every group costs memory, a file and a look per loop; a name taken from outside must not cost the publisher.
MAX_GROUPS = 256
_PREFIX = "group."


class GroupCounters(Counters):
    """What the groups of a publisher did."""

    component = "direct.groups"

    granted: Annotated[int, count("deliveries sent to workers, redeliveries included")] = 0
    acked: Annotated[int, count("events acknowledged")] = 0
    nacked: Annotated[int, count("events given back by workers")] = 0
    expired: Annotated[int, count("events taken back because their lease was over")] = 0
    dead_lettered: Annotated[
        int, count("events moved to the dead-letter journal after max_deliver attempts")
    ] = 0
    evicted: Annotated[int, loss("events that the journal dropped before a group had them")] = 0
    unclaimed: Annotated[
        int, loss("without a journal: events that no worker of a group had room for in time")
    ] = 0
    forsaken: Annotated[
        int, loss("without a journal: events that a worker gave back, or held when it was gone")
    ] = 0


class Part(msgspec.Struct, frozen=True):
    """What goes to a worker: a piece of a frame, and which events of it are meant (first, last, attempt)."""

    worker: str
    raw: bytes
    ranges: list[tuple[int, int, int]]


class Waiter:
    """Somebody who waits until `names` have acknowledged `offset`."""

    __slots__ = ("done", "missing", "names", "offset")

    def __init__(self, offset: int, names: Sequence[str]) -> None:
        self.offset = offset
        self.names = names
        self.missing = list(names)
        self.done = threading.Event()  # nothing is missing, or never comes


class Dispatcher:
    """All groups of one publisher. Used by the publisher's server thread only, except `wait_settled`."""

    def __init__(
        self,
        journal: Journal,
        dead: Journal | None,
        store: GroupStore,
        *,
        lossy_after_s: float | None = None,
    ) -> None:
        """`lossy_after_s`: there is no journal behind this ring. Each event is sent once, to a worker that has
        room for it within that time, or to nobody."""
        self.counters = GroupCounters()
        self._lossy_after_s = lossy_after_s
        # (when, the ring's end then): what was there by then and is not granted in time is lost.
        self._ends: deque[tuple[float, int]] = deque()
        self.groups: dict[str, Group] = {}
        self.outbox: list[tuple[str, bytes]] = []
        self._journal = journal
        self._dead = dead
        self._store = store
        self._filters: dict[str, Filter] = {}
        self._frames: dict[str, Frame] = {}  # the frame each group reads from
        # Losses that no worker has been told of, by reason.
        self._untold: dict[str, dict[Reason, IntervalSet]] = {}
        # Those in publish(wait="acked"). Other threads only append.
        self._waiters: deque[Waiter] = deque()
        self._closed = False
        self._more = False  # the last run left something for the next
        self._watched: dict[
            object, int
        ] = {}  # no failure before these offsets is waited for; in other threads
        for name, state in store.load().items():
            self._add(name, state)

    def _add(self, name: str, state: GroupState) -> Group:
        group = self.groups[name] = Group(name, state, lossy=self._lossy_after_s is not None)
        self._filters[name] = Filter(group.policy.topics)
        self._journal.register(_PREFIX + name, group.cursor)
        self._journal.advance(_PREFIX + name, group.cursor)
        return group

    # ---- what workers say ------------------------------------------------------------------------------

    def join(self, name: str, worker: str, policy: wire.Policy, start: str, credit: int) -> Group:
        """A worker joins a group; the first one creates it. Raises PeerError."""
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                raise PeerError(f"there are {MAX_GROUPS} groups already")
            lossy = self._lossy_after_s is not None
            begin = self._journal.next if start == "live" or lossy else self._journal.oldest
            group = self._add(name, GroupState(begin, begin, policy=policy, started=begin))
            self._keep(group)
        elif policy != group.policy:
            group.change_policy(policy)
            self._filters[name] = Filter(policy.topics)
        group.join(worker, credit)
        return group

    def settle(self, name: str, worker: str, settle: wire.Settle, now: float) -> None:
        """A worker acknowledges, gives back, or asks for more time. Words about another epoch are void."""
        group = self.groups.get(name)
        if group is None or settle.epoch != self._journal.epoch:
            return
        if worker in group.members:
            group.members[worker].said = settle.number
            group.members[worker].settles += 1
        if settle.acks:
            self.counters.acked += group.ack_all(worker, settle.acks)
        for first, last, delay_s in settle.nacks:
            self.counters.nacked += group.nack(worker, first, last, delay_s, now)
        if settle.nacks and group.keyed is not None and not group.lossy:
            group.keep_order(worker, [(first, last) for first, last, _ in settle.nacks])
        for first, last in settle.unbegun:
            group.unbegun(worker, first, last)
        if settle.extends:
            group.extend_all(worker, settle.extends, now)

    def bye(self, name: str, worker: str, settles: int) -> None:
        """A worker leaves in order, after so many words about what it held."""
        group = self.groups.get(name)
        if group is not None and worker in group.members:
            group.leave(worker, unbegun=group.members[worker].settles == settles)

    def undelivered(self, worker: str, data: bytes, now: float) -> None:
        """A delivery could not be sent: the worker does not read. Give it back, and nothing more to that worker
        until it speaks again."""
        for group in self.groups.values():
            if worker in group.members:
                group.members[worker].suspended = True
                message = wire.decode_reply(data)
                if isinstance(message, wire.Deliver):
                    for first, last, _ in message.ranges:
                        group.take_back(worker, first, last)

    def hold_back(self, name: str, worker: str) -> None:
        """Nothing more to that worker until it speaks again."""
        group = self.groups.get(name)
        if group is not None and worker in group.members:
            group.members[worker].suspended = True

    def forget(self, name: str) -> None:
        """Drop a group and its position."""
        if self.groups.pop(name, None) is not None:
            self._journal.unregister(_PREFIX + name)
            self._store.forget(name)
            self._frames.pop(name, None)
            self._filters.pop(name, None)
            self._untold.pop(name, None)

    # ---- the loop --------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `run` must be called at the latest."""
        if self._more or any(group.dead for group in self.groups.values()):
            return float("-inf")
        soonest = min((group.next_deadline() for group in self.groups.values()), default=float("inf"))
        if self._ends and self._lossy_after_s is not None:
            soonest = min(soonest, self._ends[0][0] + self._lossy_after_s)
        return soonest

    @property
    def hungry(self) -> bool:
        """Whether a worker waits for events that are not there yet."""
        return any(group.needy() for group in self.groups.values())

    def run(self, now: float, posted: Callable[[], None] = lambda: None) -> None:
        """Expire, grant and keep; then `outbox` holds what to send, as (worker, message). `posted` is called after each
        group, so that the next one sees who has room."""
        self._more = False
        overdue = self._overdue(now) if self._lossy_after_s is not None and self.groups else 0
        for group in list(self.groups.values()):
            self.counters.expired += group.handle_deadline(now)
            if group.keyed is not None:
                group.keyed.unblock(now)
            if group.dead:
                self._bury(group)
            parts = self._grant(group, now)
            if group.cursor < overdue:
                self._lose(group, overdue)
            if group.forsaken:
                self._forsake(group)
            if group.dead:
                self._bury(group)
            self._keep(group)
            if group.failed:
                group.failed.forget(min(list(self._watched.values()), default=self._journal.next))
            if self._untold:
                self._tell(group)
            self._post(group, parts)
            posted()
        if self._waiters:
            self._answer_waiters()

    def _overdue(self, now: float) -> int:
        """Note where the ring ends now; return where it ended when the time to find a worker began."""
        assert self._lossy_after_s is not None
        when, end = self._ends[-1] if self._ends else (0.0, 0)
        if self._journal.next > end and now - when >= self._lossy_after_s / 64:  # a bounded number of notes
            self._ends.append((now, self._journal.next))
        overdue = 0
        while self._ends and self._ends[0][0] + self._lossy_after_s <= now:
            overdue = self._ends.popleft()[1]
        return overdue

    def _forsake(self, group: Group) -> None:
        forsaken, group.forsaken = group.forsaken, []
        for first, last, reason in forsaken:
            self.counters.forsaken += last - first + 1
            self._note(group, first, last, reason)

    def _note(self, group: Group, first: int, last: int, reason: Reason) -> None:
        self._untold.setdefault(group.name, {}).setdefault(reason, IntervalSet()).add(first, last)

    def _keep(self, group: Group) -> None:
        if group.dirty:
            self._store.save(group.name, group.state())
            self._journal.advance(_PREFIX + group.name, group.cursor)
            group.dirty = False

    def _post(self, group: Group, parts: list[Part]) -> None:
        """Put parts into as few messages as possible: one per worker, unless it would be very large."""
        by_worker: dict[str, list[Part]] = {}
        for part in parts:
            by_worker.setdefault(part.worker, []).append(part)
        epoch = self._journal.epoch
        for worker, theirs in by_worker.items():
            at = 0
            while at < len(theirs):
                size, end = 0, at
                while end < len(theirs) and (end == at or size + len(theirs[end].raw) <= _MESSAGE_BYTES):
                    size += len(theirs[end].raw)
                    end += 1
                these = sorted(theirs[at:end], key=lambda part: part.ranges[0])
                message = wire.Deliver(
                    epoch,
                    [part.raw for part in these],
                    [r for part in these for r in part.ranges],
                    group.members[worker].said,
                )
                self.outbox.append((worker, wire.encode(message)))
                group.members[worker].unread += 1
                at = end

    def _grant(self, group: Group, now: float) -> list[Part]:
        replies: list[Part] = []
        try:
            oldest = self._journal.oldest
            if group.cursor < oldest:
                self._lose(group, oldest)
            size = 0
            while needy := group.needy():
                if size >= _RUN_BYTES and not group.lossy:  # what is not given out in time would be lost
                    self._more = True
                    break
                before = len(replies)
                for member in needy:
                    replies += self._grant_one(group, member, len(needy), now)
                if len(replies) == before:
                    break
                size += sum([len(part.raw) for part in replies[before:]])
        except Evicted as evicted:
            self._lose(group, evicted.oldest)
        return replies

    def _grant_one(self, group: Group, member: Member, sharers: int, now: float) -> list[Part]:
        """Grant one worker its share of what there is."""
        limit = min(member.room, _GRANT_EVENTS)
        if group.returned or group.keyed is not None:
            limit = min(limit, self._at_once(group))
        if group.returned:
            share = -(-group.returned.total // sharers)
            grants = group.grant_returned(member.name, min(limit, share), now)
            return self._deliveries(group, member.name, grants, now)
        if group.keyed is not None:
            self._fill_keyed(group)
            grants = group.grant_keyed(member.name, limit, now)
            return self._deliveries(group, member.name, grants, now)
        share = -(-(self._journal.next - group.next) // sharers)
        limit = min(limit, share)
        while limit > 0 and group.may_grow:
            frame = self._frame_at(group, group.next)
            if frame is None:
                break
            upto = min(frame.next_offset, group.next + limit)
            wanted = self._wanted(group, frame, group.next, upto)
            grants = group.grant_new(member.name, wanted, upto, now)
            if grants:
                return [self._delivery(member.name, frame, grants)]
        return []

    def _at_once(self, group: Group) -> int:
        """How many events make up what is given out in one run, if they are like the last ones."""
        frame = self._frames.get(group.name)
        return _GRANT_EVENTS if frame is None else max(1, _RUN_BYTES * frame.count // len(frame.raw))

    def _wanted(self, group: Group, frame: Frame, first: int, upto: int) -> list[tuple[int, int]]:
        """The ranges of a frame whose topics the group wants."""
        wanted = self._filters[group.name]
        if all(wanted(topic) for topic, _, _ in frame.topics):
            return [(first, upto - 1)]
        ranges: list[tuple[int, int]] = []
        topics = frame.topic_column()
        for offset in range(first, upto):
            if not wanted(topics[offset - frame.first_offset]):
                continue
            if ranges and ranges[-1][1] == offset - 1:
                ranges[-1] = (ranges[-1][0], offset)
            else:
                ranges.append((offset, offset))
        return ranges

    def _fill_keyed(self, group: Group) -> None:
        """Read ahead and sort by key."""
        assert group.keyed is not None
        wanted = self._filters[group.name]
        while group.may_grow and len(group.keyed) < _KEYED_AHEAD:
            frame = self._frame_at(group, group.next)
            if frame is None:
                return
            keys = frame.columns().keys or [""] * frame.count
            topics = frame.topic_column()
            for i in range(group.next - frame.first_offset, frame.count):
                offset = frame.first_offset + i
                if wanted(topics[i]):
                    group.queue_keyed(offset, keys[i])
                else:
                    group.pass_over(offset)

    def _deliveries(self, group: Group, worker: str, grants: list[Grant], now: float) -> list[Part]:
        """Deliveries of events that may lie anywhere: one part per frame that holds some of them.

        How large they are is seen only here: what is too much for one run goes back.
        """
        replies: list[Part] = []
        size = 0
        left = deque(grants)
        while left:
            if size >= _RUN_BYTES:
                for grant in left:
                    group.take_back(worker, grant.first, grant.last)
                break
            try:
                frame = self._frame_at(group, left[0].first)
            except Evicted:
                frame = None
            if frame is None:
                # Dropped by the journal at this moment: back, and the next round counts it as lost.
                grant = left.popleft()
                group.take_back(worker, grant.first, grant.last)
                continue
            part: list[Grant] = []
            while left and left[0].first < frame.next_offset:
                grant = left.popleft()
                if grant.last >= frame.next_offset:
                    left.appendleft(Grant(frame.next_offset, grant.last, grant.attempt))
                    grant = Grant(grant.first, frame.next_offset - 1, grant.attempt)
                part.append(grant)
            replies.append(self._delivery(worker, frame, part))
            size += len(replies[-1].raw)
        return replies

    def _delivery(self, worker: str, frame: Frame, grants: list[Grant]) -> Part:
        ranges = [(g.first, g.last, g.attempt) for g in grants]
        self.counters.granted += sum(last - first + 1 for first, last, _ in ranges)
        part = frame.slice(grants[0].first, grants[-1].last + 1)
        return Part(worker, part.raw, ranges)

    def _frame_at(self, group: Group, offset: int) -> Frame | None:
        """The frame that holds `offset`, or None if it is not readable (yet, or any more). Raises Evicted."""
        frame = self._frames.get(group.name)
        if frame is not None and frame.first_offset <= offset < frame.next_offset:
            return frame
        if offset >= self._journal.next:
            return None
        chunk = self._journal.read(offset, max_bytes=1)
        if not chunk.frames or chunk.frames[0].first_offset > offset:
            # Damaged on disk: gone like evicted ones, up to where the journal is readable again.
            raise Evicted(
                offset, chunk.frames[0].first_offset if chunk.frames else max(chunk.next, offset + 1)
            )
        self._frames[group.name] = chunk.frames[0]
        return chunk.frames[0]

    def _lose(self, group: Group, until: int) -> None:
        reason = Reason.EVICTED
        if group.lossy:
            reason = Reason.OVERFLOW_SENDER if group.members else Reason.OFFLINE
        for first, last in group.lose(until, reason):
            if group.lossy:
                self.counters.unclaimed += last - first + 1
            else:
                self.counters.evicted += last - first + 1
            self._note(group, first, last, reason)

    def _tell(self, group: Group) -> None:
        """Tell the workers what the group has lost, as soon as there are any."""
        untold = self._untold.pop(group.name, {}) if group.members else {}
        for reason, lost in untold.items():
            ranges = list(lost)
            for at in range(0, len(ranges), wire.MAX_RANGES):
                part = ranges[at : at + wire.MAX_RANGES]
                word = wire.encode(wire.Gone(self._journal.epoch, part, reason))
                self.outbox += [(worker, word) for worker in group.members]

    def _bury(self, group: Group) -> None:
        """Move dead events to the dead-letter journal, some at a time; what cannot be read any more is lost."""
        decoded: tuple[Frame, list[Event]] | None = None
        for offset in group.dead[:_BURIED_AT_ONCE]:
            if group.is_settled(offset):  # acknowledged after all, or evicted, while it waited here
                del group.dead[0]
                continue
            try:
                frame = self._frame_at(group, offset)
                if frame is not None and self._dead is not None:
                    if decoded is None or decoded[0] is not frame:
                        decoded = frame, frame.events()
                    event = decoded[1][offset - frame.first_offset]
                    attempts = group.attempts.get(offset, group.policy.max_deliver)
                    deadletter.bury(self._dead, deadletter.DeadLetter(group.name, attempts, event))
            except (Evicted, FrameError):
                pass
            del group.dead[0]
            self.counters.dead_lettered += group.buried(offset)

    # ---- those who wait --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Failures are remembered meanwhile. To be entered before the event that is waited for is published."""
        watcher = object()
        self._watched[watcher] = self._journal.next
        try:
            yield
        finally:
            del self._watched[watcher]

    def wait_settled(
        self, offset: int, names: Sequence[str], timeout_s: float, wake: Callable[[], None]
    ) -> list[str]:
        """Wait until all named groups have acknowledged `offset`; return those that have not, or cannot any more.

        Called by any thread but the server's, which `wake` makes look: it alone may look at groups.
        """
        waiter = Waiter(offset, names)
        self._waiters.append(waiter)
        wake()
        if not self._closed:
            waiter.done.wait(timeout_s)
        waiter.done.set()  # so that nobody looks for it any more
        return waiter.missing

    def _answer_waiters(self) -> None:
        for _ in range(len(self._waiters)):
            waiter = self._waiters.popleft()
            if waiter.done.is_set():
                continue
            missing = [name for name in waiter.names if not self._acknowledged(name, waiter.offset)]
            waiter.missing = missing
            if all(self._hopeless(name, waiter.offset) for name in missing):
                waiter.done.set()
            else:
                self._waiters.append(waiter)

    def _acknowledged(self, name: str, offset: int) -> bool:
        group = self.groups.get(name)
        return group is not None and group.is_settled(offset) and not group.has_failed(offset)

    def _hopeless(self, name: str, offset: int) -> bool:
        group = self.groups.get(name)
        return group is not None and group.is_settled(offset) and group.has_failed(offset)

    def close(self) -> None:
        """Keep everything once more, and let nobody wait any longer."""
        self._closed = True
        for group in self.groups.values():
            try:
                self._keep(group)
            except Fault:
                continue
        self._store.close()
        for waiter in list(self._waiters):
            waiter.done.set()
