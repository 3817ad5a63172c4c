"""Names: event and endpoint ids, and the name by which a process holds the outbox's lease."""

import base64
import os
import random
import secrets
import threading

from brokerless.core.runtime.process import pid_namespace, process_start


def event_id(now_us: int) -> str:
    """`msg_` and 32 characters: time, then random bits, so that ids sort roughly by time and never repeat.

    Made from time and randomness and not from a row number: a database restored from a backup counts again, and a
    receiver would drop new events as duplicates.
    """
    # Unique, not secret. os.urandom gives up the interpreter lock, which costs more than the rest of publishing.
    return f"msg_{now_us // 1000:012x}{random.getrandbits(80):020x}"


def endpoint_id() -> str:
    """`ep_` and 16 characters."""
    return "ep_" + base64.b32encode(secrets.token_bytes(10)).decode().lower()


def owner_id() -> str:
    """`space|pid|start|random`: unique, and telling for processes of the same machine whether it still lives."""
    me = os.getpid()
    return f"{_space()}|{me}|{process_start(me) or ''}|{threading.get_ident()}{secrets.token_hex(4)}"


def is_gone(owner: str) -> bool:
    """Whether that owner was a process of this machine that no longer runs. False when that cannot be known."""
    try:
        space, pid, started, _ = owner.split("|")
        return space == _space() and str(process_start(int(pid)) or "") != started
    except ValueError:
        return False  # written by some other version: its lease will run out


def _space() -> str:
    return pid_namespace() or "unknown:" + secrets.token_hex(8)
