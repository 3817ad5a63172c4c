"""The small types that journals are configured with and answer with, and the checks that they share."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from typing import Annotated, Any, Literal

import msgspec

from brokerless.core.counters import Counters, count, loss
from brokerless.core.errors import ConfigError, InvalidEvent, UsageError
from brokerless.core.event import MAX_TOPIC_BYTES, Headers, check_data, check_headers, check_time, plain
from brokerless.core.frame import MAX_FRAME_EVENTS, Frame
from brokerless.core.journal.head_file import stage_prefix
from brokerless.core.journal.staging import EVENT_OVERHEAD_BYTES, Topic
from brokerless.core.runtime.accelerated import speed

OnFull = Literal["evict", "block", "reject"]
Compact = Literal["", "key"]

# A frame larger than this delays the ones behind it; at 100 bytes an event it holds about 9,000.
FRAME_TARGET_BYTES = 1024 * 1024


def new_topic(name: str, next_seq: int = 0) -> Topic:
    """A topic that begins, or goes on at that seq."""
    return Topic(name, stage_prefix(name, "", ""), next_seq)


def _total_bytes(datas: list[bytes]) -> int:
    """The size of a list of bytes, or -1 if it has anything else in it."""
    try:
        # Two passes in C check that all are bytes and tell their size; a fifth of a loop's cost.
        return len(b"".join(datas)) if set(map(type, datas)) <= {bytes} else -1
    except (TypeError, BufferError):
        return -1


total_bytes: Callable[[list[bytes]], int] = _total_bytes if speed is None else speed.total_bytes


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much a journal keeps; 0 means that this bound is not used, but at least one must be.

    `max_bytes` counts encoded frames. `max_age_s` drops what is older when something is appended.
    """

    max_bytes: int = 0
    max_events: int = 0
    max_age_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("max_bytes", "max_events", "max_age_s"):
            if getattr(self, field) < 0:
                raise ConfigError(f"retention.{field}", "must not be negative")
        if not (self.max_bytes or self.max_events or self.max_age_s):
            raise ConfigError("retention", "give at least one of max_bytes, max_events, max_age_s")


class JournalCounters(Counters):
    """What a journal did."""

    component = "core.journal"

    appended: Annotated[int, count("events accepted")] = 0
    frames: Annotated[int, count("frames written")] = 0
    bytes: Annotated[int, count("bytes of frames written")] = 0
    dropped: Annotated[int, count("events dropped by retention that every registered cursor had passed")] = 0
    evicted: Annotated[int, loss("events dropped by retention that a registered cursor had not had")] = 0
    rejected: Annotated[int, loss("events refused with JournalFull")] = 0
    blocked: Annotated[int, count("times that a producer was held back by on_full=block")] = 0
    compactions: Annotated[int, count("times that the newest event of every key was written")] = 0
    compaction_damaged: Annotated[
        int, loss("frames or blocks that compaction could not read: their keys keep an older value, or none")
    ] = 0
    failed: Annotated[int, loss("writes that the disk refused; the events were not accepted")] = 0


class Chunk(msgspec.Struct, frozen=True):
    """What `read` returns: whole frames in order, ranges that are gone, and the offset to go on from.

    `gone` has `(first, last)` offsets that were accepted once and cannot be read (corrupt segments).
    """

    frames: list[Frame]
    gone: list[tuple[int, int]]
    next: int


def check_label(field: str, text: Any) -> str:
    """Return the text, or raise InvalidEvent unless it is a short str, as content types and keys are."""
    if not isinstance(text, str):
        raise InvalidEvent(field, f"must be str, not {type(text).__name__}")
    if len(text.encode("utf-8", "replace")) > MAX_TOPIC_BYTES:
        raise InvalidEvent(field, f"has more than {MAX_TOPIC_BYTES} bytes")
    if not text.isprintable():
        raise InvalidEvent(field, f"{text!r} contains control characters")
    return plain(text)


def check_compact(compact: object) -> None:
    """Raise ConfigError unless that is a way to compact, or none."""
    if compact not in ("", "key"):
        raise ConfigError("compact", f'must be "key", or "" for not at all, not {compact!r}')


def check_position(offset: object) -> None:
    """Raise UsageError unless `offset` can be a cursor's position."""
    if type(offset) is not int or not 0 <= offset < 1 << 63:
        raise UsageError(f"a cursor's offset is a number from 0 on, not {offset!r}")


def check_batch(
    datas: Sequence[bytes],
    content_type: str,
    keys: Sequence[str] | None,
    times: Sequence[int] | int | None,
    headers: Sequence[Mapping[str, str]] | Mapping[str, str] | None,
    limit: int,
) -> tuple[list[bytes], str, list[str] | None, Sequence[int] | int | None, list[Headers] | None]:
    """Data, content type, keys, times and headers of `append_many`, checked. Raises InvalidEvent."""
    if isinstance(times, int):
        check_time(times)
        checked, content_type, keys, _, columns = check_batch(datas, content_type, keys, None, headers, limit)
        return checked, content_type, keys, times, columns
    try:
        checked = list(datas)
    except TypeError:
        problem = f"append_many needs a list of bytes, not {type(datas).__name__}"
        raise InvalidEvent("data", problem) from None
    if not checked:
        raise InvalidEvent("data", "append_many needs at least one event")
    if not 0 <= total_bytes(checked) <= limit:
        checked = [check_data(data, limit) for data in checked]
    if times is None and keys is None and headers is None and content_type == "":
        return checked, "", None, None, None
    if isinstance(headers, Mapping):
        headers = [check_headers(headers)] * len(checked)
    for what, column in (("times", times), ("keys", keys), ("headers", headers)):
        if column is not None and len(column) != len(checked):
            raise InvalidEvent(what, f"has {len(column)} entries for {len(checked)} events")
    if times is not None:
        times = [check_time(time) for time in times]
    content_type = check_label("content_type", content_type)
    if keys is not None:
        keys = [check_label("key", key) for key in keys]
    maps = None if headers is None else [check_headers(entry) for entry in headers]
    return checked, content_type, keys, times, maps


def headers_bytes(headers: Mapping[str, str]) -> int:
    """What the headers of an event count for, at least as much as they have encoded."""
    return 8 + sum(4 * (len(name) + len(value)) + 8 for name, value in headers.items()) if headers else 0


def cuts(
    datas: list[bytes], headers: Sequence[Mapping[str, str]] | None = None
) -> list[tuple[int, int]] | None:
    """Where to cut a list into frames of about FRAME_TARGET_BYTES; None if it is one."""
    extra = sum(map(headers_bytes, headers)) if headers else 0
    if len(datas) <= MAX_FRAME_EVENTS and total_bytes(datas) + extra <= FRAME_TARGET_BYTES:
        return None
    cuts, start, size = [], 0, 0
    for i, data in enumerate(datas):
        need = len(data) + (headers_bytes(headers[i]) if headers else 0)
        if i > start and (size + need > FRAME_TARGET_BYTES or i - start >= MAX_FRAME_EVENTS):
            cuts.append((start, i))
            start, size = i, 0
        size += need + EVENT_OVERHEAD_BYTES
    cuts.append((start, len(datas)))
    return cuts


def stamps(n: int, times: Sequence[int] | int | None) -> bytes:
    """The column of times: those given, or one for all, which is now if it is not given."""
    if times is None:
        times = time_ns() // 1000
    if isinstance(times, int):
        return times.to_bytes(8, "little", signed=True) * n
    return array("q", times).tobytes()
