"""Sending many datagrams with few calls: segmentation offload, `sendmmsg`, or one by one.

Which of them works is found out by trying: a network card without offload answers EIO or EINVAL to the first
GSO batch, which then goes the next slower way, as does everything after it.
"""

import errno
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import (
    MAX_BATCH,
    OFFLOAD_REFUSED,
    Io,
    MmsgSender,
    check_io,
    probe_gso,
    send_segmented,
)
from brokerless.multicast.counters import PublisherCounters
from brokerless.multicast.sockets import SocketFault, pair_lines, parse_address, sending_socket
from brokerless.multicast.wire.packing import GsoBatch

log = logging.getLogger("brokerless.multicast")
# What the kernel says when the interface is gone, has another index than before, or is down.
_INTERFACE_FAILED = {
    errno.ENODEV,
    errno.ENXIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EADDRNOTAVAIL,
}
# Heartbeats come at least once a second, so a line is back within this and a second.
_REOPEN_EVERY_S = 0.25


class Transmitter:
    """Sends GSO batches over one connected, blocking socket."""

    def __init__(
        self,
        sock: socket.socket,
        io: Io,
        counters: PublisherCounters,
        *,
        reopen: Callable[[], socket.socket] | None = None,
        descriptors: list[int] | None = None,
    ) -> None:
        """`reopen` makes a new socket after the interface of the old one has failed.

        `descriptors` gets one more, which is always that of our socket, and -1 while nothing can be sent.
        """
        check_io(io)
        self._io = io
        self._counters = counters
        self._reopen = reopen
        self._reopen_at = 0.0
        self.failed = False  # the interface is gone or down: nothing is sent
        self._descriptors = [] if descriptors is None else descriptors
        self._place = len(self._descriptors)
        self._descriptors.append(-1)
        self._use(sock)
        if io == "gso" and not self._gso:
            raise ConfigError("io", "this kernel has no UDP segmentation offload")

    def _use(self, sock: socket.socket) -> None:
        self._sock = sock
        self._descriptors[self._place] = -1 if self.failed else sock.fileno()
        self._gso = self._io in ("auto", "gso") and probe_gso(sock)
        self._mmsg: MmsgSender | None = None
        if self._io in ("auto", "mmsg"):
            with suppress(AttributeError, OSError):
                self._mmsg = MmsgSender(sock)

    @property
    def io_mode(self) -> str:
        """How packets are sent now."""
        return "gso" if self._gso else "mmsg" if self._mmsg else "plain"

    def send(self, batches: Iterable[GsoBatch]) -> None:
        """Send GSO batches in order. What the kernel refuses is counted, not raised: repair brings it."""
        singles: list[bytes | memoryview] = []
        for batch in batches:
            if batch.packets == 1:
                singles.append(batch.buffer)
                continue
            if singles:
                self._send_packets(singles)
                singles = []
            if not (self._gso and self._send_gso(batch)):
                self._send_packets(list(batch.split()))
        if singles:
            self._send_packets(singles)

    def _send_gso(self, batch: GsoBatch) -> bool:
        """Give the kernel a whole GSO batch; False if it does not take GSO batches."""
        try:
            send_segmented(self._sock, batch.buffer, batch.packet_bytes)
        except OSError as error:
            if error.errno in OFFLOAD_REFUSED:
                self._gso = False
                self._counters.offload_off += 1
                return False
            self._refused(batch.packets, error.errno)
            return True
        self._works()
        self._counters.packets += batch.packets
        self._counters.sent_bytes += len(batch.buffer)
        return True

    def _send_packets(self, packets: list[bytes | memoryview]) -> None:
        for start in range(0, len(packets), MAX_BATCH):
            batch = packets[start : start + MAX_BATCH]
            mmsg = self._mmsg
            if mmsg is None or len(batch) == 1:
                for packet in batch:
                    self.send_one(packet)
                continue
            sent = mmsg.send(batch)
            self._counters.packets += sent
            self._counters.sent_bytes += sum(map(len, batch[:sent]))
            if sent < len(batch):
                self._refused(len(batch) - sent, mmsg.error)
            else:
                self._works()

    def send_control(self, packet: bytes | memoryview) -> bool:
        """Send a heartbeat or end of session, which are counted by the caller."""
        try:
            self._sock.send(packet)
        except OSError as error:
            self._refused(1, error.errno)
            return False
        self._works()
        return True

    def send_one(self, packet: bytes | memoryview) -> bool:
        """Send one datagram."""
        if not self.send_control(packet):
            return False
        self._counters.packets += 1
        self._counters.sent_bytes += len(packet)
        return True

    def _works(self) -> None:
        """Something was sent."""
        if self.failed:
            self.failed = False
            self._descriptors[self._place] = self._sock.fileno()

    def _refused(self, packets: int, error: int | None) -> None:
        """Count what was not sent; if the interface is the reason, say so and open the socket again."""
        self._counters.send_errors += packets
        if error not in _INTERFACE_FAILED or self._reopen is None:
            return
        if not self.failed:
            self.failed = True
            self._descriptors[self._place] = -1
            log.warning("nothing is sent any more: %s; trying again", os.strerror(error))
        now = time.monotonic()
        if now < self._reopen_at:
            return
        self._reopen_at = now + _REOPEN_EVERY_S
        try:
            sock = self._reopen()
        except (SocketFault, ConfigError):
            return  # the interface is not back yet
        old = self._sock
        self._use(sock)
        old.close()
        self._counters.reopened += 1

    def close(self) -> None:
        """Close the socket."""
        self._descriptors[self._place] = -1
        self._sock.close()


def open_lines(
    group: str | Sequence[str],
    interface: str | Sequence[str],
    ttl: int,
    io: Io,
    counters: PublisherCounters,
    descriptors: list[int] | None = None,
) -> list[Transmitter]:
    """A transmitter per line: each group on its interface. Raises ConfigError or SocketFault."""
    groups = [group] if isinstance(group, str) else list(group)
    interfaces = [interface] if isinstance(interface, str) else list(interface)
    addresses = [parse_address(text, "group", multicast=True) for text in groups]
    lines: list[Transmitter] = []
    try:
        for address, where in pair_lines(addresses, interfaces):
            open_line = functools.partial(sending_socket, address, where, ttl)
            lines.append(Transmitter(open_line(), io, counters, reopen=open_line, descriptors=descriptors))
    except BaseException:
        for line in lines:
            line.close()
        raise
    return lines
