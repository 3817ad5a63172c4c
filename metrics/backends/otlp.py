"""The OTLP backend: every window as OpenTelemetry metrics, protobuf over HTTP. Needs `brokerless[otlp]`."""

import urllib.request
from collections.abc import Iterable
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from brokerless.metrics.aggregate.flush import Flush, add_up
from brokerless.metrics.backends.base import SEND_TIMEOUT_S, Backend
from brokerless.metrics.parser import name_and_tags


def export_request(flush: Flush) -> Any:
    """A flush as one request.

    Counters are sums since the accounts began, corrected for loss, not monotonic because an estimate may be put right
    downwards; `<name>.raw`, `.bound` and `.grade` are beside them. Gauges and sets are gauges, timers summaries of the
    window. What came with times of its own is in the sums, and the latest gauge.
    """
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    scope.scope.name = "brokerless.metrics"
    writer = _Writer(scope.metrics, int(flush.since * 1e9), int(flush.end * 1e9))
    counters = {point.series: [point] for point in flush.counters}
    for point in flush.stamped_counters:
        counters.setdefault(point.series, []).append(point)
    for point in map(add_up, counters.values()):
        writer.number(point.series, "", point.total, cumulative=True)
        writer.number(point.series, ".raw", point.total_raw, cumulative=True)
        if point.total_bound is not None:
            writer.number(point.series, ".bound", point.total_bound)
        writer.number(point.series, ".grade", int(point.total_grade))
    for table in (flush.all_gauges, flush.sets):
        for series, value in table.items():
            writer.number(series, "", value)
    for series, figures in flush.timers.items():
        count, total = figures.get("count", 0), figures.get("sum", 0)
        if not isinstance(count, dict) and not isinstance(total, dict):
            writer.summary(series, int(flush.start * 1e9), count, total, _quantiles(figures))
    return request


class _Writer:
    """Adds points; those of one name are one metric."""

    def __init__(self, metrics: Any, start_ns: int, end_ns: int) -> None:
        self._metrics, self._start_ns, self._end_ns = metrics, start_ns, end_ns
        self._known: dict[tuple[str, str], Any] = {}

    def _metric(self, series: str, suffix: str, kind: str) -> tuple[Any, list[Any]]:
        name, tags = name_and_tags(series)
        key = (name + suffix, kind)
        metric = self._known.get(key)
        if metric is None:
            metric = self._known[key] = self._metrics.add(name=name + suffix)
        attributes = [KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in tags.items()]
        return metric, attributes

    def number(self, series: str, suffix: str, value: float, *, cumulative: bool = False) -> None:
        metric, attributes = self._metric(series, suffix, "sum" if cumulative else "gauge")
        if cumulative:
            metric.sum.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            point = metric.sum.data_points.add(start_time_unix_nano=self._start_ns)
        else:
            point = metric.gauge.data_points.add()
        point.time_unix_nano = self._end_ns
        point.attributes.extend(attributes)
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            point.as_int = value
        else:
            point.as_double = float(value)

    def summary(
        self, series: str, start_ns: int, count: float, total: float, quantiles: Iterable[tuple[float, float]]
    ) -> None:
        metric, attributes = self._metric(series, "", "summary")
        point = metric.summary.data_points.add(start_time_unix_nano=start_ns, time_unix_nano=self._end_ns)
        point.count, point.sum = round(count), float(total)
        point.attributes.extend(attributes)
        for share, value in quantiles:
            point.quantile_values.add(quantile=share, value=float(value))


def _quantiles(figures: Any) -> Iterable[tuple[float, float]]:
    for name, value in figures.items():
        if name == "median":
            yield 0.5, value
        elif name.startswith("upper_") and not isinstance(value, dict):
            yield float(name.removeprefix("upper_").replace("_", ".")) / 100, value


class Otlp(Backend):
    """POSTs each window to a collector's `/v1/metrics`; one that answers with an error gets it again."""

    def __init__(self, name: str, url: str) -> None:
        self._url = url
        super().__init__(name)

    def deliver(self, flush: Flush) -> int:
        body: bytes = export_request(flush).SerializeToString()
        request = urllib.request.Request(  # noqa: S310  # http or https, by check_backend
            self._url, body, {"content-type": "application/x-protobuf"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=SEND_TIMEOUT_S) as answer:  # noqa: S310
            answer.read(4096)
        return len(body)
