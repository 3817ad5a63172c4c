"""One at a time, where threads and the handlers of signals meet."""

import threading
from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

from brokerless.core.errors import UsageError

T = TypeVar("T")


class Turn:
    """What several threads may ask for, each in its turn. Closing waits for the turn to end.

    A signal's handler runs in the middle of whatever its thread does. If that is somebody's turn it cannot have
    one of its own, and what it closes is closed when that turn ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # the thread whose turn it is
        self._last: Callable[[], None] | None = None  # to be done when it closes
        self._closed = False

    def run(self, work: Callable[..., T], *args: object) -> T:
        """Do something while no other thread does. Raises UsageError if it is this thread's turn already."""
        me = get_ident()
        if self._holder == me:
            raise UsageError(
                "this is in use: call only stop() or close() from handlers of signals, and do not wait in on_loss"
            )
        try:
            with self._lock:
                self._holder = me
                try:
                    return work(*args)
                finally:
                    self._holder = 0
        finally:
            if self._last is not None:
                self._end()

    def attempt(self, work: Callable[[], None]) -> bool:
        """The same, unless it is another thread's turn. True if that need not be tried again: it was done, or it is
        this thread's turn already and it cannot be done now."""
        if self._holder == get_ident():
            return True
        # Not `acquire(blocking=False)`: a signal's handler that raises behind it would leave the lock taken.
        if self._lock.locked():
            return False
        self.run(work)
        return True

    def inside(self, work: Callable[[], T]) -> T:
        """The same, but if it is this thread's turn already it is part of that."""
        return work() if self._holder == get_ident() else self.run(work)

    def close(self, last: Callable[[], None]) -> None:
        """Do `last` once, now or when this thread's turn ends. Closing twice is fine."""
        if self._last is None:
            self._last = last
        if self._holder != get_ident():
            self._end()

    def _end(self) -> None:
        me = get_ident()
        with self._lock:
            self._holder = me
            try:
                if not self._closed:
                    self._closed = True
                    assert self._last is not None
                    self._last()
            finally:
                self._holder = 0
