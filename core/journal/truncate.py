"""Cutting the end off a copy of a journal, when it has what its source's present writer never had."""

import os

from brokerless.core.journal.reader import list_segments
from brokerless.core.journal.segment import SALT_BYTES, Segment, index_name, segment_name
from brokerless.core.runtime.files import atomic_write, sync_directory


def truncate_segments(directory: str, salt: bytes, offset: int) -> None:
    """Remove every event from `offset` on from the files of a journal that nobody writes. Raises OSError.

    From the newest segment to the oldest, so that an interruption leaves a journal with a shorter end. Files are
    replaced, not changed: whoever has one open or mapped keeps what it was.
    """
    for number in reversed(list_segments(directory)):
        segment = Segment(directory, number, salt)
        try:
            first = segment.first_offset()
            if first is not None and first < offset:
                _truncate(directory, segment, salt, offset)
                break
        finally:
            segment.close()
        for name in (segment_name(number), index_name(number)):
            path = os.path.join(directory, name)
            if os.path.exists(path):
                os.unlink(path)
    sync_directory(directory)


def _truncate(directory: str, segment: Segment, salt: bytes, offset: int) -> None:
    found = segment.seek(offset)
    position = found[0] if found is not None else segment.data_start
    size = segment.size
    rest = b""
    while position < size:
        frame = segment.intact(position, size)
        if frame is None:
            break
        if frame.next_offset > offset:
            if frame.first_offset < offset:
                rest = salt + frame.slice(frame.first_offset, offset).raw
            break
        position += SALT_BYTES + len(frame.raw)
    # The index is only a help: the reader walks the segment without it.
    atomic_write(os.path.join(directory, index_name(segment.number)), b"", sync=True)
    atomic_write(segment.path, segment.read(0, position) + rest, sync=True)
