"""A publisher that is busy when it is greeted: the client greets again, and gets two answers."""

import pytest

from brokerless.core import MemoryJournal
from brokerless.direct.counters import SubscriberCounters, WorkerCounters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.server import ControlServer
from brokerless.direct.protocol.subscriber import SubscriberProtocol
from brokerless.direct.protocol.worker import DeliveryBatch, WorkerProtocol

PEER = b"1"


def busy_control_server(events: int, *, replay: bool = True) -> ControlServer:
    journal = MemoryJournal()
    journal.bind("p")
    journal.append_many("t", [b"x"] * events)
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    return ControlServer(journal, coordinator, instance=1, live="5", beat_s=1.0, begin=0, replay=replay)


def greet(client: SubscriberProtocol | WorkerProtocol, control_server: ControlServer, times: int) -> None:
    """The client greets so often before it reads an answer."""
    for now in range(times):
        client.handle_deadline(float(now))
        send_to(client, control_server)


def send_to(client: SubscriberProtocol | WorkerProtocol, control_server: ControlServer) -> None:
    """What the client wants said reaches the publisher."""
    for message in client.outbox:
        control_server.receive(PEER, message, 0.0)
    client.outbox.clear()


def answer(
    client: SubscriberProtocol | WorkerProtocol, control_server: ControlServer, count: int = 1
) -> None:
    """The client reads the next answers."""
    for _ in range(count):
        client.receive_control(control_server.outbox.pop(0)[1], 0.0)


def test_a_worker_that_greeted_twice_is_believed_when_it_leaves() -> None:
    """The second answer comes when the worker has acknowledged something: its goodbye counts that, too."""
    control_server = busy_control_server(10)
    counters = WorkerCounters()
    hello = messages.Hello(messages.VERSION, "w", group="g", policy=messages.Policy(max_deliver=1))
    worker = WorkerProtocol(hello, prefetch=10, counters=counters, random=lambda: 0.0, now=0.0)
    greet(worker, control_server, 2)
    answer(worker, control_server)
    send_to(worker, control_server)
    control_server._coordinator.run(0.0)
    worker.receive_control(control_server._coordinator.outbox.pop()[1], 0.0)
    batch = worker.ready.popleft()
    assert isinstance(batch, DeliveryBatch)
    worker.current.extend(batch.events)
    begun = worker.begin()
    assert begun is not None
    worker.begun.clear()
    worker.acks.append((batch.epoch, begun[0].offset))
    worker.flush()
    answer(worker, control_server)
    send_to(worker, control_server)
    group = control_server._coordinator.groups["g"]
    assert group.members["w"].credit == 10
    worker.close()
    send_to(worker, control_server)
    assert (counters.joins, group.acked, group.returned.total) == (1, 1, 9)
    assert all(group.attempts.get(offset, 1) == 0 for offset in range(1, 10)), "nobody has begun them"


@pytest.mark.parametrize("replay", [True, False])
def test_a_subscriber_that_greeted_twice_has_no_gap(replay: bool) -> None:
    """The second answer is read before live events that were sent before it: these are neither lost nor asked for."""
    control_server = busy_control_server(3, replay=replay)
    counters = SubscriberCounters()
    hello = messages.Hello(messages.VERSION, "s")
    subscriber = SubscriberProtocol(
        hello, start="live", positions={}, counters=counters, random=lambda: 0.0, now=0.0
    )
    greet(subscriber, control_server, 1)
    answer(subscriber, control_server)
    subscriber.receive_live(messages.encode(messages.Beat(1, control_server._journal.epoch, 3)), 0.0)
    send_to(subscriber, control_server)
    control_server.outbox.clear()
    assert control_server.subscribers == 1
    journal = control_server._journal
    journal.append("t", b"live")
    control_server.receive(PEER, messages.encode(hello), 0.0)  # the second greeting has waited until now
    answer(subscriber, control_server)
    assert not subscriber.outbox
    (frame,) = journal.read(3).frames
    subscriber.receive_live(frame.raw, 0.0)
    assert (subscriber.position, counters.lost, counters.live_frames, counters.joins) == (4, 0, 1, 1)
    subscriber.receive_live(messages.encode(messages.Beat(1, journal.epoch, 4)), 0.0)
    send_to(subscriber, control_server)
    assert control_server.subscribers == 1, "it is ready in its new session, too"
