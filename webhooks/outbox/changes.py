"""Notifies open pages when something of their tenant has changed."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from brokerless.webhooks.models import Endpoint
from brokerless.webhooks.outbox.accept import Batch


class _Watcher(msgspec.Struct, eq=False):
    tenant: str | None
    changed: asyncio.Event
    loop: asyncio.AbstractEventLoop


class Changes:
    """Told by the writer thread about each commit, watched from any event loop. Only tells that, never what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: dict[_Watcher, None] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def watching(self, tenant: str | None) -> int:
        """How many watch this tenant (None: all of them)."""
        with self._lock:
            return sum(watcher.tenant == tenant for watcher in self._watchers)

    @contextmanager
    def watch(self, tenant: str | None) -> Iterator[asyncio.Event]:
        """An event that is set whenever something of the tenant (None: of any) was committed; the caller clears it."""
        watcher = _Watcher(tenant, asyncio.Event(), asyncio.get_running_loop())
        with self._lock:
            self._watchers[watcher] = None
        try:
            yield watcher.changed
        finally:
            with self._lock:
                del self._watchers[watcher]

    def committed(self, batch: Batch, endpoints: Mapping[str, Endpoint]) -> None:
        """A transaction of this process was committed."""
        if not len(self):
            return
        tenants = set(batch.tenants)
        for endpoint_id in {*batch.recounted, *(result.endpoint for result in batch.finished)}:
            endpoint = endpoints.get(endpoint_id)
            if endpoint is not None:
                tenants.add(endpoint.tenant)
        if not tenants:
            return
        with self._lock:
            wanted = [w for w in self._watchers if w.tenant is None or w.tenant in tenants]
        for watcher in wanted:
            with suppress(RuntimeError):  # its loop is closed: nobody watches
                watcher.loop.call_soon_threadsafe(watcher.changed.set)
