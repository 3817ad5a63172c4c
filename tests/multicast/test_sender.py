"""When heartbeats are due."""

from brokerless.core import MemoryJournal
from brokerless.multicast.policy import HeartbeatPolicy
from brokerless.multicast.protocol import END_OF_SESSION, parse_header
from brokerless.multicast.sender import Sender

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
