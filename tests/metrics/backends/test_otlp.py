"""OTLP: what a collector receives, read back by OpenTelemetry's own classes."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from brokerless.core.errors import ConfigError
from brokerless.metrics import MetricsServer, StatsClient
from tests.metrics.windows import NEVER_S


def test_a_collector_gets_every_figure(until: Callable[..., None]) -> None:
    """Corrected counter with raw, bound and grade, gauge, set and timer, with tags; after an error it is sent again."""
    bodies: list[bytes] = []
    answers = [503, 200, 200, 200]

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    web = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    backend = f"otlp:http://127.0.0.1:{web.server_port}/v1/metrics"
    with MetricsServer(udp=["127.0.0.1:0"], backends=[backend], flush_s=NEVER_S) as server:
        host, _, port = server.addresses["udp"][0].rpartition(":")
        with StatsClient(host, int(port), tags={"url": "/a"}) as client:
            client.incr("hits", 3)
            client.gauge("level", 2.5)
            client.set("users", "ann")
            client.timing("took", 30)
        until(lambda: server.receive_counters()["numbered"] >= 3)
        server.flush_now()
        until(lambda: len(bodies) == 2)
    web.shutdown()
    web.server_close()
    assert bodies[0] == bodies[1]
    request = ExportMetricsServiceRequest.FromString(bodies[1])
    metrics = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    hits = metrics["hits"].sum.data_points[0]
    assert (hits.as_int, hits.attributes[0].key, hits.attributes[0].value.string_value) == (3, "url", "/a")
    assert metrics["hits.raw"].sum.data_points[0].as_int == 3
    assert metrics["hits.grade"].gauge.data_points[0].as_int == 0
    assert metrics["level"].gauge.data_points[0].as_double == 2.5
    assert metrics["users"].gauge.data_points[0].as_int == 1
    assert (metrics["took"].summary.data_points[0].count, metrics["took"].summary.data_points[0].sum) == (
        1,
        30,
    )


def test_an_address_that_is_none_is_refused() -> None:
    """By name, when the daemon is made."""
    with pytest.raises(ConfigError, match="otlp"):
        MetricsServer(backends=["otlp:127.0.0.1:4318"])
