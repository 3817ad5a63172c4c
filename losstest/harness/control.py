"""Instructions that a worker gets from its supervisor, one line each, over a named pipe."""

import os
import threading
from collections import deque

import msgspec


class ControlChannel:
    """Reads instructions in a thread of its own. The worker's loop looks at the attributes.

    The thread ends when the pipe is closed, which happens at the latest when the supervisor dies; it is a daemon
    thread, because a worker may be told to exit first.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.go: Go | None = None
        self.stop = False
        self.slow_s = 0.0
        self.ack_first = False
        self.wake = threading.Event()
        # Instructions for the main loop, which owns adapter and clock. A scenario gives a handful at most.
        self.queue: deque[str] = deque(maxlen=64)
        threading.Thread(target=self._read, daemon=True, name="control").start()

    def _read(self) -> None:
        buffer = b""
        while data := os.read(self._fd, 4096):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._receive(line.decode())
            self.wake.set()
        self.stop = True
        self.wake.set()

    def _receive(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "go":
            start, first = rest.split()
            self.go = Go(int(start), int(first))
        elif word == "stop":
            self.stop = True
        elif word == "slow":
            self.slow_s = float(rest)
        elif word == "ack-first":
            self.ack_first = True
        else:
            self.queue.append(line)


class Go(msgspec.Struct, frozen=True):
    """Begin: event `first` is the next; event 0 was, or would have been, due at `start` (ns)."""

    start: int
    first: int
