"""Loss speaks up: at once, bounded in rate and memory, and nothing stays unsaid."""

import logging

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
    log = LossLog("brokerless.test", clock=clock)
    for number in range(1000):
        log.add("s", "overflow_receiver", 2, number * 10, number * 10 + 1)
    assert len(records) == 1
    clock.now = 10.0
    log.flush()
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
    log = LossLog("brokerless.test", clock=Clock())
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
    """However losses and time come, the counts of all records are the losses, at most one record per interval."""
    handler = Records()
    logger = logging.getLogger("brokerless.test")
    logger.addHandler(handler)
    clock = Clock()
    log = LossLog("brokerless.test", clock=clock)
    try:
        for source, reason, count, seconds in steps:
            log.add(source, reason, count)
            clock.now += seconds
        before_close = len(handler.records)
        log.close()
    finally:
        logger.removeHandler(handler)
    assert sum(vars(record)["count"] for record in handler.records) == sum(count for _, _, count, _ in steps)
    assert before_close <= 6 * (1 + clock.now / 10)


def test_memory_is_bounded(records: list[logging.LogRecord]) -> None:
    """Invented sources cost a bounded number of entries; what a forgotten one had left is logged."""
    log = LossLog("brokerless.test", clock=Clock())
    log.add("first", "evicted", 1)
    log.add("first", "evicted", 7)
    for number in range(MAX_STREAMS + 5):
        log.add(f"s{number}", "evicted", 1)
    assert len(log._streams) == MAX_STREAMS
    assert vars(next(r for r in records[1:] if vars(r)["source"] == "first"))["count"] == 7
