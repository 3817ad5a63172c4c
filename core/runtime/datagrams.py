"""Many datagrams per system call on Linux: `recvmmsg`, `sendmmsg`, UDP offload, buffers, kernel drops.

Everything here falls back by itself: a kernel or platform without a call is read and written with plain sockets.

The calls that receive do not block, and keep the interpreter lock: a thread that released it for each call would
have to wait for it after each (up to 5 ms) while the application computes.
"""

import ctypes
import errno
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.accelerated import speed

# How datagrams are moved: "auto" tries offload, then `*mmsg`, then plain calls.
Io = Literal["auto", "gso", "mmsg", "plain"]
# 64 datagrams of 64 kB are 4 MB of buffers; more per call brings nothing that can be measured.
MAX_BATCH = 64
# UDP cannot carry more than 65,507 bytes; pages that no datagram touches cost no memory.
SLOT_BYTES = 65_536
# Numbers of Linux's ABI that Python's socket module does not have on all versions.
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
SO_MEMINFO = 55
SO_RCVBUFFORCE = 33
SO_SNDBUFFORCE = 32
SO_BUSY_POLL = 46
_MEMINFO = struct.Struct("=9I")
_DROPS = 8
_MSG_DONTWAIT = 0x40
_CONTROL_BYTES = 64
# cmsghdr (length, level, type) and the segment size as an int: what UDP_GRO adds.
_CONTROL = struct.Struct("@Niii")
_SEGMENT_SENT = struct.Struct("=H")
_SEGMENT_RECEIVED = struct.Struct("=i")
_GRO_CONTROL_BYTES = socket.CMSG_SPACE(_SEGMENT_RECEIVED.size)
# What a network card without segmentation offload answers.
OFFLOAD_REFUSED = frozenset({errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE})


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Msghdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.POINTER(_Iovec)),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Mmsghdr(ctypes.Structure):
    _fields_ = (("header", _Msghdr), ("length", ctypes.c_uint32))


def _headers(iovecs: "ctypes.Array[_Iovec]", count: int) -> "ctypes.Array[_Mmsghdr]":
    headers = (_Mmsghdr * count)()
    for i in range(count):
        headers[i].header.iov = ctypes.pointer(iovecs[i])
        headers[i].header.iov_length = 1
    return headers


class MmsgSender:
    """Sends up to MAX_BATCH datagrams per call on a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises AttributeError where the C library has no `sendmmsg`."""
        self._call = ctypes.CDLL(None, use_errno=True).sendmmsg
        self._sock = sock
        self._iovecs = (_Iovec * MAX_BATCH)()
        self._messages = _headers(self._iovecs, MAX_BATCH)
        self.error: int = 0  # errno of the last datagram that was refused

    def send(self, packets: Sequence[bytes | memoryview]) -> int:
        """Send them in order; return how many were sent. The rest was refused, see `error`."""
        keep = [packet if isinstance(packet, bytes) else bytes(packet) for packet in packets]
        for i, packet in enumerate(keep):
            self._iovecs[i].base = ctypes.cast(ctypes.c_char_p(packet), ctypes.c_void_p)
            self._iovecs[i].length = len(packet)
        done = failed = 0
        while done + failed < len(keep):
            at = done + failed
            sent = self._call(
                self._sock.fileno(),
                ctypes.byref(self._messages, at * ctypes.sizeof(_Mmsghdr)),
                len(keep) - at,
                0,
            )
            if sent <= 0:
                error = ctypes.get_errno()
                if error != errno.EINTR:
                    self.error = error
                    failed += 1  # the first of them was refused: go on with the one behind it
                continue
            done += sent
        return done


class MmsgReceiver:
    """Receives up to `slots` datagrams, or offload batches of them, per call, into buffers that are reused."""

    def __init__(self, slots: int = MAX_BATCH, slot_bytes: int = SLOT_BYTES) -> None:
        """Raises AttributeError where the C library has no `recvmmsg`."""
        self._call = ctypes.PyDLL(None, use_errno=True).recvmmsg
        self._slots = slots
        self._buffer = bytearray(slots * slot_bytes)
        self._control = bytearray(slots * _CONTROL_BYTES)
        buffer_at = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        control_at = ctypes.addressof(ctypes.c_char.from_buffer(self._control))
        self._iovecs = (_Iovec * slots)()
        self._messages = _headers(self._iovecs, slots)
        for i in range(slots):
            self._iovecs[i].base = buffer_at + i * slot_bytes
            self._iovecs[i].length = slot_bytes
            self._messages[i].header.control = control_at + i * _CONTROL_BYTES
            self._messages[i].header.control_length = _CONTROL_BYTES
        self._view = memoryview(self._buffer)
        self._starts = range(0, slots * slot_bytes, slot_bytes)
        words = memoryview(self._messages).cast("B").cast("I")
        self._lengths = words[_Mmsghdr.length.offset // 4 :: ctypes.sizeof(_Mmsghdr) // 4]

    def receive(self, fd: int) -> list[tuple[memoryview, int]]:
        """What is there: (bytes, size of one datagram in them). Valid until the next call."""
        count = self._call(fd, self._messages, self._slots, _MSG_DONTWAIT, None)
        if count <= 0:
            return []
        found = []
        for i, start, size in zip(range(count), self._starts, self._lengths[:count].tolist(), strict=False):
            header = self._messages[i].header
            packet_bytes = size
            if header.control_length >= _CONTROL.size:
                _, level, kind, segment = _CONTROL.unpack_from(self._control, i * _CONTROL_BYTES)
                if level == SOL_UDP and kind == UDP_GRO and 0 < segment <= size:
                    packet_bytes = segment
            header.control_length = _CONTROL_BYTES
            found.append((self._view[start : start + size], packet_bytes))
        return found


class CopyingReceiver:
    """Reads many datagrams of a socket without receive offload: copies, for those who keep them."""

    def __init__(self) -> None:
        self._read = speed.Receiver(MAX_BATCH, SLOT_BYTES).read if speed is not None else None

    def read(self, sock: socket.socket) -> tuple[list[bytes], list[int]]:
        """What is there now, at most MAX_BATCH, and which of them (by index) the buffer cut short."""
        if self._read is not None:
            found: tuple[list[bytes], list[int]] = self._read(sock.fileno())
            return found
        datagrams: list[bytes] = []
        cut: list[int] = []
        with suppress(OSError):
            for i in range(MAX_BATCH):
                datagram, _, flags, _ = sock.recvmsg(SLOT_BYTES, 0, socket.MSG_DONTWAIT)
                if flags & socket.MSG_TRUNC:
                    cut.append(i)
                datagrams.append(datagram)
        return datagrams, cut


class DatagramReceiver:
    """Reads one non-blocking socket by the fastest way that works: receive offload, `recvmmsg`, or one by one."""

    def __init__(self, sock: socket.socket, io: Io = "auto") -> None:
        """Raises ConfigError if `io` is no known way, or offload is demanded and not there."""
        check_io(io)
        self._sock = sock
        self.sender: tuple[str, int] = ("", 0)  # of the last datagram that was read the plain way
        self._gro = io in ("auto", "gso") and enable_gro(sock)
        if io == "gso" and not self._gro:
            raise ConfigError("io", "this kernel has no UDP receive offload")
        self._mmsg: MmsgReceiver | None = None
        if io in ("auto", "mmsg"):
            with suppress(AttributeError, OSError):
                # With batches of 64 kB in a slot, 4 slots are 256 kB per call: what stays in a core's own
                # cache until it is decoded. 1 MB per call was slower by a third.
                self._mmsg = MmsgReceiver(4 if self._gro else MAX_BATCH)

    @property
    def io_mode(self) -> str:
        """How datagrams are received: gso, mmsg or plain."""
        return "gso" if self._gro else "mmsg" if self._mmsg else "plain"

    def receive(self) -> Sequence[tuple[bytes | memoryview, int]]:
        """What is there now, up to a batch: (bytes, size of one datagram in them).

        Empty when there is nothing. Memory is valid until the next call.
        """
        if self._mmsg is not None:
            return self._mmsg.receive(self._sock.fileno())
        try:
            if not self._gro:
                packet, self.sender = self._sock.recvfrom(SLOT_BYTES)
                return [(packet, len(packet) or 1)]
            data, control, _, _ = self._sock.recvmsg(SLOT_BYTES, _GRO_CONTROL_BYTES)
        except OSError:
            return []  # nothing there, or an ICMP error of an earlier packet; the next call reads on
        size = len(data) or 1
        for level, kind, raw in control:
            if level == SOL_UDP and kind == UDP_GRO:
                size = min(size, max(1, _SEGMENT_RECEIVED.unpack_from(raw)[0]))
        return [(data, size)]


def check_io(io: str) -> None:
    """Raise ConfigError unless this is one of the ways to move packets."""
    if io not in ("auto", "gso", "mmsg", "plain"):
        raise ConfigError("io", f"must be auto, gso, mmsg or plain, not {io!r}")


def probe_gso(sock: socket.socket) -> bool:
    """Does the kernel know segmentation offload? (Whether the network card does shows with the first batch.)"""
    try:
        sock.setsockopt(SOL_UDP, UDP_SEGMENT, 0)
    except OSError:
        return False
    return True


def send_segmented(sock: socket.socket, buffer: bytes, packet_bytes: int) -> None:
    """Let the kernel cut `buffer` into datagrams of `packet_bytes`. Raises OSError (see OFFLOAD_REFUSED)."""
    sock.sendmsg([buffer], [(SOL_UDP, UDP_SEGMENT, _SEGMENT_SENT.pack(packet_bytes))])


def enable_gro(sock: socket.socket) -> bool:
    """Let the kernel give consecutive datagrams of one size as one; False where it cannot."""
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True


def kernel_drops(sock: socket.socket) -> int:
    """How many datagrams (or offload batches) this socket dropped since it was opened; 0 where unknown.

    The kernel's counter has 32 bits and wraps around.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, _MEMINFO.size)
        return int(_MEMINFO.unpack(raw)[_DROPS])
    except (OSError, struct.error):
        return 0


def grow_buffer(sock: socket.socket, option: int, wanted: int) -> int:
    """Ask for a buffer (`SO_RCVBUF` or `SO_SNDBUF`) of `wanted` bytes, beyond the limit if we may.

    Returns what the kernel granted.
    """
    forced = SO_RCVBUFFORCE if option == socket.SO_RCVBUF else SO_SNDBUFFORCE
    try:
        sock.setsockopt(socket.SOL_SOCKET, forced, wanted)
    except OSError:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, wanted)
    return sock.getsockopt(socket.SOL_SOCKET, option) // 2  # the kernel doubles it for its own overhead
