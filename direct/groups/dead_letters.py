"""Dead letters: storing, reading, retrying and dropping the events that a group gave up.

`group.py` decides that an event is one (`max_deliver`); `coordinator.py` appends it here.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from brokerless.core import DiskJournal, Event, IntervalSet, Journal
from brokerless.core.errors import Evicted, JournalError, UsageError
from brokerless.core.journal.reader import Readable, chunks_from
from brokerless.core.runtime.files import atomic_write
from brokerless.direct.groups.group import Group

# Letters of one page, and what is read for it: some ten milliseconds of the server's thread.
_MAX_LETTERS = 200
_MAX_PAGE_BYTES = 4 * 1024 * 1024
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


class DeadLetters:
    """The letters of a publisher, as administrators see them: in pages, until they are retried or dropped."""

    def __init__(self, journal: Journal, dead: Journal) -> None:
        """`journal` has the events, `dead` the letters about them."""
        self._journal = journal
        self._dead = dead
        self._settled = SettledLetters(dead)

    @property
    def total(self) -> int:
        """How many there are."""
        return max(0, self._dead.next - self._dead.oldest - self._settled.total)

    def page(self, group: str, after: int) -> dict[str, Any]:
        """Letters from that number on, of one group or of all; `next` is where the following page begins, or None."""
        rows: list[dict[str, Any]] = []
        at, size = max(after, self._dead.oldest), 0
        for number, letter in read_numbered(self._dead, at):
            at = number + 1
            size += len(letter.event.data)
            if number not in self._settled and group in ("", letter.group):
                rows.append(_shown(number, letter))
            if len(rows) >= _MAX_LETTERS or size >= _MAX_PAGE_BYTES:
                break
        else:
            at = self._dead.next
        return {"letters": rows, "next": at if at < self._dead.next else None}

    def show(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """These letters with their data. Raises UsageError for unknown ones."""
        return [_shown(number, letter, whole=True) for number, letter in self._chosen(numbers)]

    def retry(
        self, numbers: Sequence[int], groups: Mapping[str, Group], keep: Callable[[], None]
    ) -> dict[str, Any]:
        """Deliver the events of these letters again, to their group alone, as if for the first time.

        `keep` saves the state of all groups. Raises UsageError for unknown letters.
        """
        retried, refused = [], {}
        for number, letter in self._chosen(numbers):
            problem = self._retry_one(letter, groups)
            if problem:
                refused[str(number)] = problem
            else:
                retried.append(number)
        # After the groups' state: a crash in between lets a letter be listed that was retried, and loses none.
        keep()
        self._settled.add(retried)
        return {"retried": retried, "refused": refused}

    def drop(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Do not list these letters any more. Raises UsageError for unknown ones."""
        chosen = [number for number, _ in self._chosen(numbers)]
        self._settled.add(chosen)
        return {"dropped": chosen}

    def _chosen(self, numbers: Sequence[int]) -> list[tuple[int, DeadLetter]]:
        found = []
        for number in numbers:
            if number in self._settled or not self._dead.oldest <= number < self._dead.next:
                raise UsageError(f"there is no dead letter {number}")
            found.append(next(read_numbered(self._dead, number)))
            if found[-1][0] != number:
                raise UsageError(f"there is no dead letter {number}")
        return found

    def _retry_one(self, letter: DeadLetter, groups: Mapping[str, Group]) -> str:
        """Why that is not possible; empty if it is done."""
        group = groups.get(letter.group)
        if group is None:
            return f"there is no group {letter.group!r} any more"
        offset = letter.event.offset
        try:
            chunk = self._journal.read(offset, max_bytes=1)
            events = [e for frame in chunk.frames[:1] for e in frame.events() if e.offset == offset]
        except Evicted:
            events = []
        if events != [letter.event]:
            return "its event is not in the journal any more; show the letter and publish its data again"
        return group.retry(offset, letter.event.key)


def _shown(number: int, letter: DeadLetter, *, whole: bool = False) -> dict[str, Any]:
    event = letter.event
    row: dict[str, Any] = {
        "number": number,
        "group": letter.group,
        "attempts": letter.attempts,
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "time": event.time,
        "bytes": len(event.data),
    }
    if whole:
        row |= {"data": event.data, "content_type": event.content_type, "headers": dict(event.headers)}
    return row
