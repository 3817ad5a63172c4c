"""Dead letters of a group, as its publisher keeps them beside its journal. Reads, changes nothing."""

import base64
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from brokerless.core import JournalReader
from brokerless.core.errors import UsageError
from brokerless.core.event import datetime_of
from brokerless.core.presence import Component
from brokerless.direct import DeadLetter, read_dead_letters

# The newest ones; `brokerless journal dump` shows all.
MAX_SHOWN = 50
MAX_BYTES = 4096


def read_letters(components: Sequence[Component], source: str, group: str) -> list[dict[str, Any]]:
    """The newest dead letters of a group, newest first. Raises UsageError, JournalError."""
    paths = [
        path
        for component in components
        if component.kind == "direct.publisher" and component.name == source
        if (path := component.state.get("dead_letters"))
    ]
    if not paths:
        raise UsageError(
            f"no publisher {source!r} on this machine keeps dead letters on disk (DiskJournal does)"
        )
    with JournalReader(paths[-1]) as reader:
        found = deque(
            (letter for letter in read_dead_letters(reader) if letter.group == group), maxlen=MAX_SHOWN
        )
    return [_shown(letter) for letter in islice(reversed(found), MAX_SHOWN)]


def _shown(letter: DeadLetter) -> dict[str, Any]:
    event = letter.event
    data = event.data[:MAX_BYTES]
    try:
        text, encoding = data.decode("utf-8"), "text"
    except UnicodeDecodeError:
        text, encoding = base64.b64encode(data).decode(), "base64"
    return {
        "offset": event.offset,
        "topic": event.topic,
        "key": event.key,
        "time": datetime_of(event.time).isoformat(timespec="seconds"),
        "attempts": letter.attempts,
        "content_type": event.content_type,
        "bytes": len(event.data),
        "data": text,
        "encoding": encoding,
    }
