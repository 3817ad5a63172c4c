"""How an Event travels inside one MoldUDP64 message block, and how many of them are read at once.

A message says everything about its event but the offset, which is the sequence number minus one, so that
message N is the same bytes however it was packed and however often it is sent:

    u8   0xB1         version 1 of this layout; anything else is a foreign message, and opaque
    u8   S            length of the source; 0: it is the name in the session
    u8   T            length of the topic
    u8   C            length of the content type
    u16  K            length of the key
    u64  epoch
    S    source       UTF-8, as are topic, content type and key
    T    topic
    C    content type
    u64  seq
    i64  time         microseconds since 1970 UTC
    K    key
         data         the rest

All that is equal in a run of events of one topic comes first. So a reader takes a run apart with one
struct format, compares that part as one field, and parses it once per run, not once per event.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from brokerless.core.errors import InvalidEvent
from brokerless.core.event import Event
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.moldudp64 import HEADER_BYTES, LENGTH, block_ends
from brokerless.multicast.wire.pure import STAMP

VERSION = 0xB1
FIXED = struct.Struct(">BBBBHQ")
# Epoch, source, topic, content type and lengths of one message; what `describe` makes and `parse` reads.
MAX_KEY_BYTES = 0xFFFF


class Described(NamedTuple):
    """What the first part of a message says, and where its second part begins (within the message)."""

    source: str
    epoch: int
    topic: str
    content_type: str
    key_bytes: int
    size: int


@lru_cache(maxsize=4096)  # one entry per topic in use; 4,096 of them are about 1 MB
def describe(source: str, epoch: int, topic: str, content_type: str, key_bytes: int) -> bytes:
    """The first part of a message. `source` is empty when it is the session's name."""
    parts = [source.encode(), topic.encode(), content_type.encode()]
    for field, part in zip(("source", "topic", "content_type"), parts, strict=True):
        if len(part) > 0xFF:
            raise InvalidEvent(field, f"has {len(part)} bytes, a multicast message has room for 255")
    if key_bytes > MAX_KEY_BYTES:
        raise InvalidEvent("key", f"has {key_bytes} bytes, the limit is {MAX_KEY_BYTES}")
    sizes = [len(part) for part in parts]
    return FIXED.pack(VERSION, *sizes, key_bytes, epoch) + b"".join(parts)


def parse(message: bytes | memoryview) -> Described | None:
    """Read the first part of a message, or None if this is not one of ours."""
    if len(message) < FIXED.size or message[0] != VERSION:
        return None
    _, s, t, c, key_bytes, epoch = FIXED.unpack_from(message)
    size = FIXED.size + s + t + c
    if not t or len(message) < size + STAMP.size + key_bytes:
        return None
    text = bytes(message[FIXED.size : size])
    try:
        parts = text[:s].decode(), text[s : s + t].decode(), text[s + t :].decode()
    except UnicodeDecodeError:
        return None
    return Described(parts[0], epoch, parts[1], parts[2], key_bytes, size)


_parse_cached = lru_cache(maxsize=4096)(parse)


def _describe_block(block: bytes | memoryview) -> Described | None:
    """`parse` by way of the cache: only the bytes up to the second part are its key."""
    if len(block) < FIXED.size + STAMP.size or block[0] != VERSION:
        return None
    size = FIXED.size + block[1] + block[2] + block[3]
    key_bytes = block[4] << 8 | block[5]
    rest = size + STAMP.size + key_bytes
    if len(block) < rest:
        return None
    # The cached parser wants to see a whole message: give it one with empty stamps and key.
    return _parse_cached(bytes(block[:size]) + bytes(STAMP.size + key_bytes))


class Columns(NamedTuple):
    """A run of messages, taken apart. `described` has one entry for all, or one for each."""

    first: int
    described: Sequence[Described | None]
    seqs: Sequence[int]
    times: Sequence[int]
    keys: Sequence[str]
    datas: Sequence[bytes]
    wire_bytes: int  # what it was received as

    def part(self, skip: int, take: int) -> "Columns":
        """Without the first `skip` messages, and only `take` of them."""
        end = skip + take
        described = self.described if len(self.described) == 1 else self.described[skip:end]
        return Columns(
            self.first + skip,
            described,
            self.seqs[skip:end],
            self.times[skip:end],
            self.keys[skip:end],
            self.datas[skip:end],
            self.wire_bytes * take // len(self.datas),
        )

    def events(self, source: str, foreign: str, now_us: int) -> list[Event]:
        """The events; `source` is the session's name.

        A foreign message is an event of source and topic `foreign`, with the time `now_us`.
        """
        offsets = range(self.first - 1, self.first - 1 + len(self.datas))
        if len(self.described) == 1 and self.described[0] is not None:
            one = self.described[0]
            name = one.source or source
            if not self.keys and not one.content_type:
                if len(offsets) == 1:  # it came alone, and somebody waits for it
                    (seq,), (time,), (data,) = self.seqs, self.times, self.datas
                    return [Event(name, one.epoch, self.first - 1, one.topic, seq, time, data)]
                made = map(
                    Event,
                    repeat(name),
                    repeat(one.epoch),
                    offsets,
                    repeat(one.topic),
                    self.seqs,
                    self.times,
                    self.datas,
                )
                return list(made)
            keys = self.keys or repeat("")
            return [
                Event(name, one.epoch, o, one.topic, s, t, d, one.content_type, k)
                for o, s, t, d, k in zip(offsets, self.seqs, self.times, self.datas, keys, strict=False)
            ]
        every = self.described if len(self.described) != 1 else [self.described[0]] * len(self.datas)
        keys = self.keys or repeat("")
        return [
            Event(foreign, 0, o, foreign, o, now_us, d)
            if one is None
            else Event(one.source or source, one.epoch, o, one.topic, s, t, d, one.content_type, k)
            for o, one, s, t, d, k in zip(
                offsets, every, self.seqs, self.times, self.datas, keys, strict=False
            )
        ]


def decode_gso_batch(
    batch: bytes | memoryview, packet_bytes: int, first: int, per_packet: int
) -> Columns | None:
    """Take apart packets whose messages all have one source, epoch, topic and content type; None if they do not.

    `batch` is whole packets of `packet_bytes` each, with `per_packet` messages each, from sequence `first`.
    Bytes after the last message of a packet are skipped.
    """
    if len(batch) < HEADER_BYTES + LENGTH.size:
        return None
    start = HEADER_BYTES + LENGTH.size
    block = memoryview(batch)[start : start + LENGTH.unpack_from(batch, HEADER_BYTES)[0]]
    described = _describe_block(block)
    if described is None:
        return None
    parts = kernels.unpack(
        batch, packet_bytes, per_packet, bytes(block[: described.size]), described.key_bytes
    )
    return None if parts is None else Columns(first, (described,), *parts, len(batch))


def decode_packet(packet: bytes | memoryview, first: int, count: int, ends: Sequence[int]) -> Columns:
    """Take one packet apart, whatever its messages are; `ends` is from `block_ends`."""
    view = memoryview(packet)
    described: list[Described | None] = []
    seqs: list[int] = []
    times: list[int] = []
    keys: list[str] = []
    datas: list[bytes] = []
    start = HEADER_BYTES
    for end in ends[:count]:
        block = view[start + 2 : end]
        start = end
        one = _describe_block(block)
        key = ""
        if one is not None and one.key_bytes:
            try:
                at = one.size + STAMP.size
                key = bytes(block[at : at + one.key_bytes]).decode()
            except UnicodeDecodeError:
                one = None
        described.append(one)
        if one is None:
            seqs.append(0)
            times.append(0)
            datas.append(bytes(block))
        else:
            seq, time = STAMP.unpack_from(block, one.size)
            seqs.append(seq)
            times.append(time)
            datas.append(bytes(block[one.size + STAMP.size + one.key_bytes :]))
        keys.append(key)
    return Columns(first, described, seqs, times, keys if any(keys) else (), datas, len(packet))


def decode(packet: bytes | memoryview, first: int, count: int, *, opaque: bool = False) -> Columns | None:
    """Take one packet apart by the fast way or the general one; None if it is shorter than it says.

    `opaque`: do not look for events in the messages.
    """
    if opaque:
        ends = block_ends(packet, count)
        if ends is None:
            return None
        starts = [HEADER_BYTES, *ends[:-1]]
        datas = [bytes(packet[start + 2 : end]) for start, end in zip(starts, ends, strict=True)]
        nothing = [0] * count
        return Columns(first, [None] * count, nothing, nothing, (), datas, len(packet))
    columns = decode_gso_batch(packet, len(packet), first, count) if count else None
    if columns is not None:
        return columns
    ends = block_ends(packet, count)
    return None if ends is None else decode_packet(packet, first, count, ends)
