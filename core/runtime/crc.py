"""CRC-32 as zlib computes it, from the fastest place that is installed (the extra `fast` brings isal)."""

from collections.abc import Callable

from brokerless.core.runtime.accelerated import speed

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # the same polynomial, about a quarter of the speed
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32 if speed is None else speed.crc32
