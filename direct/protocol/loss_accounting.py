"""How a subscriber keeps its ledger: which topics to expect from where, and what a hole in the offsets cost.

Offsets are contiguous over all topics, so a hole is seen at once; but which topics were in it is known only
when their next events show the hole in their seqs, or when the publisher tells how much it sent of each.
Entries are made when the application has been given the events, so that ledger and cursor always agree.
"""

from bisect import bisect_left
from collections import deque

import msgspec

from brokerless.core import Ledger, Lost, Reason
from brokerless.core.journal.key_state import StateBlock
from brokerless.core.topics import TopicFilter
from brokerless.direct.protocol import messages

# Topics whose first seq is known from the publisher at the time of joining; more are not tracked that way.
_MAX_BASES = 100_000
# Topics in words of the publisher that wait for events which they speak of; more words are not kept.
_MAX_WAITING = 500_000
_END = 1 << 62


class EpochStarted(msgspec.Struct, frozen=True):
    """Events of this epoch follow. `whole`: from its first one, so that every topic is expected from seq 0.

    `at`: the offset where they go on, if the position known so far was wrong.
    """

    source: str
    epoch: int
    whole: bool
    at: int = -1


class Snapshot(msgspec.Struct, frozen=True):
    """The newest event of every key begins to arrive: forget what you hold of this source. With `complete`: all have.

    `at`: they are those of the events before that offset; what comes after them follows from there on. `since`: the
    offset up to which this subscriber had had everything before.
    """

    source: str
    epoch: int
    at: int
    since: int = 0
    complete: bool = False


class SavedAccounting(msgspec.Struct, frozen=True, array_like=True):
    """What a cursor keeps beside the ledger, so that losses while we are away can be attributed to topics."""

    epoch: int
    whole: bool
    bases: dict[str, int] = {}
    suspect: str = ""
    hole_end: int = -1


class LossAccounting:
    """The ledger entries of one publisher. `kept` has what was kept of each source by the process before this one."""

    def __init__(
        self, ledger: Ledger, wanted: TopicFilter, kept: dict[str, SavedAccounting] | None = None
    ) -> None:
        self.ledger = ledger
        self._kept = {} if kept is None else kept
        self.reconciled = -1  # the journal's end at which we last compared with what was sent
        self._position = -1
        self.wanted = wanted
        self._source = ""
        self._epoch = -1
        self._seen: set[str] = set()
        self._whole = False
        self._bases: dict[str, int] = {}
        self._suspect: Reason | None = None
        self._hole_end = -1  # the end of the last loss
        self._waiting: deque[messages.Sent] = deque()
        self._partial = False  # pages of the present answer were not kept
        self._entering = False
        # The snapshot that is arriving, up to which offset it was entered, and how many from `since` on that made.
        self._snapshot: Snapshot | None = None
        self._entered_state = self._told = 0

    def started(self, started: EpochStarted) -> None:
        """An epoch begins; what is still missing of the one before will not come any more."""
        if self._epoch >= 0 and (self._source, self._epoch) != (started.source, started.epoch):
            self._suspect = Reason.PRODUCER_CRASH
            for topic in self._seen:
                self._blame(topic, _END)
        self._source, self._epoch, self._position = started.source, started.epoch, -1
        kept = self._kept.get(started.source)
        if kept is None or kept.epoch != started.epoch:
            kept = SavedAccounting(started.epoch, started.whole)
        self._whole = kept.whole
        self._bases = dict(kept.bases)
        self._suspect = Reason(kept.suspect) if kept.suspect else None
        self._hole_end = kept.hole_end
        self._waiting.clear()
        self._partial = False
        # A restored ledger knows topics from before.
        self._seen = {
            topic
            for source, epoch, topic in self.ledger.streams()
            if source == started.source and epoch == started.epoch
        }

    def enter(self, source: str, epoch: int, topics: list[tuple[str, int, int]], end: int) -> None:
        """The application has been given everything before the offset `end`: of each topic so many from a seq on.

        What was interrupted (a signal's handler raised) is done again, and enters the rest.
        """
        ledger = self.ledger
        if self._entering:
            had = [max(first, ledger.next(source, epoch, topic) or 0) for topic, first, _ in topics]
            topics = [(t, at, n - (at - f)) for (t, f, n), at in zip(topics, had, strict=True) if at < f + n]
        self._entering = True
        if epoch != self._epoch:
            self.started(EpochStarted(source, epoch, True))
        wanted, seen = self.wanted, self._seen
        for topic, first, count in topics:
            if not wanted(topic):
                continue
            if topic not in seen:
                self._first_sight(topic)
            ledger.observe(source, epoch, topic, first, count)
            if self._suspect is not None:
                self._blame(topic, first - 1)
        self._position = end
        self._entering = False
        if self._waiting:
            self._settle()

    def snapshot(self, edge: Snapshot) -> None:
        """A snapshot begins, or is complete; what it did not have was compacted. May be told twice."""
        if not edge.complete:
            self._snapshot, self._entered_state, self._told = edge, 0, 0
            self._position = -1
            return
        if (self._source, self._epoch) != (edge.source, edge.epoch):
            self.started(EpochStarted(edge.source, edge.epoch, True))
        compacted = edge.at - edge.since - self._told
        self._suspect = Reason.COMPACTED
        self._waiting.clear()
        self._hole_end = self._position = edge.at
        if self._snapshot is not None and self.wanted.everything and compacted > 0:
            self.ledger.lose(edge.source, edge.epoch, compacted, Reason.COMPACTED)
        self._snapshot = None

    def enter_state(self, block: StateBlock, until: int) -> None:
        """The application has been given the events of a snapshot's block before that offset."""
        first, frame = self._entered_state, block.frame
        if until <= first:
            return
        for topic, seqs in block.seqs_by_topic(first, until).items():
            if self.wanted(topic):
                self.ledger.observe_left(frame.source, frame.epoch, topic, seqs)
                if frame.epoch == self._epoch:
                    self._seen.add(topic)
        since = self._snapshot.since if self._snapshot is not None else 0
        begin = bisect_left(block.offsets, max(first, since))
        self._told += max(0, bisect_left(block.offsets, until) - begin)
        self._entered_state = until

    def keep(self) -> None:
        """Bring what is to be kept with the ledger up to date."""
        if self._epoch >= 0:
            suspect = self._suspect or ""
            self._kept[self._source] = SavedAccounting(
                self._epoch, self._whole, self._bases, suspect, self._hole_end
            )

    def entered(self, epoch: int) -> int:
        """The offset before which everything of the epoch is in the ledger; -1 if nothing is."""
        return self._position if epoch == self._epoch else -1

    def _first_sight(self, topic: str) -> None:
        self._seen.add(topic)
        base = self._bases.get(topic, 0 if self._whole else None)
        if base is not None:
            self.ledger.expect(self._source, self._epoch, topic, base)

    def lost(self, lost: Lost) -> None:
        """Offsets were lost: holes that show up in the seqs from now on have this reason.

        May be told twice, if the first time was interrupted.
        """
        self._suspect = Reason(lost.reason)
        self._waiting.clear()
        if self._snapshot is not None:
            begin = max(lost.first, self._snapshot.since, self._entered_state)
            self._told += max(0, lost.last + 1 - begin)
            self._entered_state = lost.last + 1
        first = max(lost.first, self._position) if lost.epoch == self._epoch else lost.first
        self._hole_end = end = lost.last + 1
        if self.wanted.everything and first < end:
            # Topics of which we have not seen anything may be in it; whoever wants only some cannot know.
            self.ledger.lose(lost.source, lost.epoch, end - first, self._suspect)
        self._position = end

    def _blame(self, topic: str, until: int) -> None:
        assert self._suspect is not None
        for first, last in self.ledger.missing(self._source, self._epoch, topic):
            if first <= until:
                self.ledger.declare(self._source, self._epoch, topic, first, min(last, until), self._suspect)

    def sent(self, sent: messages.Sent, *, at_once: bool = False) -> None:
        """The publisher tells how much it sent of each topic; used once we have had everything up to then.

        `at_once` only announces it, so that what has not arrived yet shows as pending.
        """
        if sent.epoch != self._epoch:
            return
        if at_once:
            for topic, next_seq in sent.seqs.items():
                if self.wanted(topic) and (topic in self._seen or self._whole or topic in self._bases):
                    if topic not in self._seen:
                        self._first_sight(topic)
                    self.ledger.sent(self._source, self._epoch, topic, next_seq)
            if not sent.more:
                self.reconciled = sent.at
        self._waiting.append(sent)
        if len(self._waiting) > 1 and sum([1 + len(word.seqs) for word in self._waiting]) > _MAX_WAITING:
            # Without all pages it is unknown which topics are new.
            self._waiting.clear()
            self._partial = True
        self._settle()

    def _settle(self) -> None:
        while self._waiting and self._position >= self._waiting[0].at:
            sent = self._waiting[0]
            for topic, next_seq in sent.seqs.items():
                if self.wanted(topic) and self._is_ours(topic, next_seq):
                    self.ledger.sent(self._source, self._epoch, topic, next_seq)
                    if self._suspect is not None:
                        self._blame(topic, next_seq - 1)
            if not sent.more:
                self.reconciled = sent.at
                if len(self._waiting) == 1 and sent.at >= self._hole_end:
                    self._suspect = None
                if len(self._bases) < _MAX_BASES and not self._partial:
                    # Every topic that existed has its base now; one that is new begins at 0.
                    self._whole = True
                self._partial = False
            self._waiting.popleft()

    def _is_ours(self, topic: str, next_seq: int) -> bool:
        """Whether this consumer was to have the topic's events up to `next_seq`."""
        if topic in self._seen:
            return True
        if self._whole or topic in self._bases:
            self._first_sight(topic)
            return True
        # We joined after all of them. If something was lost since then, we cannot know how many of them.
        if len(self._bases) < _MAX_BASES:
            self._bases[topic] = next_seq
        return False


def load_accounting(raw: bytes) -> dict[str, SavedAccounting]:
    """What `LossAccounting.keep` made, from a cursor; nothing if an older version wrote it."""
    return msgspec.msgpack.decode(raw, type=dict[str, SavedAccounting]) if raw else {}
