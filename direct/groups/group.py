"""One group of workers, without I/O: who holds which events until when, what comes again, what is done.

The publisher is the only coordinator of its groups. Offsets move like this:

    new ──lease──▶ leased ──ack──▶ settled            the cursor follows the settled ones
     │               │ nack, lease over, worker gone
     │               ▼
     │            returned (now, or after a delay) ──lease──▶ leased, attempt + 1
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
from collections.abc import Iterable, Sequence
from math import ceil

from brokerless.core import IntervalSet, Reason
from brokerless.direct.groups.affinity import KeyQueue
from brokerless.direct.groups.attempts import AttemptCounts, UncertainAttempts, both
from brokerless.direct.groups.members import Failures, GroupState, Lease, Member, held_by
from brokerless.direct.protocol.messages import Policy

# How far a group may run ahead of its oldest unsettled event, and into how many pieces what is settled may be
# cut. Beyond that nothing new is granted until the oldest is settled: this is what bounds a group's memory.
MAX_AHEAD = 1_000_000
MAX_PIECES = 4096
# Whatever a worker asks for: what one worker may hold. RabbitMQ's prefetch and NATS' max_ack_pending lie below.
MAX_CREDIT = 65_536

# Grants that one worker may have open: as many messages can be on their way to it, and sockets' queues are
# larger than that.
MAX_MESSAGES = 48
# How long a restarted publisher waits for the workers that held events of its predecessor, before it gives these events
# to others: they may have been acknowledged while nobody listened. Workers notice silence after 3 s.
AWAIT_S = 3.0
# Extended leases end at multiples of this part of a lease, rounded up.
_LEASE_STEPS = 16


class Group:
    """The accounting and the queues of one group."""

    def __init__(self, name: str, state: GroupState, *, lossy: bool = False) -> None:
        self.name = name
        self.lossy = lossy
        self.policy = state.policy
        self.cursor = state.cursor
        self.next = state.next
        self.started = state.started
        self.acked, self.dead_lettered = state.acked, state.dead
        self.skipped = state.skipped
        self.lost_by_reason = {Reason(reason): n for reason, n in state.lost_by_reason.items()}
        if state.lost and not self.lost_by_reason:
            self.lost_by_reason[Reason.EVICTED] = state.lost  # a file of an older version has only the sum
        # Lost because their worker gave them back or is gone; the coordinator tells the others and empties it.
        self.abandoned: list[tuple[int, int, Reason]] = []
        self._expired = IntervalSet()
        self.redelivered = 0
        self.settled = IntervalSet(state.settled)
        self.attempts = AttemptCounts(state.attempts)
        self.members: dict[str, Member] = {}
        # Workers of the publisher before this one that have not said yet what became of what they held.
        self.awaited = set() if lossy else set(state.holders)
        self._await_until = float("-inf")
        self.returned = IntervalSet()
        self.dead: list[int] = []
        self.failed = Failures()
        self.dirty = True
        self._delayed: list[tuple[float, int]] = []
        self._keys: KeyQueue | None = KeyQueue() if state.policy.affinity else None
        self._uncertain = UncertainAttempts()
        # With affinity, what is known below this is read again, for its keys; some of it may be delayed or leased.
        self._reread_until = 0
        self._postponed: dict[int, float] = {}
        # Granted by a publisher that is gone: they may have been delivered, so the next time is not the first.
        if self._keys is None:
            for first, last in self.settled.missing(self.cursor, self.next - 1):
                for offset in range(first, last + 1):
                    self._give_back(offset, sure=False)
        else:
            for offset in sorted(offset for offset, made in self.attempts.made.items() if made):
                self._uncertain.add(offset)
            self._read_again()

    # ---- members ---------------------------------------------------------------------------------------

    def join(self, worker: str, credit: int = 0) -> None:
        """A worker is there (again). What it held before stays its own."""
        if worker not in self.members:
            self.members[worker] = Member(worker, 0)
            if self._keys is not None:
                self._keys.join(worker)
        self.members[worker].settles = 0
        self.set_credit(worker, credit)

    def set_credit(self, worker: str, window: int) -> None:
        """The worker can hold `window` events in all."""
        if worker in self.members:
            self.members[worker].credit = max(0, min(window, MAX_CREDIT))
            if window:
                self.awaited.discard(worker)  # it says first what it has settled

    def heard(self, worker: str, *, read: bool = False) -> None:
        """The worker's loop is running; with `read` it has read one more message."""
        member = self.members.get(worker)
        if member is not None:
            if member.suspended and self._keys is not None:
                self._keys.join(worker)
            member.suspended = False
            member.unread = max(0, member.unread - read)

    def leave(self, worker: str, *, unbegun: bool = False) -> None:
        """The worker is gone: everything it held comes again, elsewhere; `unbegun` as if it had not been delivered."""
        member = self.members.pop(worker, None)
        if member is None:
            return
        for _, held in member.leases:
            for first, last in held:
                if unbegun:
                    self._undo(first, last)
                else:
                    self._return_range(first, last, reason=Reason.IN_FLIGHT, sure=False)
        if self._keys is not None:
            self._keys.leave(worker)

    def change_policy(self, policy: Policy) -> None:
        """The newest worker's wish counts; what is on its way keeps its lease."""
        if policy == self.policy:
            return
        if policy.affinity and self._keys is None:
            self._keys = KeyQueue()
            for member in self.members.values():
                if not member.suspended:
                    self._keys.join(member.name)
            for first, last in held_by(self.members.values()):
                for a, b in self.settled.missing(max(first, self.cursor), last):
                    for offset in range(a, b + 1):
                        self.attempts.setdefault(offset, 1)
            self._read_again()
        elif not policy.affinity and self._keys is not None:
            self._keys = None
            self.next = max(self.next, self._reread_until)
            busy = held_by(self.members.values())
            for offset in [*self._uncertain, *self.dead]:
                busy.add(offset, offset)
            for first, last in self.settled.missing(self.cursor, self.next - 1):
                for a, b in busy.missing(first, last):
                    for offset in range(a, b + 1):
                        self.attempts.setdefault(offset, 0)  # if it was only read ahead
                    self.returned.add(a, b)
        self.policy = policy
        self.dirty = True

    def _read_again(self) -> None:
        """Have everything unsettled sorted by key: what is known of it is not its key."""
        self._reread_until, self.next = max(self.next, self._reread_until), self.cursor
        self.returned = IntervalSet()
        self._postponed = {offset: due for due, offset in self._delayed}
        self._delayed = []

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

    def with_room(self) -> list[Member]:
        """Workers with room, those with the most first."""
        able = (m for m in self.members.values() if m.room > 0 and len(m.leases) < MAX_MESSAGES)
        if self.lossy:
            # What is sent once must not find the queue full.
            able = (m for m in able if m.unread < MAX_MESSAGES)
        return sorted(able, key=lambda m: -m.room)

    def lease_from_returned(self, worker: str, limit: int, now: float) -> list[Lease]:
        """Give up to `limit` returned events to a worker."""
        leases: list[Lease] = []
        while limit > 0 and self.returned:
            first, last = next(iter(self.returned))
            last = min(last, first + limit - 1)
            self.returned.remove(first, last)
            limit -= last - first + 1
            leases += self._lease_again(range(first, last + 1))
        self._lease(worker, leases, now)
        return leases

    def lease_new(self, worker: str, ranges: Iterable[tuple[int, int]], upto: int, now: float) -> list[Lease]:
        """Give new events to a worker: `ranges` within [next, upto); the rest up to there is skipped."""
        leases = []
        at = self.next
        for first, last in ranges:
            self.skip(at, first - 1)
            leases.append(Lease(first, last, 1))
            at = last + 1
        self.skip(at, upto - 1)
        self.next = upto
        self.dirty = True
        self._advance()
        self._lease(worker, leases, now)
        return leases

    def queue_keyed(self, offset: int, key: str) -> None:
        """Key affinity: put the event at `next` into the queue of the worker that owns its key."""
        assert self._keys is not None
        self.next = max(self.next, offset + 1)
        self.dirty = True
        if offset >= self._reread_until:
            self._keys.add(offset, key)
        elif not self.is_settled(offset):
            self._queue_known(self._keys, offset, key)

    def _queue_known(self, keys: KeyQueue, offset: int, key: str) -> None:
        """The same for an event that was known before there were keys, or by a publisher that is gone."""
        holder = next((member.name for member in self.members.values() if member.holds(offset)), "")
        if holder or offset in self._uncertain:
            keys.hold(offset, key, holder)
        elif self.attempts.get(offset, 0) >= self.policy.max_deliver:
            keys.hold(offset, key)
            self._uncertain.add(offset, last=True)
        else:
            keys.add(offset, key, self._postponed.pop(offset, None))

    def pass_over(self, offset: int) -> None:
        """The event at `next` is not for this group."""
        self.next = max(self.next, offset + 1)
        self.skip(offset, offset)

    def lease_keyed(self, worker: str, limit: int, now: float) -> list[Lease]:
        """Give a worker what is queued for it."""
        assert self._keys is not None
        leases: list[Lease] = []
        for offset in self._keys.take(worker, limit, now):
            if offset in self.attempts:
                leases += self._lease_again((offset,))
                continue
            # Stored even for the first time: below `next` lies much that was only read ahead.
            self.attempts.set(offset, 1)
            self.dirty = True
            if leases and leases[-1].attempt == 1 and leases[-1].last == offset - 1:
                leases[-1] = Lease(leases[-1].first, offset, 1)
            else:
                leases.append(Lease(offset, offset, 1))
        self._lease(worker, leases, now)
        return leases

    def _lease_again(self, offsets: Iterable[int]) -> list[Lease]:
        leases: list[Lease] = []
        for offset in offsets:
            if self.lossy:
                attempt = 1  # it never left
            else:
                attempt = self.attempts.set(offset, self.attempts.get(offset, 1) + 1)
                self.redelivered += attempt > 1
            if leases and leases[-1].attempt == attempt and leases[-1].last == offset - 1:
                leases[-1] = Lease(leases[-1].first, offset, attempt)
            else:
                leases.append(Lease(offset, offset, attempt))
        self.dirty = True
        return leases

    def _lease(self, worker: str, leases: list[Lease], now: float) -> None:
        if leases:
            member = self.members[worker]
            held = IntervalSet((g.first, g.last) for g in leases)
            member.held += held.total
            member.hold(now + self.policy.lease_s, held)

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
        for offset in self.attempts.delivered(wanted):
            newly += self._settle(max(offset, self.cursor), offset)
        if self._expired:
            newly += sum(self._found(a, b) for a, b in both(wanted, self._expired))
        self.acked += newly
        return newly

    def _found(self, first: int, last: int) -> int:
        """Without a journal: what was counted as lost when its lease ended was processed after all."""
        found = self._expired.remove(first, last)
        if found:
            self.lost_by_reason[Reason.IN_FLIGHT] -= found
            self.dirty = True
        return found

    def nack(self, worker: str, first: int, last: int, delay_s: float, now: float) -> int:
        """Give events back, to come again after `delay_s`. Only those that the worker holds. Returns how many."""
        mine = self._release(worker, IntervalSet([(first, last)]))
        for a, b in mine:
            if self._keys is not None:
                for offset in range(a, b + 1):
                    self._keys.slow_down(offset)
            self._return_range(a, b, now + delay_s if delay_s > 0 else None)
        return sum(b - a + 1 for a, b in mine)

    def keep_order(self, worker: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Key affinity, after nacks: what the worker still has of these keys comes before what nobody has had yet."""
        if self._keys is not None and worker in self.members:
            nacked = [offset for first, last in ranges for offset in range(first, last + 1)]
            self._keys.keep_order(nacked, held_by([self.members[worker]]))

    def take_back(self, worker: str, first: int, last: int) -> None:
        """A lease that did not leave the publisher: as if it had not been made, as far as that can be."""
        for a, b in self._release(worker, IntervalSet([(first, last)])):
            if not self.lossy:
                self._undo(a, b)
            elif self._keys is None:
                self.returned.add(a, b)
            else:
                for offset in range(a, b + 1):
                    self._keys.give_back(offset, None)
        member = self.members.get(worker)
        if self._keys is not None and member is not None and member.suspended and not member.held:
            self._keys.leave(worker)  # it does not read, and no lease will tell

    def unbegun(self, worker: str, first: int, last: int) -> None:
        """The worker had these and gave them to no handler: they come again as if they had not been delivered."""
        self.unbegun_all(worker, [(first, last)])

    def unbegun_all(self, worker: str, ranges: Sequence[tuple[int, int]]) -> None:
        """The same for many ranges. With key affinity one nack gives back all later events of its key."""
        mine = IntervalSet(self._release(worker, IntervalSet(ranges)))
        for a, b in mine:
            self._undo(a, b)
        if not self._uncertain:
            return
        # Taken from it before it could tell: by the end of a lease, or because this publisher is new.
        for first, last in ranges:
            for offset, given_up in self._uncertain.dispel(first, last, mine):
                self._uncount(offset)
                if given_up:
                    self._requeue(offset)

    def _undo(self, first: int, last: int) -> None:
        if self.lossy:
            self._return_range(first, last, reason=Reason.IN_FLIGHT)
            return
        for a, b in self.settled.missing(max(first, self.cursor), last):
            for offset in range(a, b + 1):
                self._uncount(offset)
                self._requeue(offset)

    def _uncount(self, offset: int) -> None:
        self.attempts.set(offset, max(0, self.attempts.get(offset, 1) - 1))
        self.dirty = True

    def extend(self, worker: str, first: int, last: int, now: float) -> int:
        """Renew the lease of held events. Returns how many were held."""
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
        self.members[worker].hold(until, held)
        self.members[worker].held += extended
        return extended

    def skip(self, first: int, last: int) -> None:
        """These are not for this group (another topic)."""
        self.skipped += self._settle(first, last)

    def lose(self, until: int, reason: Reason = Reason.EVICTED, *, first: int = 0) -> list[tuple[int, int]]:
        """Everything from `first` up to `until` cannot be granted any more; return the ranges that are lost by that.

        What a worker holds now is not lost: it can still be acknowledged, but not be sent again.
        """
        leased = held_by(self.members.values())
        gone = []
        for a, b in self.settled.missing(max(self.cursor, first), until - 1):
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
        self.failed.add(first, last)
        newly = self._settle(first, last)
        if newly:
            self.lost_by_reason[reason] = self.lost_by_reason.get(reason, 0) + newly

    @property
    def lost(self) -> int:
        """Events that the group will not get."""
        return sum(self.lost_by_reason.values())

    def dead_letter_written(self, offset: int) -> int:
        """A dead event is in the dead-letter journal; 0 if it was settled before."""
        if self.is_settled(offset):
            return 0
        self.failed.add(offset, offset)
        newly = self._settle(offset, offset)
        self.dead_lettered += newly
        return newly

    def retry(self, offset: int, key: str) -> str:
        """Give a dead event out again, as if for the first time. Returns why that cannot be, or nothing."""
        if self.lossy or offset < self.started or not self.is_settled(offset):
            return "it is not one that this group has given up"
        if self.next - offset >= MAX_AHEAD or len(self.settled) >= MAX_PIECES:
            return f"it lies more than {MAX_AHEAD} events back, or too many others are unsettled"
        if offset < self.cursor:
            self.settled.add(offset + 1, self.cursor - 1)
            self.cursor = offset
        self.settled.remove(offset, offset)
        self.attempts.set(offset, 0)
        self.dead_lettered -= 1
        self.dirty = True
        if self._keys is None:
            self.returned.add(offset, offset)
        elif offset < self.next:
            self._keys.add(offset, key)
        return ""

    def is_settled(self, offset: int) -> bool:
        """Whether the event is acknowledged, dead, skipped or lost."""
        return offset < self.cursor or offset in self.settled

    def has_failed(self, offset: int) -> bool:
        """Whether the event was given up or lost since somebody began to wait."""
        return offset in self.failed

    def _settle(self, first: int, last: int) -> int:
        if last < first:
            return 0
        added = self.settled.add(first, last)
        if added:
            self.dirty = True
            if self.attempts:
                self.attempts.forget(first, last)
            self.returned.remove(first, last)
            self._uncertain.settle(first, last)
            if self._keys is not None:
                self._keys.settle(first, last)
            self._advance()
        return added

    def _advance(self) -> None:
        while self.settled and self.settled.first <= self.cursor:
            first, last = next(iter(self.settled))
            self.settled.remove(first, last)
            self.cursor = max(self.cursor, last + 1)
        self.next = max(self.next, self.cursor)

    def _release(self, worker: str, wanted: IntervalSet) -> list[tuple[int, int]]:
        """Take what is wanted out of the worker's leases; return what of it was there."""
        member = self.members.get(worker)
        if member is None:
            return []
        mine: list[tuple[int, int]] = []
        for _, held in member.leases:
            part = both(wanted, held)
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
        self,
        first: int,
        last: int,
        due: float | None = None,
        reason: Reason = Reason.GAVE_UP,
        sure: bool = True,
    ) -> None:
        for a, b in self.settled.missing(max(first, self.cursor), last):
            if self.lossy:
                self.abandoned.append((a, b, reason))
                self._count_lost(a, b, reason)
                continue
            for offset in range(a, b + 1):
                self._give_back(offset, due, sure)

    def _give_back(self, offset: int, due: float | None = None, sure: bool = True) -> None:
        """After an attempt; not `sure`: it may turn out that there was none."""
        made = self.attempts.setdefault(offset, 1)
        self.dirty = True
        again = made < self.policy.max_deliver
        if not sure and made:
            self._uncertain.add(offset, last=not again)
        if again:
            self._requeue(offset, due)
        elif sure:
            self.dead.append(offset)
        elif self._keys is not None:
            self._keys.wait_for(offset)

    def _requeue(self, offset: int, due: float | None = None) -> None:
        if self._keys is not None and self._keys.give_back(offset, due):
            pass
        elif due is None:
            self.returned.add(offset, offset)
        else:
            heapq.heappush(self._delayed, (due, offset))

    # ---- time ------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When a lease ends or a delay is over; infinity if nothing waits."""
        soonest = self._delayed[0][0] if self._delayed else float("inf")
        if self.awaited:
            soonest = min(soonest, self._await_until)
        soonest = min(soonest, self._uncertain.next_deadline())
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
        if self.awaited and now >= self._await_until:
            if self._await_until < 0:
                self._await_until = now + AWAIT_S
            else:
                self.awaited.clear()
        while self._delayed and self._delayed[0][0] <= now:
            _, offset = heapq.heappop(self._delayed)
            if not self.is_settled(offset):
                self.returned.add(offset, offset)
        ended = self._expire_leases(now)
        self.dead += self._uncertain.judge(now, self.policy.lease_s, self.is_settled)
        return ended

    def _expire_leases(self, now: float) -> int:
        """Take back what workers have held for longer than their lease; return how many events that was."""
        ended = 0
        for member in self.members.values():
            while member.leases and (member.leases[0][0] <= now or not member.leases[0][1]):
                _, held = member.leases.popleft()
                member.held -= held.total
                ended += held.total
                if held:
                    self._suspend(member)
                for first, last in held:
                    if self.lossy:
                        self._expire(first, last)
                    self._return_range(first, last, reason=Reason.IN_FLIGHT, sure=False)
        return ended

    def _suspend(self, member: Member) -> None:
        """Nothing more for a worker that let a lease end. Its keys go to others, behind what it still holds of them."""
        member.suspended = True
        if self._keys is not None:
            for _, held in member.leases:
                for first, last in held:
                    for offset in range(first, last + 1):
                        self._keys.wait_for(offset)
            self._keys.leave(member.name)

    def _expire(self, first: int, last: int) -> None:
        for a, b in self.settled.missing(max(first, self.cursor), last):
            self._expired.add(a, b)
        # An acknowledgement that comes so much later is not waited for.
        while len(self._expired) > MAX_PIECES:
            oldest = next(iter(self._expired))
            self._expired.remove(*oldest)

    # ---- what is kept and shown ------------------------------------------------------------------------

    def state(self, epoch: int = -1) -> GroupState:
        """What to store so that a restarted publisher can go on; `epoch` is the journal's."""
        return GroupState(
            self.cursor,
            max(self.next, self._reread_until),
            list(self.settled),
            self.attempts.made,
            self.policy,
            self.acked,
            self.dead_lettered,
            self.lost,
            self.skipped,
            self.started,
            epoch,
            {str(reason): n for reason, n in self.lost_by_reason.items()},
            [member.name for member in self.members.values() if member.held],
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
        listed = [offset for _, offset in self._delayed] + self.dead + list(self._uncertain)
        return self.returned.total + queued + sum(not self.is_settled(offset) for offset in listed)
