"""Opening a disk journal after whatever happened to it: find the end, the interrupted write to cut off, and
what is gone. Changes nothing: `DiskJournal._reopen` cuts.
"""

import msgspec

from brokerless.core.frame import Frame
from brokerless.core.journal.head_file import NEXT, HeadFile, StagedRecord
from brokerless.core.journal.meta import Meta
from brokerless.core.journal.segment import SALT_BYTES, Segment
from brokerless.core.journal.witness import Testimony


class Recovered(msgspec.Struct):
    """What opening found. All zero after a clean close, and after most kills.

    `cut_bytes` is an interrupted write that was cut off the end (its caller never got a receipt, unless the power
    failed); `gone` are offsets that were accepted and cannot be read; `staged` events were accepted but not
    yet in a segment, and are now. `epoch_raised` is True when numbers could otherwise have been used twice: after
    damage, and whenever the journal cannot prove that it is the newest (`proven`, see `witness.py`).
    """

    clean: bool = True
    cut_bytes: int = 0
    cut_segment: int = 0
    gone: list[tuple[int, int]] = []
    staged: int = 0
    epoch_raised: bool = False
    proven: bool = True


class WriterState(msgspec.Struct):
    """What the writer needs in order to go on."""

    next: int
    topics: dict[str, int]
    append_to: int  # segment to append to, 0 for a new one
    append_at: int
    append_first: int  # first offset of that segment
    staged: list[StagedRecord]
    report: Recovered


def recover(
    directory: str,
    meta: Meta,
    head: HeadFile,
    numbers: list[int],
    testimony: Testimony | None,
    compacted: int = 0,
) -> WriterState:
    """Read the newest segment that has anything, and the head; change nothing on disk.

    `compacted`: events before that offset were accepted, because there is a state as of it.
    """
    report = Recovered(clean=meta.clean or not numbers)
    state = WriterState(0, {}, 0, 0, 0, [], report)
    for number in reversed(numbers):
        segment = Segment(directory, number, bytes.fromhex(meta.salt))
        try:
            if segment.first_offset() is not None:
                _scan(segment, state, meta)
                break
            # A power cut can leave a new file without contents: the end is in an older one.
            report.cut_bytes, report.cut_segment = report.cut_bytes + segment.size, number
            report.epoch_raised = True
        finally:
            segment.close()
    announced = head.get(NEXT)
    if announced is None:
        report.epoch_raised = bool(numbers)
    elif announced > state.next and not meta.replica:  # a copy fetches it again
        report.gone.append((state.next, announced - 1))
        state.next = announced
        state.append_to = 0
        report.epoch_raised = True
    if compacted > state.next:
        if not meta.replica:  # of a copy that was begun with a state, nothing is missing
            report.gone.append((state.next, compacted - 1))
            report.epoch_raised = True
        state.next, state.append_to = compacted, 0
    base, staged = head.staged()
    state.staged = staged[state.next - base :] if base <= state.next else []
    if (numbers or meta.epochs) and not meta.replica and not _is_newest(state, meta, testimony):
        # An older copy, or the machine was restarted: numbers from here on may have been used before.
        report.proven = False
        report.epoch_raised = True
    if report.epoch_raised:
        state.append_to = 0
    report.staged = len(state.staged)
    return state


def _is_newest(state: WriterState, meta: Meta, testimony: Testimony | None) -> bool:
    """Whether the witness confirms that nothing was written which is not here."""
    return (
        testimony is not None
        and meta.boot_id == testimony.boot_id
        and bool(meta.instance)
        and meta.instance == testimony.instance
        and state.next + len(state.staged) >= testimony.next
    )


def _scan(segment: Segment, state: WriterState, meta: Meta) -> None:
    """Walk the newest segment to its end, over damage."""
    report = state.report
    size = segment.size
    if segment.header is None:
        report.epoch_raised = True  # the numbering of topics that do not occur in it is unknown
        state.next = segment.first_offset() or 0
    else:
        state.next = segment.header.first_offset
        if segment.header.snapshot.epoch == meta.epoch:
            state.topics = dict(segment.header.snapshot.topics)
    state.append_first = state.next
    position = segment.data_start
    while position < size:
        frame = segment.intact(position, size)
        if frame is None or frame.first_offset < state.next:
            found = segment.search(position + 1, state.next)
            if found is None:
                report.cut_bytes, report.cut_segment = report.cut_bytes + size - position, segment.number
                break
            position, frame = found
            report.epoch_raised = True
        if frame.first_offset > state.next:
            report.gone.append((state.next, frame.first_offset - 1))
            report.epoch_raised = True
        _count(frame, state, meta)
        position += SALT_BYTES + len(frame.raw)
    state.append_to = segment.number if segment.header is not None else 0
    state.append_at = position


def _count(frame: Frame, state: WriterState, meta: Meta) -> None:
    state.next = frame.next_offset
    if frame.epoch == meta.epoch:
        for topic, first, count in frame.topics:
            state.topics[topic] = max(first + count, state.topics.get(topic, 0))
