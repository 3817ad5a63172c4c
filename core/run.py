"""A run: consecutive small events of one topic, staged by appending data and time to lists and nothing else.

Numbering, sizes and the topic column are made up for when the run ends. A publisher's inner loop stages this way
(`direct.staging`); every method of the journal that needs the numbers ends the run first.
"""

from typing import TYPE_CHECKING

from brokerless.core.journal_types import EVENT_OVERHEAD_BYTES

if TYPE_CHECKING:
    from brokerless.core.journal import _Topic

# Events up to this size: 1,000 of them are about one frame of the size that a journal aims at.
RUN_EVENT_BYTES = 1024


class Run:
    """What the events of a run have in common. An event may join while `k = len(datas) < limit`.

    Its offset is `written + k`, its seq `seq + k`. `topic` is None when there is no run.
    """

    __slots__ = ("_state", "limit", "max_bytes", "prefix", "seq", "start", "topic")

    def __init__(self) -> None:
        self.topic: str | None = None
        self.prefix = b""
        self.start = self.seq = self.limit = self.max_bytes = 0
        self._state: _Topic | None = None

    def begin(self, state: "_Topic", staged: int, left_bytes: int, max_event_bytes: int) -> None:
        """Begin after `staged` events, with room for `left_bytes` more; their number alone keeps that bound."""
        self.topic = state.name
        self.prefix = state.prefix
        self.start = staged
        self.seq = state.next_seq - staged
        self.max_bytes = min(RUN_EVENT_BYTES, max_event_bytes)
        self.limit = staged + max(0, left_bytes // (self.max_bytes + EVENT_OVERHEAD_BYTES))
        self._state = state

    def end(self) -> "_Topic | None":
        """End the run, if there is one; the topic whose events must be counted now."""
        state = self._state if self.topic is not None else None
        self.topic = self._state = None
        return state
