"""Signals and cancellation at any point of a receive: nothing is lost, nothing comes twice unsaid."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Journal, MemoryJournal
from brokerless.core.errors import JournalError
from brokerless.direct import Publisher, Subscriber, Worker
from tests.interrupts import Interrupt, Interrupts, now_and_then, receive_some

BACKLOG, TOTAL = 30, 60
TRANSPORTS = ["tcp", "nng+tcp", "inproc"]


@pytest.fixture(params=TRANSPORTS)
def pub(request: pytest.FixtureRequest, new_address: Callable[[str], str]) -> Iterator[Publisher]:
    """A publisher with a backlog of a batch and some lone events."""
    with Publisher(new_address(request.param), source="p", journal=MemoryJournal()) as publisher:
        publisher.publish_many("a", [b"x"] * (BACKLOG - 10))
        for _ in range(10):
            publisher.publish("b", b"y")
        publisher.flush()
        yield publisher


class Production:
    """Publishes the next lone event when the last one has arrived."""

    def __init__(self, pub: Publisher) -> None:
        self.accepted = BACKLOG
        self.patience_s = 0.02  # for the next event
        self._pub = pub
        self._deadline = time.monotonic() + 60

    def goes_on(self, received: int) -> bool:
        """Whether more is to come."""
        assert time.monotonic() < self._deadline, f"{received} of {self.accepted} events arrived"
        if received >= self.accepted and self.accepted < TOTAL:
            self._pub.publish("b" if self.accepted % 3 else "a", b"z")
            self.accepted += 1
        return received < TOTAL

    def heard(self, events: int) -> None:
        """A subscriber had so many events until there was silence: for none at all, the machine is too busy."""
        if not events:
            self.patience_s *= 2


def next_offset(sub: Subscriber) -> int:
    """The offset of the next event, which must come."""
    event = sub.receive(5)
    assert event is not None
    return event.offset


@pytest.mark.parametrize("mean", [200, 600])
@pytest.mark.parametrize("how", ["events", "receive", "batches", "mixed"])
def test_an_interrupted_subscriber_goes_on(pub: Publisher, how: str, mean: float) -> None:
    """A handler raises now and then, the application goes on: every event exactly once, in order, in the accounting."""
    rolls = random.Random(how)
    interrupts = Interrupts(now_and_then(len(how), mean))
    got: list[int] = []
    production = Production(pub)
    with Subscriber(pub.address, start="oldest") as sub:
        while production.goes_on(len(got)):
            way = rolls.choice(["events", "receive", "batches"]) if how == "mixed" else how
            receive_some(sub, way, got, interrupts)
        assert sub.receive(0) is None  # what was handed out is processed
        account = sub.ledger.account()
    assert got == list(range(TOTAL))
    assert (account.delivered, account.lost, account.pending, account.duplicates) == (TOTAL, 0, 0, 0)
    assert interrupts.raised > 1


def test_an_interrupt_that_ends_the_subscriber(pub: Publisher, tmp_path: Path) -> None:
    """A handler raises and nobody catches it: the next start repeats at most what was handed out, and says so."""
    interrupts = Interrupts(now_and_then(1, 600))
    production = Production(pub)
    got: list[int] = []
    repeated = 0
    while production.goes_on(len(set(got))):
        try:
            with Subscriber(pub.address, cursor=tmp_path / "c", commit_every_s=0) as sub, interrupts.active():
                had = len(got)
                for event in sub.events(production.patience_s):
                    if event.offset in got:
                        repeated += 1
                        assert sub.redelivered(event)
                    got.append(event.offset)
                production.heard(len(got) - had)
        except Interrupt:
            pass
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        assert sub.wait_joined()
        assert [event.offset for event in sub.events(0.2)] in ([], [TOTAL - 1])
        account = sub.ledger.account()
    assert sorted(set(got)) == list(range(TOTAL))
    assert (account.delivered, account.lost, account.pending) == (TOTAL, 0, 0)
    assert interrupts.raised > 1
    assert repeated <= interrupts.raised


@pytest.mark.parametrize("name", ["stop", "close"])
def test_a_handler_that_stops_the_subscriber(pub: Publisher, tmp_path: Path, name: str) -> None:
    """stop() and close() may come at any point: the iteration ends, and the next start goes on there.

    Exactly there after stop(); close() does not wait for an event that is just being handed out.
    """
    production = Production(pub)
    got: list[int] = []
    rolls = random.Random(name)
    stopped = 0
    while production.goes_on(len(set(got))):
        at = rolls.randrange(1, rolls.choice([400, 3000]))
        had = len(got)
        with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
            interrupts = Interrupts(lambda point, at=at: point == at, getattr(sub, name))
            with interrupts.active():
                for event in sub.events(production.patience_s):
                    got.append(event.offset)
            if not interrupts.raised:
                production.heard(len(got) - had)
            stopped += interrupts.raised
            account = sub.ledger.account()
        assert sorted(set(got)) == list(range(len(set(got))))
        assert account.lost == 0
        if name == "stop":
            assert (account.delivered, account.duplicates) == (len(got), 0)
    assert stopped > 3


def test_stop_leaves_the_rest_of_a_batch(pub: Publisher, tmp_path: Path) -> None:
    """stop() while an event is in the application's hands: that one is processed, the next ones come next time."""
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        got = []
        for event in sub:
            got.append(event.offset)
            if event.offset == 5:
                sub.stop()
        assert got == list(range(6))
        assert sub.receive(1) is None
        assert list(sub.batches(1)) == []
        assert sub.reconcile()
        assert sub.ledger.account().delivered == 6
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        rest = zip(range(6, BACKLOG), sub.events(5), strict=False)
        assert all(offset == event.offset for offset, event in rest)
        assert sub.ledger.account().delivered == BACKLOG
        assert sub.receive(0.1) is None
        assert sub.ledger.account().duplicates == 0


def test_an_interrupted_worker_goes_on(new_address: Callable[[str], str], tmp_path: Path) -> None:
    """What an interrupt takes from a worker's hands comes again when its lease is over."""
    with Publisher(new_address("tcp"), source="p", journal=DiskJournal(tmp_path / "j")) as pub:
        pub.publish_many("a", [b"x"] * TOTAL)
        interrupts = Interrupts(now_and_then(3, 150))
        got: list[tuple[int, int]] = []
        deadline = time.monotonic() + 60
        with Worker(pub.address, group="g", lease_s=0.3, max_deliver=100) as worker:
            while pub.groups().get("g") is None or pub.groups()["g"].acked < TOTAL:
                assert time.monotonic() < deadline, pub.groups()
                try:
                    with interrupts.active():
                        for delivery in worker.deliveries(0.05):
                            got.append((delivery.event.offset, delivery.attempt))
                            delivery.ack()
                except Interrupt:
                    pass
        group = pub.groups()["g"]
    assert {offset for offset, _ in got} == set(range(TOTAL))
    firsts = [offset for offset, attempt in got if attempt == 1]
    assert len(firsts) == len(set(firsts))
    assert (group.acked, group.pending, group.lost, group.balanced) == (TOTAL, 0, 0, True)
    assert interrupts.raised > 1


def test_stopping_a_worker_gives_the_rest_back(pub: Publisher) -> None:
    """stop() ends the iteration after the current delivery; another worker has the rest at once."""
    with Worker(pub.address, group="g") as worker:
        for delivery in worker:
            delivery.ack()
            if delivery.event.offset == 5:
                worker.stop()
        assert worker.receive(1) is None
    with Worker(pub.address, group="g") as worker:
        rest = []
        for delivery in worker.deliveries(5):
            delivery.ack()
            rest.append(delivery.event.offset)
            if len(rest) == BACKLOG - 6:
                break
    assert sorted(rest) == list(range(6, BACKLOG))


def test_cancelling_between_taking_and_giving(pub: Publisher) -> None:
    """A batch that was taken for a receive that is cancelled then is given by the next one."""

    async def run() -> list[int]:
        async with Subscriber(pub.address, start="oldest") as sub:
            got = []
            while len(got) < BACKLOG:
                receiving = sub.areceive(5)
                try:
                    receiving.send(None)  # up to its first wait
                    receiving.throw(asyncio.CancelledError())
                except StopIteration as done:
                    got.append(done.value.offset)
                    continue
                except asyncio.CancelledError:
                    pass
                event = await sub.areceive(5)
                assert event is not None
                got.append(event.offset)
            return got

    assert asyncio.run(run()) == list(range(BACKLOG))


def test_the_current_batch_when_the_application_fails(pub: Publisher, tmp_path: Path) -> None:
    """A batch whose handler raises comes again as a whole, and an event even if the ledger was read meanwhile."""
    with pytest.raises(RuntimeError), Subscriber(pub.address, cursor=tmp_path / "a") as sub:
        for batch in sub.batches():
            assert batch.events[0].offset == 0
            assert sub.ledger.account().delivered == len(batch)
            raise RuntimeError
    with Subscriber(pub.address, cursor=tmp_path / "a") as sub:
        assert next_offset(sub) == 0
    with pytest.raises(RuntimeError), Subscriber(pub.address, cursor=tmp_path / "b") as sub:
        for event in sub:
            if event.offset == 7:
                assert sub.ledger.account().delivered == 8
                raise RuntimeError
    with Subscriber(pub.address, cursor=tmp_path / "b") as sub:
        event = sub.receive(5)
        assert event is not None
        assert event.offset == 7
        assert sub.redelivered(event)
        assert sub.ledger.account().duplicates == 1


def test_two_iterations_share_the_current_batch(pub: Publisher) -> None:
    """receive() inside a loop, a second loop, batches and then the first loop again: every event once."""
    with Subscriber(pub.address, start="oldest") as sub:
        loop = sub.events(5)
        got = [next(loop).offset]
        while len(got) < BACKLOG - 12:  # past the end of the first batch
            got.append(next_offset(sub))
            got.append(next(loop).offset)
        got += [event.offset for _, event in zip(range(2), sub.events(5), strict=False)]
        got += [event.offset for event in next(sub.batches(5)).events]
        while len(got) < BACKLOG:
            got.append(next(loop).offset)
        assert got == list(range(BACKLOG))
        assert sub.ledger.account().delivered == BACKLOG


def test_receive_inside_a_loop_over_batches(pub: Publisher) -> None:
    """What receive() left of a batch is the loop's next one."""
    with Subscriber(pub.address, start="oldest") as sub:
        got: list[int] = []
        for batch in sub.batches(5):
            got += [event.offset for event in batch.events]
            if len(got) < BACKLOG:
                got.append(next_offset(sub))
            if len(got) >= BACKLOG:
                break
        assert got == list(range(BACKLOG))
        assert sub.ledger.account().delivered == BACKLOG


def test_close_inside_a_loop_ends_it(pub: Publisher, tmp_path: Path) -> None:
    """Nothing is given after close(), neither by a subscriber nor by a worker; it comes next time."""
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        got = []
        for event in sub:
            got.append(event.offset)
            if event.offset == 1:
                sub.close()
    assert got == [0, 1]
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        assert next_offset(sub) == 2
    with Worker(pub.address, group="g") as worker:
        handled = []
        for delivery in worker:
            handled.append(delivery.event.offset)
            delivery.ack()
            if len(handled) == 3:
                worker.close()
    assert len(handled) == 3


def test_an_error_after_the_loop_was_stopped(pub: Publisher, tmp_path: Path) -> None:
    """The loop asked for the next event, so the last one was processed, whatever fails later in the `with`."""
    with pytest.raises(RuntimeError), Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        for event in sub:
            if event.offset == 2:
                sub.stop()
        raise RuntimeError
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        assert next_offset(sub) == 3


def test_a_cursor_that_cannot_be_saved(new_address: Callable[[str], str], tmp_path: Path) -> None:
    """The application is told and goes on: nothing is half done, so nothing is rejoined, or lost without a journal."""
    place = tmp_path / "place"
    with (
        Publisher(new_address("tcp"), source="p") as pub,
        Subscriber(pub.address, cursor=place / "c", commit_every_s=0) as sub,
    ):
        assert sub.wait_joined()
        place.rename(tmp_path / "away")
        place.write_text("not a directory")
        got, failed = 0, 0
        for _ in range(50):
            pub.publish("t", b"x")
            while True:
                try:
                    got += sub.receive(5) is not None
                    break
                except JournalError:
                    failed += 1
        assert got == 50
        assert failed > 10
        assert (sub.counters.joins, sub.counters.lost) == (1, 0)
        place.unlink()


def test_reconcile_before_the_first_receive(new_address: Callable[[str], str]) -> None:
    """The publisher's word is of now, and shows what was not received yet."""
    with (
        Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address) as sub,
    ):
        assert sub.wait_joined()
        pub.publish("b", b"z")
        assert sub.reconcile()
        assert sub.ledger.account().pending == 1
        assert sub.receive(5) is not None
        assert sub.reconcile()
        account = sub.ledger.account()
        assert (account.delivered, account.pending) == (1, 0)


@pytest.mark.parametrize("pub", ["inproc"], indirect=True)
def test_an_interrupted_look_at_the_ledger(pub: Publisher) -> None:
    """Wherever the handler raises, the accounting are right when they are looked at again."""
    for at in itertools.count(1):
        with Subscriber(pub.address, start="oldest") as sub:
            for event in sub.events(5):
                if event.offset == 9:
                    interrupts = Interrupts(lambda point, at=at: point == at)
                    with contextlib.suppress(Interrupt), interrupts.active():
                        sub.ledger.account()
                if event.offset == BACKLOG - 1:
                    break
            assert sub.ledger.account().delivered == BACKLOG
        if not interrupts.raised:
            break  # all points were tried
    assert at > 20


def test_an_interrupted_receive_and_then_reconcile(new_address: Callable[[str], str]) -> None:
    """reconcile() goes on with what was interrupted like a receive does: nothing comes twice."""
    for at in range(1, 400, 7):
        with (
            Publisher(new_address("inproc"), source="p", journal=MemoryJournal()) as pub,
            Subscriber(pub.address) as sub,
        ):
            assert sub.wait_joined()
            pub.publish("t", b"0")
            got = []
            try:
                with Interrupts(lambda point, at=at: point == at).active():
                    event = sub.receive(0.05)
                    got += [event.offset] if event is not None else []
            except Interrupt:
                pass
            assert sub.reconcile()
            pub.publish("t", b"1")
            while not got or got[-1] < 1:
                got.append(next_offset(sub))
            assert got == [0, 1]
            assert sub.ledger.account().duplicates == 0


def test_a_task_that_waits_while_another_closes(pub: Publisher) -> None:
    """The waiting task ends at once, and without an error."""

    async def run() -> None:
        sub = Subscriber(pub.address)
        worker = Worker(pub.address, group="g", start="live")
        waiting = [asyncio.create_task(sub.areceive()), asyncio.create_task(worker.areceive())]
        await asyncio.sleep(0.1)  # so that they wait
        sub.close()
        worker.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 0.8) == [None, None]

    asyncio.run(run())


def test_what_was_committed_stays_so(pub: Publisher, tmp_path: Path) -> None:
    """commit() says that the current event is processed: a failure afterwards does not take that back."""
    with pytest.raises(RuntimeError), Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        for event in sub:
            if event.offset == 7:
                sub.commit()
                raise RuntimeError
    with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
        assert next_offset(sub) == 8


def test_stop_from_another_thread(pub: Publisher, tmp_path: Path) -> None:
    """Whatever the iterating thread does at that moment: what it was given is processed, the rest comes next time."""
    pub.publish_many("a", [b"x"] * 20_000)
    got: list[int] = []
    while len(got) < BACKLOG + 20_000:
        with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
            had = len(got)
            stopper = threading.Thread(target=lambda sub=sub, had=had: stop_after(sub, got, had + 300))
            stopper.start()
            for event in sub.events(0.5):
                got.append(event.offset)
            stopper.join()
    assert got == list(range(BACKLOG + 20_000))


def stop_after(sub: Subscriber, got: list[int], length: int) -> None:
    deadline = time.monotonic() + 0.5
    while len(got) < length and time.monotonic() < deadline:
        pass
    sub.stop()


def test_events_first_then_batches(pub: Publisher) -> None:
    """Whoever takes some events one by one and then asks for batches gets the rest as a batch."""
    with Subscriber(pub.address, start="oldest") as sub:
        got = [event.offset for _, event in zip(range(7), sub.events(5), strict=False)]
        for batch in sub.batches(5):
            got += [event.offset for event in batch.events]
            if len(got) >= BACKLOG:
                break
        assert got == list(range(BACKLOG))
        assert sub.ledger.account().delivered == BACKLOG


def test_an_interrupted_publisher_goes_on(new_address: Callable[[str], str], journal: Journal) -> None:
    """Whatever publish() returned a receipt for arrives; offsets have no holes; nothing is locked for ever."""
    rolls = random.Random(7)
    interrupts = Interrupts(lambda _: rolls.random() < 1 / 60)
    receipts: list[int] = []
    with (
        Publisher(new_address("tcp"), source="p", journal=journal) as pub,
        Subscriber(pub.address, start="oldest") as sub,
    ):
        for i in range(200):
            try:
                with interrupts.active():
                    receipt = pub.publish("a", b"%d" % i) if i % 7 else pub.publish_many("b", [b"x"] * 5)
                    receipts.append(receipt.offset)
            except Interrupt:
                pass
        last = pub.publish("a", b"end").offset
        got = []
        for event in sub.events(10):
            got.append(event.offset)
            if event.offset == last:
                break
        account = sub.ledger.account()
    assert got == list(range(last + 1))
    assert set(receipts) <= set(got)
    assert (account.delivered, account.lost, account.duplicates) == (last + 1, 0, 0)
    assert interrupts.raised > 10
