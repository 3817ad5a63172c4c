"""EventLog: JSON lines for what happens rarely (processes, faults, declared losses, counters)."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec


class EventLog:
    """Appends one JSON object per line, each with its time `t` (CLOCK_MONOTONIC, ns) and `what`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **fields: object) -> int:
        """Append a note and return its time."""
        now = time.monotonic_ns()
        os.write(self._fd, msgspec.json.encode({"t": now, "what": what, **fields}) + b"\n")
        return now

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_event_log(path: Path) -> list[dict[str, Any]]:
    """All complete lines; an incomplete last line is left out."""
    notes = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    for line in data.split(b"\n")[:-1]:
        try:
            note = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(note, dict):
            notes.append(note)
    return notes


def plain(text: str) -> str:
    """Foreign text without control characters, which neither XML nor a terminal takes well."""
    return "".join(char if char.isprintable() else " " for char in text)
