"""The inner loops of packing and taking apart, in Python; `_speed.c` has the same functions, many times as fast.

A *run* is events of one topic and source, without keys: their messages begin with the same bytes (`head`, see
`message.describe`). `first_sequence` and `seq` belong to `datas[start]`; `times` is one time for all, or one for
each of `datas`.
"""

import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2s
from hmac import compare_digest
from itertools import chain, pairwise, repeat

from brokerless.core.runtime.datagrams import SOL_UDP, UDP_GRO
from brokerless.multicast.wire.moldudp64 import (
    END_OF_SESSION,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    LENGTH,
    MAX_COUNT,
    MAX_SEQUENCE,
    block_ends,
)

STAMP = struct.Struct(">Qq")
# The trailer that authenticates a packet (see `auth.py`): length, mark, signer, time; then the tag.
TRAILER_MARK = b"BLh3"
TRAILER_PREFIX = struct.Struct(">H4sQQ")
# 128 bits: a forger has to guess online.
TAG_BYTES = 16
MAX_KEY_BYTES = 32
# The size of one datagram in a GSO batch, as the kernel tells it.
_SEGMENT = struct.Struct("=i")
TRAILER_BYTES = TRAILER_PREFIX.size + TAG_BYTES


def size_range(datas: Sequence[bytes]) -> tuple[int, int] | None:
    """The smallest and the largest size; None unless it is a list or tuple of bytes, and of at least one."""
    if type(datas) not in (list, tuple) or set(map(type, datas)) != {bytes}:
        return None
    sizes = set(map(len, datas))
    return min(sizes), max(sizes)


def pack_gso_batch(
    session: bytes,
    first_sequence: int,
    head: bytes,
    seq: int,
    times: int | Sequence[int],
    datas: Sequence[bytes],
    start: int,
    stop: int,
    per_packet: int,
) -> bytes:
    """The packets of a run of events of one size, `per_packet` in each (fewer in the last), as one buffer."""
    some, n = datas[start:stop], stop - start
    block_head = LENGTH.pack(len(head) + STAMP.size + len(some[0])) + head
    # Four fields per event (all that is equal, seq, time, data), of which the first begins with the packet's
    # header where a packet begins: one list for all, and one struct format packs the whole GSO batch.
    stops = [*range(0, n, per_packet), n]
    heads = [block_head] * n
    heads[0::per_packet] = [
        HEADER.pack(session, first_sequence + a, b - a) + block_head for a, b in pairwise(stops)
    ]
    fields = zip(heads, range(seq, seq + n), _stamps(times, start, stop), some, strict=True)
    return _batch_format(n, len(block_head), len(some[0]), per_packet).pack(*chain.from_iterable(fields))


def pack_packets(
    session: bytes,
    first_sequence: int,
    head: bytes,
    seq: int,
    times: int | Sequence[int],
    datas: Sequence[bytes],
    start: int,
    stop: int,
    limit: int,
) -> list[bytes]:
    """The packets of a run, one by one, each of at most `limit` bytes or with a single message."""
    some, overhead = datas[start:stop], len(head) + STAMP.size
    stamps = map(STAMP.pack, range(seq, seq + len(some)), _stamps(times, start, stop))
    lengths = map(LENGTH.pack, (overhead + len(data) for data in some))
    blocks = list(map(b"".join, zip(lengths, repeat(head), stamps, some, strict=False)))
    return fill_packets(session, first_sequence, blocks, limit)


def fill_packets(session: bytes, first_sequence: int, blocks: Sequence[bytes], limit: int) -> list[bytes]:
    """Message blocks of any kind, as many in each packet as fit into `limit` bytes, and at least one."""
    packets, start, size = [], 0, HEADER_BYTES
    for end, length in enumerate(chain(map(len, blocks), [limit])):
        if end > start and (size + length > limit or end - start == MAX_COUNT):
            header = HEADER.pack(session, first_sequence + start, end - start)
            packets.append(b"".join([header, *blocks[start:end]]))
            start, size = end, HEADER_BYTES
        size += length
    return packets


def send_lone(
    descriptors: list[int], session: bytes, sequence: int, head: bytes, seq: int, time_us: int, data: bytes
) -> int:
    """Send the packet of one event by these sockets, without waiting; returns how many of them have sent it.

    The caller sends by the others as it sends anything else. Only C has a shorter way than that.
    """
    return 0


def gso_batch_header(batch: bytes | memoryview, packet_bytes: int) -> tuple[bytes, int, int] | None:
    """Session, first sequence and messages per packet, if `batch` is whole packets of data in sequence."""
    if packet_bytes < HEADER_BYTES or not batch or len(batch) % packet_bytes:
        return None
    sessions, firsts, counts = zip(*_headers(packet_bytes).iter_unpack(batch), strict=True)
    packets, session, first, count = len(firsts), sessions[0], firsts[0], counts[0]
    if count in (HEARTBEAT, END_OF_SESSION) or not 0 < first <= MAX_SEQUENCE - packets * count:
        return None
    if sessions.count(session) != packets or counts.count(count) != packets:
        return None
    return (session, first, count) if firsts == tuple(range(first, first + packets * count, count)) else None


def unpack(
    batch: bytes | memoryview, packet_bytes: int, count: int, head: bytes, key_bytes: int
) -> tuple[Sequence[int], list[int], list[str], list[bytes]] | None:
    """Seqs, times, keys (none if `key_bytes` is 0) and datas of all messages in packets of `count` each.

    None if a message does not fit into its packet, or does not begin with `head`.
    """
    least = len(head) + STAMP.size + key_bytes
    if packet_bytes < HEADER_BYTES or not batch or len(batch) % packet_bytes or key_bytes < 0:
        return None
    if not 0 < count <= (packet_bytes - HEADER_BYTES) // (2 + least):
        return None
    at = HEADER_BYTES + LENGTH.size
    if batch[at : at + len(head)] != head:
        return None  # without a look at the others
    length = LENGTH.unpack_from(batch, HEADER_BYTES)[0]
    rest = packet_bytes - HEADER_BYTES - count * (2 + length)
    flat: list[bytes | int] = []
    step = 5 if key_bytes else 4
    if length >= least and rest >= 0:  # perhaps all have one size, as they mostly do
        shape = _packet(count, 2 + len(head), key_bytes, length - least, rest)
        flat = list(chain.from_iterable(shape.iter_unpack(batch)))
    begin = LENGTH.pack(length) + head
    if flat[0::step].count(begin) != len(batch) // packet_bytes * count:
        flat = []
        for at in range(0, len(batch), packet_bytes):
            if not _split_messages(flat, batch[at : at + packet_bytes], count, head, key_bytes):
                return None
    keys: list[str] = []
    if key_bytes:
        try:
            keys = [key.decode() for key in flat[3::step]]  # type: ignore[union-attr]
        except UnicodeDecodeError:
            return None
    return flat[1::step], flat[2::step], keys, flat[step - 1 :: step]  # type: ignore[return-value]


def mac_key(key: bytes) -> bytes:
    """The key as `sign_packets` and `verify_packets` want it; what it looks like is theirs to know."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError("a key has 1 to 32 bytes")
    return key


def _tag(key: bytes, packet: bytes | memoryview) -> bytes:
    return blake2s(packet, key=key, digest_size=TAG_BYTES).digest()


def sign_packets(key: bytes, buffer: bytes, packet_bytes: int, signer: int, time_us: int) -> bytes:
    """Packets of `packet_bytes` each (the last may be shorter), each with its trailer, one microsecond apart."""
    if packet_bytes < 1 or not buffer:
        raise ValueError("a packet has at least one byte")
    signed = []
    for i, at in enumerate(range(0, len(buffer), packet_bytes)):
        packet = buffer[at : at + packet_bytes] + TRAILER_PREFIX.pack(
            TRAILER_BYTES - 2, TRAILER_MARK, signer, time_us + i
        )
        signed += [packet, _tag(key, packet)]
    return b"".join(signed)


def verify_packets(key: bytes, batch: bytes | memoryview, packet_bytes: int) -> bool:
    """Whether `batch` is whole packets of `packet_bytes` each, all with a valid trailer."""
    if packet_bytes <= TRAILER_BYTES or not batch or len(batch) % packet_bytes:
        return False
    begin = TRAILER_PREFIX.pack(TRAILER_BYTES - 2, TRAILER_MARK, 0, 0)[:6]
    for end in range(packet_bytes, len(batch) + 1, packet_bytes):
        if batch[end - TRAILER_BYTES : end - TRAILER_BYTES + len(begin)] != begin:
            return False
        tag = _tag(key, batch[end - packet_bytes : end - TAG_BYTES])
        if not compare_digest(tag, batch[end - TAG_BYTES : end]):
            return False
    return True


def wait_next(
    socks: tuple[socket.socket, ...],
    others: tuple[int, ...],
    wait_ns: int,
    spin_ns: int,
    buffer: bytearray,
    session: bytes,
    expected: int,
    head: bytes,
) -> tuple[int, int, int, tuple[int, int, bytes] | None] | None:
    """Wait until one of the non-blocking sockets or other descriptors is ready, and read one datagram (or GSO batch).

    The first `spin_ns` it looks again and again, then it sleeps. Returns which socket was read, the length, the size of
    one datagram in it, and seq, time and data of the message, if it is the packet of this session with sequence
    `expected`, with one message that begins with `head` and nothing behind that. None if nothing was read: the time is
    over, or something else is ready.
    """
    descriptors = [sock.fileno() for sock in socks]
    poll = select.poll()
    for fd in (*descriptors, *others):
        if fd >= 0:  # otherwise it was closed meanwhile
            poll.register(fd, select.POLLIN)
    until = time.monotonic_ns() + min(spin_ns, wait_ns)
    while not (ready := {fd for fd, _ in poll.poll(0)}) and time.monotonic_ns() < until:
        pass
    if not ready and spin_ns < wait_ns:
        ready = {fd for fd, _ in poll.poll((wait_ns - spin_ns) / 1e6)}
    for line, sock in enumerate(socks):
        if descriptors[line] not in ready or sock.fileno() != descriptors[line]:
            continue
        try:
            size, control, _, _ = sock.recvmsg_into((buffer,), socket.CMSG_SPACE(_SEGMENT.size))
        except OSError:
            continue  # nothing there, or an ICMP error of an earlier packet
        packet_bytes = size or 1
        for level, kind, raw in control:
            if level == SOL_UDP and kind == UDP_GRO and (segment := _SEGMENT.unpack(raw)[0]) > 0:
                packet_bytes = min(packet_bytes, segment)
        rest = size - HEADER_BYTES - LENGTH.size - len(head) - STAMP.size
        if rest >= 0 and packet_bytes == size and head and 0 < expected < MAX_SEQUENCE:
            begin = HEADER.pack(session, expected, 1) + LENGTH.pack(len(head) + STAMP.size + rest) + head
            seq, stamp = STAMP.unpack_from(buffer, len(begin))
            if buffer[: len(begin)] == begin and seq < MAX_SEQUENCE:
                return line, size, packet_bytes, (seq, stamp, bytes(buffer[size - rest : size]))
        return line, size, packet_bytes, None
    return None


def _split_messages(
    flat: list[bytes | int], packet: bytes | memoryview, count: int, head: bytes, key_bytes: int
) -> bool:
    """Add the fields of one packet's messages, one by one; False if one is not as it should be."""
    ends = block_ends(packet, count)
    if ends is None:
        return False
    key_at = 2 + len(head) + STAMP.size
    for start, end in pairwise([HEADER_BYTES, *ends]):
        block = bytes(packet[start:end])
        if len(block) < key_at + key_bytes or not block.startswith(head, 2):
            return False
        flat += (head, *STAMP.unpack_from(block, 2 + len(head)))
        if key_bytes:
            flat.append(block[key_at : key_at + key_bytes])
        flat.append(block[key_at + key_bytes :])
    return True


def _stamps(times: int | Sequence[int], start: int, stop: int) -> Iterable[int]:
    return repeat(times, stop - start) if isinstance(times, int) else times[start:stop]


# Shapes in use at one time are few; a hostile sender can make at most 512 of each stay.
@lru_cache(maxsize=512)
def _headers(packet_bytes: int) -> struct.Struct:
    return struct.Struct(f">10sQH{packet_bytes - HEADER_BYTES}x")


@lru_cache(maxsize=512)
def _packet(messages: int, head_bytes: int, key_bytes: int, data_bytes: int, rest: int) -> struct.Struct:
    """One packet of messages that all have the same lengths, and what is behind them."""
    key = f"{key_bytes}s" if key_bytes else ""
    return struct.Struct(f">{HEADER_BYTES}x" + f"{head_bytes}sQq{key}{data_bytes}s" * messages + f"{rest}x")


@lru_cache(maxsize=512)
def _batch_format(messages: int, head_bytes: int, data_bytes: int, per_packet: int) -> struct.Struct:
    """So many equal messages, in packets of `per_packet`; only the last packet may have fewer."""
    first, other = f"{HEADER_BYTES + head_bytes}sQq{data_bytes}s", f"{head_bytes}sQq{data_bytes}s"
    whole, rest = divmod(messages, per_packet)
    return struct.Struct(
        ">" + (first + other * (per_packet - 1)) * whole + (first + other * (rest - 1) if rest else "")
    )
