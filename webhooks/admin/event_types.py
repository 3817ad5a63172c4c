"""The catalogue of event types: what the API, the command line and applications do with it."""

import msgspec

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.webhooks.catalogue import MAX_EVENT_TYPES, MAX_SCHEMA_BYTES, Catalogue, compiled
from brokerless.webhooks.errors import Conflict, NotFound
from brokerless.webhooks.models import EventType
from brokerless.webhooks.outbox.outbox import Outbox
from brokerless.webhooks.outbox.store import Store
from brokerless.webhooks.rules import MAX_DESCRIPTION


class EventTypeManager:
    """Reads and changes the catalogue; every process takes changes over with its next transaction."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def set(self, found: EventType) -> EventType:
        """Add or replace; ConfigError names what is wrong, Conflict if there are too many."""
        if len(found.description) > MAX_DESCRIPTION:
            raise ConfigError("description", f"has more than {MAX_DESCRIPTION} characters")
        if found.validate and found.schema is None:
            raise ConfigError("validate", "needs a schema")
        if found.schema is not None:
            compiled(found.schema)
        if found.example is not None:
            _check_example(found)

        def save(store: Store) -> None:
            known = {topic for topic, there in store.event_types().items() if there is not None}
            if len(known - {found.topic}) >= MAX_EVENT_TYPES:
                raise Conflict(f"the catalogue has {MAX_EVENT_TYPES} topics, which is the limit")
            store.save_event_type(found.topic, found)

        await self._outbox.call_async(save)
        return found

    async def remove(self, topic: str) -> None:
        """Take a topic out; NotFound if it is not in the catalogue."""

        def remove(store: Store) -> None:
            if store.event_types().get(topic) is None:
                raise NotFound("event type", topic)
            store.save_event_type(topic, None)

        await self._outbox.call_async(remove)

    async def list_all(self) -> list[EventType]:
        """All, by topic."""
        found = await self._outbox.read(lambda session: Store(session).event_types())
        return [there for there in found.values() if there is not None]

    async def get(self, topic: str) -> EventType:
        """One of them; NotFound if there is none."""
        found = await self._outbox.read(lambda session: Store(session).event_types().get(topic))
        if found is None:
            raise NotFound("event type", topic)
        return found


def _check_example(found: EventType) -> None:
    """An example that does not fit its own schema is a mistake in one of them."""
    try:
        data = msgspec.json.encode(found.example)
    except (TypeError, ValueError) as error:
        raise ConfigError("example", f"cannot be written as JSON: {error}") from None
    if len(data) > MAX_SCHEMA_BYTES:
        raise ConfigError("example", f"is longer than {MAX_SCHEMA_BYTES} bytes")
    if found.schema is not None:
        catalogue = Catalogue()
        catalogue.update({found.topic: msgspec.structs.replace(found, validate=True)})
        try:
            catalogue.check(found.topic, data, "application/json")
        except InvalidEvent as error:
            raise ConfigError("example", error.problem) from None
