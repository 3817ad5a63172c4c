"""Where a subscriber goes on: what may be said of it, and the files that remember it."""

import os

from brokerless.core.errors import ConfigError
from brokerless.core.slots import Slots


def make_directory(path: str) -> None:
    """Where the cursor's file will be. Raises ConfigError."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if not os.access(os.path.dirname(path) or ".", os.W_OK):
            raise ConfigError("cursor", f"{path} lies in a directory that cannot be written")
    except OSError as error:
        raise ConfigError("cursor", f"{path}: {error.strerror}") from None


def open_marks(cursor: str) -> Slots:
    """What is kept beside a cursor's file, for one subscriber at a time. Raises ConfigError."""
    try:
        return Slots(f"{cursor}.marks", exclusive=True)
    except BlockingIOError:
        problem = f"{cursor} is in use by another subscriber; each needs a file of its own"
    except OSError as error:
        problem = f"{cursor}.marks beside it cannot be used: {error.strerror}"
    raise ConfigError("cursor", problem)


def check_start(start: object, has_cursor: bool) -> str | int:
    """`start` as it was given, or what it is by default. Raises ConfigError."""
    if start is None:
        return "cursor" if has_cursor else "live"
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return start
    if start in ("live", "oldest", "cursor"):
        return str(start)
    raise ConfigError("start", f"{start!r} is not live, oldest, cursor or an offset")
