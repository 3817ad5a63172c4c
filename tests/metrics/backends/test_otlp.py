"""OTLP: what a collector receives, read back by OpenTelemetry's own classes."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from brokerless.core.errors import ConfigError
from brokerless.metrics import MetricsServer, StatsClient
from brokerless.metrics.backends.base import console_text
from brokerless.metrics.backends.journal import rows
from brokerless.metrics.backends.otlp import export_request
from brokerless.metrics.server.saved_state import save
from tests.metrics.simulation import SimulatedDaemon
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


def test_tags_with_several_values_and_lines_with_a_time_keep_all_they_say() -> None:
    """In OTLP and in the journal: series that differ stay different, and what has a time of its own is there."""
    daemon = SimulatedDaemon()
    daemon.receive([b"a:1|c|#k:1,k:2\na:2|c|#k:2\na:4|c|T1700000000\nb:8|c|T1700000000\ng:3|g|T1700000009"])
    flush = daemon.flush()
    metrics = export_request(flush).resource_metrics[0].scope_metrics[0].metrics
    found = {
        (metric.name, *((tag.key, tag.value.string_value) for tag in point.attributes)): point.as_int
        for metric in metrics
        for point in [*metric.sum.data_points, *metric.gauge.data_points]
    }
    assert {key: value for key, value in found.items() if key[0] in ("a", "b", "g", "b.grade")} == {
        ("a", ("k", "1,2")): 1,
        ("a", ("k", "2")): 2,
        ("a",): 4,
        ("b",): 8,
        ("b.grade",): 2,
        ("g",): 3,
    }
    written = [(row.name, row.tags, row.value) for row in rows(flush)]
    assert ("a", {"k": "1,2"}, 1) in written
    assert ("a", {"k": "2"}, 2) in written
    assert ("b", {}, 8) in written
    assert "c b 8 at 1700000000" in console_text(flush)


def test_sums_began_with_the_accounts_and_not_with_the_process(tmp_path: Path) -> None:
    """A daemon with state goes on: a new start time would make its sums count once more."""
    daemon = SimulatedDaemon()
    daemon.now = 1000.0
    daemon.start_anew()
    daemon.receive([b"a:1|c"])
    first = daemon.flush()
    save(daemon.rollup, tmp_path / "state")
    daemon.restart(tmp_path / "state")
    for flush in (first, daemon.flush()):
        (metric, *_) = export_request(flush).resource_metrics[0].scope_metrics[0].metrics
        assert metric.sum.data_points[0].start_time_unix_nano == 1_000_000_000_000


def test_an_address_that_is_none_is_refused() -> None:
    """By name, when the daemon is made."""
    with pytest.raises(ConfigError, match="otlp"):
        MetricsServer(backends=["otlp:127.0.0.1:4318"])
