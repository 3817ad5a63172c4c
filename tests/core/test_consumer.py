"""The consumer core, driven over a transport in memory: what is handed out, processed, stopped and committed."""

import asyncio
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Event, Ledger, Lost, Position, Reason
from brokerless.core.consumer import OVER, Consumer, HandedOut, Stage, check_start
from brokerless.core.errors import Closed, ConfigError, UsageError
from brokerless.core.runtime.serial_section import SerialSection
from tests.interrupts import Interrupts, now_and_then, receive_some


class MemoryBatch:
    """Events with consecutive offsets; those with odd data are not wanted if `even` is set."""

    source, epoch = "s", 1

    def __init__(self, first: int, stop: int, even: bool = False) -> None:
        self.first_offset, self.next_offset = first, stop
        self._even = even
        wanted = [i for i in range(first, stop) if not (even and i % 2)]
        self.events = [Event("s", 1, i, "t", i, 0, b"%d" % i) for i in wanted]

    @property
    def datas(self) -> list[bytes]:
        return [event.data for event in self.events]

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def after(self, offset: int) -> "MemoryBatch":
        assert self.first_offset < offset < self.next_offset  # a batch of one event cannot be divided
        return MemoryBatch(offset, self.next_offset, self._even)


class Counts:
    """The counters that a consumer needs."""

    def __init__(self) -> None:
        self.events = 0


class MemoryConsumer(Consumer[MemoryBatch]):
    """Gets what is appended to `arrivals` in a step of its own, and saves positions to a list."""

    _logger = "brokerless.core.consumer"
    _kind = "core.consumer"

    def __init__(self, arrivals: list[MemoryBatch | Lost], **options: Any) -> None:
        self.counters = Counts()
        self.saved: list[dict[str, Position]] = []
        self.saving_thread = 0
        self.steps = 0
        super().__init__(
            section=SerialSection(),
            ledger=options.pop("ledger", None) or Ledger(),
            positions={},
            counters=self.counters,
            on_loss=options.pop("on_loss", None),
            saves=True,
            commit_every_s=options.pop("commit_every_s", 0.0),
            **options,
        )
        self.arrivals = arrivals
        self.queue: deque[MemoryBatch | Lost] = deque()
        self.closed = False

    def _next_queue(self) -> "deque[MemoryBatch | Lost] | None":
        return self.queue or None

    def _step(self, deadline: float | None) -> float:
        if self.closed:
            raise Closed("the consumer")
        self.steps += 1
        if self.arrivals:
            item = self.arrivals[0]
            self.queue.append(item)
            del self.arrivals[0]
            return 0.0
        return OVER

    def _wait(self, seconds: float) -> None:
        pass

    async def _wait_async(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def _wake(self) -> None:
        pass

    def _observe(self, batch: MemoryBatch, first: int, until: int, again: bool) -> None:
        if again:
            first = max(first, self._ledger.next("s", 1, "t") or 0)
        if first < until:
            self._ledger.observe("s", 1, "t", first, until - first)

    def _observe_loss(self, lost: Lost) -> None:
        self._ledger.expect("s", 1, "t", lost.first)
        self._ledger.declare("s", 1, "t", lost.first, lost.last, lost.reason)

    def _write_positions(self) -> None:
        self.saving_thread = threading.get_ident()
        self.saved.append(dict(self.positions))

    def _shut_down(self, finish: Callable[[], None]) -> None:
        def end() -> None:
            finish()
            self.closed = True

        self._section.close(end)

    @property
    def position(self) -> int:
        """The next offset that is not processed."""
        known = self.positions.get("s")
        return 0 if known is None else known.offset


def batches(*sizes: int, even: bool = False) -> list[MemoryBatch | Lost]:
    """Consecutive batches of these sizes."""
    edges = [0, *itertools.accumulate(sizes)]
    return [MemoryBatch(a, b, even) for a, b in itertools.pairwise(edges)]


def loss(first: int, last: int) -> Lost:
    return Lost("s", 1, None, first, last, Reason.EVICTED)


def test_an_event_is_processed_when_the_next_is_requested() -> None:
    """The position follows one event behind what was handed out; the ledger includes what was handed out."""
    sub = MemoryConsumer(batches(3))
    events = sub.events()
    assert next(events).offset == 0
    assert sub.position == 0
    assert sub.ledger.account().delivered == 1
    assert sub.receive(0).offset == 1  # type: ignore[union-attr]
    sub.commit()
    assert sub.position == 2
    assert [event.offset for event in events] == [2]
    assert (sub.position, sub.counters.events, sub.saved[-1]["s"].offset) == (3, 3, 3)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    ways=st.lists(st.sampled_from(["event", "batch", "item", "loop", "commit", "ledger"]), max_size=30),
    even=st.booleans(),
)
def test_all_ways_of_receiving_mix(sizes: list[int], ways: list[str], even: bool) -> None:
    """However the application mixes its ways of receiving, it gets every event once, in order."""
    sub = MemoryConsumer(batches(*sizes, even=even))
    loop = sub.events(0)
    got: list[int] = []
    for way in ways:
        if way == "event":
            event = sub.receive(0)
            got += [event.offset] if event is not None else []
        elif way == "loop":
            got += [event.offset for event in itertools.islice(loop, 1)]
        elif way in ("batch", "item"):
            found = next(sub.batches(0) if way == "batch" else sub.items(0), None)
            got += [event.offset for event in found] if isinstance(found, MemoryBatch) else []
        elif way == "commit":
            sub.commit()
            assert sub.position <= sum(sizes)
            if got:
                assert sub.position > got[-1]
        elif got:
            assert sub.ledger.account().delivered > got[-1]
    got += [event.offset for event in sub.events(0)]
    assert got == [i for i in range(sum(sizes)) if not (even and i % 2)]
    assert (sub.position, sub.counters.events) == (sum(sizes), len(got))
    assert sub.ledger.account().delivered == sum(sizes)
    assert sub.ledger.account().duplicates == 0


@pytest.mark.parametrize("how", ["events", "receive", "batches", "items"])
def test_a_signal_handler_that_raises_anywhere(how: str) -> None:
    """At every single point of the core in turn: every event comes once, in order, and is accounted once."""
    for at in itertools.count(1):
        sub = MemoryConsumer([*batches(2, 1, 3), loss(6, 7), MemoryBatch(8, 10)])
        interrupts = Interrupts(lambda point, at=at: point == at)
        got: list[int] = []
        while len(got) < 8:
            receive_some(sub, how, got, interrupts)
        assert sub.receive(0) is None
        account = sub.ledger.account()
        assert got == [*range(6), 8, 9]
        assert (account.delivered, account.duplicates, account.lost) == (8, 0, 2)
        assert (sub.position, sub.counters.events, len(sub.losses)) == (10, 8, 1)
        if not interrupts.raised:
            break  # all points were tried
    assert at > 50


@pytest.mark.parametrize("seed", range(20))
def test_many_interrupts(seed: int) -> None:
    """Interrupts that follow each other closely, with all ways of receiving mixed."""
    rolls = random.Random(seed)
    interrupts = Interrupts(now_and_then(seed, 15))
    sub = MemoryConsumer(batches(*[rolls.randint(1, 4) for _ in range(10)]))
    total = sum(len(b) for b in sub.arrivals if isinstance(b, MemoryBatch))
    got: list[int] = []
    for _ in range(10_000):
        if len(got) >= total:
            break
        receive_some(sub, rolls.choice(["events", "receive", "batches", "items"]), got, interrupts)
    assert got == list(range(total))
    assert sub.ledger.account().delivered == total
    assert sub.ledger.account().duplicates == 0


@pytest.mark.parametrize("name", ["stop", "close"])
@pytest.mark.parametrize("how", ["events", "batches"])
def test_a_signal_handler_that_stops_anywhere(name: str, how: str) -> None:
    """stop() at every point in turn: exactly what was given is processed, and the next consumer has the rest."""
    for at in itertools.count(1):
        sub = MemoryConsumer(batches(2, 1, 3))
        interrupts = Interrupts(lambda point, at=at: point == at, getattr(sub, name))
        got: list[int] = []
        with interrupts.active():
            if how == "events":
                got += [event.offset for event in sub.events(0)]
            else:
                for batch in sub.batches(0):
                    got += [event.offset for event in batch]
        sub.close()
        assert got == list(range(len(got)))
        if name == "stop":
            assert sub.position == len(got)
            assert sub.ledger.account().delivered == len(got)
        else:  # close() does not wait for an event that is just being handed out
            assert sub.position <= len(got)
        if not interrupts.raised:
            break
    assert at > 20


def test_stop_leaves_the_rest_of_a_batch() -> None:
    """The current event is processed, the others of its batch are not, whichever way is tried afterwards."""
    sub = MemoryConsumer(batches(5))
    got = []
    for event in sub:
        got.append(event.offset)
        if event.offset == 2:
            sub.stop()
    assert got == [0, 1, 2]
    assert sub.receive(0) is None
    assert list(sub.batches(0)) == list(sub.items(0)) == []
    sub.close()
    assert sub.position == 3


def test_an_exception_in_the_block_repeats_the_last_one() -> None:
    """The event, or the whole batch, whose handler raised is not processed; what was committed stays so."""
    for how, position in (("events", 1), ("batches", 0), ("committed", 2)):
        sub = MemoryConsumer(batches(4))
        with pytest.raises(RuntimeError), sub:
            if how == "batches":
                next(sub.batches(0))
            else:
                itertools.islice(sub, 2)
                assert [event.offset for event in itertools.islice(sub, 2)] == [0, 1]
            if how == "committed":
                sub.commit()
            raise RuntimeError
        assert sub.position == position, how


def test_losses_in_their_place() -> None:
    """on_loss is called before the first event after the gap; items() has the loss between the batches."""
    told: list[tuple[int, Lost]] = []
    arrivals: list[MemoryBatch | Lost] = [MemoryBatch(0, 2), loss(2, 4), MemoryBatch(5, 6)]
    sub = MemoryConsumer(arrivals, on_loss=lambda lost: told.append((sub.position, lost)))
    items = list(sub.items(0))
    assert [type(item) for item in items] == [MemoryBatch, Lost, MemoryBatch]
    assert told == [(5, items[1])]
    account = sub.ledger.account()
    assert (account.delivered, account.lost) == (3, 3)


def test_an_on_loss_that_raises_is_called_once() -> None:
    """Its exception reaches the application; the loss is accounted, and receiving goes on behind it."""
    calls = []

    def on_loss(lost: Lost) -> None:
        calls.append(lost)
        raise RuntimeError

    sub = MemoryConsumer([loss(0, 1), MemoryBatch(2, 3)], on_loss=on_loss)
    with pytest.raises(RuntimeError):
        sub.receive(0)
    event = sub.receive(0)
    assert event is not None
    assert event.offset == 2
    assert len(calls) == len(sub.losses) == 1


def test_what_on_loss_may_do() -> None:
    """It may look, commit, stop and close, but not receive."""

    def on_loss(_: Lost) -> None:
        assert sub.ledger.account().lost == 1
        sub.commit()
        with pytest.raises(UsageError):
            sub.receive(0)
        sub.close()

    sub = MemoryConsumer([loss(0, 0), MemoryBatch(1, 3)], on_loss=on_loss)
    assert list(sub.events(0)) == []
    assert sub.closed
    assert sub.position == 1


def test_asyncio_saves_in_another_thread() -> None:
    """Neither a regular save nor commit nor close writes a file in the loop's thread."""

    async def run() -> None:
        me = threading.get_ident()
        sub = MemoryConsumer(batches(1, 1, 1))
        got = [event.offset async for event in sub.aevents(0)]
        assert got == [0, 1, 2]
        assert sub.saved
        assert sub.saving_thread != me
        sub.saving_thread = 0
        await sub.acommit()
        assert sub.saving_thread not in (0, me)
        await sub.aclose()
        assert sub.closed

    asyncio.run(run())


@pytest.mark.parametrize("how", ["areceive", "abatches", "aitems", "aevents"])
def test_a_cancelled_receive_loses_nothing(how: str) -> None:
    """A batch that was taken for a receive which is then cancelled is handed out by the next one."""

    async def run() -> list[int]:
        sub = MemoryConsumer(batches(2, 3, 1))
        got: list[int] = []
        while len(got) < 6:
            receiving: Any = sub.areceive(1) if how == "areceive" else anext(getattr(sub, how)(1))
            try:
                receiving.__await__().send(None)
                receiving.throw(asyncio.CancelledError())
            except StopIteration as done:
                given = done.value if hasattr(done.value, "events") else [done.value]
                got += [event.offset for event in given]
                continue
            except asyncio.CancelledError:
                pass
            event = await sub.areceive(1)
            assert event is not None
            got.append(event.offset)
        return got

    assert asyncio.run(run()) == list(range(6))


def test_stop_by_another_thread() -> None:
    """However the two threads run, what was given is processed and the rest is not."""
    for _ in range(200):
        sub = MemoryConsumer(batches(*[50] * 20))
        stopper = threading.Thread(target=sub.stop)
        got = []
        for event in sub.events(0):
            got.append(event.offset)
            if event.offset == 30:
                stopper.start()
        stopper.join()
        sub.close()
        assert got == list(range(len(got)))
        assert sub.position == len(got)


def test_positions_are_bounded() -> None:
    """Beyond `max_sources` the oldest position is dropped."""
    handed: HandedOut[MemoryBatch] = HandedOut(lambda *_: None, {}, Counts(), max_sources=2)
    for name in "abc":
        handed.move_to(name, Position(1, 1))
    assert list(handed.positions) == ["b", "c"]
    assert handed.stage is Stage.NOTHING


@pytest.mark.parametrize(
    ("start", "has_cursor", "expected"),
    [(None, False, "live"), (None, True, "cursor"), ("oldest", True, "oldest"), (7, False, 7)],
)
def test_start(start: Any, has_cursor: bool, expected: Literal["live"] | int) -> None:
    """A cursor is used if there is one and nothing else was said."""
    assert check_start(start, has_cursor) == expected


@pytest.mark.parametrize("start", [True, -1, "newest", 1.5, b"live"])
def test_a_wrong_start(start: Any) -> None:
    """Anything else is refused, with the words that are known."""
    with pytest.raises(ConfigError, match="oldest"):
        check_start(start, True)


def test_a_batch_of_which_nothing_was_given_is_not_divided() -> None:
    """An interrupt between opening a batch and giving its first event; then whole batches are asked for."""
    for at in itertools.count(1):
        sub = MemoryConsumer(batches(1, 1))
        interrupts = Interrupts(lambda point, at=at: point == at)
        got: list[int] = []
        receive_some(sub, "receive", got, interrupts)
        got += [event.offset for batch in sub.batches(0) for event in batch]
        assert got == [0, 1]
        if not interrupts.raised:
            break
