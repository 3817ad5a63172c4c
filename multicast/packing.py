"""Events into packets: equal-size runs as whole trains for segmentation offload, anything else one by one.

Pure. A train is packets of one size, one after another in one buffer (only the last may be shorter): what
the kernel can cut up by itself (`UDP_SEGMENT`).
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat
from operator import add
from typing import NamedTuple

from brokerless.core.frame import Frame
from brokerless.multicast.message import FIXED, STAMP, describe
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
    times: Iterable[int],
    datas: Sequence[bytes],
    limit: int,
    seal: Seal | None = None,
) -> Iterator[Train]:
    """Pack events of one topic, without keys, and all of one size. `head` is from `describe`.

    A packet has at most `limit` bytes, or one event if a single one is larger. Trains are made one by one: a
    buffer that is sent and freed before the next is made is memory that is already in the cache, which
    halves the time for large events.
    """
    total = len(datas)
    length = len(head) + STAMP.size + len(datas[0])
    sealed = len(seal(b"")) if seal else 0
    per_packet = min(MAX_COUNT, max(1, (limit - HEADER_BYTES - sealed) // (2 + length)))
    packet_bytes = HEADER_BYTES + per_packet * (2 + length) + sealed
    per_train = per_packet * max(1, min(MAX_SEGMENTS, MAX_DATAGRAM // packet_bytes))
    # Four fields per event (all that is equal, seq, time, data), of which the first begins with the packet's
    # header where a packet begins: one list for all, and one struct format packs a whole train of it.
    block_head = LENGTH.pack(length) + head
    sequences = range(first_sequence, first_sequence + total, per_packet)
    headers = list(map(HEADER.pack, repeat(session), sequences, repeat(per_packet)))
    headers[-1] = HEADER.pack(session, sequences[-1], first_sequence + total - sequences[-1])
    heads = [block_head] * total
    heads[0::per_packet] = map(add, headers, repeat(block_head))
    fields = list(chain.from_iterable(zip(heads, range(seq, seq + total), times, datas, strict=True)))
    shape = (len(block_head), len(datas[0]), per_packet)
    for start in range(0, total, per_train):
        end = min(total, start + per_train)
        packets = -(-(end - start) // per_packet)
        if seal is None:
            buffer = _shape(end - start, *shape).pack(*fields[4 * start : 4 * end])
        else:
            stops = [*range(start, end, per_packet), end]
            ones = [_shape(b - a, *shape).pack(*fields[4 * a : 4 * b]) for a, b in pairwise(stops)]
            buffer = b"".join(chain.from_iterable(zip(ones, map(seal, ones), strict=True)))
        yield Train(buffer, min(packet_bytes, len(buffer)), packets)


@lru_cache(maxsize=256)
def _shape(messages: int, head_bytes: int, data_bytes: int, per_packet: int) -> struct.Struct:
    """So many equal messages, in packets of `per_packet`; only the last packet may have fewer."""
    first, other = f"{HEADER_BYTES + head_bytes}sQq{data_bytes}s", f"{head_bytes}sQq{data_bytes}s"
    whole, rest = divmod(messages, per_packet)
    return struct.Struct(
        ">" + (first + other * (per_packet - 1)) * whole + (first + other * (rest - 1) if rest else "")
    )


def pack_blocks(
    session: bytes, first_sequence: int, blocks: Sequence[bytes], limit: int, seal: Seal | None = None
) -> Iterator[Train]:
    """Pack message blocks of any size (u16 length and message), as many per packet as fit into `limit`."""
    sealed = len(seal(b"")) if seal else 0
    room = limit - HEADER_BYTES - sealed
    ends = list(accumulate(map(len, blocks)))
    start, done = 0, 0
    while start < len(blocks):
        stop = min(max(start + 1, bisect_right(ends, done + room)), start + MAX_COUNT)
        header = HEADER.pack(session, first_sequence + start, stop - start)
        packet = b"".join([header, *blocks[start:stop]])
        if seal:
            packet += seal(packet)
        yield Train(packet, len(packet), 1)
        start, done = stop, ends[stop - 1]


def encode_block(
    source: str,
    epoch: int,
    topic: str,
    seq: int,
    time: int,
    data: bytes,
    content_type: str = "",
    key: str = "",
) -> bytes:
    """One event as a message block. `source` is empty when it is the session's name."""
    key_bytes = key.encode()
    head = describe(source, epoch, topic, content_type, len(key_bytes))
    length = len(head) + STAMP.size + len(key_bytes) + len(data)
    return b"".join((LENGTH.pack(length), head, STAMP.pack(seq, time), key_bytes, data))


def message_overhead(source: str, topic: str, content_type: str, key: str) -> int:
    """Bytes of a message beside its data (`source` empty when it is the session's name)."""
    return FIXED.size + STAMP.size + sum(len(text.encode()) for text in (source, topic, content_type, key))


def frame_blocks(frame: Frame, name: str, lo: int, hi: int) -> list[bytes]:
    """The events number `lo` to `hi - 1` of a frame as message blocks. `name` is the session's."""
    header, columns = frame.header, frame.columns()
    source = "" if header.source == name else header.source
    times = memoryview(columns.times).cast("q")[lo:hi]
    datas = columns.datas[lo:hi]
    if columns.topic_index:
        topics: Iterable[str] = frame.topic_column()[lo:hi]
        seqs: Iterable[int] = frame.seqs()[lo:hi]
    else:
        topic, first, _ = header.topics[0]
        topics, seqs = repeat(topic, hi - lo), range(first + lo, first + hi)
    contents = frame.content_type_column()[lo:hi] if header.content_types else repeat("", hi - lo)
    keys: Iterable[str] = columns.keys[lo:hi] if columns.keys else repeat("", hi - lo)
    return list(
        map(encode_block, repeat(source), repeat(header.epoch), topics, seqs, times, datas, contents, keys)
    )


def pack_frame(
    session: bytes,
    name: str,
    frame: Frame,
    limit: int,
    seal: Seal | None = None,
    *,
    lo: int = 0,
    hi: int | None = None,
    known: tuple[Sequence[int], Sequence[bytes]] | None = None,
) -> Iterator[Train]:
    """Pack the events number `lo` to `hi - 1` of a frame: fast if they are of one topic and of one size.

    `known` are the times and datas of all of them, without keys, if the caller has them at hand.
    """
    header = frame.header
    hi = header.count if hi is None else hi
    first = header.first_offset + lo + 1
    if known is not None and len(header.topics) == 1:
        times: Iterable[int] = known[0]
        datas, plain = known[1], True
    else:
        columns = frame.columns()
        times = memoryview(columns.times).cast("q")[lo:hi]
        datas = columns.datas if hi - lo == header.count else columns.datas[lo:hi]
        plain = len(header.topics) == 1 and not columns.keys
    if plain and len(header.content_types) <= 1 and len(set(map(len, datas))) == 1:
        topic, seq, _ = header.topics[0]
        source = "" if header.source == name else header.source
        content_type = header.content_types[0] if header.content_types else ""
        head = describe(source, header.epoch, topic, content_type, 0)
        return pack_run(session, first, head, seq + lo, times, datas, limit, seal)
    return pack_blocks(session, first, frame_blocks(frame, name, lo, hi), limit, seal)
