"""Namespaces of a run: one process makes them, others enter, and they vanish with the last of these."""

import ctypes
import os
from typing import Literal

_FLAGS = {"net": 0x4000_0000, "mnt": 0x0002_0000}  # CLONE_NEWNET, CLONE_NEWNS
Kind = Literal["net", "mnt"]


def unshare(kind: Kind) -> None:
    """Give this process a namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_FLAGS[kind]) != 0:
        raise OSError(ctypes.get_errno(), f"unshare({kind})")


def enter(kind: Kind, pid: int) -> None:
    """Move this thread, and those that it starts, into the namespace of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.getcwd()
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        if libc.setns(fd, _FLAGS[kind]) != 0:
            raise OSError(ctypes.get_errno(), f"setns({kind})")
    finally:
        os.close(fd)
    os.chdir(here)  # a mount namespace is entered at its root
