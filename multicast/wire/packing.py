"""Events into packets: equal-size runs as whole GSO batches for segmentation offload, anything else one by one.

Pure. A GSO batch is packets of one size, one after another in one buffer (only the last may be shorter): what
the kernel can cut up by itself (`UDP_SEGMENT`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from brokerless.core.frame import Frame
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.message import FIXED, describe
from brokerless.multicast.wire.moldudp64 import HEADER_BYTES, LENGTH, MAX_COUNT, MAX_DATAGRAM
from brokerless.multicast.wire.pure import STAMP, TRAILER_BYTES, fill_packets

# The kernel's limit is 64 segments per call up to Linux 6.8 and 128 since; 64 works everywhere.
MAX_SEGMENTS = 64


class GsoBatch(NamedTuple):
    """`packets` packets of `packet_bytes` each, the last one possibly shorter."""

    buffer: bytes
    packet_bytes: int
    packets: int

    def split(self) -> list[memoryview]:
        """The packets one by one."""
        view = memoryview(self.buffer)
        return [view[i : i + self.packet_bytes] for i in range(0, len(view), self.packet_bytes)]


class Run(NamedTuple):
    """Events of one topic, without keys. `head` is from `describe`; `times` is one for all, or one for each."""

    session: bytes
    first_sequence: int
    head: bytes
    seq: int
    times: int | Sequence[int]
    datas: Sequence[bytes]


def pack_run(run: Run, limit: int, sign: Signer | None = None) -> Iterator[GsoBatch]:
    """Pack events that all have one size. A packet has at most `limit` bytes, or one event if it is larger.

    GSO batches are made one by one: a buffer that is sent and freed before the next is made is memory that is
    already in the cache, which halves the time for large events.
    """
    session, first, head, seq, times, datas = run
    block = LENGTH.size + len(head) + STAMP.size + len(datas[0])
    signed = TRAILER_BYTES if sign else 0
    per_packet = min(MAX_COUNT, max(1, (limit - HEADER_BYTES - signed) // block))
    packet_bytes = HEADER_BYTES + per_packet * block + signed
    per_batch = per_packet * max(1, min(MAX_SEGMENTS, MAX_DATAGRAM // packet_bytes))
    pack = kernels.pack_gso_batch
    for start in range(0, len(datas), per_batch):
        end = min(len(datas), start + per_batch)
        buffer = pack(session, first + start, head, seq + start, times, datas, start, end, per_packet)
        if sign is not None:
            buffer = sign.batch(buffer, packet_bytes - signed)
        yield GsoBatch(buffer, min(packet_bytes, len(buffer)), -(-(end - start) // per_packet))


def singles(packets: Iterable[bytes], sign: Signer | None = None) -> Iterator[GsoBatch]:
    """Each packet as a GSO batch of its own, signed if it is to be."""
    for packet in packets:
        whole = packet + sign(packet) if sign else packet
        yield GsoBatch(whole, len(whole), 1)


def pack_blocks(
    session: bytes, first_sequence: int, blocks: Sequence[bytes], limit: int, sign: Signer | None = None
) -> Iterator[GsoBatch]:
    """Pack message blocks of any size (u16 length and message), as many per packet as fit into `limit`."""
    room = limit - (TRAILER_BYTES if sign else 0)
    return singles(fill_packets(session, first_sequence, blocks, room), sign)


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
    sign: Signer | None = None,
    *,
    lo: int = 0,
    hi: int | None = None,
    known: tuple[int | Sequence[int], Sequence[bytes]] | None = None,
) -> Iterator[GsoBatch]:
    """Pack the events number `lo` to `hi - 1` of a frame: fast if they are of one topic, faster if of one size.

    `known` are the time (or times) and datas of all of them, without keys, if the caller has them at hand.
    """
    header = frame.header
    hi = header.count if hi is None else hi
    first = header.first_offset + lo + 1
    sizes = None
    if len(header.topics) == 1 and len(header.content_types) <= 1:
        if known is not None:
            times, datas = known
            sizes = kernels.size_range(datas)
        if sizes is None and not frame.columns().keys:
            columns = frame.columns()
            times = memoryview(columns.times).cast("q")[lo:hi].tolist()
            datas = columns.datas if hi - lo == header.count else columns.datas[lo:hi]
            sizes = kernels.size_range(datas)
    if sizes is None:
        return pack_blocks(session, first, frame_blocks(frame, name, lo, hi), limit, sign)
    topic, seq, _ = header.topics[0]
    source = "" if header.source == name else header.source
    content_type = header.content_types[0] if header.content_types else ""
    head = describe(source, header.epoch, topic, content_type, 0)
    run = Run(session, first, head, seq + lo, times, datas)
    if sizes[0] == sizes[1]:
        return pack_run(run, limit, sign)
    room = limit - (TRAILER_BYTES if sign else 0)
    return singles(kernels.pack_packets(*run, 0, len(datas), room), sign)
