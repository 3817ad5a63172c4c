"""The data source's options: strings from Spark into one checked Struct."""

import os
from collections.abc import Mapping
from datetime import datetime
from typing import TypeVar

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.event import microseconds
from brokerless.spark_collector.source.locations import LocationOffset
from brokerless.spark_collector.source.selection import Selection, check_pattern
from brokerless.spark_collector.tier.object_store import SCHEMES

# A micro-batch that a small machine finishes in seconds: 2 M events of 100 bytes are 200 MB.
MAX_EVENTS_PER_TRIGGER = 2_000_000
KNOWN = (
    "path", "endpoint", "startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp",
    "subscribe", "subscribePattern", "sources", "sourcesPattern", "maxEventsPerTrigger", "maxBytesPerTrigger",
    "failOnDataLoss", "onCorrupt", "numPartitions", "minPartitions", "storageOptions", "ranges",
)  # fmt: skip


Kind = TypeVar("Kind")


class SourceOptions(msgspec.Struct, frozen=True):
    """What `spark.read.format("brokerless").option(…)` was given."""

    paths: list[str]
    endpoints: list[str]
    starting: str | dict[str, LocationOffset]
    ending: str | dict[str, LocationOffset]
    max_events: int
    fail_on_data_loss: bool
    quarantine_corrupt: bool
    partitions: int | None  # None: as many as there are cores
    storage_options: dict[str, str]
    starting_time: int | None = None  # µs
    ending_time: int | None = None
    max_bytes: int = 0
    min_partitions: int = 1
    selection: Selection = Selection()
    ranges: bool = False  # rows are the ranges that tasks would read, not what lies there


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Check and convert. Raises ConfigError that names the option."""
    lower = {k.lower(): v for k, v in options.items()}
    unknown = sorted(set(lower) - {k.lower() for k in KNOWN})
    if unknown:
        known = ", ".join(KNOWN)
        raise ConfigError(unknown[0], f"is not an option of format brokerless; they are: {known}")
    paths = _list(lower.get("path", ""))
    endpoints = _list(lower.get("endpoint", ""))
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    if not paths and not endpoints:
        raise ConfigError("path", "give a spool or journal (path), or a publisher's address (endpoint)")
    on_corrupt = lower.get("oncorrupt", "fail").lower()
    if on_corrupt not in ("fail", "quarantine"):
        raise ConfigError("onCorrupt", f"must be fail or quarantine, not {on_corrupt!r}")
    return SourceOptions(
        [_directory(path) for path in paths],
        endpoints,
        _offsets("startingOffsets", lower.get("startingoffsets", "earliest")),
        _offsets("endingOffsets", lower.get("endingoffsets", "latest")),
        _number("maxEventsPerTrigger", lower.get("maxeventspertrigger", str(MAX_EVENTS_PER_TRIGGER)), 0),
        _flag("failOnDataLoss", lower.get("failondataloss", "true")),
        on_corrupt == "quarantine",
        _number("numPartitions", lower["numpartitions"], 1) if "numpartitions" in lower else None,
        _json("storageOptions", lower.get("storageoptions", "{}"), dict[str, str]),
        _time("startingTimestamp", lower.get("startingtimestamp", "")),
        _time("endingTimestamp", lower.get("endingtimestamp", "")),
        _number("maxBytesPerTrigger", lower.get("maxbytespertrigger", "0"), 0),
        _number("minPartitions", lower.get("minpartitions", "1"), 1),
        Selection(
            _names("subscribe", lower),
            check_pattern("subscribePattern", lower.get("subscribepattern", "")),
            _names("sources", lower),
            check_pattern("sourcesPattern", lower.get("sourcespattern", "")),
        ),
        _flag("ranges", lower.get("ranges", "false")),
    )


def _directory(path: str) -> str:
    plain = _plain(path)
    if "://" in plain and not plain.startswith(SCHEMES):
        stores = ", ".join(SCHEMES[:-1])
        raise ConfigError(
            "path",
            f"{path} is neither a directory nor a remote tier ({stores}; file:// for what is mounted here); "
            "a publisher is the option endpoint",
        )
    return plain.rstrip("/") if "://" in plain else plain


def _names(option: str, lower: Mapping[str, str]) -> list[str] | None:
    """Names of topics or sources; None: all."""
    if option.lower() not in lower:
        return None
    names = _list(lower[option.lower()])
    if not names:
        raise ConfigError(option, "is empty: leave it out to read everything")
    return names


def _time(name: str, text: str) -> int | None:
    """Milliseconds since 1970, as Kafka's source has them, or ISO 8601 with a time zone; in µs."""
    if not text:
        return None
    if text.removeprefix("-").isdecimal():
        return int(text) * 1000
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(name, f"must be milliseconds since 1970 or ISO 8601, not {text!r}") from None
    if found.tzinfo is None:
        raise ConfigError(name, f"{text} has no time zone: add Z or +02:00")
    return microseconds(found)


def _check_endpoint(address: str) -> None:
    from brokerless.direct import parse_address

    try:
        parse_address(address)
    except ConfigError as error:
        raise ConfigError("endpoint", error.problem) from None


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(name: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(name, f"must be a whole number, not {text!r}") from None
    if value < least:
        raise ConfigError(name, f"must be at least {least}")
    return value


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(name, f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _offsets(name: str, text: str) -> str | dict[str, LocationOffset]:
    """`earliest`, `latest`, or JSON: `{"<path or endpoint>": offset}`."""
    if text in ("earliest", "latest"):
        return text
    numbers = _json(name, text, dict[str, int])
    return {_key(location): LocationOffset("", 0, offset) for location, offset in numbers.items()}


def _json(name: str, text: str, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(name, str(error)) from None
    except msgspec.DecodeError:
        raise ConfigError(name, f"must be JSON, not {text!r}") from None


def _key(location: str) -> str:
    location = _plain(location)
    return location if "://" in location else os.path.abspath(location)


def _plain(path: str) -> str:
    return path.removeprefix("file://").removeprefix("file:")
