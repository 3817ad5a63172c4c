"""`/metrics` of this process for Prometheus: components that were made with `metrics="host:port"`.

Components that name the same address share one page. It has every counter of each, and `brokerless_up`, `_lag`, `_lost`
and `_balanced`; the values are taken when Prometheus asks.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from brokerless.core.config import split_host_port
from brokerless.core.counters import PROMETHEUS_TEXT
from brokerless.core.errors import ConfigError
from brokerless.core.exposition import exposition
from brokerless.core.presence import Announcement, Component, announce


class Exporter:
    """One HTTP server of this process, for as long as a component uses it."""

    _open: ClassVar[dict[str, "Exporter"]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, host: str, port: int) -> None:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        from brokerless.core.runtime.http_host import HttpHost, listen

        def metrics(_: Request) -> Response:
            return Response(exposition(self.components()), media_type=PROMETHEUS_TEXT)

        self._announced: list[Announcement] = []
        self._host = HttpHost(Starlette(routes=[Route("/metrics", metrics)]), listen(host, port), linger_s=1)
        self.address = f"{self._host.address}/metrics"

    def components(self) -> list[Component]:
        """The components as they are now."""
        with self._lock:
            announced = list(self._announced)
        return [each.now() for each in announced]

    @classmethod
    def add(cls, where: str, announcement: Announcement) -> "Exporter":
        """Show a component at `host:port`; port 0 is a free one. Raises ConfigError."""
        host, port = split_host_port(where, "metrics")
        if not host:
            raise ConfigError("metrics", f"{where!r} names no host, as 127.0.0.1:9464 does")
        with cls._lock:
            exporter = cls._open.get(where) if port else None
            if exporter is None:
                try:
                    exporter = cls(host, port)
                except ConfigError as error:
                    raise ConfigError("metrics", error.problem) from None
                cls._open[where if port else exporter.address] = exporter
            exporter._announced.append(announcement)
            return exporter

    def remove(self, announcement: Announcement) -> None:
        """Show it no more; the last one ends the server. Removing twice is fine."""
        with self._lock:
            if announcement not in self._announced:
                return
            self._announced.remove(announcement)
            if self._announced:
                return
            for where in [where for where, exporter in self._open.items() if exporter is self]:
                del self._open[where]
        self._host.close()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: servers and components are the parent's."""
        cls._lock, cls._open = threading.RLock(), {}


os.register_at_fork(after_in_child=Exporter.forget_all)


class Announced:
    """A component that is announced until it is closed, and shown to Prometheus if that was asked for."""

    _presence: Announcement | None = None

    def close(self) -> None:
        """Release everything; closing twice is fine."""
        raise NotImplementedError

    def _announce(
        self, kind: str, name: str, addresses: Sequence[str], *, enabled: bool, metrics: str
    ) -> None:
        """Announce it (see `core.presence`), and serve it at `metrics`; raises ConfigError if that is not possible."""
        self._presence = announcement = announce(kind, name, addresses, self._state, enabled=enabled)
        if metrics:
            try:
                exporter = Exporter.add(metrics, announcement)
            except BaseException:
                self.close()
                raise
            announcement.exporter, announcement.metrics_address = exporter, exporter.address

    def _withdraw(self) -> None:
        if self._presence is not None:
            self._presence.close()

    def _state(self) -> dict[str, Any]:
        """What it announces about itself. Called in another thread, once a second."""
        raise NotImplementedError

    @property
    def metrics_address(self) -> str:
        """Where Prometheus finds this process's metrics; empty without `metrics=`."""
        return "" if self._presence is None else self._presence.metrics_address
