"""From datagrams to the receiver."""

import random

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.multicast.auth import opener, sealer
from brokerless.multicast.intake import Intake
from brokerless.multicast.message import Columns
from brokerless.multicast.packing import pack_frame
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.protocol import wire_session
from brokerless.multicast.receiver import Receiver

KEY = b"k" * 16


def make(key: bytes | None = None) -> Intake:
    receiver: Receiver[Columns] = Receiver(
        start=lambda _: 1, policy=RepairPolicy(), servers=1, random=random.random, session="T"
    )
    return Intake(receiver, unseal=opener(key) if key else None)


def offsets(intake: Intake) -> list[int]:
    found: list[int] = []
    for _, item in intake.receiver.take():
        assert isinstance(item, Columns)
        found += range(item.first - 1, item.first - 1 + len(item.datas))
    return found


@given(
    count=st.integers(1, 600),
    size=st.integers(0, 200),
    sealed=st.booleans(),
    cut=st.integers(0, 3),
)
def test_a_train_is_the_same_as_its_packets(count: int, size: int, sealed: bool, cut: int) -> None:
    """Whole trains, trains without their first packets, and packets one by one give the same messages."""
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"x" * size] * count)
    session = wire_session("T", journal.epoch)
    seal = sealer(KEY) if sealed else None
    whole, single = make(KEY if sealed else None), make(KEY if sealed else None)
    for train in pack_frame(session, "T", journal.read(0).frames[0], 1400, seal):
        skip = min(cut, train.packets - 1) * train.packet_bytes
        for packet in train.split():
            single.packet(packet, 0.0)
        if skip:
            whole.train(train.buffer[skip:], train.packet_bytes, 0.0)
            whole.train(train.buffer[:skip], train.packet_bytes, 0.0)
        whole.train(train.buffer, train.packet_bytes, 0.0)
    assert offsets(single) == offsets(whole) == list(range(count))
    assert whole.receiver.counters.malformed == 0


@given(st.lists(st.binary(max_size=120), max_size=30), st.integers(1, 200))
def test_noise_is_counted_and_nothing_else(packets: list[bytes], packet_bytes: int) -> None:
    """Any bytes, as packets and as trains: no exception, nothing delivered, every datagram counted."""
    intake = make()
    for packet in packets:
        intake.packet(packet, 0.0)
        intake.packet(packet, 0.0, server=0)
        intake.train(packet, packet_bytes, 0.0)
    c = intake.receiver.counters
    assert offsets(intake) == []
    assert c.malformed + c.other_session + c.implausible <= c.packets


def test_a_train_of_two_streams_is_taken_apart() -> None:
    """Packets of equal size but of different sessions in one train are looked at one by one."""
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"x" * 100] * 100)
    frame = journal.read(0).frames[0]
    ours = next(pack_frame(wire_session("T", 1), "T", frame, 1400))
    other = next(pack_frame(wire_session("U", 1), "U", frame, 1400))
    intake = make()
    size = ours.packet_bytes
    mixed = b"".join(bytes(p) for pair in zip(ours.split()[:5], other.split()[:5], strict=True) for p in pair)
    intake.train(mixed, size, 0.0)
    assert offsets(intake) == list(range(5 * int.from_bytes(ours.buffer[18:20], "big")))
    assert intake.receiver.counters.other_session == 5
