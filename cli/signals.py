"""Ctrl-C and SIGTERM, for commands that receive: they end between two events."""

import signal
from collections.abc import Callable


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
