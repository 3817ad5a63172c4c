"""From datagrams to the receiver."""

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.decode import PacketDecoder
from brokerless.multicast.receive.gaps import Missing
from brokerless.multicast.receive.reorder import Receiver
from brokerless.multicast.send.retransmit import Retransmitter
from brokerless.multicast.wire import kernels
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.message import Columns
from brokerless.multicast.wire.moldudp64 import heartbeat, wire_session
from brokerless.multicast.wire.packing import pack_frame
from brokerless.multicast.wire.status import shared_repair

KEY = b"k" * 16


def make(key: bytes | None = None, *, opaque: bool = False) -> PacketDecoder:
    receiver: Receiver[Columns] = Receiver(
        start=lambda _: 1, policy=RepairPolicy(), servers=1, random=random.random, session="T"
    )
    return PacketDecoder(receiver, auth_key=key, opaque=opaque)


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
def test_a_gso_batch_is_the_same_as_its_packets(count: int, size: int, signed: bool, cut: int) -> None:
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
    shortest, short, general = make(), make(), make()
    general._next = lambda packet, now: False  # type: ignore[method-assign]
    out, inbound = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with out, inbound:
        inbound.setblocking(False)
        for at in [*order, *range(len(packets))]:
            packet = packets[at % len(packets)]
            for one in (packet[:-1], packet) if noise else (packet,):
                out.send(one)
                read_next(shortest, inbound)
                short.packet(one, 0.0)
                general.packet(one, 0.0)
    assert shortest.receiver.counters == short.receiver.counters == general.receiver.counters
    taken = [
        [
            (s, item if isinstance(item, Missing) else item.events("T", "T", 0))
            for s, item in d.receiver.take()
        ]
        for d in (shortest, short, general)
    ]
    assert taken[0] == taken[1] == taken[2]
    assert shortest.receiver.expected == general.receiver.expected == len(events) + 1


def read_next(decoder: PacketDecoder, sock: socket.socket) -> bool:
    """Read a packet as a subscriber does that waits for a lone event; whether it was what the decoder expected."""
    buffer, receiver = bytearray(65_536), decoder.receiver
    session, sequence, _ = expects = decoder.expects
    found = kernels.wait_next((sock,), (), 0, 0, buffer, *expects)
    assert found is not None
    _, size, _, event = found
    if event is not None:
        assert (session, sequence) == (receiver.session, receiver.expected)
        seq, time_us, data = event
        receiver.counters.packets += 1
        receiver.counters.received_bytes += size
        columns = Columns(receiver.expected, decoder.last[1], (seq,), (time_us,), (), (data,), size)
        receiver.next_in_order(1, 0.0, receiver.ready, (session, columns))
        return True
    decoder.packet(bytes(buffer[:size]), 0.0)
    return False


@pytest.mark.parametrize("case", ["plain", "signed", "opaque", "gap", "shared"])
def test_the_shortest_way_is_for_plain_streams_without_a_gap(case: str) -> None:
    """Where something must be checked or sorted first, the general way takes the packet."""
    journal = MemoryJournal(source="src")
    sign = Signer(KEY, "group") if case == "signed" else None
    decoder = make(KEY if sign else None, opaque=case == "opaque")
    packets = []
    for i in range(5):
        journal.append("a", b"%d" % i)
        for batch in pack_frame(wire_session("T", journal.epoch), "T", journal.read(i).frames[0], 1400, sign):
            packets += [bytes(packet) for packet in batch.split()]
    for packet in packets[:2]:  # they begin the session, and show what messages begin with
        decoder.packet(packet, 0.0)
    sent = packets[2:] if case != "gap" else [packets[3], packets[2], packets[4]]
    ways = []
    out, inbound = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with out, inbound:
        inbound.setblocking(False)
        for packet in sent:
            out.send(packet + (shared_repair(1) if case == "shared" else b""))
            ways.append(read_next(decoder, inbound))
    assert ways == {"plain": [True] * 3, "gap": [False, False, True]}.get(case, [False] * 3)
    assert offsets(decoder) == [0, 1, 2, 3, 4]


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


def test_a_gso_batch_of_two_streams_is_taken_apart() -> None:
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


@given(runs=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(2, 60)), max_size=8))
def test_batches_of_changing_topics_and_keys_keep_their_own(runs: list[tuple[str, bool, int]]) -> None:
    """What the messages before began with is not taken for the beginning of others."""
    journal = MemoryJournal(source="src")
    session = wire_session("T", journal.epoch)
    decoder, expected = make(), []
    for topic, keyed, count in runs:
        datas = [b"B" * 100] * count  # with the first byte of the mark of a shared repair
        journal.append_many(topic, datas, keys=["k"] * count if keyed else None, times=1)
        frame = journal.read(journal.next - count).frames[0]
        expected += frame.events()
        for batch in pack_frame(session, "T", frame, 1400):
            decoder.batch(batch.buffer, batch.packet_bytes, 0.0)
    found = []
    for _, item in decoder.receiver.take():
        assert isinstance(item, Columns)
        found += item.events("T", "", 0)
    assert found == expected


@pytest.mark.parametrize("key", [KEY, None])
def test_repairs_for_the_group_that_come_as_one_batch_prove_no_living_publisher(key: bytes | None) -> None:
    """Receive offload joins equal packets: two repairs in one buffer are as good as two by themselves, and no more."""
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"x" * 50] * 3)
    sign = Signer(KEY, "group") if key else None
    beat = heartbeat(wire_session("T", journal.epoch), 1)
    retransmitter = Retransmitter(journal, "T", sign_shared=sign)
    answers = [retransmitter.answer(first, 1, 1400, shared=True) for first in (1, 2, 3)]
    packets = [answer[0] for answer in answers if isinstance(answer, tuple)]
    decoder = make(key)
    decoder.packet(beat + sign(beat) if sign else beat, 0.0)
    decoder.batch(b"".join(packets), len(packets[0]), 2.5)
    assert offsets(decoder) == [0, 1, 2]
    assert decoder.receiver.silent_s(2.5) == 2.5
