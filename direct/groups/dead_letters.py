"""Dead letters: events that a group could not handle, kept with the story of what happened to them."""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from brokerless.core import Chunk, Event, Journal
from brokerless.core.errors import Evicted

CONTENT_TYPE = "application/vnd.brokerless.dead-letter+msgpack"


class DeadLetter(msgspec.Struct, frozen=True):
    """An event that was delivered `attempts` times to workers of `group` and acknowledged by none."""

    group: str
    attempts: int
    event: Event


class _Readable(Protocol):
    @property
    def oldest(self) -> int: ...
    @property
    def next(self) -> int: ...
    def read(self, offset: int, *, max_bytes: int = ...) -> Chunk: ...


def append_dead_letter(journal: Journal, letter: DeadLetter) -> None:
    """Append a letter under its event's topic, with the group as key."""
    journal.append(letter.event.topic, msgspec.msgpack.encode(letter), CONTENT_TYPE, letter.group)


def read_dead_letters(journal: _Readable, offset: int | None = None) -> Iterator[DeadLetter]:
    """All letters of a dead-letter journal (or a JournalReader of one), from `offset` on (default: the oldest)."""
    at = journal.oldest if offset is None else offset
    while at < journal.next:
        try:
            chunk = journal.read(at)
        except Evicted as evicted:
            at = evicted.oldest
            continue
        for frame in chunk.frames:
            for event in frame.events():
                if event.offset >= at and event.content_type == CONTENT_TYPE:
                    yield msgspec.msgpack.decode(event.data, type=DeadLetter)
        if chunk.next <= at:
            return
        at = chunk.next
