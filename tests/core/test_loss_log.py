"""Loss speaks up: at once, bounded in rate and memory, and nothing stays unsaid."""

import logging
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Lost, Reason
from brokerless.core.loss_log import MAX_STREAMS, LossLog


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timers:
    """Timers that the test lets fire."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waiting: list[Timer] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> "Timer":
        self.waiting.append(Timer(self._clock.now + seconds, call))
        return self.waiting[-1]

    def move(self, seconds: float) -> None:
        """Time passes; what is due fires when it is due."""
        end = self._clock.now + seconds
        while due := sorted((each for each in self.waiting if each.at <= end), key=lambda each: each.at):
            self.waiting.remove(due[0])
            if due[0].is_alive():
                self._clock.now = max(self._clock.now, due[0].at)
                due[0].alive = False
                due[0].function()
        self._clock.now = end


class Timer(threading.Timer):
    """One of them; its thread is never started."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        super().__init__(0, call)
        self.at, self.alive = at, True

    def is_alive(self) -> bool:
        return self.alive

    def cancel(self) -> None:
        self.alive = False


class Records(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> object:
    handler = Records()
    logger = logging.getLogger("brokerless.test")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


def test_the_first_loss_is_logged_at_once_with_its_range(records: list[logging.LogRecord]) -> None:
    """A WARNING with source, reason, range and count, in the text and as fields."""
    LossLog("brokerless.test")(Lost("orders", 1, None, 3, 7, Reason.EVICTED))
    (record,) = records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "lost 5 events of orders (evicted, offsets 3 to 7)"
    fields = vars(record)
    assert (fields["source"], fields["reason"], fields["first"], fields["last"], fields["count"]) == (
        *("orders", "evicted"),
        *(3, 7, 5),
    )


def test_a_burst_is_summed_up(records: list[logging.LogRecord]) -> None:
    """A thousand gaps within the interval are two records, and their counts add up."""
    clock = Clock()
    timers = Timers(clock)
    log = LossLog("brokerless.test", clock=clock, later=timers)
    for number in range(1000):
        log.add("s", "overflow_receiver", 2, number * 10, number * 10 + 1)
    assert len(records) == len(timers.waiting) == 1
    timers.move(10.0)  # and nothing more is lost, nor does anybody ask
    assert len(records) == 2
    assert records[1].getMessage() == (
        "lost 1998 events of s (overflow_receiver, offsets 10 to 9991 in 999 ranges)"
    )


def test_it_says_what_was_lost(records: list[logging.LogRecord]) -> None:
    """A daemon that counts datagrams says datagrams."""
    LossLog("brokerless.test", unit="datagrams").add("clients", "in_flight", 2)
    assert records[0].getMessage() == "lost 2 datagrams of clients (in_flight)"


def test_sources_and_reasons_are_apart(records: list[logging.LogRecord]) -> None:
    """One noisy source does not silence another."""
    clock = Clock()
    log = LossLog("brokerless.test", clock=clock, later=Timers(clock))
    for source in ("a", "b"):
        for reason in ("evicted", "gave_up"):
            log.add(source, reason, 1)
    assert len(records) == 4


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y"]), st.integers(0, 5), st.floats(0, 30)),
        max_size=60,
    )
)
def test_what_is_logged_adds_up_to_what_was_lost(steps: list[tuple[str, str, int, float]]) -> None:
    """However losses and time come, all is said within two intervals, and with at most one record per interval."""
    handler = Records()
    logger = logging.getLogger("brokerless.test")
    logger.addHandler(handler)
    clock = Clock()
    timers = Timers(clock)
    log = LossLog("brokerless.test", clock=clock, later=timers)
    try:
        for source, reason, count, seconds in steps:
            log.add(source, reason, count)
            timers.move(seconds)
        timers.move(20.0)
    finally:
        logger.removeHandler(handler)
    assert sum(vars(record)["count"] for record in handler.records) == sum(count for _, _, count, _ in steps)
    assert len(handler.records) <= 6 * (1 + clock.now / 10)
    log.close()
    assert not any(each.is_alive() for each in timers.waiting)


def test_what_waits_is_said_at_the_end(records: list[logging.LogRecord]) -> None:
    """`close` does not wait for the interval, and leaves no thread."""
    log = LossLog("brokerless.test")
    log.add("s", "evicted", 1)
    log.add("s", "evicted", 7)
    assert any(thread.name == "loss-log" for thread in threading.enumerate())
    log.close()
    assert [vars(record)["count"] for record in records] == [1, 7]
    assert not any(thread.name == "loss-log" for thread in threading.enumerate())


def test_the_rest_of_a_burst_is_said_without_another_loss(
    records: list[logging.LogRecord], until: Callable[..., None]
) -> None:
    """With the real clock and thread: a component that waits in silence says what it lost."""
    log = LossLog("brokerless.test", interval_s=0.05)
    for number in range(5):
        log.add("s", "evicted", 1, number, number)
    until(lambda: sum(vars(record)["count"] for record in records) == 5)
    log.close()


def test_a_handler_that_loses_something_itself(records: list[logging.LogRecord]) -> None:
    """One that publishes what is logged, to a journal that evicts for it: nothing hangs, all is counted."""
    log = LossLog("brokerless.test", interval_s=0.0)

    class Publishes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if vars(record)["source"] == "s":
                other = threading.Thread(target=log.add, args=("log", "evicted", 1))
                other.start()
                other.join(30)

    logger = logging.getLogger("brokerless.test")
    handler = Publishes()
    logger.addHandler(handler)
    try:
        log.add("s", "evicted", 2)
    finally:
        logger.removeHandler(handler)
    assert sorted(vars(record)["count"] for record in records) == [1, 2]


def test_memory_is_bounded(records: list[logging.LogRecord]) -> None:
    """Invented sources cost a bounded number of entries; what a forgotten one had left is logged."""
    clock = Clock()
    log = LossLog("brokerless.test", clock=clock, later=Timers(clock))
    log.add("first", "evicted", 1)
    log.add("first", "evicted", 7)
    for number in range(MAX_STREAMS + 5):
        log.add(f"s{number}", "evicted", 1)
    assert len(log._streams) == MAX_STREAMS
    assert vars(next(r for r in records[1:] if vars(r)["source"] == "first"))["count"] == 7
