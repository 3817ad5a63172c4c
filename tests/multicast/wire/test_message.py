"""Events inside message blocks."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.core.event import Event
from brokerless.multicast.wire import message, pure
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.message import decode, decode_gso_batch, parse
from brokerless.multicast.wire.moldudp64 import HEADER, MAX_DATAGRAM, block_ends
from brokerless.multicast.wire.packing import MAX_SEGMENTS, GsoBatch, encode_block, pack_blocks, pack_frame
from brokerless.multicast.wire.pure import TRAILER_BYTES

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=20)
TOPIC = TEXT.filter(bool)
EVENTS = st.lists(
    st.tuples(
        TOPIC,
        st.integers(0, 2**64 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=300),
        TEXT,
        TEXT,
        st.integers(0, 2**64 - 1),
        TEXT,
    ),
    min_size=1,
    max_size=30,
)
SESSION = b"NAME000001"


@given(EVENTS, st.integers(1, 2**62), st.integers(150, 3000))
def test_any_events_come_back(rows: list[tuple], first: int, limit: int) -> None:  # type: ignore[type-arg]
    """Whatever an event has, and however events are packed, the receiver rebuilds them exactly."""
    expected, blocks = [], []
    for i, (topic, seq, time, data, content_type, key, epoch, source) in enumerate(rows):
        blocks.append(encode_block(source, epoch, topic, seq, time, data, content_type, key))
        name = source or "NAME"
        expected.append(Event(name, epoch, first - 1 + i, topic, seq, time, data, content_type, key))
    got: list[Event] = []
    for batch in pack_blocks(SESSION, first, blocks, limit):
        session, sequence, count = HEADER.unpack_from(batch.buffer)
        assert session == SESSION
        assert sequence == first + len(got)
        assert len(batch.buffer) <= limit or count == 1
        columns = decode(batch.buffer, sequence, count)
        assert columns is not None
        got += columns.events("NAME", "?", 0)
    assert got == expected


@given(
    count=st.integers(1, 400),
    size=st.integers(0, 400),
    limit=st.integers(150, 9000),
    signed=st.booleans(),
    content_type=TEXT,
)
def test_a_run_is_packed_and_read_as_batches(
    count: int, size: int, limit: int, signed: bool, content_type: str
) -> None:
    """Equal events become GSO batches, and reading one at once gives what reading single packets gives."""
    journal = MemoryJournal(source="src")
    datas = [i.to_bytes(4, "big") * (size // 4 + 1) for i in range(count)]
    datas = [data[:size] for data in datas]
    journal.append_many("topic", datas, content_type)
    frame = journal.read(0).frames[0]
    sign = Signer(b"k" * 16, "group") if signed else None
    trailer = TRAILER_BYTES if signed else 0
    sequence = 1
    whole: list[Event] = []
    single: list[Event] = []
    for batch in pack_frame(SESSION, "src", frame, limit, sign):
        packets = batch.split()
        assert len(packets) == batch.packets <= MAX_SEGMENTS
        assert len(batch.buffer) <= MAX_DATAGRAM or batch.packets == 1
        assert {len(p) for p in packets[:-1]} <= {batch.packet_bytes}
        assert len(packets[-1]) <= batch.packet_bytes
        _, first, per_packet = HEADER.unpack_from(batch.buffer)
        assert first == sequence
        full = batch.buffer[: len(batch.buffer) // batch.packet_bytes * batch.packet_bytes]
        columns = decode_gso_batch(full, batch.packet_bytes, first, per_packet)
        assert columns is not None
        whole += columns.events("src", "?", 0)
        for packet in packets:
            _, at, n = HEADER.unpack_from(packet)
            one = decode(packet[: len(packet) - trailer], at, n)
            assert one is not None
            single += one.events("src", "?", 0)
            sequence += n
        if len(whole) < len(single):
            whole += single[len(whole) :]
    assert single == whole == frame.events()


@given(st.binary(max_size=400), st.integers(0, 30))
def test_any_bytes_are_read_or_refused(data: bytes, count: int) -> None:
    """Hostile packets never raise: they are None, or so many messages as they say."""
    packet = HEADER.pack(SESSION, 1, count) + data
    columns = decode(packet, 1, count)
    if columns is None:
        assert block_ends(packet, count) is None
    else:
        assert len(columns.datas) == count
        assert len(columns.events("a", "b", 0)) == count
    parse(data)


@given(EVENTS, st.data())
def test_flipped_bits_never_raise(rows: list[tuple], data: st.DataObject) -> None:  # type: ignore[type-arg]
    """A packet of ours with some bytes changed is still read without an exception."""
    blocks = [encode_block(r[7], r[6], r[0], r[1], r[2], r[3], r[4], r[5]) for r in rows]
    batch = next(pack_blocks(SESSION, 1, blocks, 60_000))
    raw = bytearray(batch.buffer)
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(20, len(raw) - 1))] = data.draw(st.integers(0, 255))
    columns = decode(bytes(raw), 1, len(blocks))
    if columns is not None:
        assert len(columns.events("a", "b", 0)) == len(blocks)


def test_foreign_messages_are_opaque_and_keep_their_place() -> None:
    """Foreign and own messages in one packet: each is what it is."""
    ours = encode_block("", 1, "t", 5, 6, b"data")
    foreign = struct.pack(">H", 5) + b"Shalt"
    batch: GsoBatch = next(pack_blocks(SESSION, 10, [ours, foreign, ours], 1400))
    columns = decode(batch.buffer, 10, 3)
    assert columns is not None
    events = columns.events("NAME", "NAME000001", 77)
    assert [e.source for e in events] == ["NAME", "NAME000001", "NAME"]
    assert events[1] == Event("NAME000001", 0, 10, "NAME000001", 10, 77, b"Shalt")
    opaque = decode(batch.buffer, 10, 3, opaque=True)
    assert opaque is not None
    assert [len(d) for d in opaque.datas] == [len(ours) - 2, 5, len(ours) - 2]


def test_a_part_of_columns_is_that_part() -> None:
    """What a receiver cuts off because it had it already does not shift anything."""
    blocks = [encode_block("", 1, "t" * (1 + i % 2), i, i, b"%d" % i, key="k") for i in range(10)]
    batch = next(pack_blocks(SESSION, 1, blocks, 1400))
    columns = decode(batch.buffer, 1, 10)
    assert columns is not None
    assert columns.part(3, 4).events("N", "?", 0) == columns.events("N", "?", 0)[3:7]


def test_the_caches_are_bounded() -> None:
    """A hostile sender cannot fill memory with shapes and descriptions."""
    for i in range(6000):
        decode(
            next(pack_blocks(SESSION, 1, [encode_block("", i, "t", 0, 0, b"x" * (i % 700))], 1400)).buffer,
            1,
            1,
        )
    assert pure._packet.cache_info().currsize <= 512
    assert message._parse_cached.cache_info().currsize <= 4096
