"""A consumer that is moved between a publisher, mirrors that lag, and promoted ones: nothing lost, nothing twice."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Lost, Position, encode_frame
from brokerless.core.journal.epoch import TERM
from brokerless.direct.batch import Batch
from brokerless.direct.counters import SubscriberCounters, WorkerCounters
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import State
from brokerless.direct.protocol.mirror_client import MirrorProtocol
from brokerless.direct.protocol.subscriber import SubscriberProtocol
from brokerless.direct.protocol.worker import WorkerProtocol

HELLO = messages.Hello(messages.VERSION, "me")


class Source:
    """What the publisher has: epochs, and the epoch of each offset."""

    def __init__(self) -> None:
        self.epochs = [(1, 0)]
        self.events: list[int] = []
        self.instance = 1

    def publish(self, n: int) -> None:
        self.events += [self.epochs[-1][0]] * n

    def promote(self, lag: int) -> None:
        """A mirror that lacks the last `lag` events becomes the publisher."""
        del self.events[max(0, len(self.events) - lag) :]
        self.epochs = [(epoch, at) for epoch, at in self.epochs if at <= len(self.events)]
        self.epochs.append(((self.epochs[-1][0] // TERM + 1) * TERM, len(self.events)))

    def welcome(self, end: int, *, copy: bool) -> messages.Welcome:
        epochs = [(epoch, at) for epoch, at in self.epochs if at <= end]
        self.instance += 1
        return messages.Welcome(
            messages.VERSION,
            "s",
            self.instance,
            epochs[-1][0],
            epochs[-1][1],
            0,
            end,
            "1",
            1.0,
            epochs=epochs,
            copy=copy,
        )

    def chunk(self, request: messages.Replay, end: int, epoch: int) -> messages.Chunk:
        """Two frames at most, of one epoch each."""
        frames, at = [], request.offset
        for _ in range(2):
            stop = at
            while stop < end and stop - at < 7 and self.events[stop] == self.events[at]:
                stop += 1
            if stop == at:
                break
            data = [b"x"] * (stop - at)
            frame = encode_frame(
                "s",
                self.events[at],
                at,
                topics=[("t", at)],
                topic_index=None,
                times=[0] * len(data),
                datas=data,
            )
            frames.append(frame.raw)
            at = stop
        return messages.Chunk(request.request, epoch, at, end, [], frames)


def read(protocol: SubscriberProtocol, source: Source, lag: int, now: float) -> list[tuple[int, int]]:
    """Connect to whoever lacks the last `lag` events (0: the publisher), and read all that there is."""
    end = max(0, len(source.events) - lag)
    welcome = source.welcome(end, copy=lag > 0)
    protocol.moved(now)
    protocol.handle_deadline(now)
    protocol.receive_control(messages.encode(welcome), now)
    got: list[tuple[int, int]] = []
    for _ in range(1000):
        while protocol.ready:
            item = protocol.ready.popleft()
            if isinstance(item, Batch):
                got += [(item.epoch, at) for at in range(item.first_offset, item.next_offset)]
        asked = [
            request
            for request in map(messages.decode_request, protocol.outbox)
            if isinstance(request, messages.Replay)
        ]
        protocol.outbox = []
        if not asked:
            return got
        for request in asked:
            protocol.receive_control(messages.encode(source.chunk(request, end, welcome.epoch)), now)
    raise AssertionError("it never ends")


def subscriber(positions: dict[str, Position] | None = None) -> SubscriberProtocol:
    return SubscriberProtocol(
        HELLO,
        start="cursor" if positions else "oldest",
        positions=positions or {},
        counters=SubscriberCounters(),
        random=lambda: 0.5,
        now=0.0,
    )


def worker() -> WorkerProtocol:
    return WorkerProtocol(HELLO, prefetch=10, counters=WorkerCounters(), random=lambda: 0.5, now=0.0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 20)),
        st.tuples(st.just("read"), st.integers(0, 15)),
        st.tuples(st.just("promote"), st.integers(0, 15)),
    ),
    max_size=25,
)


@given(STEPS)
def test_nothing_is_lost_or_doubled_on_the_way_between_them(steps: list[tuple[str, int]]) -> None:
    """At the end, at the publisher: all that it has came once; what else came was of an end that it never had."""
    source, protocol = Source(), subscriber()
    got: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()
    now = 1.0
    for what, n in [*steps, ("read", 0)]:
        now += 10.0
        if what == "publish":
            source.publish(n)
        elif what == "promote":
            source.promote(n)
        else:
            got += read(protocol, source, n, now)
            seen |= set(got)
    assert len(got) == len(seen)
    assert {(epoch, at) for at, epoch in enumerate(source.events)} <= seen


@pytest.mark.parametrize("make", [subscriber, worker])
def test_who_has_seen_a_promotion_follows_nobody_older(make: Callable[[], object]) -> None:
    """The old publisher is told, and not followed, however high its clock makes its epoch."""
    source, protocol = Source(), make()
    assert isinstance(protocol, (SubscriberProtocol, WorkerProtocol))
    old = source.welcome(0, copy=False)
    source.promote(0)
    protocol.receive_control(messages.encode(source.welcome(0, copy=False)), 1.0)
    assert protocol.state is State.FOLLOWING
    protocol.moved(2.0)
    protocol.outbox = []
    protocol.receive_control(messages.encode(old), 2.0)
    assert protocol.state is State.JOINING
    assert [messages.decode_request(said) for said in protocol.outbox] == [messages.Superseded(TERM)]


def test_a_cursor_from_after_a_promotion_is_enough_to_know() -> None:
    """A subscriber that has only its cursor does not follow the old publisher, either."""
    source, protocol = Source(), subscriber({"s": Position(TERM, 5)})
    protocol.receive_control(messages.encode(source.welcome(0, copy=False)), 1.0)
    assert protocol.state is State.JOINING


def test_acknowledgements_outlive_a_promotion() -> None:
    """What was acknowledged and not read by the old publisher is said to the new one, in terms of its epoch."""
    source, protocol = Source(), worker()
    source.publish(10)
    protocol.receive_control(messages.encode(source.welcome(10, copy=False)), 1.0)
    protocol.acks += [(1, 3), (1, 9)]
    protocol.moved(2.0)
    source.promote(4)  # the new one has the first six
    protocol.outbox = []
    protocol.receive_control(messages.encode(source.welcome(6, copy=False)), 3.0)
    said = [messages.decode_request(data) for data in protocol.outbox]
    assert [s.acks for s in said if isinstance(s, messages.Settle)] == [[(3, 3)]]
    assert {s.epoch for s in said if isinstance(s, messages.Settle)} == {TERM}


def test_an_announced_end_that_no_mirror_had_is_told() -> None:
    """Heard of at the publisher, then read from a mirror, then promoted without it: lost, with its range."""
    source, protocol = Source(), subscriber()
    source.publish(10)
    read(protocol, source, 0, 1.0)
    protocol.tail = 15  # a heartbeat spoke of more, and the machine was gone
    read(protocol, source, 2, 10.0)
    source.promote(0)
    protocol.moved(20.0)
    protocol.receive_control(messages.encode(source.welcome(10, copy=False)), 20.0)
    assert [(i.first, i.last) for i in protocol.ready if isinstance(i, Lost)] == [(10, 14)]


def test_a_mirror_follows_nobody_below_its_promise() -> None:
    """Also if it has seen no such epoch yet; `align` is not even asked."""
    source = Source()
    asked: list[messages.Welcome] = []
    protocol = MirrorProtocol(
        HELLO,
        align=asked.append,
        promised=lambda: TERM,
        time_before=lambda _: -1,
        differs=lambda: None,
        positions={},
        counters=SubscriberCounters(),
        random=lambda: 0.5,
        now=0.0,
    )
    protocol.receive_control(messages.encode(source.welcome(0, copy=False)), 1.0)
    assert not asked
    source.promote(0)
    protocol.receive_control(messages.encode(source.welcome(0, copy=False)), 1.0)
    assert len(asked) == 1


def test_an_answer_to_a_greeting_with_the_old_address_is_not_the_last_word() -> None:
    """A mirror that learns its address greeted twice before the first answer came: the publisher must know the new one,
    or it never counts there, and nobody says so."""
    source = Source()
    source.publish(1)

    def align(welcome: messages.Welcome) -> Position | None:
        if "right" in named:
            return Position(welcome.epoch, 0)
        named.append("right")
        protocol.rename("right")
        return None

    named: list[str] = []
    protocol = MirrorProtocol(
        HELLO,
        align=align,
        promised=lambda: 0,
        time_before=lambda _: -1,
        differs=lambda: None,
        positions={},
        counters=SubscriberCounters(),
        random=lambda: 0.5,
        now=0.0,
    )
    protocol.receive_control(messages.encode(source.welcome(1, copy=False)), 0.1)
    protocol.outbox = []
    protocol.receive_control(messages.encode(source.welcome(1, copy=False)), 0.1)
    assert protocol.state is State.FOLLOWING
    said = [messages.decode_request(message) for message in protocol.outbox]
    assert [request.mirror for request in said if isinstance(request, messages.Hello)] == ["right"]
