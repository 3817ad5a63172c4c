"""Authentication of packets, if wanted: keyed BLAKE2s (RFC 7693) after the last message block.

Plain receivers read `count` messages and never look behind them, so they still work; analysers may remark on the
extra block. The trailer looks like a message block itself:

    u16  length
    4    mark "BLh3"
    u64  signer    random, one per publisher, request server and subscriber that runs
    u64  time      microseconds since 1970 UTC when it was signed; a signer never uses one twice
    16   tag       keyed BLAKE2s of everything before it, 128 bits

It covers the whole packet, session and sequence included. What goes to the group, requests, and answers to one
subscriber are signed with keys of their own, derived from the one that users give. So a packet of one kind does not
pass for another; a subscriber's question has the shape of a heartbeat. A recorded packet can be repeated, but not as
something new: `Freshness` tells it by its time.
"""

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from brokerless.core.config import check_key
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.pure import TRAILER_BYTES, TRAILER_PREFIX

# What a packet is: sent to the group (by the publisher, or as a repair for all), a request, or an answer to one.
Role = Literal["group", "request", "answer"]
# How far the clocks of two machines may differ, and so for how long a recorded packet can pass as new. NTP keeps
# clocks within milliseconds; a minute also allows for machines that have just started.
CLOCK_WINDOW_S = 60.0
# Signers of requests that are remembered: each subscriber is one.
MAX_SIGNERS = 4096


def _key_of(key: bytes, role: Role) -> bytes:
    """The key, as kernels want it, of one kind of packets."""
    return kernels.mac_key(hashlib.blake2s(check_key(key), person=role.encode()).digest())


def wall_us() -> int:
    """Microseconds since 1970 UTC."""
    return time.time_ns() // 1000


class Signer:
    """Signs the packets of one publisher, request server or subscriber. For several threads at one time."""

    def __init__(self, key: bytes, role: Role, clock_us: Callable[[], int] = wall_us) -> None:
        self._key = _key_of(key, role)
        self._clock_us = clock_us
        self._name = secrets.randbits(64)
        self._next = 0
        self._lock = threading.Lock()

    def _reserve(self, packets: int) -> int:
        """The time of the first of so many packets: no time is used twice."""
        with self._lock:
            first = max(self._next, self._clock_us())
            self._next = first + packets
            return first

    def __call__(self, packet: bytes) -> bytes:
        """The trailer of a packet."""
        return kernels.sign_packets(self._key, packet, len(packet), self._name, self._reserve(1))[
            len(packet) :
        ]

    def batch(self, buffer: bytes, packet_bytes: int) -> bytes:
        """Packets of `packet_bytes` each (the last may be shorter), each with its trailer."""
        packets = -(-len(buffer) // packet_bytes)
        return kernels.sign_packets(self._key, buffer, packet_bytes, self._name, self._reserve(packets))


class Verifier:
    """Tells packets that somebody with the key signed, as packets of that kind."""

    def __init__(self, key: bytes, role: Role) -> None:
        self._key = _key_of(key, role)

    def __call__(self, packet: memoryview) -> memoryview | None:
        """A packet without its trailer, or None if the trailer is missing or wrong."""
        good = kernels.verify_packets(self._key, packet, len(packet))
        return packet[:-TRAILER_BYTES] if good else None

    def batch(self, batch: memoryview, packet_bytes: int) -> bool:
        """Whether all packets, of `packet_bytes` each, are signed."""
        return kernels.verify_packets(self._key, batch, packet_bytes)


def signed_at(packet: bytes | memoryview) -> tuple[int, int]:
    """Signer and time of a packet that was verified."""
    _, _, name, time_us = TRAILER_PREFIX.unpack_from(packet, len(packet) - TRAILER_BYTES)
    return name, time_us


class Freshness:
    """Tells new packets from recorded ones: within the window of our clock, and later than what was seen before.

    `one_stream`: all packets belong to one stream, whoever signs them (a publisher and those before it). Otherwise
    each signer is on its own (requests of many subscribers). Memory is bounded: when a signer is forgotten, everybody
    that is not remembered must be later than it was.
    """

    def __init__(
        self,
        *,
        window_s: float = CLOCK_WINDOW_S,
        one_stream: bool = False,
        max_signers: int = MAX_SIGNERS,
        clock_us: Callable[[], int] = wall_us,
    ) -> None:
        self._window_us = window_s * 1e6
        self._one_stream = one_stream
        self._max_signers = max_signers
        self._clock_us = clock_us
        self._newest: OrderedDict[int, int] = OrderedDict()
        self._floor = 0
        self._lock = threading.Lock()  # the threads of a request server share it

    def is_new(self, signer: int, time_us: int) -> bool:
        """Is a packet with this stamp no repeat? If so it is remembered."""
        if self._window_us and abs(time_us - self._clock_us()) > self._window_us:
            return False
        key = 0 if self._one_stream else signer
        with self._lock:
            if time_us <= self._newest.get(key, self._floor):
                return False
            self._newest[key] = time_us
            self._newest.move_to_end(key)
            if len(self._newest) > self._max_signers:
                self._floor = max(self._floor, self._newest.popitem(last=False)[1])
        return True
