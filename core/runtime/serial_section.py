"""One caller at a time, where threads and signal handlers meet."""

import threading
from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

from brokerless.core.errors import UsageError

T = TypeVar("T")


class SerialSection:
    """Work that several threads ask for runs one piece at a time. Closing waits for the current piece.

    A signal handler runs in the middle of whatever its thread does. If that is inside the section, the handler
    cannot enter it again, and what it closes is closed when the current piece of work ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # the thread that is inside
        self._last: Callable[[], None] | None = None  # to run when it closes
        self._closed = False

    def run(self, work: Callable[..., T], *args: object) -> T:
        """Run it while no other thread is inside. Raises UsageError if this thread is inside already."""
        me = get_ident()
        if self._holder == me:
            raise UsageError(
                "this is in use: call only stop() or close() from signal handlers, and do not wait in on_loss"
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
        """`run`, unless another thread is inside. True if that need not be tried again: it was done, or this thread
        is inside already and it cannot be done now."""
        if self._holder == get_ident():
            return True
        # Not `acquire(blocking=False)`: a signal handler that raises behind it would leave the lock taken.
        if self._lock.locked():
            return False
        self.run(work)
        return True

    def inside(self, work: Callable[[], T]) -> T:
        """`run`, but if this thread is inside already it is part of that."""
        return work() if self._holder == get_ident() else self.run(work)

    def close(self, last: Callable[[], None]) -> None:
        """Run `last` once, now or when this thread leaves the section. Closing twice is fine."""
        if self._last is None:
            self._last = last
        if self._holder != get_ident():
            self._end()

    def reset(self) -> None:
        """In a forked child: whoever was inside is a thread that is not here."""
        self._lock = threading.Lock()
        self._holder = 0

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
