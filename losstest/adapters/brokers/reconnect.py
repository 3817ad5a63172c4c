"""A connection to a broker that is made again when it breaks: what every client of a broker has to do."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from brokerless.losstest.adapters.base import Indeterminate

T = TypeVar("T")
R = TypeVar("R")
PAUSE_S = 0.05


class Unreachable(Indeterminate):
    """The broker did not answer in time: what was asked of it may have happened or not."""


class Reconnecting(Generic[T]):
    """Connects when needed; `faults` are the exceptions that mean "connect again"."""

    def __init__(
        self,
        connect: Callable[[], T],
        close: Callable[[T], None],
        faults: tuple[type[Exception], ...],
        patience_s: float,
    ) -> None:
        self._connect, self._close, self._faults = connect, close, faults
        self._patience_s = patience_s
        self._it: T | None = None

    def until_done(self, work: Callable[[T], R]) -> R:
        """Do it, again after a broken connection: at least once, so the broker may see it twice."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self.once(work)
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)

    def once(self, work: Callable[[T], R]) -> R:
        """Do it on the connection there is, or a new one. Raises Unreachable if that breaks."""
        try:
            if self._it is None:
                self._it = self._connect()
            return work(self._it)
        except self._faults as error:
            self.drop()
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def drop(self) -> None:
        """Give the connection up; the next use makes a new one."""
        broken, self._it = self._it, None
        if broken is not None:
            try:
                self._close(broken)
            except self._faults:
                return
