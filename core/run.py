"""A run: consecutive small events of one topic, staged by appending data and time to lists and nothing else.

Numbering, sizes and the topic column are made up for when the run ends. A publisher's inner loop stages this way
(`direct.staging`); every method of the journal that needs the numbers ends the run first. All of this happens
under the journal's lock.
"""

from typing import TYPE_CHECKING

from brokerless.core.journal_types import EVENT_OVERHEAD_BYTES, Topic

if TYPE_CHECKING:
    from brokerless.core.journal import Journal

# Events up to this size: 1,000 of them are about one frame of the size that a journal aims at.
RUN_EVENT_BYTES = 1024


class Run:
    """What the events of a run have in common. An event may join while `k = len(datas) < limit`.

    Its offset is `written + k`, its seq `seq + k`. `topic` is None when there is no run.
    """

    __slots__ = ("_start", "_state", "limit", "max_bytes", "prefix", "seq", "topic")

    def __init__(self) -> None:
        self.topic: str | None = None
        self.prefix = b""
        self.seq = self.limit = self.max_bytes = self._start = 0
        self._state: Topic | None = None

    def begin(self, journal: "Journal", topic: str) -> None:
        """Begin a run after what is staged now, if the batch has this topic and its events have no labels."""
        self.end(journal)
        state = journal._topics.get(topic)
        if state is None or state.batch != journal._batch or journal._extras:
            return
        staged = len(journal._datas)
        left = journal._stage_room - journal._staged_bytes
        self._state, self._start = state, staged
        self.prefix, self.seq = state.prefix, state.next_seq - staged
        self.max_bytes = min(RUN_EVENT_BYTES, journal.max_event_bytes)
        # As if each were of the largest size: their number alone keeps the bound.
        self.limit = staged + max(0, left // (self.max_bytes + EVENT_OVERHEAD_BYTES))
        self.topic = state.name

    def end(self, journal: "Journal") -> None:
        """Count the events of the run, if there is one, as if each had been counted when it came."""
        state = self._state
        if self.topic is None or state is None:
            return
        added = journal._datas[self._start :]
        n = len(added)
        size = sum(map(len, added)) + n * EVENT_OVERHEAD_BYTES
        # No call from here on: between calls no interrupt (Ctrl-C) gets in.
        journal._index += [state.index] * n
        journal._next += n
        state.next_seq += n
        journal._staged_bytes += size
        self.topic = None

    def mend(self, journal: "Journal") -> None:
        """After an interrupt in the middle of appending: what has data and time is staged, the rest is not."""
        whole = min(len(journal._datas), len(journal._times))
        del journal._datas[whole:], journal._times[whole:]
        self.end(journal)
        journal._unstage()
