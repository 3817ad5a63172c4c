"""The catalogue of event types: what topics mean, and the JSON Schemas that their data must fit. No I/O.

Schemas are compiled by jsonschema-rs (`brokerless[webhooks]`): its regular expressions take linear time, and a schema
that refers to another host is refused and never fetched.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError, InvalidEvent, MissingDependency
from brokerless.webhooks.cloudevents import is_json
from brokerless.webhooks.models import EventType

logger = logging.getLogger("brokerless.webhooks")
# A schema is read by people and sent in lists.
MAX_SCHEMA_BYTES = 64 * 1024
# More topics than that usually mean that ids are put into topics.
MAX_EVENT_TYPES = 1000


class Catalogue:
    """Event types by topic. `update` belongs to one thread; `check` to any."""

    def __init__(self) -> None:
        self._validators: dict[str, Any] = {}

    def update(self, changes: Mapping[str, EventType | None]) -> None:
        """Take over event types that were changed, or removed (None)."""
        validators = dict(self._validators)
        for topic, found in changes.items():
            validators.pop(topic, None)
            if found is not None and found.validate and found.schema is not None:
                try:
                    validators[topic] = compiled(found.schema)
                except (ConfigError, MissingDependency) as error:
                    # Written by a process that has the library: publishing goes on without the check.
                    logger.warning("events of %s are not checked: %s", topic, error)
        self._validators = validators

    def check(self, topic: str, data: bytes, content_type: str) -> None:
        """InvalidEvent if the topic has a schema that is to be kept and the data does not fit it."""
        validator = self._validators.get(topic)
        if validator is None:
            return
        if not is_json(content_type):
            raise InvalidEvent("content_type", f"events of {topic} have a schema: their data must be JSON")
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InvalidEvent("data", f"events of {topic} have a schema: their data must be JSON") from None
        error = next(iter(validator.iter_errors(document)), None)
        if error is not None:
            place = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path
            )
            raise InvalidEvent("data", f"${place}: {error.message[:300]} (schema of {topic})")


def compiled(schema: Mapping[str, Any]) -> Any:
    """A validator of the schema; ConfigError if the schema is invalid."""
    try:
        import jsonschema_rs
    except ImportError:
        raise MissingDependency("jsonschema-rs", "webhooks", "a schema of an event type") from None
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise ConfigError("schema", f"is longer than {MAX_SCHEMA_BYTES} bytes")
    try:
        return jsonschema_rs.validator_for(dict(schema), retriever=_refuse)
    except (ValueError, RecursionError) as error:
        problem = (getattr(error, "message", "") or str(error)).splitlines()[0]
        raise ConfigError("schema", f"is not a JSON Schema: {problem[:300]}") from None


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is elsewhere; schemas must be complete")
