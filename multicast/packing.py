"""Events into packets: equal-size runs as whole trains for segmentation offload, anything else one by one.

Pure. A train is packets of one size, one after another in one buffer (only the last may be shorter): what
the kernel can cut up by itself (`UDP_SEGMENT`).
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, repeat
from operator import add
from typing import NamedTuple

from brokerless.core.event import Event
from brokerless.multicast.message import STAMP, describe
from brokerless.multicast.protocol import HEADER, HEADER_BYTES, LENGTH, MAX_COUNT, MAX_DATAGRAM

# The kernel's limit is 64 segments per call up to Linux 6.8 and 128 since; 64 works everywhere.
MAX_SEGMENTS = 64

# Gives the trailer that authenticates a packet; always of the same size.
Seal = Callable[[bytes], bytes]


class Train(NamedTuple):
    """`packets` packets of `packet_bytes` each, the last one possibly shorter."""

    buffer: bytes
    packet_bytes: int
    packets: int

    def split(self) -> list[memoryview]:
        """The packets one by one."""
        view = memoryview(self.buffer)
        return [view[i : i + self.packet_bytes] for i in range(0, len(view), self.packet_bytes)]


def pack_run(
    session: bytes,
    first_sequence: int,
    head: bytes,
    seq: int,
    times: Sequence[int],
    datas: Sequence[bytes],
    limit: int,
    seal: Seal | None = None,
) -> list[Train]:
    """Pack events of one topic, without keys, and all of one size. `head` is from `describe`.

    A packet has at most `limit` bytes, or one event if a single one is larger.
    """
    total = len(datas)
    length = len(head) + STAMP.size + len(datas[0])
    sealed = len(seal(b"")) if seal else 0
    per_packet = min(MAX_COUNT, max(1, (limit - HEADER_BYTES - sealed) // (2 + length)))
    packet_bytes = HEADER_BYTES + per_packet * (2 + length) + sealed
    per_train = per_packet * max(1, min(MAX_SEGMENTS, MAX_DATAGRAM // packet_bytes))
    block_head = LENGTH.pack(length) + head
    # One list of pieces for all: [header + head, stamp, data], [head, stamp, data], … and join the parts of it.
    heads = [block_head] * total
    headers = [
        HEADER.pack(session, first_sequence + i, min(per_packet, total - i))
        for i in range(0, total, per_packet)
    ]
    heads[0::per_packet] = map(add, headers, repeat(block_head))
    stamps = map(STAMP.pack, range(seq, seq + total), times)
    pieces = list(chain.from_iterable(zip(heads, stamps, datas, strict=True)))
    trains = []
    join = b"".join
    for start in range(0, total, per_train):
        end = min(total, start + per_train)
        packets = -(-(end - start) // per_packet)
        if seal is None:
            buffer = join(pieces[3 * start : 3 * end])
        else:
            ones = [join(pieces[3 * i : 3 * min(end, i + per_packet)]) for i in range(start, end, per_packet)]
            buffer = join(chain.from_iterable(zip(ones, map(seal, ones), strict=True)))
        trains.append(Train(buffer, min(packet_bytes, len(buffer)), packets))
    return trains


def pack_blocks(
    session: bytes, first_sequence: int, blocks: Sequence[bytes], limit: int, seal: Seal | None = None
) -> list[Train]:
    """Pack message blocks of any size (u16 length and message), as many per packet as fit into `limit`."""
    sealed = len(seal(b"")) if seal else 0
    room = limit - HEADER_BYTES - sealed
    ends = list(accumulate(map(len, blocks)))
    trains = []
    start, done = 0, 0
    while start < len(blocks):
        stop = min(max(start + 1, bisect_right(ends, done + room)), start + MAX_COUNT)
        header = HEADER.pack(session, first_sequence + start, stop - start)
        packet = b"".join([header, *blocks[start:stop]])
        if seal:
            packet += seal(packet)
        trains.append(Train(packet, len(packet), 1))
        start, done = stop, ends[stop - 1]
    return trains


def encode_block(event: Event, name: str) -> bytes:
    """One event as a message block. `name` is the session's, and stands for a source of the same name."""
    key = event.key.encode()
    source = "" if event.source == name else event.source
    head = describe(source, event.epoch, event.topic, event.content_type, len(key))
    length = len(head) + STAMP.size + len(key) + len(event.data)
    return b"".join((LENGTH.pack(length), head, STAMP.pack(event.seq, event.time), key, event.data))


def block_bytes(source: str, topic: str, content_type: str, key: str, data: bytes) -> int:
    """How long the block of such an event is, its length field included (`source` empty if implied)."""
    texts = (source, topic, content_type, key)
    return 2 + _FIXED_BYTES + sum(len(text.encode()) for text in texts) + len(data)


_FIXED_BYTES = struct.calcsize(">BBBBHQ") + STAMP.size


def pack_events(
    session: bytes, name: str, events: Sequence[Event], limit: int, seal: Seal | None = None
) -> list[Train]:
    """Pack consecutive events, by the fast way if they are of one topic and size."""
    one = events[0]
    if _uniform(events):
        source = "" if one.source == name else one.source
        head = describe(source, one.epoch, one.topic, one.content_type, 0)
        times = [event.time for event in events]
        datas = [event.data for event in events]
        return pack_run(session, one.offset + 1, head, one.seq, times, datas, limit, seal)
    blocks = [encode_block(event, name) for event in events]
    return pack_blocks(session, one.offset + 1, blocks, limit, seal)


def _uniform(events: Sequence[Event]) -> bool:
    one = events[0]
    size = len(one.data)
    return all(
        event.topic == one.topic
        and len(event.data) == size
        and not event.key
        and event.content_type == one.content_type
        for event in events
    )
