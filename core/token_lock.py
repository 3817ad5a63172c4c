"""A mutex that costs a third of `threading.Lock` when nobody else wants it."""

import threading
import time
from collections import deque
from types import TracebackType

# Long enough to let the holder finish a write, short against the time that events wait for a batch.
_RETRY_S = 0.00005


class TokenLock:
    """A deque that holds one token: taking it is the lock. Not reentrant.

    `deque.pop` and `deque.append` are atomic in CPython. With a semaphore-based lock the two calls are a
    quarter of what `Journal.stage` costs (measured: 240 ns against 80 ns), hence this. A hot path may use
    `take` and `give` directly: `take()` raises IndexError when the lock is held, and then `acquire` waits.
    """

    __slots__ = ("_queue", "give", "take")

    def __init__(self) -> None:
        token: deque[None] = deque((None,))
        self.take = token.pop
        self.give = token.append
        self._queue = threading.Lock()

    def acquire(self) -> None:
        """Wait for the lock. All but one of those who wait sleep in a real lock; that one looks regularly."""
        try:
            return self.take()
        except IndexError:
            pass
        with self._queue:
            while True:
                try:
                    return self.take()
                except IndexError:
                    time.sleep(_RETRY_S)

    def release(self) -> None:
        """Give the lock back."""
        self.give(None)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give(None)
