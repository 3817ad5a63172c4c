"""Payload filters: does an event's JSON data meet an endpoint's conditions? No I/O."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from brokerless.core.errors import ConfigError
from brokerless.webhooks.cloudevents import is_json
from brokerless.webhooks.models import PayloadFilter

_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*)|\[([0-9]+)\]")
_MISSING = object()


def check_filter(condition: PayloadFilter) -> PayloadFilter:
    """Return the filter, or ConfigError: exactly one kind of condition."""
    in_range = condition.minimum is not UNSET or condition.maximum is not UNSET
    kinds = (condition.equals is not UNSET) + (condition.prefix is not UNSET) + in_range
    if kinds != 1:
        raise ConfigError("filters", f"{condition.path}: give one of equals, prefix, or minimum and maximum")
    return condition


class CompiledFilters:
    """The filters of one endpoint with their paths parsed."""

    def __init__(self, conditions: Sequence[PayloadFilter]) -> None:
        self._conditions = [(_steps(condition.path), condition) for condition in conditions]

    def match(self, document: Any) -> bool:
        """Whether every condition holds for the decoded data."""
        return all(_holds(_find(document, steps), condition) for steps, condition in self._conditions)


def decode(data: bytes, content_type: str) -> Any:
    """The data as JSON, or a value that no filter matches."""
    if not is_json(content_type):
        return _MISSING
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _MISSING


def _steps(path: str) -> list[str | int]:
    return [name if name else int(index) for name, index in _STEP.findall(path)]


def _find(document: Any, steps: Sequence[str | int]) -> Any:
    found = document
    for step in steps:
        if isinstance(step, str):
            found = found.get(step, _MISSING) if isinstance(found, dict) else _MISSING
        else:
            found = found[step] if isinstance(found, list) and step < len(found) else _MISSING
    return found


def _holds(value: Any, condition: PayloadFilter) -> bool:
    if value is _MISSING:
        return False
    if condition.equals is not UNSET:
        # In Python True == 1; in JSON they differ.
        same_kind = isinstance(value, bool) == isinstance(condition.equals, bool)
        return same_kind and bool(value == condition.equals)
    if condition.prefix is not UNSET:
        return isinstance(value, str) and value.startswith(condition.prefix)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    low = condition.minimum is UNSET or value >= condition.minimum
    return low and (condition.maximum is UNSET or value <= condition.maximum)
