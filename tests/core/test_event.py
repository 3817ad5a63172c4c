"""Events and what is refused as one."""

import pytest

from brokerless.core import Event, Lost, Reason
from brokerless.core.errors import InvalidEvent
from brokerless.core.event import check_data, check_source, check_topic


def test_an_event_is_immutable_and_has_an_id() -> None:
    """Fields cannot be changed, and the id names source, epoch and offset."""
    event = Event("orders", 7, 42, "eu", 3, 1_000_000, b"x")
    assert event.id == "orders:7:42"
    with pytest.raises(AttributeError):
        event.data = b"y"  # type: ignore[misc]


def test_a_lost_range_knows_its_size() -> None:
    """Both ends are inclusive."""
    assert Lost("s", 1, None, 10, 19, Reason.EVICTED).count == 10


@pytest.mark.parametrize(
    "topic", ["", "a\nb", "a\x00", "\x7f", "x" * 256, "é" * 128, "\ud800", 3, None, b"t"]
)
def test_bad_topics_are_refused(topic: object) -> None:
    """Empty, over-long, control characters, not text: each names the topic."""
    with pytest.raises(InvalidEvent, match="topic") as caught:
        check_topic(topic)  # type: ignore[arg-type]
    assert caught.value.field == "topic"


@pytest.mark.parametrize("topic", ["a", "orders.eu", "x" * 255, "größe", "a b"])
def test_good_topics_pass(topic: str) -> None:
    """Printable text up to the limit is fine."""
    assert check_topic(topic) == topic


@pytest.mark.parametrize("source", ["", "a:b", "a/b", "a\n"])
def test_bad_sources_are_refused(source: str) -> None:
    """A source is part of ids and file names, so separators are not allowed."""
    with pytest.raises(InvalidEvent, match="source"):
        check_source(source)


def test_data_is_bytes_and_bounded() -> None:
    """Bytes-like objects become bytes; text and too much of it are refused with a hint."""
    assert check_data(bytearray(b"abc")) == b"abc"
    assert check_data(memoryview(b"abc")) == b"abc"
    with pytest.raises(InvalidEvent, match="encode"):
        check_data("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidEvent, match="limit is 3"):
        check_data(b"abcd", 3)
