"""What the application has in its hands, and how far the books and positions are."""

import sys
from collections.abc import Iterator

from brokerless.core import Event, Ledger, Position
from brokerless.multicast.batch import Batch

# Sources whose position is kept. A stream has one; only a forger sends more, and must not fill memory.
_MAX_SOURCES = 1024
# The ledger's stream of a multicast source: all topics together, counted by offset.
ALL_TOPICS = ""


class Hand:
    """One batch at a time: the one that the application has, or gets next.

    A wait can be cancelled, and a signal's handler can raise whenever a function is entered, a call of C code has
    returned or a loop goes round. So every change here is either made between two such points, or made again when it
    was not finished: a batch that was taken is there until it was given, and until it was dealt with.
    """

    def __init__(self, ledger: Ledger, positions: dict[str, Position]) -> None:
        self.ledger = ledger
        self.positions = positions
        self.dirty = False  # something changed that is not saved yet
        self.batch: Batch | None = None
        # The application has it: all of it (`whole`), or the events that `pending` gave.
        self.given = False
        self.whole = False
        self.pending: Iterator[Event] = iter(())
        self.stopped = False
        self._withheld: list[Event] = []  # what `pending` had not given when it was stopped
        self._entered = 0  # offsets of the batch before this are in the ledger
        self._entering = False  # entering was interrupted
        self._settled = 0  # offsets of the batch before this are dealt with

    # -- handing out -------------------------------------------------------------------------------------

    def take(self, batch: Batch, nothing: bool) -> None:
        """The next batch. `nothing`: the application wants none of it, and it is dealt with."""
        self._entered = self._settled = batch.first_offset
        self.given = self.whole = nothing
        self.batch = batch

    def open(self) -> bool:
        """Give the batch event by event, from `pending`; False if stopped meanwhile."""
        assert self.batch is not None
        pending = iter(self.batch.events)
        if self.stopped:
            return False
        if not self.given:
            self.whole = False
            self.pending = pending
            self.given = True
        return True

    def give(self) -> Batch | None:
        """Give the batch as a whole; None if stopped meanwhile."""
        if self.stopped:
            return None
        self.given = self.whole = True
        return self.batch

    def split(self) -> None:
        """What is left of a batch that the application took events of is a batch of its own, not given yet."""
        assert self.batch is not None
        until = self.reach()
        rest = self.batch.after(until)
        old, none = self.pending, iter(())
        self._entered = self._settled = until
        self.pending = none
        self.given = False
        self.batch = rest
        old.__setstate__(sys.maxsize)  # type: ignore[attr-defined]  # an iteration that goes on has the end there

    def stop(self) -> None:
        """Give nothing more: an iteration over `pending` ends. From any thread, and from handlers of signals."""
        self.stopped = True
        # One call takes the rest from the iterator and keeps it, whatever other threads do.
        self._withheld.extend(self.pending)

    def left(self) -> int:
        """How many events of the batch the application has not been given."""
        if not self.given:
            return 0 if self.batch is None else len(self.batch)
        return 0 if self.whole else self.pending.__length_hint__() + len(self._withheld)  # type: ignore[attr-defined]

    def reach(self, *, but_last: bool = False) -> int:
        """The offset up to which the application has been given the batch, without what it got last or with."""
        batch = self.batch
        assert batch is not None
        left = self.left()
        if not left and not but_last:
            return batch.next_offset
        given = 0 if self.whole else len(batch) - left - but_last
        return batch.events[given - 1].offset + 1 if given > 0 else batch.first_offset

    # -- books and positions -----------------------------------------------------------------------------

    def finish(self) -> None:
        """The batch has been dealt with."""
        batch = self.batch
        assert batch is not None
        following = batch.next_offset
        self._enter(batch, following)
        self.move_to(batch.source, Position(batch.epoch, following))
        self.batch = None

    def advance(self, *, but_last: bool = False) -> None:
        """What was given of the batch is dealt with. What was so before stays so."""
        batch = self.batch
        if batch is None:
            return
        until = self.reach(but_last=but_last)
        self._enter(batch, until)
        if until > self._settled:
            self.move_to(batch.source, Position(batch.epoch, until))
            self._settled = until

    def enter(self) -> None:
        """Bring the books up to what was given; the position stays where it is."""
        if self.batch is not None:
            self._enter(self.batch, self.reach())

    def _enter(self, batch: Batch, until: int) -> None:
        first = self._entered
        if first >= until:
            return
        if self._entering:
            # What was interrupted may have been done: then the ledger is further than we know.
            first = max(first, self.ledger.next(batch.source, batch.epoch, ALL_TOPICS) or 0)
        self._entering = True
        if first < until:
            self.ledger.observe(batch.source, batch.epoch, ALL_TOPICS, first, until - first)
        self._entered = until
        self._entering = False

    def move_to(self, source: str, position: Position) -> None:
        """Everything of this source before that position is dealt with."""
        if source not in self.positions and len(self.positions) >= _MAX_SOURCES:
            del self.positions[next(iter(self.positions))]
        self.positions[source] = position
        self.dirty = True
