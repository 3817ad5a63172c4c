"""The publisher's side of all its groups: reads the journal, decides with `groups`, and keeps what was decided.

No sockets and no clock: deliveries are appended to `outbox`, `now` is an argument. What must survive is stored
before it is sent, so that an event that may have been delivered never comes again as if for the first time.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from brokerless.core import DiskJournal, Event, Frame, IntervalSet, Journal, Reason
from brokerless.core.errors import Evicted, Fault, FrameError, PeerError
from brokerless.core.topics import TopicFilter
from brokerless.direct.counters import GroupCounters
from brokerless.direct.groups.dead_letters import DeadLetter, append_dead_letter
from brokerless.direct.groups.group import Group
from brokerless.direct.groups.members import GroupState, Lease, Member, clip
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages

# One answer to a worker: large enough to make its cost per event small, small enough to spread a backlog.
_LEASE_EVENTS = 512
# Events read ahead and sorted by key; what a busy key can hold up.
_KEYED_AHEAD = 8192
_MESSAGE_BYTES = 512 * 1024
# What a group gives out before others have their turn, and before it is known who reads it.
_RUN_BYTES = 4 * 1024 * 1024
# Dead letters written before others have their turn: a few milliseconds.
_DEAD_LETTERS_AT_ONCE = 256
# Every group costs memory, a file and a look per loop; a name taken from outside must not cost the publisher.
MAX_GROUPS = 256
_PREFIX = "group."


log = logging.getLogger(__name__)


class Part(msgspec.Struct, frozen=True):
    """What goes to a worker: a piece of a frame, and which events of it are meant (first, last, attempt)."""

    worker: str
    raw: bytes
    ranges: list[tuple[int, int, int]]


class _Damaged(Evicted):
    """Offsets from `wanted` up to `oldest` cannot be read, although the journal begins before them."""


class Waiter:
    """Somebody who waits until `names` have acknowledged `offset`."""

    __slots__ = ("done", "missing", "names", "offset")

    def __init__(self, offset: int, names: Sequence[str]) -> None:
        self.offset = offset
        self.names = names
        self.missing = list(names)
        self.done = threading.Event()  # nothing is missing, or never comes


class GroupCoordinator:
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
        self._letters_unsynced = False
        self._store = store
        self._filters: dict[str, TopicFilter] = {}
        self._frames: dict[str, Frame] = {}  # the frame each group reads from
        # Losses that no worker has been told of, by reason.
        self._unreported: dict[str, dict[Reason, IntervalSet]] = {}
        # Those in publish(wait="acked"). Other threads only append.
        self._waiters: deque[Waiter] = deque()
        self.dispatching = True  # whether events may be given out
        self._closed = False
        self._more = False  # the last run left something for the next
        self._watched: dict[
            object, int
        ] = {}  # no failure before these offsets is waited for; in other threads
        for name, state in self._restored(store).items():
            self._add(name, state)

    def _restored(self, store: GroupStore) -> dict[str, GroupState]:
        """The groups of the publisher before this one, as far as its files and this journal's end allow."""
        journal = self._journal
        stored = store.load()
        registered = {
            name.removeprefix(_PREFIX): cursor
            for name, cursor in journal.registered().items()
            if name.startswith(_PREFIX)
        }
        restored = {}
        for name in sorted({*stored, *(registered if store.durable else ())}):
            state = stored.get(name)
            if state is None:
                cursor = min(registered.get(name, journal.oldest), journal.next)
                log.error(
                    "group %s: its state is missing or unreadable (a power cut?); it goes on at offset %d, and events "
                    "that it had settled behind that come again",
                    name,
                    cursor,
                )
                self.counters.state_lost += 1
                restored[name] = GroupState(cursor, cursor, started=cursor)
                continue
            restored[name] = clipped = clip(state, _end_of(journal, state.epoch))
            if clipped is not state:
                lost = clipped.lost - state.lost
                log.error(
                    "group %s had been given offsets up to %d, but the journal ended at %d when it was opened (a power "
                    "cut?): it goes on there; %d events that nobody had settled are lost with the journal's end",
                    name,
                    max(state.next, state.cursor),
                    clipped.next,
                    lost,
                )
                self.counters.tail_lost += lost
        return restored

    def _add(self, name: str, state: GroupState) -> Group:
        group = self.groups[name] = Group(name, state, lossy=self._lossy_after_s is not None)
        self._filters[name] = TopicFilter(group.policy.topics)
        self._journal.register(_PREFIX + name, group.cursor)
        self._journal.advance(_PREFIX + name, group.cursor)
        return group

    # ---- what workers say ------------------------------------------------------------------------------

    def join(self, name: str, worker: str, policy: messages.Policy, start: str, credit: int) -> Group:
        """A worker joins a group; the first one creates it. Raises PeerError, or ConfigError for its topics."""
        group = self.groups.get(name)
        wanted = TopicFilter(policy.topics)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                raise PeerError(f"there are {MAX_GROUPS} groups already")
            lossy = self._lossy_after_s is not None
            begin = self._journal.next if start == "live" or lossy else self._journal.oldest
            if (time := messages.start_time(start)) is not None and not lossy:
                begin = self._journal.offset_at(time)
            group = self._add(name, GroupState(begin, begin, policy=policy, started=begin))
            self._keep(group)
        elif policy != group.policy:
            group.change_policy(policy)
            self._filters[name] = wanted
        group.join(worker, credit)
        return group

    def settle(self, name: str, worker: str, settle: messages.Settle, now: float) -> None:
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
        if settle.unbegun:
            group.unbegun_all(worker, settle.unbegun)
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
                message = messages.decode_reply(data)
                if isinstance(message, messages.Deliver):
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
            self._unreported.pop(name, None)

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
    def idle(self) -> bool:
        """Whether a worker waits for events that are not there yet."""
        return any(group.with_room() for group in self.groups.values())

    @property
    def leased(self) -> bool:
        """Whether a worker holds events that are not settled."""
        return any(group.leased_live for group in self.groups.values())

    def run(self, now: float, posted: Callable[[], None] = lambda: None) -> None:
        """Expire, lease and keep; then `outbox` holds what to send, as (worker, message). `posted` is called after each
        group, so that the next one sees who has room."""
        self._more = False
        overdue = self._overdue(now) if self._lossy_after_s is not None and self.groups else 0
        for group in list(self.groups.values()):
            self.counters.expired += group.handle_deadline(now)
            if group.keyed is not None:
                group.keyed.unblock(now)
            if group.dead:
                self._dead_letter(group)
            parts = self._lease_events(group, now)
            if group.cursor < overdue:
                self._lose(group, overdue)
            if group.abandoned:
                self._count_abandoned(group)
            if group.dead:
                self._dead_letter(group)
            self._keep(group)
            if group.failed:
                group.failed.forget(min(list(self._watched.values()), default=self._journal.next))
            if self._unreported:
                self._report_losses(group)
            self._post(group, parts)
            posted()
        self._store.sync_if_due()
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

    def _count_abandoned(self, group: Group) -> None:
        abandoned, group.abandoned = group.abandoned, []
        for first, last, reason in abandoned:
            self.counters.abandoned += last - first + 1
            self._note(group, first, last, reason)

    def _note(self, group: Group, first: int, last: int, reason: Reason) -> None:
        self._unreported.setdefault(group.name, {}).setdefault(reason, IntervalSet()).add(first, last)

    def unreported(self, name: str) -> dict[str, tuple[int, int]]:
        """By reason, the last range that the group lost and that no worker of it was there to be told."""
        return {
            str(reason): list(lost)[-1] for reason, lost in self._unreported.get(name, {}).items() if lost
        }

    def _keep(self, group: Group) -> None:
        if group.dirty:
            if self._letters_unsynced and isinstance(self._dead, DiskJournal):
                # First: the group's file may reach the disk by itself, and then nobody would look for the event again.
                self._dead.sync()
                self._letters_unsynced = False
            self._store.save(group.name, group.state(self._journal.epoch))
            self._journal.advance(_PREFIX + group.name, group.cursor)
            group.dirty = False

    def withdraw(self, offset: int) -> None:
        """Nobody waits for this event any more: if it waits to be given out again, it is not."""
        for group in self.groups.values():
            if offset in group.returned:
                group.skip(offset, offset)

    def keep(self) -> None:
        """Store what has changed. Raises JournalError."""
        for group in self.groups.values():
            self._keep(group)

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
                message = messages.Deliver(
                    epoch,
                    [part.raw for part in these],
                    [r for part in these for r in part.ranges],
                    group.members[worker].said,
                )
                self.outbox.append((worker, messages.encode(message)))
                group.members[worker].unread += 1
                at = end

    def _lease_events(self, group: Group, now: float) -> list[Part]:
        replies: list[Part] = []
        if not self.dispatching:
            return replies
        try:
            oldest = self._journal.oldest
            if group.cursor < oldest:
                self._lose(group, oldest)
            size = 0
            while with_room := group.with_room():
                if size >= _RUN_BYTES and not group.lossy:  # what is not given out in time would be lost
                    self._more = True
                    break
                before = len(replies)
                for member in with_room:
                    replies += self._lease_to(group, member, len(with_room), now)
                if len(replies) == before:
                    break
                size += sum([len(part.raw) for part in replies[before:]])
        except _Damaged as damaged:
            self._lose_damaged(group, damaged.wanted, damaged.oldest)
        except Evicted as evicted:
            self._lose(group, evicted.oldest)
        return replies

    def _lease_to(self, group: Group, member: Member, sharers: int, now: float) -> list[Part]:
        """Lease one worker its share of what there is."""
        limit = min(member.room, _LEASE_EVENTS)
        if group.returned or group.keyed is not None:
            limit = min(limit, self._at_once(group))
        if group.awaited and group.keyed is not None:
            return []  # the order of keys begins with what they held
        if group.returned and not group.awaited:
            share = -(-group.returned.total // sharers)
            leases = group.lease_from_returned(member.name, min(limit, share), now)
            return self._deliveries(group, member.name, leases, now)
        if group.keyed is not None:
            self._fill_keyed(group)
            leases = group.lease_keyed(member.name, limit, now)
            return self._deliveries(group, member.name, leases, now)
        share = -(-(self._journal.next - group.next) // sharers)
        limit = min(limit, share)
        while limit > 0 and group.may_grow:
            frame = self._frame_at(group, group.next)
            if frame is None:
                break
            upto = min(frame.next_offset, group.next + limit)
            wanted = self._wanted(group, frame, group.next, upto)
            leases = group.lease_new(member.name, wanted, upto, now)
            if leases:
                return [self._delivery(member.name, frame, leases)]
        return []

    def _at_once(self, group: Group) -> int:
        """How many events make up what is given out in one run, if they are like the last ones."""
        frame = self._frames.get(group.name)
        return _LEASE_EVENTS if frame is None else max(1, _RUN_BYTES * frame.count // len(frame.raw))

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

    def _deliveries(self, group: Group, worker: str, leases: list[Lease], now: float) -> list[Part]:
        """Deliveries of events that may lie anywhere: one part per frame that holds some of them.

        How large they are is seen only here: what is too much for one run goes back.
        """
        replies: list[Part] = []
        size = 0
        left = deque(leases)
        while left:
            if size >= _RUN_BYTES:
                for lease in left:
                    group.take_back(worker, lease.first, lease.last)
                break
            try:
                frame = self._frame_at(group, left[0].first)
            except _Damaged as damaged:
                lease = left.popleft()
                last = min(lease.last, damaged.oldest - 1)
                if last < lease.last:
                    left.appendleft(Lease(last + 1, lease.last, lease.attempt))
                group.take_back(worker, lease.first, last)
                self._lose_damaged(group, lease.first, last + 1)
                continue
            except Evicted:
                frame = None
            if frame is None:
                # Dropped by the journal at this moment: back, and the next round counts it as lost.
                lease = left.popleft()
                group.take_back(worker, lease.first, lease.last)
                continue
            part: list[Lease] = []
            while left and left[0].first < frame.next_offset:
                lease = left.popleft()
                if lease.last >= frame.next_offset:
                    left.appendleft(Lease(frame.next_offset, lease.last, lease.attempt))
                    lease = Lease(lease.first, frame.next_offset - 1, lease.attempt)
                part.append(lease)
            replies.append(self._delivery(worker, frame, part))
            size += len(replies[-1].raw)
        return replies

    def _delivery(self, worker: str, frame: Frame, leases: list[Lease]) -> Part:
        ranges = [(g.first, g.last, g.attempt) for g in leases]
        self.counters.granted += sum(last - first + 1 for first, last, _ in ranges)
        part = frame.slice(leases[0].first, leases[-1].last + 1)
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
            # Gone up to where the journal is readable again.
            raise _Damaged(
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

    def _lose_damaged(self, group: Group, first: int, until: int) -> None:
        """The journal cannot read these any more; what lies before them it can."""
        for a, b in group.lose(until, Reason.UNATTRIBUTED, first=first):
            self.counters.damaged += b - a + 1
            self._note(group, a, b, Reason.UNATTRIBUTED)

    def _report_losses(self, group: Group) -> None:
        """Tell the workers what the group has lost, as soon as there are any."""
        unreported = self._unreported.pop(group.name, {}) if group.members else {}
        for reason, lost in unreported.items():
            ranges = list(lost)
            for at in range(0, len(ranges), messages.MAX_RANGES):
                part = ranges[at : at + messages.MAX_RANGES]
                word = messages.encode(messages.Gone(self._journal.epoch, part, reason))
                self.outbox += [(worker, word) for worker in group.members]

    def _dead_letter(self, group: Group) -> None:
        """Move dead events to the dead-letter journal, some at a time; what cannot be read any more is lost."""
        decoded: tuple[Frame, list[Event]] | None = None
        for offset in group.dead[:_DEAD_LETTERS_AT_ONCE]:
            if group.is_settled(offset):  # acknowledged after all, or evicted, while it waited here
                del group.dead[0]
                continue
            frame = None
            with contextlib.suppress(Evicted):
                frame = self._frame_at(group, offset)
            try:
                if frame is not None and (decoded is None or decoded[0] is not frame):
                    decoded = frame, frame.events()
            except FrameError:
                frame = None
            if frame is None or decoded is None:
                self._lose_damaged(group, offset, offset + 1)
                del group.dead[0]
                continue
            if self._dead is not None:
                event = decoded[1][offset - frame.first_offset]
                attempts = group.attempts.get(offset, group.policy.max_deliver)
                append_dead_letter(self._dead, DeadLetter(group.name, attempts, event))
                self._letters_unsynced = isinstance(self._dead, DiskJournal) and self._dead.fsync != "never"
            del group.dead[0]
            self.counters.dead_lettered += group.dead_letter_written(offset)

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


def _end_of(journal: Journal, epoch: int) -> int:
    """Up to where the journal is the one that a state of `epoch` speaks of: later epochs may use offsets again."""
    epochs = journal.epochs() if isinstance(journal, DiskJournal) else []
    known = [number for number, _ in epochs]
    later = [first for _, first in epochs[known.index(epoch) + 1 :]] if epoch in known else []
    return min([*later, journal.next])
