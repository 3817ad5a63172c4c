"""Durations and sizes as people write them on a command line: `10m`, `1h30m`, `1GiB`. Pure."""

import re

from brokerless.core.errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}}
_BYTES |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def seconds(text: str, option: str) -> float:
    """`90`, `1.5`, `10m`, `1h30m`, `200ms`. Raises ConfigError that names the option."""
    try:
        value = float(text)
    except ValueError:
        if not _DURATION.fullmatch(text):
            raise ConfigError(option, f"{text!r} is no duration: write 90, 10m, 1h30m or 200ms") from None
        value = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if not 0 <= value < 1e9:
        raise ConfigError(option, f"{text!r} is no duration")
    return value


def size(text: str, option: str) -> int:
    """`1000`, `64KiB`, `1GiB`, `2MB`. Raises ConfigError that names the option."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] not in _BYTES:
        raise ConfigError(option, f"{text!r} is no size: write 1000000, 64KiB or 1GiB")
    return int(float(found[1]) * _BYTES[found[2]])
