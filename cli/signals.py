"""Ctrl-C and SIGTERM, for commands that send or receive: they end between two events."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

# A signal whose handler returns does not end a sleep: how late a command that only serves may notice it.
LOOK_S = 0.2


def on_signals(stop: Callable[[], None]) -> list[int]:
    """Let the first Ctrl-C or SIGTERM end the iteration after the current event, and the next one end us anyhow.

    The list that is returned gets the signal's number.
    """
    arrived: list[int] = []

    def handle(number: int, _frame: object) -> None:
        arrived.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return arrived


def exit_code(interrupted: list[int]) -> int:
    """What a shell expects of a command that a signal ended; 0 if none did."""
    return 128 + interrupted[0] if interrupted else 0


class _StopReading(Exception):
    """A signal came while there was nothing to read."""


class StandardInput:
    """The lines of standard input, until they end or a signal comes."""

    def __init__(self) -> None:
        self._waiting = False

    def __iter__(self) -> Iterator[bytes]:
        with suppress(_StopReading):
            while True:
                self._waiting = True
                line = sys.stdin.buffer.readline()
                self._waiting = False
                if not line:
                    return
                yield line.removesuffix(b"\n").removesuffix(b"\r")

    def stop(self) -> None:
        """In the handler of the signal: only a wait is broken off, never the publishing of an event."""
        if self._waiting:
            self._waiting = False
            raise _StopReading
