"""The data source's options: strings from Spark into one checked Struct."""

import json
import os
from collections.abc import Mapping

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.places import Mark

# A micro-batch that a small machine finishes in seconds: 2 M events of 100 bytes are 200 MB.
MAX_EVENTS_PER_TRIGGER = 2_000_000
KNOWN = (
    "path", "endpoint", "startingOffsets", "endingOffsets", "maxEventsPerTrigger", "failOnDataLoss",
    "onCorrupt", "numPartitions",
)  # fmt: skip


class SourceOptions(msgspec.Struct, frozen=True):
    """What `spark.read.format("brokerless").option(…)` was given."""

    paths: list[str]
    endpoints: list[str]
    starting: str | dict[str, Mark]
    ending: str | dict[str, Mark]
    max_events: int
    fail_on_data_loss: bool
    quarantine_corrupt: bool
    partitions: int


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Check and convert. Raises ConfigError that names the option."""
    lower = {k.lower(): v for k, v in options.items()}
    unknown = sorted(set(lower) - {k.lower() for k in KNOWN})
    if unknown:
        known = ", ".join(KNOWN)
        raise ConfigError(unknown[0], f"is not an option of format brokerless; they are: {known}")
    paths = _list(lower.get("path", ""))
    endpoints = _list(lower.get("endpoint", ""))
    if not paths and not endpoints:
        raise ConfigError("path", "give a spool or journal (path), or a publisher's address (endpoint)")
    on_corrupt = lower.get("oncorrupt", "fail").lower()
    if on_corrupt not in ("fail", "quarantine"):
        raise ConfigError("onCorrupt", f"must be fail or quarantine, not {on_corrupt!r}")
    return SourceOptions(
        [_plain(path) for path in paths],
        endpoints,
        _offsets("startingOffsets", lower.get("startingoffsets", "earliest")),
        _offsets("endingOffsets", lower.get("endingoffsets", "latest")),
        _number("maxEventsPerTrigger", lower.get("maxeventspertrigger", str(MAX_EVENTS_PER_TRIGGER)), 0),
        _flag("failOnDataLoss", lower.get("failondataloss", "true")),
        on_corrupt == "quarantine",
        # One task per core keeps a small machine busy; on a cluster give the number of its cores.
        _number("numPartitions", lower.get("numpartitions", str(os.cpu_count() or 2)), 1),
    )


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


def _offsets(name: str, text: str) -> str | dict[str, Mark]:
    """`earliest`, `latest`, or JSON: `{"<path or endpoint>": offset}`."""
    if text in ("earliest", "latest"):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        raise ConfigError(name, f"must be earliest, latest or JSON, not {text!r}") from None
    try:
        numbers = msgspec.convert(found, dict[str, int])
    except msgspec.ValidationError as error:
        raise ConfigError(name, f"must map places to offsets: {error}") from None
    return {_key(place): Mark("", 0, offset) for place, offset in numbers.items()}


def _key(place: str) -> str:
    place = _plain(place)
    return place if "://" in place else os.path.abspath(place)


def _plain(path: str) -> str:
    return path.removeprefix("file://").removeprefix("file:")
