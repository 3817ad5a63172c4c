"""Dead letters of a group, asked from its publisher: look at them, and send one again."""

import base64
from collections import deque
from collections.abc import Sequence
from typing import Any

from brokerless.core.errors import UsageError
from brokerless.core.presence import Component
from brokerless.direct import AdminClient

# The newest ones; `brokerless dead-letters list` shows all.
MAX_SHOWN = 50
MAX_BYTES = 4096


def _publisher(components: Sequence[Component], source: str) -> AdminClient:
    for component in components:
        known = (component.kind, component.name) == ("direct.publisher", source)
        if known and component.alive and component.addresses:
            return AdminClient(component.addresses[0])
    raise UsageError(f"no publisher {source!r} is running here")


def read_letters(components: Sequence[Component], source: str, group: str) -> list[dict[str, Any]]:
    """The newest dead letters of a group, newest first. Raises UsageError, PeerError."""
    with _publisher(components, source) as publisher:
        newest = deque(publisher.dead_letters(group), maxlen=MAX_SHOWN)
        return [_shown(each) for each in publisher.show([row["number"] for row in reversed(newest)])]


def send_again(components: Sequence[Component], source: str, number: int) -> None:
    """Deliver the event of a letter again, to its group alone. Raises UsageError, PeerError."""
    with _publisher(components, source) as publisher:
        refused = publisher.retry([number])["refused"]
    if refused:
        raise UsageError(str(next(iter(refused.values()))))


def _shown(letter: dict[str, Any]) -> dict[str, Any]:
    data = letter["data"][:MAX_BYTES]
    try:
        text, encoding = data.decode("utf-8"), "text"
    except UnicodeDecodeError:
        text, encoding = base64.b64encode(data).decode(), "base64"
    shown = {
        name: letter[name] for name in ("number", "id", "topic", "key", "attempts", "content_type", "bytes")
    }
    return shown | {"time": letter["time"].isoformat(timespec="seconds"), "data": text, "encoding": encoding}
