"""The event, and its opposite: `Lost`, a range of events that will not come."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import index
from typing import Any, NoReturn

import msgspec

from brokerless.core.errors import InvalidEvent, UsageError

# Peers: NATS allows 1 MiB by default, Kafka 1 MB, ZeroMQ anything. 16 MiB lets a document pass and
# keeps one event from filling a default journal.
MAX_EVENT_BYTES = 16 * 1024 * 1024
# What a journal may be told to take: such an event inside a frame, which is what a collector's spool holds.
MAX_NESTED_BYTES = MAX_EVENT_BYTES + 64 * 1024
# MQTT allows 65,535 bytes, NATS recommends fewer than 256 characters; topics are repeated per frame.
MAX_TOPIC_BYTES = 255
# Most HTTP servers take 8 KiB of headers; trace context with baggage has some hundred bytes.
MAX_HEADERS = 64
MAX_HEADERS_BYTES = 8 * 1024
# Times are stored as 64-bit microseconds: some 292,000 years either way.
MIN_TIME, MAX_TIME = -(1 << 63), (1 << 63) - 1


class Headers(dict[str, str]):
    """The headers of an event: a dict that cannot be changed, so that events stay immutable and hashable."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the headers of an event cannot be changed; make a dict of them first")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["Headers"], tuple[dict[str, str]]]:
        return Headers, (dict(self),)


NO_HEADERS = Headers()


class Event(msgspec.Struct, frozen=True, gc=False):
    """One immutable record.

    `offset` counts all events of (source, epoch); `seq` counts those of (source, epoch, topic).
    `time` is in microseconds since 1970 UTC. `key` is what key affinity goes by; empty means none.
    `headers` are what the producer attached to it, for example `traceparent`.
    """

    source: str
    epoch: int
    offset: int
    topic: str
    seq: int
    time: int
    data: bytes
    content_type: str = ""
    key: str = ""
    headers: Mapping[str, str] = NO_HEADERS

    @property
    def id(self) -> str:
        """Unique over all sources and times: `source:epoch:offset`."""
        return f"{self.source}:{self.epoch}:{self.offset}"

    def cloudevent(self) -> dict[str, str]:
        """The attributes of its CloudEvents 1.0 form; the data is beside them.

        The key is `partitionkey`, the seq is `sequence`. A header whose name can be one of an attribute, such as
        `traceparent`, is an extension attribute; all others are in `headers`, as the text of a JSON object.
        """
        named = {
            "specversion": "1.0",
            "id": self.id,
            "source": self.source,
            "type": self.topic,
            "time": datetime_of(self.time).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "sequence": str(self.seq),
        }
        if self.content_type:
            named["datacontenttype"] = self.content_type
        if self.key:
            named["partitionkey"] = self.key
        others = {}
        for name, value in self.headers.items():
            if _ATTRIBUTE.fullmatch(name) and name not in _RESERVED:
                named[name] = value
            else:
                others[name] = value
        if others:
            named["headers"] = msgspec.json.encode(others).decode()
        return named


# Names that attributes of a CloudEvent may have, and those that are taken.
_ATTRIBUTE = re.compile("[a-z0-9]{1,20}")
_RESERVED = {
    *("specversion", "id", "source", "type", "time", "sequence", "datacontenttype", "dataschema", "subject"),
    *("partitionkey", "headers", "data"),
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def datetime_of(time: int) -> datetime:
    """A time in microseconds since 1970 as a datetime, or the first or last one that there is."""
    try:
        return _EPOCH + timedelta(microseconds=time)
    except OverflowError:
        return _LAST if time > 0 else _FIRST


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What `publish` and `append` return: where the event (or the first of `count`) is."""

    epoch: int
    offset: int
    seq: int
    count: int = 1


class Reason(StrEnum):
    """Why an accepted event was not delivered; all but `compacted` are losses."""

    OFFLINE = "offline"
    PRODUCER_CRASH = "producer_crash"
    OVERFLOW_SENDER = "overflow_sender"
    OVERFLOW_RECEIVER = "overflow_receiver"
    IN_FLIGHT = "in_flight"
    EVICTED = "evicted"
    GAVE_UP = "gave_up"
    UNATTRIBUTED = "unattributed"
    # Not lost: a later event of the same key stands for it (see core/journal/key_state.py).
    COMPACTED = "compacted"


class Lost(msgspec.Struct, frozen=True):
    """An in-band marker for a lost range: sequence numbers `first` to `last`, both inclusive.

    With a `topic` the numbers are seqs of that topic; with `topic=None` they are offsets.
    """

    source: str
    epoch: int
    topic: str | None
    first: int
    last: int
    reason: Reason

    @property
    def count(self) -> int:
        """How many events."""
        return self.last - self.first + 1


def plain(text: str) -> str:
    """The same as a `str` of no subclass: those cannot be encoded, and may compare in their own way."""
    return text if type(text) is str else str.__str__(text)


def check_topic(topic: str) -> str:
    """Return the topic, or raise InvalidEvent: 1 to 255 UTF-8 bytes, no control characters."""
    if not isinstance(topic, str):
        raise InvalidEvent("topic", f"must be str, not {type(topic).__name__}")
    if not topic:
        raise InvalidEvent("topic", "is empty")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise InvalidEvent("topic", f"{topic!r} is not valid Unicode") from None
    if size > MAX_TOPIC_BYTES:
        raise InvalidEvent("topic", f"has {size} bytes, the limit is {MAX_TOPIC_BYTES}")
    if not topic.isprintable():
        raise InvalidEvent("topic", f"{topic!r} contains control characters")
    return plain(topic)


def check_headers(headers: Mapping[str, str] | None) -> Headers:
    """Return the headers, or raise InvalidEvent: at most 64, of 8 KiB in all, printable names and values."""
    if not headers:
        return NO_HEADERS
    if type(headers) is Headers:
        return headers  # of an event, and checked with it
    if not isinstance(headers, Mapping):
        raise InvalidEvent("headers", f"must be a dict of str, not {type(headers).__name__}")
    if len(headers) > MAX_HEADERS:
        raise InvalidEvent("headers", f"has {len(headers)} entries, the limit is {MAX_HEADERS}")
    size, checked = 0, {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidEvent("headers", f"{name!r}: {value!r} must both be str")
        if not name or not name.isprintable() or not value.isprintable():
            raise InvalidEvent("headers", f"{name!r}: {value!r} has an empty name, or control characters")
        size += len(name.encode()) + len(value.encode())
        checked[plain(name)] = plain(value)
    if size > MAX_HEADERS_BYTES:
        raise InvalidEvent("headers", f"has {size} bytes, the limit is {MAX_HEADERS_BYTES}")
    return Headers(checked)


def check_source(source: str) -> str:
    """Return the source name, or raise InvalidEvent: like a topic, without `:` and `/`."""
    try:
        source = check_topic(source)
    except InvalidEvent as error:
        raise InvalidEvent("source", error.problem) from None
    if ":" in source or "/" in source:
        raise InvalidEvent("source", f"{source!r} must not contain ':' or '/'")
    return source


def check_time(time: int) -> int:
    """Return the time, or raise InvalidEvent: an integer of microseconds that 64 bits can hold."""
    try:
        stamp = index(time)
    except TypeError:
        raise InvalidEvent(
            "time", f"must be an int of microseconds since 1970, not {type(time).__name__}"
        ) from None
    if not MIN_TIME <= stamp <= MAX_TIME:
        raise InvalidEvent("time", f"{stamp} does not fit into 64 bits")
    return stamp


def microseconds(time: int | datetime) -> int:
    """A time as events have it. Raises UsageError unless it is µs since 1970 or a datetime with a time zone."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise UsageError("give the datetime a time zone: datetime.now(UTC), or .astimezone()")
        return (time - _EPOCH) // timedelta(microseconds=1)
    if type(time) is not int:
        raise UsageError(f"a time is µs since 1970 or a datetime, not {time!r}")
    return time


def check_data(data: bytes, limit: int = MAX_EVENT_BYTES) -> bytes:
    """Return the data as bytes, or raise InvalidEvent: bytes-like, at most `limit` bytes."""
    if type(data) is not bytes:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidEvent(
                "data", f"must be bytes, not {type(data).__name__}; encode text with .encode()"
            )
        data = bytes(memoryview(data))
    if len(data) > limit:
        raise InvalidEvent("data", f"has {len(data)} bytes, the limit is {limit}")
    return data
