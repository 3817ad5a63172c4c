"""`/metrics`, `/state` and `/health` over HTTP, in its own thread: a scrape never delays receiving."""

import socket
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.core.counters import PROMETHEUS_TEXT
from brokerless.core.runtime.http_host import HttpHost
from brokerless.metrics.backends.prometheus import OPENMETRICS

# Idle connections; each is an open file, of which a process usually has 1024. Beyond it the oldest is closed.
MAX_CONNECTIONS = 64
# A connection that has sent no whole request head by then is closed.
IDLE_S = 10.0
# Answers that are not read as fast as they come; of 200,000 series each is 80 MB. Beyond it the oldest is cut off.
MAX_UNREAD = 4
# Series that /state shows unless asked for more by ?limit=; 200,000 would be 40 MB.
DEFAULT_LIMIT = 1000


class WebServer:
    """Serves a bound listener from here on: `metrics(openmetrics)` gives the page, `state(prefix, limit)` the state."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        metrics: Callable[[bool], bytes],
        state: Callable[[str, int], dict[str, Any]],
        health: Callable[[], str],
    ) -> None:
        encoder = msgspec.json.Encoder(enc_hook=str)

        def get_metrics(request: Request) -> Response:
            openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
            return Response(metrics(openmetrics), media_type=OPENMETRICS if openmetrics else PROMETHEUS_TEXT)

        def get_state(request: Request) -> Response:
            try:
                limit = int(request.query_params.get("limit", DEFAULT_LIMIT))
            except ValueError:
                return Response("limit must be a number\n", 400)
            body = state(request.query_params.get("prefix", ""), max(0, limit))
            return Response(encoder.encode(body), media_type="application/json")

        def get_health(_: Request) -> Response:
            status = health()
            return Response(status + "\n", 200 if status == "up" else 503)

        app = Starlette(
            routes=[
                Route("/metrics", get_metrics),
                Route("/state", get_state),
                Route("/health", get_health),
            ]
        )
        self._host = HttpHost(
            app,
            listener,
            max_unfinished=MAX_CONNECTIONS,
            max_unread=MAX_UNREAD,
            header_timeout_s=IDLE_S,
            linger_s=2,
        )

    def stop(self) -> None:
        """End the thread; open requests get two seconds."""
        self._host.close()
