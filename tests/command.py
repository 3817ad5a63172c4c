"""The command line in this process: starting Python for each call would take longer than what most of them do.

What only a process has (signals, pipes, what is left behind) is tested with real ones.
"""

import contextlib
import io
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from brokerless.cli.main import main

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_here(
    *arguments: object, cwd: Path | str = ".", env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `brokerless` with these arguments (and more environment): the exit code, and what it printed."""
    words = list(map(str, arguments))
    # As Python has them: what cannot be printed as text is escaped on standard error.
    out, errors = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", how, write_through=True)
        for how in ("strict", "backslashreplace")
    )
    code = 0
    with (
        _unchanged(),
        mock.patch.dict(os.environ, env or {}),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    said = [stream.buffer.getvalue().decode() for stream in (out, errors)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *said)


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """What a command sets for its process, as it was before."""
    logger = logging.getLogger("brokerless")
    log = logger.handlers[:], logger.level, logger.propagate
    handlers = [signal.getsignal(each) for each in _SIGNALS]
    try:
        yield
    finally:
        logger.handlers[:], logger.level, logger.propagate = log
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
