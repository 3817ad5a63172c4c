"""Signals and cancellation at any point of a receive: what can be repaired is not lost, and nothing comes twice."""

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokerless.core import Lost, MemoryJournal
from brokerless.multicast import HeartbeatPolicy, Publisher, RepairPolicy, Subscriber
from tests.interrupts import Interrupt, Interrupts, now_and_then, receive_some

BACKLOG, TOTAL = 30, 60
# A datagram that an interrupt swallowed at the end of the stream is noticed by the next heartbeat.
HEARTBEAT = HeartbeatPolicy(limit_s=0.05)
WAYS = ["auto", "plain"]


@pytest.fixture
def pub(group: str) -> Iterator[Publisher]:
    """A publisher with a backlog of some packets."""
    with Publisher(group, "T", journal=MemoryJournal(), heartbeat=HEARTBEAT) as publisher:
        publisher.publish_many("a", [b"x"] * (BACKLOG - 10))
        for _ in range(10):
            publisher.publish("b", b"y")
        publisher.flush()
        yield publisher


class Production:
    """Publishes the next lone event, or a few, when the last one has arrived."""

    def __init__(self, pub: Publisher, begun: int = BACKLOG) -> None:
        self.accepted = begun
        self._pub = pub
        self._deadline = time.monotonic() + 30

    def goes_on(self, received: int) -> bool:
        """Whether more is to come."""
        assert time.monotonic() < self._deadline, f"{received} of {self.accepted} events arrived"
        if received >= self.accepted and self.accepted < TOTAL:
            count = min(TOTAL - self.accepted, 1 + self.accepted % 3)
            self._pub.publish_many("b" if self.accepted % 2 else "a", [b"z"] * count)
            self.accepted += count
        return received < TOTAL


@pytest.mark.parametrize("mean", [200, 600])
@pytest.mark.parametrize("how", ["events", "receive", "batches", "items", "mixed"])
@pytest.mark.parametrize("io", WAYS)
def test_an_interrupted_subscriber_goes_on(
    group: str, pub: Publisher, io: str, how: str, mean: float
) -> None:
    """A handler raises now and then, the application goes on: every event exactly once, in order, in the accounting."""
    rolls = random.Random(how)
    interrupts = Interrupts(now_and_then(len(how), mean))
    got: list[int] = []
    production = Production(pub)
    with Subscriber(group, "T", start="oldest", io=io) as sub:  # type: ignore[arg-type]
        while production.goes_on(len(got)):
            io_mode = rolls.choice(["events", "receive", "batches", "items"]) if how == "mixed" else how
            receive_some(sub, io_mode, got, interrupts)
        assert sub.receive(0) is None  # what was handed out is processed
        account = sub.ledger.account()
        c = sub.counters
        missing = c.missing_kernel + c.missing_network
        assert missing == c.repaired + c.late + c.lost + c.skipped + sub.pending_missing
        assert (c.delivered, c.lost) == (TOTAL, 0)
        assert sub.positions["T"].offset == TOTAL
    assert got == list(range(TOTAL))
    assert (account.delivered, account.lost, account.pending, account.duplicates) == (TOTAL, 0, 0, 0)
    assert interrupts.raised > 1


def test_a_long_gap_is_fetched_in_spite_of_interrupts(group: str) -> None:
    """A fetch over TCP, its thread included, survives interrupts."""
    total = 5000
    policy = RepairPolicy(tcp_threshold=100)
    with Publisher(group, "T", heartbeat=HEARTBEAT) as pub:
        pub.publish_many("a", [b"x" * 50] * total)
        interrupts = Interrupts(now_and_then(5, 400))
        got: list[int] = []
        deadline = time.monotonic() + 30
        with Subscriber(group, "T", start="oldest", repair=policy) as sub:
            while len(got) < total:
                assert time.monotonic() < deadline, f"{len(got)} of {total} events arrived"
                receive_some(sub, "batches", got, interrupts)
            assert sub.receive(0) is None
            account = sub.ledger.account()
            assert sub.counters.fetches
    assert got == list(range(total))
    assert (account.delivered, account.lost, account.duplicates) == (total, 0, 0)
    assert interrupts.raised > 1


@pytest.mark.parametrize("how", ["events", "items"])
def test_what_nothing_can_repair_is_told(group: str, how: str) -> None:
    """Without request servers a datagram that an interrupt swallowed is a Lost, in its place and in the accounting."""
    interrupts = Interrupts(now_and_then(2, 40))
    got: list[int] = []
    told: list[Lost] = []
    with (
        Publisher(group, "T", requests=None, heartbeat=HEARTBEAT) as pub,
        Subscriber(group, "T", start=0, request_servers=[], on_loss=told.append) as sub,
    ):
        production = Production(pub, 0)
        assert sub.wait_joined(5)
        while production.goes_on(len(got) + sum(lost.last - lost.first + 1 for lost in told)):
            receive_some(sub, how, got, interrupts)
        assert sub.receive(0) is None
        account = sub.ledger.account()
        assert list(sub.losses) == told
    lost = [offset for one in told for offset in range(one.first, one.last + 1)]
    assert sorted(got + lost) == list(range(TOTAL))
    assert got == sorted(got)
    assert told
    assert (account.delivered, account.lost, account.duplicates) == (len(got), len(lost), 0)
    assert account.balanced


def test_an_interrupt_that_ends_the_subscriber(group: str, pub: Publisher, tmp_path: Path) -> None:
    """A handler raises and nobody catches it: the next start repeats at most what was handed out."""
    interrupts = Interrupts(now_and_then(1, 600))
    production = Production(pub)
    got: list[int] = []
    repeated = 0
    while production.goes_on(len(set(got))):
        try:
            with (
                Subscriber(group, "T", cursor=tmp_path / "c", commit_every_s=0) as sub,
                interrupts.active(),
            ):
                for event in sub.events(0.1):
                    repeated += event.offset in got
                    got.append(event.offset)
        except Interrupt:
            pass
    with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        again = [event.offset for event in sub.events(0.2)]
        deadline = time.monotonic() + 30
        while sub.ledger.account().delivered < TOTAL and time.monotonic() < deadline:
            again += [event.offset for event in sub.events(0.2)]
        assert again in ([], [TOTAL - 1])
        account = sub.ledger.account()
    assert sorted(set(got)) == list(range(TOTAL))
    assert (account.delivered, account.lost, account.pending) == (TOTAL, 0, 0)
    assert interrupts.raised > 1
    assert repeated <= interrupts.raised


@pytest.mark.parametrize("name", ["stop", "close"])
@pytest.mark.parametrize("how", ["events", "batches"])
def test_a_handler_that_stops_the_subscriber(
    group: str, pub: Publisher, tmp_path: Path, how: str, name: str
) -> None:
    """stop() and close() may come at any point: the iteration ends, and the next start goes on there.

    Exactly there after stop(); close() does not wait for an event that is just being handed out.
    """
    production = Production(pub)
    got: list[int] = []
    rolls = random.Random(name)
    stopped = 0
    while production.goes_on(len(set(got))):
        at = rolls.randrange(1, rolls.choice([400, 3000]))
        with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
            interrupts = Interrupts(lambda point, at=at: point == at, getattr(sub, name))
            with interrupts.active():
                if how == "events":
                    for event in sub.events(0.1):
                        got.append(event.offset)
                else:
                    for batch in sub.batches(0.1):
                        got.extend(event.offset for event in batch.events)
            stopped += interrupts.raised
            account = sub.ledger.account()
        assert sorted(set(got)) == list(range(len(set(got))))
        assert account.lost == 0
        if name == "stop":
            assert (account.delivered, account.duplicates) == (len(got), 0)
    assert stopped > 3


def test_stop_leaves_the_rest_of_a_batch(group: str, pub: Publisher, tmp_path: Path) -> None:
    """stop() while an event is in the application's hands: that one is processed, the next ones come next time."""
    with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        got = []
        for event in sub:
            got.append(event.offset)
            if event.offset == 5:
                sub.stop()
        assert got == list(range(6))
        assert sub.receive(1) is None
        assert list(sub.batches(1)) == []
        assert list(sub.items(1)) == []
        assert sub.ledger.account().delivered == 6
    with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        rest = [event.offset for event in itertools.islice(sub.events(30), BACKLOG - 6)]
        assert rest == list(range(6, BACKLOG))
        assert sub.receive(0.1) is None
        assert sub.ledger.account().duplicates == 0


def test_stop_by_another_thread(group: str, pub: Publisher, tmp_path: Path) -> None:
    """However the two threads run, what was given is processed once and what was not is given next time."""
    got: list[int] = []
    for _ in range(20):
        with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
            stopper = threading.Timer(0.02, sub.stop)
            stopper.start()
            for event in sub:
                got.append(event.offset)
                if len(got) % 3 == 0:
                    time.sleep(0.005)
            stopper.join()
    with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        got += [event.offset for event in itertools.islice(sub.events(30), max(0, BACKLOG - len(got)))]
        got += [event.offset for event in sub.events(0.1)]  # and no more
        account = sub.ledger.account()
    assert got == list(range(BACKLOG))
    assert (account.delivered, account.duplicates) == (BACKLOG, 0)


@pytest.mark.parametrize("first", ["areceive", "abatches"])
def test_cancelling_between_taking_and_giving(group: str, pub: Publisher, first: str) -> None:
    """A batch that was taken for a receive that is cancelled then is given by the next one."""

    async def run() -> list[int]:
        got: list[int] = []
        async with Subscriber(group, "T", start="oldest") as sub:
            while len(got) < BACKLOG:
                receiving = sub.areceive(5) if first == "areceive" else anext(sub.abatches(5))
                try:
                    receiving.__await__().send(None)  # type: ignore[attr-defined]  # up to its first wait
                    receiving.throw(asyncio.CancelledError())  # type: ignore[attr-defined]
                except StopIteration as done:
                    given = [done.value] if first == "areceive" else done.value.events
                    got += [event.offset for event in given]
                    continue
                except asyncio.CancelledError:
                    pass
                event = await sub.areceive(5)
                assert event is not None
                got.append(event.offset)
        return got

    assert asyncio.run(run()) == list(range(BACKLOG))


def test_what_was_handed_out_when_the_application_fails(group: str, pub: Publisher, tmp_path: Path) -> None:
    """A batch whose handler raises comes again as a whole, and an event even if the ledger was read meanwhile."""
    with pytest.raises(RuntimeError), Subscriber(group, "T", cursor=tmp_path / "a") as sub:
        for batch in sub.batches():
            assert batch.events[0].offset == 0
            assert sub.ledger.account().delivered == len(batch)
            raise RuntimeError
    with Subscriber(group, "T", cursor=tmp_path / "a") as sub:
        event = sub.receive(5)
        assert event is not None
        assert event.offset == 0
    with pytest.raises(RuntimeError), Subscriber(group, "T", cursor=tmp_path / "b") as sub:
        for event in sub:
            if event.offset == 7:
                assert sub.ledger.account().delivered == 8
                raise RuntimeError
    with Subscriber(group, "T", cursor=tmp_path / "b") as sub:
        event = sub.receive(5)
        assert event is not None
        assert event.offset == 7
        assert sub.ledger.account().duplicates == 1


@pytest.mark.parametrize("how", ["events", "batches"])
def test_what_was_committed_stays_so(group: str, pub: Publisher, tmp_path: Path, how: str) -> None:
    """Who says commit() while it has something handed out, and fails then, does not get it again."""
    until = 0
    with pytest.raises(RuntimeError), Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        if how == "events":
            for event in sub:
                until = event.offset + 1
                if until == 8:
                    sub.commit()
                    raise RuntimeError
        else:
            until = next(sub.batches()).next_offset
            sub.commit()
            raise RuntimeError
    pub.publish("a", b"more")
    with Subscriber(group, "T", cursor=tmp_path / "c") as sub:
        event = sub.receive(5)
        assert event is not None
        assert event.offset == until
        assert sub.ledger.account().duplicates == 0


def test_events_first_then_batches(group: str, pub: Publisher) -> None:
    """Whoever takes some events one by one and then asks for batches gets the rest as a batch, and the other way."""
    with Subscriber(group, "T", start="oldest") as sub:
        events = sub.events(5)
        got = [next(events).offset for _ in range(7)]
        for batch in sub.batches(5):
            got += [event.offset for event in batch.events]
            if len(got) >= BACKLOG:
                break
        pub.publish_many("a", [b"x"] * 3)
        got.append(next(events).offset)
        while len(got) < BACKLOG + 3:
            event = sub.receive(5)
            assert event is not None
            got.append(event.offset)
        assert got == list(range(BACKLOG + 3))
        assert sub.ledger.account().delivered == BACKLOG + 3


def test_two_ways_of_receiving_in_turns(group: str, pub: Publisher) -> None:
    """receive() in the middle of an iteration may open the next batch: its other events are not passed over."""
    with Subscriber(group, "T", start="live") as sub:
        assert sub.wait_joined(5)
        for _ in range(10):
            pub.publish_many("a", [b"x"] * 3)
            pub.flush()
        got = []
        for event in sub.events(5):
            got.append(event.offset)
            other = sub.receive(5)
            assert other is not None
            got.append(other.offset)
            if len(got) == 30:
                break
        assert got == list(range(BACKLOG, BACKLOG + 30))


def test_the_helper_goes_on_after_an_interrupted_wait(
    group: str, pub: Publisher, until: Callable[..., None]
) -> None:
    """A real signal whose handler raises in the middle of a wait: the sockets are read in the background again."""

    def handle(_number: int, _frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Subscriber(group, "T", start="live") as sub:
            assert sub.wait_joined(5)
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
            with pytest.raises(Interrupt):
                timer.start()
                while sub.receive(20) is not None:
                    pass
            timer.join()
            delivered = sub.counters.delivered
            pub.publish("a", b"x")
            until(lambda: sub.counters.delivered > delivered, what="the helper reads it")
            event = sub.receive(0)
            assert event is not None
            assert event.offset == BACKLOG
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_reading_the_state_where_losses_are_told(group: str) -> None:
    """`on_loss` may look at the subscriber, commit, and close it."""
    told: list[object] = []

    def on_loss(lost: Lost) -> None:
        told.append((lost.last, sub.gaps, sub.pending_missing, sub.count_drops(), sub.ledger.account().lost))
        sub.commit()
        sub.close()

    with Publisher(group, "T", requests=None) as pub:
        pub.publish_many("a", [b"x"] * 10)
        with Subscriber(group, "T", request_servers=[], start=0, on_loss=on_loss) as sub:
            assert list(sub.events(5)) == []
    assert told == [(9, [], 0, 0, 10)]
