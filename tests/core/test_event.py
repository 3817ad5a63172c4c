"""Events and what is refused as one."""

import json
import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brokerless.core import Event, Lost, Reason
from brokerless.core.errors import InvalidEvent
from brokerless.core.event import (
    Headers,
    check_data,
    check_headers,
    check_source,
    check_topic,
    datetime_of,
    microseconds,
)


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


def test_headers_cannot_be_changed() -> None:
    """Events with headers stay immutable, hashable and picklable."""
    event = Event("s", 1, 0, "t", 0, 0, b"", headers=Headers({"traceparent": "00-1-2-01"}))
    with pytest.raises(TypeError, match="cannot be changed"):
        event.headers["a"] = "b"  # type: ignore[index]
    with pytest.raises(TypeError):
        event.headers.update(a="b")  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(event))
    assert again == event
    assert hash(again) == hash(event)
    assert {**event.headers, "more": "1"} == {"traceparent": "00-1-2-01", "more": "1"}


@pytest.mark.parametrize(
    "headers",
    [
        *(["a"], "text", {"a": 1}, {1: "a"}, {"": "a"}, {"a\n": "b"}, {"a": "b\r"}, {"a": "x" * 9000}),
        *({str(i): "" for i in range(65)}, {"a": "\ud800"}),
    ],
)
def test_bad_headers_are_refused(headers: object) -> None:
    """What is no small map of printable text is refused by name."""
    with pytest.raises(InvalidEvent, match="headers"):
        check_headers(headers)  # type: ignore[arg-type]


def test_the_cloudevents_form() -> None:
    """Headers with names of attributes are extensions; those that would hide an attribute, and others, are in one."""
    headers = Headers({"traceparent": "00-1-2-01", "id": "mine", "X-Y": "1"})
    event = Event("s", 7, 42, "orders.eu", 3, 1_000_001, b"x", "text/plain", "k", headers)
    form = event.cloudevent()
    assert json.loads(form.pop("headers")) == {"id": "mine", "X-Y": "1"}
    assert form == {
        "specversion": "1.0",
        "id": "s:7:42",
        "source": "s",
        "type": "orders.eu",
        "time": "1970-01-01T00:00:01.000001Z",
        "sequence": "3",
        "datacontenttype": "text/plain",
        "partitionkey": "k",
        "traceparent": "00-1-2-01",
    }
    assert Event("s", 1, 0, "t", 0, -(1 << 63), b"").cloudevent()["time"].startswith("0001-01-01")


@given(
    st.integers(
        microseconds(datetime.min.replace(tzinfo=UTC)), microseconds(datetime.max.replace(tzinfo=UTC))
    )
)
@example(1_769_860_800_000_003)
@example(253_402_300_799_999_999)
def test_a_time_survives_being_a_datetime(time: int) -> None:
    """To the microsecond, in every year: floating point has too few digits for that."""
    assert microseconds(datetime_of(time)) == time
