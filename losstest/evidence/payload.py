"""What an event of the loss test carries: enough to know it again, and to notice damage and mixed-up bodies."""

import struct
import zlib

import msgspec

_HEAD = struct.Struct("<4sIQQ")  # magic, producer, n, run
_CRC = struct.Struct("<I")
MAGIC = b"bLt1"
PROBE = 0xFFFF_FFFF  # producer number of a probe: asks "are you there?", is no event of the run
MIN_SIZE = _HEAD.size + _CRC.size  # 28 bytes
# A payload may be carried inside something else (a datagram with a header, a packet with many of them):
# whoever looks for it searches the magic and reads this many bytes.
HEAD_SIZE = _HEAD.size


class Tag(msgspec.Struct, frozen=True, gc=False):
    """Which event a payload is."""

    run: int
    producer: int
    n: int

    @property
    def probe(self) -> bool:
        """True for a probe, which is no event of the run."""
        return self.producer == PROBE


def encode(run: int, producer: int, n: int, size: int) -> bytes:
    """The payload of event `n`, padded to `size` bytes (at least MIN_SIZE)."""
    body = _HEAD.pack(MAGIC, producer, n, run) + _padding(run, n, max(0, size - MIN_SIZE))
    return body + _CRC.pack(zlib.crc32(body))


def _padding(run: int, n: int, size: int) -> bytes:
    """Bytes that are different for every event, and never contain the magic: mixed-up bodies are noticed."""
    pattern = (
        (n + 1) * 0x9E37_79B9_7F4A_7C15 ^ run
    ) | 0x8080_8080_8080_8080  # no byte is ASCII, as the magic is
    return ((pattern & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") * (size // 8 + 1))[:size]


def decode(data: bytes) -> Tag | None:
    """The tag of a payload, or None if it is damaged or is not one."""
    if len(data) < MIN_SIZE or not data.startswith(MAGIC):
        return None
    if zlib.crc32(memoryview(data)[:-4]) != _CRC.unpack_from(data, len(data) - 4)[0]:
        return None
    _, producer, n, run = _HEAD.unpack_from(data)
    return Tag(run, producer, n)


def find(packet: bytes, run: int) -> list[int]:
    """The numbers of all events of `run` that a packet carries, probes left out: for the relay."""
    found = []
    at = packet.find(MAGIC)
    while at >= 0 and at + HEAD_SIZE <= len(packet):
        _, producer, n, that_run = _HEAD.unpack_from(packet, at)
        if that_run == run and producer != PROBE:
            found.append(n)
        at = packet.find(MAGIC, at + HEAD_SIZE)
    return found
