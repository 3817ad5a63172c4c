"""The one sequence tracker: what arrived of one stream of numbers, what is missing, what is lost and why."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from brokerless.core.event import Reason
from brokerless.core.intervals import IntervalSet


class Account(msgspec.Struct):
    """The account of one stream, or of many added up. `accepted = delivered + pending + lost + compacted` must hold.

    `compacted` events were passed over because a snapshot had a later event of their key, or none for a deleted key.
    `late` events had been declared lost and came after all: they are in `delivered`, no longer in `lost`.
    `stale` ones are older than what the tracker remembers (or than where the consumer began): not counted.
    `shed` says how many of the lost were declared only because memory was bounded.
    """

    accepted: int = 0
    delivered: int = 0
    pending: int = 0
    lost: int = 0
    lost_by_reason: dict[str, int] = {}
    duplicates: int = 0
    reordered: int = 0
    late: int = 0
    stale: int = 0
    shed: int = 0
    compacted: int = 0

    @property
    def balanced(self) -> bool:
        """Whether everything accepted is accounted for."""
        return (
            self.accepted == self.delivered + self.pending + self.lost + self.compacted
            and sum(self.lost_by_reason.values()) == self.lost
        )

    def add(self, other: "Account") -> None:
        """Add another account to this one."""
        for name in (
            "accepted",
            "delivered",
            "pending",
            "lost",
            "duplicates",
            "reordered",
            "late",
            "stale",
            "shed",
            "compacted",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, n in other.lost_by_reason.items():
            self.lost_by_reason[reason] = self.lost_by_reason.get(reason, 0) + n

    def not_delivered(self, reason: Reason) -> int:
        """How many were not delivered for that reason."""
        return self.compacted if reason is Reason.COMPACTED else self.lost_by_reason.get(reason, 0)


class Tracker:
    """Numbers from `base` on: seen below `next` unless in `gaps` (open) or `declared` (lost, by reason).

    Below `floor` only counts are kept. An in-order range is constant time and changes two integers.
    """

    __slots__ = (
        "base",
        "begun",
        "declared",
        "delivered",
        "duplicates",
        "floor",
        "gaps",
        "late",
        "looked_at",
        "next",
        "reordered",
        "sent",
        "settled",
        "shed",
        "stale",
    )

    def __init__(self, base: int) -> None:
        self.base = self.next = self.sent = self.floor = base
        # False: known only from what the producer announced, so the first number that comes is the beginning.
        self.begun = True
        self.looked_at = -1  # for the ledger: what it had when the ledger looked for a stream to close
        self.gaps = IntervalSet()
        self.declared: dict[Reason, IntervalSet] = {}
        self.settled: dict[Reason, int] = {}
        self.delivered = self.duplicates = self.reordered = self.late = self.stale = self.shed = 0

    @property
    def intervals(self) -> int:
        """What the memory of this tracker depends on."""
        return len(self.gaps) + sum(map(len, self.declared.values()))

    def observe(self, first: int, count: int = 1) -> list[tuple[int, int]] | None:
        """Numbers `first … first+count-1` arrived. None: all new; otherwise the list of ranges that were new."""
        if not self.begun:
            self._begin(first)
        if first == self.next:
            self.next = first + count
            self.delivered += count
            return None
        if first > self.next:
            self.gaps.add(self.next, first - 1)
            self.next = first + count
            self.delivered += count
            return None
        return self._observe_old(first, first + count - 1)

    def observe_left(self, seqs: Sequence[int]) -> None:
        """These rising numbers arrived, and of all others up to the last of them what is missing was compacted."""
        if not self.begun:
            self._begin(0)
        known = bisect_left(seqs, self.next)
        for seq in seqs[:known]:
            self._observe_old(seq, seq)
        fresh = len(seqs) - known
        if not fresh:
            return
        end = seqs[-1] + 1
        compacted = end - self.next - fresh
        self.delivered += fresh
        self.next = end
        if compacted:
            # Counts only: a large state would have more holes than a ledger can remember.
            compacted += sum(self.gaps.remove(a, b) for a, b in self.gaps.overlap(0, end - 1))
            self.settled[Reason.COMPACTED] = self.settled.get(Reason.COMPACTED, 0) + compacted
            self.floor = end
            self._settle_below_floor()

    def _observe_old(self, first: int, last: int) -> list[tuple[int, int]] | None:
        wanted = last - first + 1
        new: list[tuple[int, int]] = []
        if first < self.floor:
            self.stale += min(last, self.floor - 1) - first + 1
            first = self.floor
        if first <= last:
            end = min(last, self.next - 1)
            healed = self.gaps.overlap(first, end)
            for a, b in healed:
                self.gaps.remove(a, b)
                self.reordered += b - a + 1
            for lost in self.declared.values():
                for a, b in lost.overlap(first, end):
                    lost.remove(a, b)
                    healed.append((a, b))
                    self.late += b - a + 1
            healed.sort()
            fresh = sum(b - a + 1 for a, b in healed)
            if end >= first:
                self.duplicates += end - first + 1 - fresh
            self.delivered += fresh
            new += healed
            if last >= self.next:
                new.append((self.next, last))
                self.delivered += last - self.next + 1
                self.next = last + 1
        return None if sum(b - a + 1 for a, b in new) == wanted else new

    def _begin(self, first: int) -> None:
        """A stream that was only announced begins, earlier than announced perhaps."""
        self.begun = True
        if first < self.base:
            self.base = self.next = self.floor = first

    def expect(self, first: int) -> None:
        """The consumer begins at `first`: an earlier beginning than known makes what is before it a gap."""
        if not self.begun:
            self._begin(first)
        elif first < self.base and self.floor > self.base:
            # What is below `floor` is not told apart any more.
            missing = self.base - first
            self.settled[Reason.UNATTRIBUTED] = self.settled.get(Reason.UNATTRIBUTED, 0) + missing
            self.shed += missing
            self.base = first
        elif first < self.base:
            self.gaps.add(first, self.base - 1)
            self.floor = self.base = first

    def announce(self, next_number: int) -> None:
        """The producer says that the next number will be `next_number`."""
        self.sent = max(self.sent, next_number)

    def declare(self, first: int, last: int, reason: Reason) -> int:
        """What is still missing in the range is lost; return how many."""
        if not self.begun:
            self._begin(first)
        first = max(first, self.floor)
        if last < first:
            return 0
        if last >= self.next:
            # A lost tail: the numbers were announced or are known from elsewhere.
            self.gaps.add(self.next, last)
            self.next = last + 1
        lost = 0
        for a, b in self.gaps.overlap(first, last):
            # In this order: what a signal's handler interrupted, by raising, can be declared again.
            self.declared.setdefault(reason, IntervalSet()).add(a, b)
            lost += self.gaps.remove(a, b)
        return lost

    def shed_lowest(self, n: int) -> None:
        """Forget where the `n` lowest gaps were: they are counted as lost, and `floor` rises above them."""
        popped = self.gaps.pop_lowest(n)
        if popped:
            missing = sum(b - a + 1 for a, b in popped)
            self.settled[Reason.UNATTRIBUTED] = self.settled.get(Reason.UNATTRIBUTED, 0) + missing
            self.shed += missing
            self.floor = popped[-1][1] + 1
        elif self.declared:
            lowest = [s.pop_lowest(n) for s in self.declared.values()]
            self.floor = max([self.floor, *(p[-1][1] + 1 for p in lowest if p)])
            for reason, p in zip(self.declared, lowest, strict=True):
                self.settled[reason] = self.settled.get(reason, 0) + sum(b - a + 1 for a, b in p)
        self._settle_below_floor()

    def _settle_below_floor(self) -> None:
        for reason, known in self.declared.items():
            below = sum(known.remove(a, b) for a, b in known.overlap(0, self.floor - 1))
            if below:
                self.settled[reason] = self.settled.get(reason, 0) + below

    def _lost_below(self, floor: int) -> dict[Reason, int]:
        """How many below `floor` did not arrive, by reason; open gaps there have none."""
        lost = dict(self.settled)
        for reason, known in (*self.declared.items(), (Reason.UNATTRIBUTED, self.gaps)):
            below = sum(b - a + 1 for a, b in known.overlap(self.floor, floor - 1))
            if below:
                lost[reason] = lost.get(reason, 0) + below
        return lost

    def account(self) -> Account:
        """The account so far."""
        by_reason: dict[str, int] = {str(r): n for r, n in self.settled.items() if n}
        for reason, known in self.declared.items():
            if known.total:
                by_reason[str(reason)] = by_reason.get(str(reason), 0) + known.total
        end = max(self.sent, self.next)
        compacted = by_reason.pop(Reason.COMPACTED, 0)
        return Account(
            accepted=end - self.base,
            delivered=self.delivered,
            pending=self.gaps.total + end - self.next,
            lost=sum(by_reason.values()),
            lost_by_reason=by_reason,
            duplicates=self.duplicates,
            reordered=self.reordered,
            late=self.late,
            stale=self.stale,
            shed=self.shed,
            compacted=compacted,
        )

    def seen(self) -> IntervalSet:
        """The numbers from `floor` on that arrived."""
        seen = IntervalSet([(self.floor, self.next - 1)])
        for missing in (self.gaps, *self.declared.values()):
            for a, b in missing:
                seen.remove(a, b)
        return seen

    def merge(self, other: "Tracker") -> None:
        """Take in what another tracker of the same stream saw; numbers that both saw are duplicates.

        Exact unless one of them has shed: below the higher `floor` the larger count of losses is kept.
        """
        if not other.begun:
            self.sent = max(self.sent, other.sent)
            return
        if not self.begun:
            self._begin(other.base)
        mine, theirs = self.seen(), other.seen()
        # A floor above the base: something was shed, or declared losses were settled.
        forgot = [t.floor for t in (self, other) if t.floor > t.base]
        floor = max(forgot, default=min(self.base, other.base))
        base, end = min(self.base, other.base), max(self.next, other.next)
        union = mine.copy()
        for a, b in theirs:
            union.add(a, b)
        both = mine.total + theirs.total - union.total
        union.remove(0, floor - 1)
        declared: dict[Reason, IntervalSet] = {}
        gaps = IntervalSet()
        for a, b in union.missing(floor, end - 1):
            gaps.add(a, b)
        for tracker in (self, other):
            for reason, known in tracker.declared.items():
                for a, b in known:
                    for c, d in gaps.overlap(a, b):
                        gaps.remove(c, d)
                        declared.setdefault(reason, IntervalSet()).add(c, d)
        self.settled = max(self._lost_below(floor), other._lost_below(floor), key=lambda s: sum(s.values()))
        settled = sum(self.settled.values())
        self.base, self.next, self.floor = base, end, floor
        self.sent = max(self.sent, other.sent)
        self.gaps, self.declared = gaps, declared
        self.delivered = max(0, floor - base - settled) + union.total
        self.duplicates += other.duplicates + both
        self.reordered += other.reordered
        self.late += other.late
        self.stale += other.stale
        self.shed = max(self.shed, other.shed)
