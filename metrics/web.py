"""`/metrics`, `/state` and `/health` over HTTP, in its own thread: a scrape never delays receiving."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.metrics.prometheus import OPENMETRICS, TEXT

START_S = 10.0
# Series that /state shows unless asked for more by ?limit=; 200,000 would be 40 MB.
DEFAULT_LIMIT = 1000


class WebServer:
    """Serves a bound listener: `metrics(openmetrics)` gives the page, `state(prefix, limit)` the state."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        metrics: Callable[[bool], str],
        state: Callable[[str, int], dict[str, Any]],
        health: Callable[[], str],
    ) -> None:
        self._listener = listener
        encoder = msgspec.json.Encoder(enc_hook=str)

        def get_metrics(request: Request) -> Response:
            openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
            return Response(metrics(openmetrics), media_type=OPENMETRICS if openmetrics else TEXT)

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
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._run, name="metrics-http")

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def start(self) -> None:
        """Begin to serve; returns when it does."""
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def stop(self) -> None:
        """End the thread; open requests get two seconds."""
        self._server.should_exit = True
        self._thread.join(2.0)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(5.0)
        self._listener.close()
