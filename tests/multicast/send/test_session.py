"""When heartbeats are due, and what a single event looks like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.multicast.policy import HeartbeatPolicy
from brokerless.multicast.send.session import Sender
from brokerless.multicast.wire.auth import Signer, Verifier
from brokerless.multicast.wire.message import describe
from brokerless.multicast.wire.moldudp64 import END_OF_SESSION, parse_header

SESSION = b"ORDERS0001"


def test_heartbeats_are_fast_at_first_and_then_one_per_second() -> None:
    """After the last packet: 10, 20, 40 … ms, at most 1 s, each with the next sequence."""
    journal = MemoryJournal(source="src")
    sender = Sender(SESSION, "src", 1, datagram_bytes=1400, policy=HeartbeatPolicy(), now=0.0)
    assert sender.heartbeat(0.0) is not None, "the first one at once"
    journal.append_many("a", [b"x"] * 10)
    list(sender.frame(journal.read(0).frames[0], 5.0))
    at, waits = 5.0, []
    for _ in range(10):
        due = sender.next_deadline()
        waits.append(round(due - at, 3))
        assert sender.heartbeat(due - 0.001) is None
        beat = sender.heartbeat(due)
        assert beat is not None
        header = parse_header(beat)
        assert header is not None
        assert (header.sequence, header.messages) == (11, 0)
        at = due
    assert waits == [0.01, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    end = parse_header(sender.end())
    assert end is not None
    assert (end.sequence, end.messages) == (11, END_OF_SESSION)


@pytest.mark.parametrize("signed", [False, True])
@given(topic=st.text("abc.é", min_size=1, max_size=9), data=st.binary(max_size=200), ours=st.booleans())
def test_a_single_event_is_the_same_as_by_way_of_a_frame(
    signed: bool, topic: str, data: bytes, ours: bool
) -> None:
    """Whether an event is sent before or after it is a frame, its packet and the next heartbeat are the same."""
    journal = MemoryJournal(source="src")
    receipt = journal.append(topic, data, time=1_234_567)
    key, name = b"k" * 16, "src" if ours else "other"
    senders = [
        Sender(
            SESSION,
            name,
            1,
            datagram_bytes=1400,
            policy=HeartbeatPolicy(),
            now=0.0,
            sign=Signer(key, "group", lambda: 5) if signed else None,
        )
        for _ in range(2)
    ]
    by_frame = next(iter(senders[0].frame(journal.read(0).frames[0], 3.0))).buffer
    head = describe("" if ours else "src", receipt.epoch, topic, "", 0)
    single = senders[1].single(head, receipt.seq, 1_234_567, data)
    senders[1].sent_single(3.0)
    if signed:
        opened = [Verifier(key, "group")(memoryview(packet)) for packet in (by_frame, single)]
        assert opened[0] == opened[1] is not None
    else:
        assert by_frame == single
    assert senders[0].next_sequence == senders[1].next_sequence == 2
    assert senders[0].next_deadline() == senders[1].next_deadline()
