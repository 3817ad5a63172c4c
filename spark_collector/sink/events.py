"""Rows that become events: which columns they need, how tasks hand them over, what is refused; pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec

from brokerless.core import Retention
from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.core.event import check_data, check_headers, check_source, check_time, check_topic
from brokerless.core.journal.types import check_label
from brokerless.spark_collector.source.schema import COLUMNS, KIND_EVENT

if TYPE_CHECKING:
    import pyarrow as pa

OnFull = Literal["evict", "block", "reject"]
KNOWN = ("path", "source", "topic", "maxBytes", "onFull", "checkpointLocation")
# Spark's names of the types that a column may have.
TYPES = {
    "topic": ("string",),
    "data": ("binary", "string"),
    "content_type": ("string",),
    "key": ("string",),
    "headers": ("map<string,string>",),
    "time": ("timestamp",),
    "kind": ("string",),
}
# As many bytes as a collector's spool has by default.
_MAX_BYTES = 8 * 1024**3


class SinkEvent(msgspec.Struct, array_like=True, frozen=True):
    """One row as a task sends it to the driver; `time` in µs, None for now."""

    topic: str
    data: bytes
    content_type: str = ""
    key: str = ""
    headers: dict[str, str] = {}
    time: int | None = None


class SinkOptions(msgspec.Struct, frozen=True):
    """What `df.write.format("brokerless").option(…)` was given."""

    path: str
    source: str
    topic: str
    retention: Retention
    on_full: OnFull


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Check and convert. Raises ConfigError that names the option."""
    lower = {k.lower(): v for k, v in options.items()}
    unknown = sorted(set(lower) - {k.lower() for k in KNOWN})
    if unknown:
        known = ", ".join(KNOWN[:-1])
        raise ConfigError(unknown[0], f"is not an option of writing to format brokerless; they are: {known}")
    path = lower.get("path", "").removeprefix("file://").removeprefix("file:").rstrip("/")
    if not path or "://" in path:
        raise ConfigError("path", f"must be the directory of a journal on the driver's machine, not {path!r}")
    source, topic = lower.get("source", path.rpartition("/")[2]), lower.get("topic", "")
    try:
        check_source(source)
        if topic:
            check_topic(topic)
    except InvalidEvent as error:
        raise ConfigError(error.field, error.problem) from None
    max_bytes, on_full = lower.get("maxbytes", str(_MAX_BYTES)), lower.get("onfull", "evict")
    if not max_bytes.isdecimal() or int(max_bytes) < 1 << 20:
        raise ConfigError("maxBytes", "must be a whole number of at least 1 MiB")
    if on_full not in get_args(OnFull):
        raise ConfigError("onFull", f"must be one of {', '.join(get_args(OnFull))}, not {on_full!r}")
    return SinkOptions(path, source, topic, Retention(max_bytes=int(max_bytes)), cast(OnFull, on_full))


def check_columns(columns: Mapping[str, str], topic: str) -> None:
    """Raise ConfigError unless rows with these columns (name: Spark's type) can be events.

    `topic` is the option. Columns of our own row schema that are no part of an event are ignored.
    """
    if "data" not in columns:
        raise ConfigError("data", "is missing: the rows need a column data (binary or string)")
    if "topic" not in columns and not topic:
        raise ConfigError("topic", "is missing: give the rows a column topic, or the option topic")
    for name, kind in columns.items():
        if name in TYPES and kind not in TYPES[name]:
            raise ConfigError(name, f"the column must be {' or '.join(TYPES[name])}, not {kind}")
        if name not in TYPES and name not in COLUMNS:
            raise ConfigError(name, f"is not a column of an event; they are: {', '.join(TYPES)}")


def make_event(row: Mapping[str, Any], topic: str) -> SinkEvent | None:
    """The event of one row as Arrow gives it (times in µs); None if it is a row of another kind than event."""
    if row.get("kind", KIND_EVENT) != KIND_EVENT:
        return None
    name, data = topic or row["topic"], row["data"]
    for field, value in (("topic", name), ("data", data)):
        if value is None:
            raise InvalidEvent(field, "is null")
    return SinkEvent(
        name,
        data.encode() if isinstance(data, str) else data,
        row.get("content_type") or "",
        row.get("key") or "",
        dict(row.get("headers") or {}),
        row.get("time"),
    )


_encode_one = msgspec.msgpack.Encoder().encode
_decode_all = msgspec.msgpack.Decoder(list[SinkEvent]).decode


def encode_events(events: Sequence[SinkEvent]) -> bytes:
    """The events of one task, for its message to the driver."""
    return _encode_one(events)


def encode_batches(batches: Iterator["pa.RecordBatch"], topic: str) -> bytes:
    """The rows of one task as its message."""
    import pyarrow as pa

    events = []
    for each in batches:
        batch = each
        if "time" in batch.schema.names:
            at = batch.schema.get_field_index("time")
            batch = batch.set_column(at, "time", batch.column(at).cast(pa.timestamp("us")).cast(pa.int64()))
        made = (make_event(row, topic) for row in batch.to_pylist())
        events += [event for event in made if event is not None]
    return encode_events(events)


def decode_events(messages: Sequence[bytes]) -> Iterator[SinkEvent]:
    """The events of all tasks, in the tasks' order. Raises InvalidEvent for the first that no journal would take."""
    for message in messages:
        try:
            events = _decode_all(message)
        except msgspec.ValidationError as error:
            # It ends with the number of the row and that of the field.
            found = re.search(r"\]\[(\d+)\]`$", str(error))
            name = SinkEvent.__struct_fields__[int(found[1])] if found else "row"
            raise InvalidEvent(name, f"cannot be in an event: {error}") from None
        except msgspec.DecodeError as error:
            raise InvalidEvent("row", f"cannot be an event: {error}") from None
        for event in events:
            check_topic(event.topic)
            check_data(event.data)
            check_label("content_type", event.content_type)
            check_label("key", event.key)
            check_headers(event.headers)
            if event.time is not None:
                check_time(event.time)
            yield event
