"""From datagrams to the receiver."""

import random

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.decode import PacketDecoder
from brokerless.multicast.receive.reorder import Receiver
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.message import Columns
from brokerless.multicast.wire.moldudp64 import wire_session
from brokerless.multicast.wire.packing import pack_frame

KEY = b"k" * 16


def make(key: bytes | None = None) -> PacketDecoder:
    receiver: Receiver[Columns] = Receiver(
        start=lambda _: 1, policy=RepairPolicy(), servers=1, random=random.random, session="T"
    )
    return PacketDecoder(receiver, auth_key=key)


def offsets(decoder: PacketDecoder) -> list[int]:
    found: list[int] = []
    for _, item in decoder.receiver.take():
        assert isinstance(item, Columns)
        found += range(item.first - 1, item.first - 1 + len(item.datas))
    return found


@given(
    count=st.integers(1, 600),
    size=st.integers(0, 200),
    signed=st.booleans(),
    cut=st.integers(0, 3),
)
def test_a_train_is_the_same_as_its_packets(count: int, size: int, signed: bool, cut: int) -> None:
    """Whole GSO batches, GSO batches without their first packets, and packets one by one give the same messages."""
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"x" * size] * count)
    session = wire_session("T", journal.epoch)
    sign = Signer(KEY, "group") if signed else None
    whole, single = make(KEY if signed else None), make(KEY if signed else None)
    for batch in pack_frame(session, "T", journal.read(0).frames[0], 1400, sign):
        skip = min(cut, batch.packets - 1) * batch.packet_bytes
        for packet in batch.split():
            single.packet(packet, 0.0)
        if skip:
            whole.batch(batch.buffer[skip:], batch.packet_bytes, 0.0)
            whole.batch(batch.buffer[:skip], batch.packet_bytes, 0.0)
        whole.batch(batch.buffer, batch.packet_bytes, 0.0)
    assert offsets(single) == offsets(whole) == list(range(count))
    assert whole.receiver.counters.malformed == 0


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.binary(max_size=20), st.sampled_from(["", "", "k"])),
        min_size=1,
        max_size=12,
    ),
    order=st.lists(st.integers(0, 11), max_size=20),
    noise=st.booleans(),
)
def test_the_short_way_of_lone_packets_gives_the_same(
    events: list[tuple[str, bytes, str]], order: list[int], noise: bool
) -> None:
    """Packets in and out of order, repeated, of several topics, with keys and rubbish: the general way agrees."""
    journal = MemoryJournal(source="src")
    session = wire_session("T", journal.epoch)
    packets = []
    for i, (topic, data, key) in enumerate(events):
        journal.append(topic, data, key=key, time=i)
        for batch in pack_frame(session, "T", journal.read(i).frames[0], 1400):
            packets += [bytes(packet) for packet in batch.split()]
    short, general = make(), make()
    general._next = lambda packet, now: False  # type: ignore[method-assign]
    for at in [*order, *range(len(packets))]:
        for decoder in (short, general):
            if noise:
                decoder.packet(packets[at % len(packets)][:-1], 0.0)
            decoder.packet(packets[at % len(packets)], 0.0)
    assert short.receiver.counters == general.receiver.counters
    taken = [[(s, type(item), item[0]) for s, item in d.receiver.take()] for d in (short, general)]
    assert taken[0] == taken[1]
    assert short.receiver.expected == general.receiver.expected == len(events) + 1


@given(st.lists(st.binary(max_size=120), max_size=30), st.integers(1, 200))
def test_noise_is_counted_and_nothing_else(packets: list[bytes], packet_bytes: int) -> None:
    """Any bytes, as packets and as GSO batches: no exception, nothing delivered, every datagram counted."""
    decoder = make()
    for packet in packets:
        decoder.packet(packet, 0.0)
        decoder.packet(packet, 0.0, server=0)
        decoder.batch(packet, packet_bytes, 0.0)
    c = decoder.receiver.counters
    assert offsets(decoder) == []
    assert c.malformed + c.other_session + c.implausible <= c.packets


def test_a_train_of_two_streams_is_taken_apart() -> None:
    """Packets of equal size but of different sessions in one GSO batch are looked at one by one."""
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"x" * 100] * 100)
    frame = journal.read(0).frames[0]
    ours = next(pack_frame(wire_session("T", 1), "T", frame, 1400))
    other = next(pack_frame(wire_session("U", 1), "U", frame, 1400))
    decoder = make()
    size = ours.packet_bytes
    mixed = b"".join(bytes(p) for pair in zip(ours.split()[:5], other.split()[:5], strict=True) for p in pair)
    decoder.batch(mixed, size, 0.0)
    assert offsets(decoder) == list(range(5 * int.from_bytes(ours.buffer[18:20], "big")))
    assert decoder.receiver.counters.other_session == 5
