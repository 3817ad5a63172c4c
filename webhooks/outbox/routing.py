"""Which endpoints an event goes to. Pure; owned by the outbox's writer, read by everybody."""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from brokerless.webhooks.filters import CompiledFilters, decode
from brokerless.webhooks.models import Endpoint
from brokerless.webhooks.topics import TopicFilter

# Answers kept per (tenant, topic); topics that carry ids would otherwise fill memory. Cleared when full.
MAX_CACHED = 10_000


# Patterns are compiled once, however often an endpoint changes.
@lru_cache(maxsize=10_000)
def _compiled(topics: tuple[str, ...]) -> TopicFilter:
    return TopicFilter(topics)


class Targets(msgspec.Struct, frozen=True):
    """Where an event goes: endpoints that get it, and disabled ones that would have."""

    active: tuple[Endpoint, ...]
    disabled: tuple[Endpoint, ...]
    filtered: bool = False


class Routes:
    """All endpoints by id and by tenant, with a cache of answers. A change touches its own tenant only."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self._by_tenant: dict[str, dict[str, Endpoint]] = {}
        self._filters: dict[str, CompiledFilters] = {}
        self._cache: dict[str, dict[str, Targets]] = {}
        self._cached = 0
        for endpoint in endpoints:
            self.put(endpoint)

    def put(self, endpoint: Endpoint) -> None:
        """Add or replace an endpoint."""
        self.endpoints[endpoint.id] = endpoint
        self._by_tenant.setdefault(endpoint.tenant, {})[endpoint.id] = endpoint
        self._filters.pop(endpoint.id, None)
        if endpoint.filters:
            self._filters[endpoint.id] = CompiledFilters(endpoint.filters)
        self._forget_answers(endpoint.tenant)

    def remove(self, endpoint_id: str) -> None:
        """Forget an endpoint; does nothing if there is none."""
        found = self.endpoints.pop(endpoint_id, None)
        if found is not None:
            owned = self._by_tenant[found.tenant]
            owned.pop(endpoint_id, None)
            if not owned:
                del self._by_tenant[found.tenant]
            self._filters.pop(endpoint_id, None)
            self._forget_answers(found.tenant)

    def _forget_answers(self, tenant: str) -> None:
        self._cached -= len(self._cache.pop(tenant, ()))

    def route(self, tenant: str, topic: str, data: bytes, content_type: str) -> Targets:
        """The endpoints that get the event, by topic and by their filters."""
        found = self._cache.get(tenant, {}).get(topic)
        if found is None:
            found = self._by_topic(tenant, topic)
            if self._cached >= MAX_CACHED:
                self._cache, self._cached = {}, 0
            self._cache.setdefault(tenant, {})[topic] = found
            self._cached += 1
        if not found.filtered:
            return found
        document = decode(data, content_type)
        return Targets(
            tuple(endpoint for endpoint in found.active if self._passes(endpoint, document)),
            tuple(endpoint for endpoint in found.disabled if self._passes(endpoint, document)),
        )

    def _passes(self, endpoint: Endpoint, document: object) -> bool:
        filters = self._filters.get(endpoint.id)
        return filters is None or filters.match(document)

    def _by_topic(self, tenant: str, topic: str) -> Targets:
        # Pending ones have not agreed yet: nothing is owed to them.
        matching = [
            endpoint
            for endpoint in self._by_tenant.get(tenant, {}).values()
            if endpoint.state in {"active", "disabled"} and _compiled(tuple(endpoint.topics)).matches(topic)
        ]
        return Targets(
            tuple(endpoint for endpoint in matching if endpoint.active),
            tuple(endpoint for endpoint in matching if not endpoint.active),
            any(endpoint.filters for endpoint in matching),
        )

    def wanted(self, tenant: str, topic: str) -> bool:
        """Whether any active endpoint of the tenant asked for the topic, whatever its filters say."""
        return bool(self._by_topic(tenant, topic).active)

    def of_tenant(self, tenant: str) -> list[Endpoint]:
        """All endpoints of a tenant, whatever their state."""
        return list(self._by_tenant.get(tenant, {}).values())


def wants(endpoint: Endpoint, topic: str, data: bytes, content_type: str) -> bool:
    """Whether an event is one that the endpoint asked for, whatever its state."""
    if not _compiled(tuple(endpoint.topics)).matches(topic):
        return False
    return not endpoint.filters or CompiledFilters(endpoint.filters).match(decode(data, content_type))
