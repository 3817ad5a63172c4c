"""One group of workers, without I/O: who holds which events until when, what comes again, what is done.

The publisher is the only dispatcher of its groups. Offsets move like this:

    new ──grant──▶ leased ──ack──▶ settled            the cursor follows the settled ones
     │               │ nack, lease over, worker gone
     │               ▼
     │            returned (now, or after a delay) ──grant──▶ leased, attempt + 1
     │               └─ after max_deliver attempts ──▶ dead ──settle──▶ settled
     └──skip (topic not wanted, evicted)──▶ settled

Without a journal nothing can be sent again (`lossy`): an event is granted at most once; what its worker gives back,
leaves behind or holds beyond its lease is lost, with the reason. A message may have been dropped on the way to the
worker, and only the lease tells. An acknowledgement that comes later still counts.

Ranges are used throughout, so that a well-behaved group costs the same per frame and not per event. `now` is
an argument; nothing here sleeps.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from math import ceil

import msgspec

from brokerless.core import IntervalSet, Reason
from brokerless.direct.affinity import KeyQueue
from brokerless.direct.wire import Policy

# How far a group may run ahead of its oldest unsettled event, and into how many pieces what is settled may be
# cut. Beyond that nothing new is granted until the oldest is settled: this is what bounds a group's memory.
MAX_AHEAD = 1_000_000
MAX_PIECES = 4096
# Whatever a worker asks for: what one worker may hold. RabbitMQ's prefetch and NATS' max_ack_pending lie below.
MAX_CREDIT = 65_536

# Grants that one worker may have open: as many messages can be on their way to it, and sockets' queues are
# larger than that.
MAX_MESSAGES = 48
# Extended leases end at multiples of this part of a lease, rounded up.
_LEASE_STEPS = 16


class Grant(msgspec.Struct, frozen=True):
    """Offsets `first` to `last` now belong to a worker, for the attempt-th time."""

    first: int
    last: int
    attempt: int


class GroupState(msgspec.Struct, array_like=True):
    """What must survive a crash of the publisher. Everything in [cursor, next) that is not settled comes again."""

    cursor: int
    next: int
    settled: list[tuple[int, int]] = []
    attempts: dict[int, int] = {}
    policy: Policy = Policy()
    acked: int = 0
    dead: int = 0
    lost: int = 0
    skipped: int = 0
    started: int = 0


class Member:
    """One worker, as its group sees it."""

    __slots__ = ("credit", "held", "leases", "name", "suspended", "unread")

    def __init__(self, name: str, credit: int) -> None:
        self.name = name
        self.credit = credit
        self.held = 0
        # It let a lease end: nothing more for it until it is heard of again.
        self.suspended = False
        self.unread = 0  # messages on their way to it, as far as it has said
        self.leases: deque[tuple[float, IntervalSet]] = deque()

    @property
    def room(self) -> int:
        """How many more events it can take."""
        return 0 if self.suspended else self.credit - self.held


class Group:
    """The books and queues of one group."""

    def __init__(
        self, name: str, state: GroupState, *, lossy: bool = False, max_messages: int = MAX_MESSAGES
    ) -> None:
        self.name = name
        self._max_messages = max_messages
        self.lossy = lossy
        self.policy = state.policy
        self.cursor = state.cursor
        self.next = state.next
        self.started = state.started
        self.acked, self.dead_lettered = state.acked, state.dead
        self.skipped = state.skipped
        # Only what a journal evicted outlives the publisher: without a journal nothing does.
        self.lost_by_reason: dict[Reason, int] = {Reason.EVICTED: state.lost} if state.lost else {}
        # Lost because their worker gave them back or is gone; the dispatcher tells the others and empties it.
        self.forsaken: list[tuple[int, int, Reason]] = []
        self._expired = IntervalSet()
        self.redelivered = 0
        self.settled = IntervalSet(state.settled)
        self.attempts = dict(state.attempts)
        # The keys of `attempts`: an acknowledgement must not cost a look at each of them.
        self._retried = IntervalSet((offset, offset) for offset in sorted(self.attempts))
        self.members: dict[str, Member] = {}
        self.returned = IntervalSet()
        self.dead: list[int] = []
        # The last ones that were given up, for those who wait for an acknowledgement.
        self.failed: deque[tuple[int, int]] = deque(maxlen=1024)
        self.dirty = True
        self._delayed: list[tuple[float, int]] = []
        self._keys: KeyQueue | None = KeyQueue() if state.policy.affinity else None
        for first, last in self.settled.missing(self.cursor, self.next - 1):
            # Granted by a publisher that is gone: they may have been delivered, so the next time is not the first.
            for offset in range(first, last + 1):
                self._give_back(offset)

    # ---- members ---------------------------------------------------------------------------------------

    def join(self, worker: str, credit: int = 0) -> None:
        """A worker is there (again). What it held before stays its own."""
        if worker not in self.members:
            self.members[worker] = Member(worker, 0)
            if self._keys is not None:
                self._keys.join(worker)
        self.set_credit(worker, credit)

    def set_credit(self, worker: str, window: int) -> None:
        """The worker can hold `window` events in all."""
        if worker in self.members:
            self.members[worker].credit = max(0, min(window, MAX_CREDIT))

    def heard(self, worker: str, *, read: bool = False) -> None:
        """The worker's loop is running; with `read` it has read one more message."""
        member = self.members.get(worker)
        if member is not None:
            member.suspended = False
            member.unread = max(0, member.unread - read)

    def leave(self, worker: str) -> None:
        """The worker is gone: everything it held comes again, elsewhere."""
        member = self.members.pop(worker, None)
        if member is None:
            return
        for _, held in member.leases:
            for first, last in held:
                self._return_range(first, last, reason=Reason.IN_FLIGHT)
        if self._keys is not None:
            self._keys.leave(worker)

    def change_policy(self, policy: Policy) -> None:
        """The newest worker's wish counts; what is on its way keeps its lease."""
        if policy == self.policy:
            return
        if policy.affinity and self._keys is None:
            self._keys = KeyQueue()
            for worker in self.members:
                self._keys.join(worker)
        elif not policy.affinity and self._keys is not None:
            for offset in self._keys.drain():
                self.returned.add(offset, offset)
            self._keys = None
        self.policy = policy
        self.dirty = True

    # ---- granting --------------------------------------------------------------------------------------

    @property
    def keyed(self) -> KeyQueue | None:
        """The queue by key, if the group has key affinity."""
        return self._keys

    @property
    def may_grow(self) -> bool:
        """Whether anything new may be granted or queued. Without leases one that hangs must not hold the others."""
        ahead = 0 if self.lossy else self.next - self.cursor
        return ahead < MAX_AHEAD and len(self.settled) < MAX_PIECES

    def needy(self) -> list[Member]:
        """Workers with room, those with the most first."""
        able = (m for m in self.members.values() if m.room > 0 and len(m.leases) < MAX_MESSAGES)
        if self.lossy:
            able = (m for m in able if m.unread < self._max_messages)
        return sorted(able, key=lambda m: -m.room)

    def grant_returned(self, worker: str, limit: int, now: float) -> list[Grant]:
        """Give up to `limit` returned events to a worker."""
        grants: list[Grant] = []
        while limit > 0 and self.returned:
            first, last = next(iter(self.returned))
            last = min(last, first + limit - 1)
            self.returned.remove(first, last)
            limit -= last - first + 1
            grants += self._lease_again(range(first, last + 1))
        self._lease(worker, grants, now)
        return grants

    def grant_new(self, worker: str, ranges: Iterable[tuple[int, int]], upto: int, now: float) -> list[Grant]:
        """Give new events to a worker: `ranges` within [next, upto); the rest up to there is skipped."""
        grants = []
        at = self.next
        for first, last in ranges:
            self.skip(at, first - 1)
            grants.append(Grant(first, last, 1))
            at = last + 1
        self.skip(at, upto - 1)
        self.next = upto
        self.dirty = True
        self._advance()
        self._lease(worker, grants, now)
        return grants

    def queue_keyed(self, offset: int, key: str) -> None:
        """Key affinity: put the event at `next` into the queue of the worker that owns its key."""
        assert self._keys is not None
        self._keys.add(offset, key)
        self.next = offset + 1
        self.dirty = True

    def pass_over(self, offset: int) -> None:
        """The event at `next` is not for this group."""
        self.next = offset + 1
        self.skip(offset, offset)

    def grant_keyed(self, worker: str, limit: int, now: float) -> list[Grant]:
        """Give a worker what is queued for it."""
        assert self._keys is not None
        grants: list[Grant] = []
        for offset in self._keys.take(worker, limit, now):
            if offset in self.attempts:
                grants += self._lease_again((offset,))
            elif grants and grants[-1].attempt == 1 and grants[-1].last == offset - 1:
                grants[-1] = Grant(grants[-1].first, offset, 1)
            else:
                grants.append(Grant(offset, offset, 1))
        self._lease(worker, grants, now)
        return grants

    def _lease_again(self, offsets: Iterable[int]) -> list[Grant]:
        grants: list[Grant] = []
        for offset in offsets:
            if self.lossy:
                attempt = 1  # it never left
            else:
                attempt = self._attempted(offset) + 1
                self.attempts[offset] = attempt
                self.redelivered += 1
            if grants and grants[-1].attempt == attempt and grants[-1].last == offset - 1:
                grants[-1] = Grant(grants[-1].first, offset, attempt)
            else:
                grants.append(Grant(offset, offset, attempt))
        self.dirty = True
        return grants

    def _attempted(self, offset: int) -> int:
        """How often it has been granted so far: once, if nothing else is known."""
        made = self.attempts.get(offset)
        if made is None:
            made = self.attempts[offset] = 1
            self._retried.add(offset, offset)
        return made

    def _lease(self, worker: str, grants: list[Grant], now: float) -> None:
        if grants:
            member = self.members[worker]
            held = IntervalSet((g.first, g.last) for g in grants)
            member.held += held.total
            self._hold(member, now + self.policy.lease_s, held)

    # ---- settling --------------------------------------------------------------------------------------

    def ack(self, worker: str, first: int, last: int) -> int:
        """Settle a range. Late acks (the lease was over) count too: the work has been done. Returns how many."""
        return self.ack_all(worker, [(first, last)])

    def ack_all(self, worker: str, ranges: Iterable[tuple[int, int]]) -> int:
        """The same for many ranges."""
        newly = 0
        wanted = IntervalSet(ranges)
        for a, b in self._release(worker, wanted):
            newly += self._settle(max(a, self.cursor), b)
        if self._retried:
            for a, b in _both(wanted, self._retried):
                newly += self._settle(max(a, self.cursor), b)
        if self._expired:
            newly += sum(self._found(a, b) for a, b in _both(wanted, self._expired))
        self.acked += newly
        return newly

    def _found(self, first: int, last: int) -> int:
        """Without a journal: what was counted as lost when its lease ended has been dealt with after all."""
        found = self._expired.remove(first, last)
        if found:
            self.lost_by_reason[Reason.IN_FLIGHT] -= found
            self.dirty = True
        return found

    def nack(self, worker: str, first: int, last: int, delay_s: float, now: float) -> int:
        """Give events back, to come again after `delay_s`. Only those that the worker holds. Returns how many."""
        mine = self._release(worker, IntervalSet([(first, last)]))
        for a, b in mine:
            self._return_range(a, b, now + delay_s if delay_s > 0 else None)
        return sum(b - a + 1 for a, b in mine)

    def take_back(self, worker: str, first: int, last: int) -> None:
        """A grant that did not leave the publisher: as if it had not been made, as far as that can be."""
        for a, b in self._release(worker, IntervalSet([(first, last)])):
            if not self.lossy:
                self._return_range(a, b)
            elif self._keys is None:
                self.returned.add(a, b)
            else:
                for offset in range(a, b + 1):
                    self._keys.give_back(offset, None)

    def extend(self, worker: str, first: int, last: int, now: float) -> int:
        """Begin the lease of held events anew. Returns how many were held."""
        return self.extend_all(worker, [(first, last)], now)

    def extend_all(self, worker: str, ranges: Iterable[tuple[int, int]], now: float) -> int:
        """The same for many ranges: one lease for all of them."""
        mine = self._release(worker, IntervalSet(ranges))
        if not mine:
            return 0
        leases = self.members[worker].leases
        # A worker that extends its events one by one must not have as many leases: they end at a few points in time.
        step = self.policy.lease_s / _LEASE_STEPS
        until, held = ceil((now + self.policy.lease_s) / step) * step, IntervalSet()
        if leases and (leases[-1][0] == until or len(leases) >= 2 * MAX_MESSAGES):
            newest, held = leases.pop()
            until = max(until, newest)
        extended = sum(held.add(a, b) for a, b in mine)
        self._hold(self.members[worker], until, held)
        self.members[worker].held += extended
        return extended

    def _hold(self, member: Member, until: float, held: IntervalSet) -> None:
        """Leases are kept in the order in which they end, which is that of granting as long as all last as long."""
        at = len(member.leases)
        while at and member.leases[at - 1][0] > until:
            at -= 1
        member.leases.insert(at, (until, held))

    def skip(self, first: int, last: int) -> None:
        """These are not for this group (another topic)."""
        self.skipped += self._settle(first, last)

    def lose(self, until: int, reason: Reason = Reason.EVICTED) -> list[tuple[int, int]]:
        """Everything before `until` cannot be granted any more; return the ranges that are lost by that.

        What a worker holds now is not lost: it can still be acknowledged, but not be sent again.
        """
        leased = IntervalSet()
        for member in self.members.values():
            for _, held in member.leases:
                for a, b in held:
                    leased.add(a, b)
        gone = []
        for a, b in self.settled.missing(self.cursor, until - 1):
            gone += leased.missing(a, b)
        for a, b in gone:
            self.returned.remove(a, b)
            if self._keys is not None:
                self._keys.remove(a, b)
            self._count_lost(a, b, reason)
        self._delayed = [(due, o) for due, o in self._delayed if o not in self.settled and o >= self.cursor]
        heapq.heapify(self._delayed)
        self.next = max(self.next, until)
        self._advance()
        self.dirty = True
        return gone

    def _count_lost(self, first: int, last: int, reason: Reason) -> None:
        newly = self._settle(first, last)
        if newly:
            self.failed.append((first, last))
            self.lost_by_reason[reason] = self.lost_by_reason.get(reason, 0) + newly

    @property
    def lost(self) -> int:
        """Events that the group will not get."""
        return sum(self.lost_by_reason.values())

    def buried(self, offset: int) -> int:
        """A dead event is in the dead-letter journal; 0 if it was settled before."""
        newly = self._settle(offset, offset)
        self.dead_lettered += newly
        self.failed.append((offset, offset))
        return newly

    def is_settled(self, offset: int) -> bool:
        """Whether the event is acknowledged, dead, skipped or lost."""
        return offset < self.cursor or offset in self.settled

    def has_failed(self, offset: int) -> bool:
        """Whether the event was given up or lost, not too long ago."""
        return any(first <= offset <= last for first, last in self.failed)

    def _settle(self, first: int, last: int) -> int:
        if last < first:
            return 0
        added = self.settled.add(first, last)
        if added:
            self.dirty = True
            if self.attempts:
                self._forget(first, last)
            self.returned.remove(first, last)
            if self._keys is not None:
                self._keys.settle(first, last)
            self._advance()
        return added

    def _forget(self, first: int, last: int) -> None:
        for a, b in self._retried.overlap(first, last):
            for offset in range(a, b + 1):
                del self.attempts[offset]
        self._retried.remove(first, last)

    def _advance(self) -> None:
        while self.settled and self.settled.first <= self.cursor:
            first, last = next(iter(self.settled))
            self.settled.remove(first, last)
            self.cursor = max(self.cursor, last + 1)

    def _release(self, worker: str, wanted: IntervalSet) -> list[tuple[int, int]]:
        """Take what is wanted out of the worker's leases; return what of it was there."""
        member = self.members.get(worker)
        if member is None:
            return []
        mine: list[tuple[int, int]] = []
        for _, held in member.leases:
            part = _both(wanted, held)
            mine += part
            for first, last in part:
                member.held -= held.remove(first, last)
        while member.leases and not member.leases[0][1]:
            member.leases.popleft()
        if len(member.leases) >= MAX_MESSAGES:
            # One event that takes long, or never arrived, must not count as so many messages on their way.
            member.leases = deque(lease for lease in member.leases if lease[1])
        return mine

    def _return_range(
        self, first: int, last: int, due: float | None = None, reason: Reason = Reason.GAVE_UP
    ) -> None:
        for a, b in self.settled.missing(max(first, self.cursor), last):
            if self.lossy:
                self.forsaken.append((a, b, reason))
                self._count_lost(a, b, reason)
                continue
            for offset in range(a, b + 1):
                self._give_back(offset, due)

    def _give_back(self, offset: int, due: float | None = None) -> None:
        made = self._attempted(offset)
        self.dirty = True
        if made >= self.policy.max_deliver:
            self.dead.append(offset)
        elif self._keys is not None and self._keys.give_back(offset, due):
            pass
        elif due is None:
            self.returned.add(offset, offset)
        else:
            heapq.heappush(self._delayed, (due, offset))

    # ---- time ------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When a lease ends or a delay is over; infinity if nothing waits."""
        soonest = self._delayed[0][0] if self._delayed else float("inf")
        if self._keys is not None:
            soonest = min(soonest, self._keys.next_due())
        for member in self.members.values():
            for deadline, held in member.leases:
                if held:
                    soonest = min(soonest, deadline)
                    break
        return soonest

    def handle_deadline(self, now: float) -> int:
        """Take back what was leased for too long and what was delayed long enough; return how many leases ended."""
        while self._delayed and self._delayed[0][0] <= now:
            _, offset = heapq.heappop(self._delayed)
            if not self.is_settled(offset):
                self.returned.add(offset, offset)
        ended = 0
        for member in self.members.values():
            while member.leases and (member.leases[0][0] <= now or not member.leases[0][1]):
                _, held = member.leases.popleft()
                member.held -= held.total
                ended += held.total
                member.suspended = member.suspended or bool(held)
                for first, last in held:
                    if self.lossy:
                        self._expire(first, last)
                    self._return_range(first, last, reason=Reason.IN_FLIGHT)
        return ended

    def _expire(self, first: int, last: int) -> None:
        for a, b in self.settled.missing(max(first, self.cursor), last):
            self._expired.add(a, b)
        while (
            len(self._expired) > MAX_PIECES
        ):  # an acknowledgement that comes so much later is not waited for
            oldest = next(iter(self._expired))
            self._expired.remove(*oldest)

    # ---- what is kept and shown ------------------------------------------------------------------------

    def state(self) -> GroupState:
        """What to store so that a restarted publisher can go on."""
        return GroupState(
            self.cursor,
            self.next,
            list(self.settled),
            self.attempts,
            self.policy,
            self.acked,
            self.dead_lettered,
            self.lost,
            self.skipped,
            self.started,
        )

    @property
    def leased(self) -> int:
        """Events that workers hold now."""
        return sum(member.held for member in self.members.values())

    @property
    def leased_live(self) -> int:
        """Events that workers hold and nobody has settled meanwhile."""
        return sum(
            b - a + 1
            for member in self.members.values()
            for _, held in member.leases
            for first, last in held
            for a, b in self.settled.missing(max(first, self.cursor), last)
        )

    @property
    def waiting(self) -> int:
        """Events that were granted once and wait to be granted again."""
        queued = len(self._keys) if self._keys is not None else 0
        # A late acknowledgement may have settled some of those that are still in these lists.
        listed = [offset for _, offset in self._delayed] + self.dead
        return self.returned.total + queued + sum(not self.is_settled(offset) for offset in listed)


def _both(some: IntervalSet, others: IntervalSet) -> list[tuple[int, int]]:
    """What is in both sets, at the cost of the one with fewer intervals."""
    if not some or not others or some.first > others.last or others.first > some.last:
        return []
    if len(some) > len(others):
        some, others = others, some
    return [part for first, last in some for part in others.overlap(first, last)]
