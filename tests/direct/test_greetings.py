"""A publisher that is busy when it is greeted: the client greets again, and gets two answers."""

import pytest

from brokerless.core import MemoryJournal
from brokerless.direct import wire
from brokerless.direct.desk import Desk
from brokerless.direct.dispatch import Dispatcher
from brokerless.direct.protocol import Follower
from brokerless.direct.settings import SubscriberCounters
from brokerless.direct.store import GroupStore
from brokerless.direct.work import Labour, Parcel, WorkerCounters

PEER = b"1"


def busy_desk(events: int, *, replay: bool = True) -> Desk:
    journal = MemoryJournal()
    journal.bind("p")
    journal.append_many("t", [b"x"] * events)
    dispatcher = Dispatcher(journal, None, GroupStore(None))
    return Desk(journal, dispatcher, instance=1, live="5", beat_s=1.0, begin=0, replay=replay)


def greet(client: Follower | Labour, desk: Desk, times: int) -> None:
    """The client greets so often before it reads an answer."""
    for now in range(times):
        client.handle_deadline(float(now))
        tell(client, desk)


def tell(client: Follower | Labour, desk: Desk) -> None:
    """What the client wants said reaches the publisher."""
    for message in client.outbox:
        desk.receive(PEER, message, 0.0)
    client.outbox.clear()


def answer(client: Follower | Labour, desk: Desk, count: int = 1) -> None:
    """The client reads the next answers."""
    for _ in range(count):
        client.receive_control(desk.outbox.pop(0)[1], 0.0)


def test_a_worker_that_greeted_twice_is_believed_when_it_leaves() -> None:
    """The second answer comes when the worker has acknowledged something: its farewell counts that, too."""
    desk = busy_desk(10)
    counters = WorkerCounters()
    hello = wire.Hello(wire.VERSION, "w", group="g", policy=wire.Policy(max_deliver=1))
    worker = Labour(hello, prefetch=10, counters=counters, random=lambda: 0.0, now=0.0)
    greet(worker, desk, 2)
    answer(worker, desk)
    tell(worker, desk)
    desk._dispatcher.run(0.0)
    worker.receive_control(desk._dispatcher.outbox.pop()[1], 0.0)
    parcel = worker.ready.popleft()
    assert isinstance(parcel, Parcel)
    worker.hand.extend(parcel.events)
    begun = worker.begin()
    assert begun is not None
    worker.begun.clear()
    worker.acks.append((parcel.epoch, begun[0].offset))
    worker.flush()
    answer(worker, desk)
    tell(worker, desk)
    group = desk._dispatcher.groups["g"]
    assert group.members["w"].credit == 10
    worker.close()
    tell(worker, desk)
    assert (counters.joins, group.acked, group.returned.total) == (1, 1, 9)
    assert all(group.attempts.get(offset, 1) == 0 for offset in range(1, 10)), "nobody has begun them"


@pytest.mark.parametrize("replay", [True, False])
def test_a_subscriber_that_greeted_twice_has_no_gap(replay: bool) -> None:
    """The second answer is read before live events that were sent before it: these are neither lost nor asked for."""
    desk = busy_desk(3, replay=replay)
    counters = SubscriberCounters()
    hello = wire.Hello(wire.VERSION, "s")
    follower = Follower(hello, start="live", positions={}, counters=counters, random=lambda: 0.0, now=0.0)
    greet(follower, desk, 1)
    answer(follower, desk)
    follower.receive_live(wire.encode(wire.Beat(1, desk._journal.epoch, 3)), 0.0)
    tell(follower, desk)
    desk.outbox.clear()
    assert desk.subscribers == 1
    journal = desk._journal
    journal.append("t", b"live")
    desk.receive(PEER, wire.encode(hello), 0.0)  # the second greeting has waited until now
    answer(follower, desk)
    assert not follower.outbox
    (frame,) = journal.read(3).frames
    follower.receive_live(frame.raw, 0.0)
    assert (follower.position, counters.lost, counters.live_frames, counters.joins) == (4, 0, 1, 1)
    follower.receive_live(wire.encode(wire.Beat(1, journal.epoch, 4)), 0.0)
    tell(follower, desk)
    assert desk.subscribers == 1, "it is ready in its new session, too"
