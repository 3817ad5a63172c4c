"""Names: event and endpoint ids, and the name by which a process holds the outbox's lease."""

import base64
import os
import random
import secrets
import threading
from pathlib import Path


def event_id(now_us: int) -> str:
    """`msg_` and 32 characters: time, then random bits, so that ids sort roughly by time and never repeat.

    Made from time and randomness and not from a row number: a database restored from a backup counts again,
    and a
    receiver would drop new events as duplicates.
    """
    # Unique, not secret. os.urandom gives up the interpreter lock, which costs more than the rest of
    # publishing.
    return f"msg_{now_us // 1000:012x}{random.getrandbits(80):020x}"


def endpoint_id() -> str:
    """`ep_` and 16 characters."""
    return "ep_" + base64.b32encode(secrets.token_bytes(10)).decode().lower()


def owner_id() -> str:
    """`space|pid|start|random`: unique, and telling for processes of the same machine whether it still
    lives.
    """
    return f"{_space()}|{os.getpid()}|{_started(os.getpid())}|{threading.get_ident()}{secrets.token_hex(4)}"


def is_gone(owner: str) -> bool:
    """Whether that owner was a process of this machine that no longer runs. False when that cannot be
    known.
    """
    try:
        space, pid, started, _ = owner.split("|")
        return space == _space() and _started(int(pid)) != started
    except ValueError:
        return False  # written by some other version: its lease will run out


def _space() -> str:
    """Tells apart machines, their boots and process namespaces: only within one can pids be looked up."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown:" + secrets.token_hex(8)


def _started(pid: int) -> str:
    """When the process started, in clock ticks: a pid that was given out again is another process."""
    try:
        # The command name may contain anything, also ')': the fields after its last one are fixed.
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return ""
