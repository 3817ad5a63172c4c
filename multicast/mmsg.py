"""`sendmmsg` and `recvmmsg` by ctypes: many datagrams per call, where offload is not to be had.

The calls that receive do not block, and keep the interpreter lock: a thread that gave it up for each call
would have to wait for its turn after each (up to 5 ms) while the application computes.
"""

import ctypes
import errno
import socket
import struct
from collections.abc import Sequence

# 64 datagrams of 64 kB are 4 MB of buffers; more per call brings nothing that can be measured.
MAX_BATCH = 64
SLOT_BYTES = 65_536
MSG_DONTWAIT = 0x40
_CONTROL_BYTES = 64
# cmsghdr (length, level, type) and the segment size as an int: what UDP_GRO adds.
_CONTROL = struct.Struct("@Niii")
SOL_UDP = 17
UDP_GRO = 104


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
        self._call = ctypes.CDLL(None, use_errno=True).sendmmsg
        self._sock = sock
        self._iovecs = (_Iovec * MAX_BATCH)()
        self._messages = _headers(self._iovecs, MAX_BATCH)

    def send(self, packets: Sequence[bytes | memoryview]) -> int:
        """Send them in order; return how many went out (the rest was refused)."""
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
                if ctypes.get_errno() != errno.EINTR:
                    failed += 1  # the first of them was refused: go on with the one behind it
                continue
            done += sent
        return done


class MmsgReceiver:
    """Receives up to `slots` datagrams, or trains of them, per call, into buffers that are used again."""

    def __init__(self, sock: socket.socket, slots: int = MAX_BATCH) -> None:
        self._call = ctypes.PyDLL(None, use_errno=True).recvmmsg
        self._sock = sock
        self._slots = slots
        self._buffer = bytearray(slots * SLOT_BYTES)
        self._control = bytearray(slots * _CONTROL_BYTES)
        buffer_at = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        control_at = ctypes.addressof(ctypes.c_char.from_buffer(self._control))
        self._iovecs = (_Iovec * slots)()
        self._messages = _headers(self._iovecs, slots)
        for i in range(slots):
            self._iovecs[i].base = buffer_at + i * SLOT_BYTES
            self._iovecs[i].length = SLOT_BYTES
            self._messages[i].header.control = control_at + i * _CONTROL_BYTES
            self._messages[i].header.control_length = _CONTROL_BYTES
        self._view = memoryview(self._buffer)

    def receive(self) -> list[tuple[memoryview, int]]:
        """What is there: (bytes, size of one datagram in them). Valid until the next call."""
        count = self._call(self._sock.fileno(), self._messages, self._slots, MSG_DONTWAIT, None)
        if count <= 0:
            return []
        found = []
        for i in range(count):
            message = self._messages[i]
            size = message.length
            packet_bytes = size
            if message.header.control_length >= _CONTROL.size:
                _, level, kind, segment = _CONTROL.unpack_from(self._control, i * _CONTROL_BYTES)
                if level == SOL_UDP and kind == UDP_GRO and 0 < segment <= size:
                    packet_bytes = segment
            message.header.control_length = _CONTROL_BYTES
            found.append((self._view[i * SLOT_BYTES : i * SLOT_BYTES + size], packet_bytes))
        return found
