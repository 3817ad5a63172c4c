"""Namespaces of a run: one process makes them, others enter, and they vanish with the last of these."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.harness.control import ControlChannel

_FLAGS = {"net": 0x4000_0000, "mnt": 0x0002_0000}  # CLONE_NEWNET, CLONE_NEWNS
Namespace = Literal["net", "mnt"]
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_TRANSMITTED_BYTES = 8  # field of a line of /proc/net/dev
_LISTENING = "0A"
_TIMEOUT_S = 30.0


def unshare(kind: Namespace) -> None:
    """Give this process a namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_FLAGS[kind]) != 0:
        raise OSError(ctypes.get_errno(), f"unshare({kind})")


def enter(kind: Namespace, pid: int) -> None:
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


@cache
def network_possible() -> bool:
    """True if this process may make network namespaces. Lets util-linux's `unshare` try it."""
    if os.geteuid() != 0:
        return False
    words = ["unshare", "--net", "true"]
    try:
        return not subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return False


def loopback_up() -> None:
    """Switch on the only interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        ask = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(sock, _SIOCGIFFLAGS, ask), 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def hold_network(witness: Witness, control: ControlChannel) -> None:
    """Hold the network namespace of this process until told to stop."""
    loopback_up()
    witness.write(Kind.READY)
    while not control.stop:
        control.wake.wait()
        control.wake.clear()


def carried_bytes(pid: int) -> int:
    """How many bytes, with the headers of IP, loopback has carried in the network namespace of a process."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[_TRANSMITTED_BYTES])
    return 0


def listens(pid: int, host: str, port: int) -> bool:
    """True if somebody accepts connections there, in the network namespace of a process."""
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
    mapped = [int.from_bytes(word, sys.byteorder) for word in (bytes(4), bytes(4), b"\0\0\xff\xff")]
    places = [f"{number:08X}", "".join(f"{word:08X}" for word in (*mapped, number)), "0" * 8, "0" * 32]
    wanted = {f"{place}:{port:04X}" for place in places}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING and local in wanted:
                return True
    return False
