"""Staging: what a journal has accepted and nobody can read yet. The hot path of every publisher.

An event is accepted when it has its number and is where it survives what the journal survives: in memory here, and
with a mapped head attached also in memory that outlives the process. A flush makes all of a batch one frame.

`_speed` has the same four classes in C. There every call is one step to threads and signals. Here `put` and `add`
are many, so whoever calls them holds the token, and calls `mend` after an exception: Ctrl-C can raise after any
call, and what was not numbered by then is not accepted.
"""

from array import array
from collections import deque
from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING, Any

from brokerless.core.event import MAX_TIME, MIN_TIME, Receipt
from brokerless.core.journal.head_file import HeadFile
from brokerless.core.runtime.accelerated import speed

# What an event costs beside its data: time, msgpack headers, index. Used to bound memory, not to encode.
EVENT_OVERHEAD_BYTES = 24

# Topic table, topic index, times, data, content types and keys (None if all are empty).
StagedColumns = tuple[
    list[tuple[str, int, int]], bytes, bytes, list[bytes], list[str] | None, list[str] | None
]


class PureTopic:
    """Numbering of one topic, and its place in the batch that is being staged."""

    __slots__ = ("batch", "index", "name", "next_seq", "prefix")

    def __init__(self, name: str, prefix: bytes, next_seq: int = 0) -> None:
        """`prefix` is what a record of this topic without labels has before the data."""
        self.name = name
        self.prefix = prefix
        self.next_seq = next_seq
        self.batch = -1
        self.index = 0


class PureBatch:
    """Events that will be one frame. `bytes` is their size as it counts against the bounds, `room` what it may be."""

    __slots__ = (
        "bytes",
        "contents",
        "count",
        "datas",
        "first",
        "firsts",
        "index",
        "keys",
        "labelled",
        "members",
        "room",
        "serial",
        "times",
    )

    def __init__(self, serial: int, first: int) -> None:
        self.serial = serial
        self.first = first
        self.count = 0
        self.bytes = self.room = 0
        self.times: list[int] = []
        self.index: list[int] = []
        self.datas: list[bytes] = []
        self.members: list[PureTopic] = []
        self.firsts: list[int] = []
        self.labelled = False
        self.contents: list[str] = []
        self.keys: list[str] = []

    def __len__(self) -> int:
        return self.count

    @property
    def next(self) -> int:
        """Offset after the last event."""
        return self.first + self.count

    def topics(self) -> dict[str, int]:
        """The first seq of each topic."""
        return {topic.name: first for topic, first in zip(self.members, self.firsts, strict=True)}

    def single(self, source: str, epoch: int) -> bytes | None:
        """The frame of a batch of one event without labels, as C makes it; None: make it from the columns."""
        return None

    def table(self) -> list[tuple[str, int, int]]:
        """Each topic with its first seq and count."""
        return [
            (t.name, first, t.next_seq - first) for t, first in zip(self.members, self.firsts, strict=True)
        ]

    def columns(self) -> StagedColumns:
        """What a frame is made of."""
        table = self.table()
        index = array("H", self.index).tobytes() if len(table) > 1 else b""
        labels = (self.contents, self.keys) if self.labelled else (None, None)
        return table, index, array("q", self.times).tobytes(), self.datas, *labels


class PureStage:
    """A journal's topics and the batch that it fills.

    `put` takes an ordinary event and declines (None) a new topic, labels, no room, a wrong type; `add`
    takes whatever was checked and has its room. To end a batch, prepare the next one with `begin`, write the frame,
    and then assign `batch`: one step, so that an interrupt comes before or after it.

    `kept` has frames `(raw, offset, topic, seq)` of single events that a lane has sent. They are the journal's, which
    gives them their place before anybody looks. At most 1,024 with 256 KiB; in C only, and while `keeps` is set.
    """

    __slots__ = (
        "_head",
        "_serial",
        "batch",
        "epoch",
        "give",
        "keeps",
        "kept",
        "kept_bytes",
        "max_event_bytes",
        "take",
        "topics",
    )

    def __init__(self, receipt: Callable[[int, int, int], Receipt], max_event_bytes: int) -> None:
        token: deque[None] = deque((None,))
        # The token of the journal's lock: taking it is `deque.pop`, which is one step.
        self.take, self.give = token.pop, token.append
        self.max_event_bytes = max_event_bytes
        self.epoch = 0
        self.topics: dict[str, PureTopic] = {}
        self.batch = PureBatch(0, 0)
        self.keeps = False
        self.kept: list[tuple[bytes, int, str, int]] = []
        self.kept_bytes = 0
        self._serial = 0
        self._head: HeadFile | None = None

    def put(self, topic: str, data: bytes, time: int | None) -> Receipt | None:
        """Stage an ordinary event; None if it is not one, or there is no room. `time` is in µs, None for now."""
        batch = self.batch
        state = self.topics.get(topic)
        if state is None or type(data) is not bytes or batch.labelled:
            return None
        size = len(data)
        total = batch.bytes + size + EVENT_OVERHEAD_BYTES
        if state.batch != batch.serial:
            total += len(state.prefix)
        if total > batch.room or size > self.max_event_bytes:
            return None
        if time is None:
            time = time_ns() // 1000
        elif type(time) is not int or not MIN_TIME <= time <= MAX_TIME:
            return None
        if self._head is not None and not self._head.keep(batch.first, time, state.prefix, data):
            return None
        if state.batch != batch.serial:
            self._join(state)
        return self._enter(state, data, time, total)

    def offer(self, topic: str, data: bytes, time: int | None) -> Receipt | None:
        """`put` for who has not taken the token; None, too, if somebody has it. Only in C it can be had without."""
        return None

    def _join(self, state: PureTopic) -> None:
        batch = self.batch
        batch.firsts.append(state.next_seq)
        batch.members.append(state)
        state.batch, state.index = batch.serial, len(batch.members) - 1

    def _enter(self, state: PureTopic, data: bytes, time: int, total: int) -> Receipt:
        batch = self.batch
        batch.index.append(state.index)
        batch.times.append(time)
        batch.datas.append(data)
        seq = state.next_seq
        receipt = Receipt(self.epoch, batch.first + batch.count, seq)
        # Accepted. No call from here on: between calls no interrupt (Ctrl-C) gets in.
        batch.count += 1
        batch.bytes = total
        state.next_seq = seq + 1
        return receipt

    def add(
        self, topic: PureTopic, data: bytes, content_type: str, key: str, time: int, prefix: bytes
    ) -> Receipt | None:
        """Stage any event whose room was made; None if the mapped head has none. `prefix` is its record's."""
        batch = self.batch
        if self._head is not None and not self._head.keep(batch.first, time, prefix, data):
            return None
        total = batch.bytes + len(data) + EVENT_OVERHEAD_BYTES
        if topic.batch != batch.serial:
            self._join(topic)
            total += len(topic.prefix)
        if content_type or key or batch.labelled:
            if not batch.labelled:
                # The first event with a label in a batch gives the ones before it their empty ones.
                batch.contents, batch.keys = [""] * batch.count, [""] * batch.count
                batch.labelled = True
            batch.contents.append(content_type)
            batch.keys.append(key)
            # Labels count too (a character has up to 4 bytes), or a batch of them could outgrow a frame.
            total += 4 * (len(content_type) + len(key))
        return self._enter(topic, data, time, total)

    def keep(self, source: str) -> bool:
        """Keep the only event that is staged, which was sent; False if it must be flushed. Only C keeps any."""
        return False

    def begin(self, first: int) -> PureBatch:
        """A fresh batch whose first event will have that offset; it is used when it is assigned to `batch`."""
        self._serial += 1
        return PureBatch(self._serial, first)

    def mend(self) -> None:
        """After an error or an interrupt in `put` or `add`: leave only what was numbered."""
        batch = self.batch
        n = batch.count
        for column in (batch.index, batch.times, batch.datas, batch.contents, batch.keys):
            del column[n:]
        del batch.firsts[len(batch.members) :]
        if batch.members and batch.members[-1].next_seq == batch.firsts[-1]:
            batch.members[-1].batch = -1
            del batch.members[-1], batch.firsts[-1]
        if self._head is not None:
            self._head.rewind(batch.next)

    def attach(self, head: HeadFile) -> None:
        """Keep every event in this mapped head, too."""
        self._head = head

    def detach(self) -> None:
        """Let go of the mapped head."""
        self._head = None


class PureLane:
    """What a publisher calls for every event: `lane(topic, data)` stages it, and flushes when it is time.

    `otherwise(now, topic, data, …)` stages what is not ordinary, and must look at `due` and `armed` itself:
    `flush(now)` if the time `due` has come, `arm(now)` if nobody will flush by then. Times are ns since 1970.
    In C an ordinary event does not get to `otherwise`, and needs no lock. And if it is alone when it is `due`, and the
    stage keeps such ones, C keeps it and calls `send_single(raw)` with its frame instead of `flush`: the few steps that
    whoever waits for the event has to wait for. `due` moves by `pause`, from now or from up to `credit` before.
    `on_frame` does not get these.
    """

    __slots__ = ("__dict__", "_otherwise", "armed", "credit", "due", "pause")

    def __init__(
        self,
        stage: PureStage,
        source: str,
        otherwise: Callable[..., Any],
        flush: Callable[[int], None],
        arm: Callable[[int], None],
        send_single: Callable[[bytes], None] | None,
    ) -> None:
        self._otherwise = otherwise
        self.due = self.pause = self.credit = 0
        self.armed = False

    def __call__(self, topic: str, data: bytes, *args: Any, **kwargs: Any) -> Any:
        return self._otherwise(time_ns(), topic, data, *args, **kwargs)


if TYPE_CHECKING or speed is None:
    Topic = PureTopic
    Batch = PureBatch
    Stage = PureStage
    Lane = PureLane
else:
    Topic = speed.Topic
    Batch = speed.Batch
    Stage = speed.Stage
    Lane = speed.Lane
