"""How the collector lays frames into a journal: each event of the spool holds one received frame, unchanged.

The outer event's topic is `<transport>/<kind>`, its time is when the frame was received, and its content type
says that a frame is inside. So the collector never decodes or encodes single events, and nothing of what the
producer said is changed. A journal without such events (a producer's own) is read by the same code.
"""

import os
from collections.abc import Iterator, Sequence

import msgspec

from brokerless.core import Frame, JournalReader, encode_frame
from brokerless.core.errors import FrameError, JournalError
from brokerless.core.journal.reader import list_segments
from brokerless.core.journal.segment import Segment, segment_name
from brokerless.spark_collector.source.schema import KIND_EVENT

# Offsets an event of a spool that holds a frame.
NESTED = "application/vnd.brokerless.frame"
# The transport of rows that come from a journal without a collector in between.
JOURNAL_TRANSPORT = "journal"


class Item(msgspec.Struct, frozen=True):
    """One frame in a spool: what the outer event says about it. `received` is in µs."""

    offset: int
    transport: str
    kind: str
    received: int
    frame: Frame


class LedgerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of a `kind="ledger"` row.

    `what="lost"`: sequence numbers (offsets if the row has no topic) `first` to `last` are lost for `reason`.
    `what="begin"`: this consumer's responsibility for the stream begins at `first`.
    """

    what: str
    first: int
    last: int = -1
    reason: str = ""


def spool_topic(transport: str, kind: str) -> str:
    """The outer topic."""
    return f"{transport}/{kind}"


def is_nested(frame: Frame) -> bool:
    """Whether the events of this outer frame hold frames."""
    return NESTED in frame.header.content_types


def unnest(outer: Frame, first: int, stop: int) -> Iterator[Item]:
    """The frames inside an outer frame, at outer offsets `[first, stop)`. Raises FrameError.

    The outer CRC covers them, so theirs is not computed again.
    """
    columns = outer.columns()
    base = outer.first_offset
    low, high = max(0, first - base), min(outer.count, stop - base)
    times = memoryview(columns.times).cast("q")
    topics: Sequence[str] = outer.topic_column()
    contents = outer.content_type_column()
    for n in range(low, high):
        transport, _, kind = topics[n].partition("/")
        if contents[n] != NESTED:
            raise FrameError(f"offset {base + n} of a spool does not hold a frame")
        yield Item(base + n, transport, kind, times[n], Frame.parse(columns.datas[n], verify=False))


def as_items(outer: Frame, first: int, stop: int) -> Iterator[Item]:
    """The content of an outer frame, whatever it is: nested frames, or itself."""
    if is_nested(outer):
        yield from unnest(outer, first, stop)
    elif first > outer.first_offset or stop < outer.next_offset:
        yield Item(first, JOURNAL_TRANSPORT, KIND_EVENT, -1, outer.slice(first, stop))
    else:
        yield Item(outer.first_offset, JOURNAL_TRANSPORT, KIND_EVENT, -1, outer)


def sent_frame(source: str, epoch: int, offset: int, time: int, seqs: dict[str, int]) -> Frame:
    """A producer's sent counts as a frame: at `time` its next offset was `offset`, and its next seqs were `seqs`."""
    topics = sorted(seqs.items())
    return encode_frame(
        source,
        epoch,
        offset,
        topics=topics,
        topic_index=range(len(topics)),
        times=[time] * len(topics),
        datas=[b""] * len(topics),
    )


def note_frame(source: str, epoch: int, topic: str, first: int, time: int, data: bytes) -> Frame:
    """A ledger note as a frame; without a topic `first` is an offset, otherwise a seq."""
    return encode_frame(
        source,
        epoch,
        0 if topic else first,
        topics=[(topic, first)],
        topic_index=None,
        times=[time],
        datas=[data],
        content_types=["application/json"],
    )


class Corrupt(JournalError):
    """A range of a journal cannot be read; `segment` is the file, `first` and `last` the offsets."""

    def __init__(self, path: str, segment: str, first: int, last: int) -> None:
        super().__init__(
            path,
            f"segment {segment} is damaged: offsets {first} to {last} cannot be read; "
            "restore the file, or set onCorrupt=quarantine to go on without them",
        )
        self.segment = segment
        self.first = first
        self.last = last


def segment_of(reader: JournalReader, offset: int) -> str:
    """The name of the segment file that holds (or held) this offset."""
    found = ""
    salt = bytes.fromhex(reader.meta.salt)
    for number in list_segments(reader.path):
        try:
            segment = Segment(reader.path, number, salt)
        except FileNotFoundError:
            continue
        try:
            begins = segment.first_offset()
        finally:
            segment.close()
        if begins is not None and begins > offset and found:
            break
        found = segment_name(number)
    return os.path.join(reader.path, found)
