"""Reference: a Unix named pipe. Full means the producer waits; the kernel keeps what is in it."""

import contextlib
import os
import select
import time
from collections.abc import Iterable

from brokerless.losstest.adapters.base import (
    Consumer,
    Indeterminate,
    Message,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.adapters.framing import Deframer, frame
from brokerless.losstest.model import Promise, Traits


class PipeProducer(Producer):
    """Writes frames; waits while nobody reads."""

    def __init__(self, setup: Setup) -> None:
        self._path = setup.shared / "pipe"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path)
        self._fd = -1
        self._patience_s = setup.patience_s

    def send(self, data: bytes) -> None:
        """Write one frame; after a reader died, to the next reader."""
        out = frame(data)
        deadline = time.monotonic() + self._patience_s
        whole = len(out)
        while out:
            if self._fd < 0:
                self._open(deadline)
            try:
                written = os.write(self._fd, out)
                out = out[written:]
            except BlockingIOError:
                select.select([], [self._fd], [], 0.2)
            except BrokenPipeError:
                # The pipe stays open, so what is in it is kept; a write without a reader is tried again.
                time.sleep(0.01)
            if time.monotonic() > deadline:
                if len(out) < whole:
                    raise Indeterminate("nobody reads the rest of it from the pipe")
                raise Rejected("nobody reads the pipe")

    def _open(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
                return
            except OSError:  # ENXIO: no reader yet
                time.sleep(0.01)
        raise Rejected("nobody reads the pipe")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class PipeConsumer(Consumer):
    """Reads frames."""

    def __init__(self, setup: Setup) -> None:
        path = setup.shared / "pipe"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._frames = Deframer()

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if self._fd < 0:
            return []
        readable, _, _ = select.select([self._fd], [], [], timeout_s)
        if not readable:
            return []
        try:
            data = os.read(self._fd, 4096)
        except BlockingIOError:
            return []
        if not data:  # no writer at the moment: select() would return at once
            time.sleep(min(timeout_s, 0.01))
        return [Message(body) for body in self._frames.feed(data)]

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


_HAD = Promise(
    "may", ("in_flight",), "what the reader had taken from the pipe and not yet handled dies with it"
)
TRANSPORTS = [
    Transport(
        "pipe",
        PipeProducer,
        PipeConsumer,
        Traits(
            family="reference",
            enclosed=True,
            without=("all-down", "rolling"),  # a pipe has one reader
            promises=dict.fromkeys(("kill", "kill-fresh", "flap", "stop"), _HAD),
            summary="Unix named pipe: holds the producer back",
        ),
    )
]
