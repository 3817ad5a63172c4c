"""Sending many datagrams with few calls: segmentation offload, `sendmmsg`, or one by one.

Which of them works is found out by trying: a network card without offload answers EIO or EINVAL to the first
train, which then goes the next slower way, as does everything after it.
"""

import errno
import socket
import struct
from collections.abc import Iterable
from typing import Literal

from brokerless.core.errors import ConfigError
from brokerless.multicast.counters import PublisherCounters
from brokerless.multicast.mmsg import MAX_BATCH, MmsgSender
from brokerless.multicast.packing import Train

Io = Literal["auto", "gso", "mmsg", "plain"]
SOL_UDP = 17
UDP_SEGMENT = 103
_SEGMENT = struct.Struct("=H")
_REFUSED = {errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE}


def check_io(io: str) -> None:
    """Raise ConfigError unless this is one of the ways to move packets."""
    if io not in ("auto", "gso", "mmsg", "plain"):
        raise ConfigError("io", f"must be auto, gso, mmsg or plain, not {io!r}")


def probe_gso(sock: socket.socket) -> bool:
    """Does the kernel know the option? (Whether the network card does shows with the first train.)"""
    try:
        sock.setsockopt(SOL_UDP, UDP_SEGMENT, 0)
    except OSError:
        return False
    return True


class Transmitter:
    """Sends trains over one connected, blocking socket."""

    def __init__(self, sock: socket.socket, io: Io, counters: PublisherCounters) -> None:
        check_io(io)
        self._sock = sock
        self._counters = counters
        self._gso = io in ("auto", "gso") and probe_gso(sock)
        self._mmsg: MmsgSender | None = None
        if io in ("auto", "mmsg"):
            try:
                self._mmsg = MmsgSender(sock)
            except (AttributeError, OSError):
                self._mmsg = None
        if io == "gso" and not self._gso:
            raise ConfigError("io", "this kernel has no UDP segmentation offload")

    @property
    def way(self) -> str:
        """How packets are sent now."""
        return "gso" if self._gso else "mmsg" if self._mmsg else "plain"

    def send(self, trains: Iterable[Train]) -> None:
        """Send trains in order. What the kernel refuses is counted, not raised: repair brings it."""
        singles: list[bytes | memoryview] = []
        for train in trains:
            if train.packets == 1:
                singles.append(train.buffer)
                continue
            if singles:
                self._send_packets(singles)
                singles = []
            if not (self._gso and self._send_train(train)):
                self._send_packets(list(train.split()))
        if singles:
            self._send_packets(singles)

    def _send_train(self, train: Train) -> bool:
        """Give the kernel a whole train; False if it does not take trains."""
        try:
            self._sock.sendmsg([train.buffer], [(SOL_UDP, UDP_SEGMENT, _SEGMENT.pack(train.packet_bytes))])
        except OSError as error:
            if error.errno in _REFUSED:
                self._gso = False
                self._counters.offload_off += 1
                return False
            self._counters.send_errors += train.packets
            return True
        self._counters.packets += train.packets
        self._counters.sent_bytes += len(train.buffer)
        return True

    def _send_packets(self, packets: list[bytes | memoryview]) -> None:
        if self._mmsg is not None and len(packets) > 1:
            for start in range(0, len(packets), MAX_BATCH):
                batch = packets[start : start + MAX_BATCH]
                sent = self._mmsg.send(batch)
                self._counters.packets += sent
                self._counters.sent_bytes += sum(map(len, batch[:sent]))
                self._counters.send_errors += len(batch) - sent
            return
        for packet in packets:
            self.send_one(packet)

    def send_control(self, packet: bytes) -> bool:
        """Send a heartbeat or end of session, which are counted by the caller."""
        try:
            self._sock.send(packet)
        except OSError:
            self._counters.send_errors += 1
            return False
        return True

    def send_one(self, packet: bytes | memoryview) -> bool:
        """Send one datagram."""
        try:
            self._sock.send(packet)
        except OSError:
            self._counters.send_errors += 1
            return False
        self._counters.packets += 1
        self._counters.sent_bytes += len(packet)
        return True
