"""Which endpoints an event goes to. Pure; replaced as a whole when an endpoint changes."""

from collections.abc import Iterable
from functools import lru_cache

from brokerless.webhooks.models import Endpoint
from brokerless.webhooks.topics import TopicFilter

# Answers kept per (tenant, topic); topics that carry ids would otherwise fill memory. Cleared when full.
MAX_CACHED = 10_000


# Snapshots are rebuilt at every change; patterns are compiled once.
@lru_cache(maxsize=10_000)
def _compiled(topics: tuple[str, ...]) -> TopicFilter:
    return TopicFilter(topics)


class Routes:
    """An immutable snapshot of all endpoints, with an answer cache."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.endpoints: dict[str, Endpoint] = {endpoint.id: endpoint for endpoint in endpoints}
        self._filters: dict[str, list[tuple[Endpoint, TopicFilter]]] = {}
        for endpoint in self.endpoints.values():
            # Pending ones have not agreed yet: nothing is owed to them.
            if endpoint.state != "pending":
                entry = (endpoint, _compiled(tuple(endpoint.topics)))
                self._filters.setdefault(endpoint.tenant, []).append(entry)
        self._by_tenant: dict[str, list[Endpoint]] = {}
        for endpoint in self.endpoints.values():
            self._by_tenant.setdefault(endpoint.tenant, []).append(endpoint)
        self._cache: dict[tuple[str, str], tuple[tuple[Endpoint, ...], int]] = {}

    def route(self, tenant: str, topic: str) -> tuple[tuple[Endpoint, ...], int]:
        """The endpoints that get the event, and how many would have but are disabled."""
        key = (tenant, topic)
        found = self._cache.get(key)
        if found is None:
            matching = [e for e, wanted in self._filters.get(tenant, ()) if wanted.matches(topic)]
            active = tuple(endpoint for endpoint in matching if endpoint.active)
            found = (active, len(matching) - len(active))
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[key] = found
        return found

    def of_tenant(self, tenant: str) -> list[Endpoint]:
        """All endpoints of a tenant, whatever their state."""
        return self._by_tenant.get(tenant, [])

    def with_endpoint(self, endpoint: Endpoint) -> "Routes":
        """A snapshot in which this endpoint is added or replaced."""
        return Routes((self.endpoints | {endpoint.id: endpoint}).values())

    def without(self, endpoint_id: str) -> "Routes":
        """A snapshot without that endpoint."""
        return Routes(endpoint for endpoint in self.endpoints.values() if endpoint.id != endpoint_id)
