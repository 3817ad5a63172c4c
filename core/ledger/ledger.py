"""The ledger: per (source, epoch, topic) which events arrived, how often, which are lost and why."""

from collections.abc import Iterator, Sequence

import msgspec

from brokerless.core.errors import ConfigError, UsageError
from brokerless.core.event import Reason
from brokerless.core.frame import Frame
from brokerless.core.intervals import IntervalSet
from brokerless.core.ledger.tracker import Account, Tracker
from brokerless.core.runtime.crc import crc32

Key = tuple[str, int, str]
# 65,536 intervals of two 64-bit numbers with list overhead are about 5 MB.
MAX_GAPS = 65_536
MAX_STREAMS = 100_000
# Epochs that lost something and are told apart: one more each time that a producer comes back without its journal.
MAX_LOSSY = 1024
_VERSION = 1


class _Saved(msgspec.Struct, array_like=True):
    """One tracker as it is stored."""

    source: str
    epoch: int
    topic: str
    base: int
    next: int
    sent: int
    floor: int
    gaps: list[tuple[int, int]]
    declared: dict[Reason, list[tuple[int, int]]]
    settled: dict[Reason, int]
    counts: tuple[int, int, int, int, int, int]
    begun: bool = True


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    max_gaps: int
    max_streams: int
    folded: Account
    trackers: list[_Saved]
    holes: list[tuple[str, int, dict[Reason, int]]] = []


class Ledger:
    """Makes loss visible: `accepted = delivered + pending + lost(by reason) + compacted` for every stream.

    Memory is bounded: beyond `max_gaps` open or declared intervals the lowest gaps are counted as lost with
    reason `unattributed` (and in `shed`), beyond `max_streams` the account of a stream that was not heard of for
    long are closed and kept only as sums. Not thread-safe: the consumer that owns it is one thread.
    """

    def __init__(self, *, max_gaps: int = MAX_GAPS, max_streams: int = MAX_STREAMS) -> None:
        if max_gaps < 16 or max_streams < 1:
            raise ConfigError("max_gaps", "must be at least 16, and max_streams at least 1")
        self.max_gaps = max_gaps
        self.max_streams = max_streams
        self._trackers: dict[Key, Tracker] = {}
        self._folded = Account()
        # Events lost by (source, epoch), topic unknown.
        self._holes: dict[tuple[str, int], dict[Reason, int]] = {}
        self._checked = 0

    # -- writing ------------------------------------------------------------------------------------

    def expect(self, source: str, epoch: int, topic: str, first: int) -> None:
        """This consumer begins at `first`; without this, the first number observed is the beginning."""
        tracker = self._trackers.get((source, epoch, topic))
        if tracker is None:
            self._begin((source, epoch, topic), first)
        else:
            tracker.expect(first)

    def observe(
        self, source: str, epoch: int, topic: str, first: int, count: int = 1
    ) -> list[tuple[int, int]] | None:
        """Seqs `first … first+count-1` arrived.

        Returns None if all of them were new, otherwise the list of ranges `(first, last)` that were new.
        """
        tracker = self._trackers.get((source, epoch, topic))
        if tracker is None:
            tracker = self._begin((source, epoch, topic), first)
        if count < 1:
            raise UsageError(f"{count} events cannot be observed")
        if first == tracker.next:  # the hot path, without a call
            tracker.next = first + count
            tracker.delivered += count
            return None
        fresh = tracker.observe(first, count)
        self._bound(tracker)
        return fresh

    def observe_left(self, source: str, epoch: int, topic: str, seqs: Sequence[int]) -> None:
        """These rising seqs arrived; compaction removed all others up to the last of them."""
        tracker = self._trackers.get((source, epoch, topic)) or self._begin((source, epoch, topic), 0)
        tracker.observe_left(seqs)

    def observe_frame(self, frame: Frame) -> bool:
        """All events of a frame arrived; False if some of them had been seen before."""
        source, epoch = frame.header.source, frame.header.epoch
        new = True
        for topic, first, count in frame.header.topics:
            if self.observe(source, epoch, topic, first, count) is not None:
                new = False
        return new

    def sent(self, source: str, epoch: int, topic: str, next_seq: int) -> None:
        """The producer says that the next seq will be `next_seq`: what is missing before it is pending."""
        tracker = self._trackers.get((source, epoch, topic))
        if tracker is None:
            # Not a beginning yet: what comes first may be older, and must not be taken for stale.
            tracker = self._begin((source, epoch, topic), next_seq)
            tracker.begun = False
        tracker.announce(next_seq)

    def declare(
        self, source: str, epoch: int, topic: str, first: int, last: int, reason: Reason | str
    ) -> int:
        """What is still missing from `first` to `last` is lost for that reason; return how many events."""
        try:
            reason = Reason(reason)
        except ValueError:
            known = ", ".join(Reason)
            raise UsageError(f"{reason!r} is not a reason for loss; the reasons are {known}") from None
        tracker = self._trackers.get((source, epoch, topic))
        if tracker is None:
            tracker = self._begin((source, epoch, topic), first)
        lost = tracker.declare(first, last, reason)
        self._bound(tracker)
        return lost

    def lose(self, source: str, epoch: int, count: int, reason: Reason) -> None:
        """So many events of a source were lost; their topics are unknown.

        As far as no topic is declared to have lost them, before or after this, they are counted for the source alone.
        """
        if len(self._holes) >= MAX_LOSSY and (source, epoch) not in self._holes:
            oldest = next(iter(self._holes))
            self._folded.add(self._nameless(*oldest))
            del self._holes[oldest]
        holes = self._holes.get((source, epoch), {})
        holes = {**holes, reason: holes.get(reason, 0) + count}
        self._holes[source, epoch] = holes  # one step, and the last: an interrupt comes before or after it

    def restart(self, source: str) -> None:
        """This consumer goes on elsewhere in the source's stream: later numbers are no gap, earlier ones no duplicates.

        What was delivered and lost stays in the sums of `account()`; what was pending is not waited for any more.
        """
        for key in [key for key in self._trackers if key[0] == source]:
            account = self._trackers.pop(key).account()
            account.accepted -= account.pending
            account.pending = 0
            self._fold(key, account)
        for hole in [hole for hole in self._holes if hole[0] == source]:
            self._folded.add(self._nameless(*hole))
            del self._holes[hole]

    def _begin(self, key: Key, base: int) -> Tracker:
        if len(self._trackers) >= self.max_streams:
            self._close_one()
        tracker = self._trackers[key] = Tracker(base)
        return tracker

    def _close_one(self) -> None:
        """Close the account of a stream that was not heard of for long.

        Second chance: a stream that moved since it was last looked at goes to the end of the line. So the hot path
        need not keep an order.
        """
        while True:
            key, tracker = next(iter(self._trackers.items()))
            del self._trackers[key]
            heard = tracker.next + tracker.delivered + tracker.duplicates
            if heard == tracker.looked_at:
                self._fold(key, tracker.account())
                return
            tracker.looked_at = heard
            self._trackers[key] = tracker

    def _fold(self, key: Key, account: Account) -> None:
        self._folded.add(account)
        holes = self._holes.get(key[:2], {})
        for reason in holes:
            holes[reason] = max(0, holes[reason] - account.not_delivered(reason))

    def _bound(self, tracker: Tracker) -> None:
        """Keep the number of intervals bounded; counting all of them is done only every so often."""
        self._checked += 1
        if tracker.intervals <= self.max_gaps and self._checked < 1024:
            return
        self._checked = 0
        excess = self.intervals - self.max_gaps
        if excess <= 0:
            return
        # One pass over all streams makes room for many more gaps: with a gap in each of 100,000 topics, a pass
        # for every single one would stall the consumer for minutes.
        step = max(1, self.max_gaps // 16)
        excess += step - 1
        by_width = sorted(self._trackers.values(), key=lambda t: t.intervals, reverse=True)
        while excess > 0:
            for widest in by_width:
                had = widest.intervals
                if had:
                    widest.shed_lowest(step)
                    excess -= had - widest.intervals
                if excess <= 0:
                    break

    # -- reading ------------------------------------------------------------------------------------

    @property
    def intervals(self) -> int:
        """Open and declared intervals in memory; stays near `max_gaps` at most."""
        return sum(t.intervals for t in self._trackers.values())

    def streams(self) -> Iterator[Key]:
        """All (source, epoch, topic) with an account of its own."""
        return iter(list(self._trackers))

    def gaps(self, source: str, epoch: int, topic: str) -> list[tuple[int, int]]:
        """Open gaps `(first, last)`, without the announced tail."""
        tracker = self._trackers.get((source, epoch, topic))
        return list(tracker.gaps) if tracker else []

    def missing(self, source: str, epoch: int, topic: str) -> IntervalSet:
        """Everything pending: the open gaps and the announced tail."""
        tracker = self._trackers.get((source, epoch, topic))
        if tracker is None:
            return IntervalSet()
        missing = tracker.gaps.copy()
        missing.add(tracker.next, tracker.sent - 1)
        return missing

    def next(self, source: str, epoch: int, topic: str) -> int | None:
        """The seq after the highest that arrived or was declared lost; None for an unknown stream."""
        tracker = self._trackers.get((source, epoch, topic))
        return tracker.next if tracker else None

    def account(
        self, source: str | None = None, epoch: int | None = None, topic: str | None = None
    ) -> Account:
        """The sum over all streams that match; everything, closed accounts included, without arguments."""
        total = Account()
        if source is None and epoch is None and topic is None:
            total.add(self._folded)
        for (s, e, t), tracker in self._trackers.items():
            if source in (None, s) and epoch in (None, e) and topic in (None, t):
                total.add(tracker.account())
        if topic is None:
            for s, e in self._holes:
                if source in (None, s) and epoch in (None, e):
                    total.add(self._nameless(s, e))
        return total

    def _nameless(self, source: str, epoch: int) -> Account:
        """What a source lost (or compacted) that no topic is known to have lost."""
        holes = self._holes[source, epoch]
        total = Account()
        for key, tracker in self._trackers.items():
            if key[:2] == (source, epoch):
                total.add(tracker.account())
        named = {reason: total.not_delivered(reason) for reason in holes}
        # A hole may have been declared for another reason, when there were several: only the sum is certain.
        left = max(0, sum(holes.values()) - sum(named.values()))
        found = Account(accepted=left)
        for reason, n in holes.items():
            part = min(left, max(0, n - named[reason]))
            left -= part
            if reason is Reason.COMPACTED:
                found.compacted = part
            elif part:
                found.lost_by_reason[reason] = part
                found.lost += part
        return found

    def accounts(self) -> dict[Key, Account]:
        """The account of every stream."""
        return {key: tracker.account() for key, tracker in self._trackers.items()}

    # -- keeping within bounds ----------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole ledger as bytes, to be kept with a cursor."""
        saved = [
            _Saved(
                *key,
                t.base,
                t.next,
                t.sent,
                t.floor,
                list(t.gaps),
                {reason: list(known) for reason, known in t.declared.items() if known},
                t.settled,
                (t.delivered, t.duplicates, t.reordered, t.late, t.stale, t.shed),
                t.begun,
            )
            for key, t in self._trackers.items()
        ]
        body = msgspec.msgpack.encode(
            _Snapshot(
                _VERSION,
                self.max_gaps,
                self.max_streams,
                self._folded,
                saved,
                [(*key, holes) for key, holes in self._holes.items()],
            )
        )
        return crc32(body).to_bytes(4, "little") + body

    @classmethod
    def restore(cls, raw: bytes) -> "Ledger":
        """The ledger that `snapshot` made. Raises UsageError for anything else."""
        try:
            if len(raw) < 4 or crc32(raw[4:]) != int.from_bytes(raw[:4], "little"):
                raise UsageError("these bytes are not a ledger's snapshot: the CRC does not match")
            snapshot = msgspec.msgpack.decode(raw[4:], type=_Snapshot)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"these bytes are not a ledger's snapshot: {error}") from None
        if snapshot.version != _VERSION:
            raise UsageError(f"a snapshot of version {snapshot.version}, this software knows {_VERSION}")
        ledger = cls(max_gaps=snapshot.max_gaps, max_streams=snapshot.max_streams)
        ledger._folded = snapshot.folded
        ledger._holes = {(source, epoch): holes for source, epoch, holes in snapshot.holes}
        for s in snapshot.trackers:
            t = ledger._trackers[(s.source, s.epoch, s.topic)] = Tracker(s.base)
            t.next, t.sent, t.floor = s.next, s.sent, s.floor
            t.gaps = IntervalSet(s.gaps)
            t.declared = {reason: IntervalSet(known) for reason, known in s.declared.items()}
            t.settled = s.settled
            t.delivered, t.duplicates, t.reordered, t.late, t.stale, t.shed = s.counts
            t.begun = s.begun
        return ledger

    def merge(self, other: "Ledger") -> None:
        """Take in another ledger; events of one stream that both saw are duplicates."""
        self._folded.add(other._folded)
        for key, tracker in other._trackers.items():
            mine = self._trackers.get(key)
            if mine is None:
                mine = self._begin(key, tracker.base)
            mine.merge(tracker)
            self._bound(mine)
        for hole, reasons in other._holes.items():
            mine_too = self._holes.get(hole, {})
            for reason in reasons.keys() | mine_too.keys():
                n = max(reasons.get(reason, 0), mine_too.get(reason, 0)) - mine_too.get(reason, 0)
                self.lose(*hole, n, reason)
