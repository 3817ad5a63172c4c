"""Ends the wait of another thread or task: an eventfd that is waited for beside the sockets."""

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress


class WakeUp:
    """`wake()` makes whoever waits for `fd` look again. Safe in signal handlers and from any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Between reading the descriptor's number and using it nobody may close it: it could be another file's.
        self._lock = threading.RLock()
        self._sleepers = 0  # tasks that wait for it
        self._ended = False

    def wake(self) -> None:
        """End the current wait, or the next one."""
        with self._lock, suppress(OSError, ValueError):  # -1: closed meanwhile
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Take back `wake`."""
        with self._lock, suppress(OSError, ValueError):  # nothing to take back, or closed meanwhile
            os.eventfd_read(self.fd)

    async def wait(self, descriptors: Iterable[int], seconds: float) -> None:
        """Wait in asyncio until a descriptor can be read, `wake` or so many seconds.

        A cancelled wait leaves nothing behind.
        """
        # Not `wait_for`: before Python 3.12 it can swallow a cancellation that comes at the moment of its time-out.
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def done() -> None:
            if not arrived.done():
                arrived.set_result(None)

        watched = [fd for fd in (self.fd, *descriptors) if fd >= 0]
        for fd in watched:
            loop.add_reader(fd, done)
        timer = loop.call_later(seconds, done)
        self._sleepers += 1
        try:
            await arrived
        finally:
            self._sleepers -= 1
            timer.cancel()
            for fd in watched:
                loop.remove_reader(fd)
            self.clear()
            if self._ended:
                self._close()

    def close(self, *, at_once: bool = False) -> None:
        """Close it when the last task that waits for it has ended (`at_once`: now). Closing twice is fine."""
        self._ended = True
        if at_once or not self._sleepers:
            self._close()

    def _close(self) -> None:
        with self._lock:
            descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)
