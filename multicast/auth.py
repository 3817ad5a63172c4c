"""Authentication of packets, if wanted: a truncated HMAC-SHA256 after the last message block.

Plain receivers read `count` messages and never look behind them, so they still work; analysers may remark on
the extra block. The trailer looks like a message block itself: u16 length, mark, tag. It covers the whole
packet, session and sequence included, so that a recorded packet can only be repeated as what it was: a
duplicate. Costs 22 bytes per packet and one HMAC at each end (`bench/multicast.py` shows what that is).
"""

import hmac
from collections.abc import Callable

from brokerless.core.errors import ConfigError
from brokerless.multicast.protocol import LENGTH

MARK = b"BLh1"
# 128 bits, as NIST SP 800-107 has it for truncated HMACs: a forger has to guess online.
TAG_BYTES = 16
_PREFIX = LENGTH.pack(len(MARK) + TAG_BYTES) + MARK
TRAILER_BYTES = len(_PREFIX) + TAG_BYTES
# Shorter keys can be guessed offline from one packet.
MIN_KEY_BYTES = 16


def check_key(key: bytes) -> bytes:
    """Return the key, or raise ConfigError."""
    if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
        raise ConfigError("auth_key", f"must be at least {MIN_KEY_BYTES} random bytes")
    return key


def sealer(key: bytes) -> Callable[[bytes], bytes]:
    """A function that gives the trailer of a packet."""
    check_key(key)
    digest = hmac.digest

    def seal(packet: bytes) -> bytes:
        return _PREFIX + digest(key, packet, "sha256")[:TAG_BYTES]

    return seal


def opener(key: bytes) -> Callable[[memoryview], memoryview | None]:
    """A function that gives a packet without its trailer, or None if the trailer is missing or wrong."""
    check_key(key)
    digest, equal = hmac.digest, hmac.compare_digest

    def unseal(packet: memoryview) -> memoryview | None:
        body, trailer = packet[:-TRAILER_BYTES], packet[-TRAILER_BYTES:]
        if len(trailer) != TRAILER_BYTES or not body or trailer[: len(_PREFIX)] != _PREFIX:
            return None
        tag = digest(key, body, "sha256")[:TAG_BYTES]
        return body if equal(tag, trailer[len(_PREFIX) :]) else None

    return unseal
