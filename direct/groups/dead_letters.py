"""Dead letters: storing, reading, retrying and dropping the events that a group gave up.

`group.py` decides that an event is one (`max_deliver`); `coordinator.py` appends it here.
"""

import os
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import msgspec

from brokerless.core import DiskJournal, Event, IntervalSet, Journal
from brokerless.core.errors import JournalError
from brokerless.core.journal.reader import Readable, chunks_from
from brokerless.core.runtime.files import atomic_write

CONTENT_TYPE = "application/vnd.brokerless.dead-letter+msgpack"
# Beside the segments of a dead-letter journal: the letters that somebody has retried or dropped.
_SETTLED = "settled"
# The same for journals that are not on disk.
_IN_MEMORY: WeakKeyDictionary[object, IntervalSet] = WeakKeyDictionary()


class DeadLetter(msgspec.Struct, frozen=True):
    """An event that was delivered `attempts` times to workers of `group` and acknowledged by none."""

    group: str
    attempts: int
    event: Event


def append_dead_letter(journal: Journal, letter: DeadLetter) -> None:
    """Append a letter under its event's topic, with the group as key."""
    journal.append(letter.event.topic, msgspec.msgpack.encode(letter), CONTENT_TYPE, letter.group)


def read_dead_letters(journal: Readable, offset: int | None = None) -> Iterator[DeadLetter]:
    """All letters of a dead-letter journal (or a JournalReader of one), from `offset` on (default: the oldest).

    Without those that were retried or dropped.
    """
    settled = SettledLetters(journal)
    at = journal.oldest if offset is None else offset
    return (letter for number, letter in read_numbered(journal, at) if number not in settled)


def read_numbered(journal: Readable, at: int) -> Iterator[tuple[int, DeadLetter]]:
    """All letters from that number on, each with its number: its offset in the dead-letter journal."""
    for start, chunk in chunks_from(journal, at):
        for frame in chunk.frames:
            for event in frame.events():
                if event.offset >= start and event.content_type == CONTENT_TYPE:
                    yield event.offset, msgspec.msgpack.decode(event.data, type=DeadLetter)


class SettledLetters:
    """Numbers of letters that were retried or dropped; kept in a file if the journal is on disk."""

    def __init__(self, journal: Readable) -> None:
        """Raises JournalError if the file cannot be read."""
        self._journal = journal
        directory = getattr(journal, "path", None)
        self._path = os.path.join(directory, _SETTLED) if directory is not None else None
        self._numbers = IntervalSet() if self._path else _IN_MEMORY.setdefault(journal, IntervalSet())
        if self._path is not None:
            try:
                with open(self._path, "rb") as file:
                    self._numbers = IntervalSet(msgspec.json.decode(file.read(), type=list[tuple[int, int]]))
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:
                raise JournalError(self._path, f"cannot be read: {error}") from None

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    @property
    def total(self) -> int:
        """How many there are of those that the journal still has."""
        return sum(b - a + 1 for a, b in self._numbers.overlap(self._journal.oldest, self._journal.next))

    def add(self, numbers: Iterable[int]) -> None:
        """These are done with. Raises JournalError, and then they are listed again after a restart."""
        for number in numbers:
            self._numbers.add(number, number)
        self._numbers.remove(0, self._journal.oldest - 1)
        if self._path is None:
            return
        sync = isinstance(self._journal, DiskJournal) and self._journal.fsync != "never"
        try:
            atomic_write(self._path, msgspec.json.encode(list(self._numbers)), sync=sync)
        except OSError as error:
            raise JournalError(
                self._path, f"cannot be written: {error.strerror}", errno=error.errno
            ) from None
