"""OpenTelemetry: one trace from publish to handler, over a real publisher, and instruments that agree with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from brokerless.core import MemoryJournal
from brokerless.core.tracing import handling, observe_components, publishing
from brokerless.direct import Publisher, Subscriber, Worker

EXPORTER = InMemorySpanExporter()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    # A process has one provider for good.
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


def test_one_trace_from_publish_to_every_handler(spans: InMemorySpanExporter) -> None:
    """Subscriber and worker get the publisher's trace by the event's headers, beside headers of the user's own."""
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as publisher,
        Subscriber(publisher.address, start="oldest") as subscriber,
        Worker(publisher.address, group="g") as worker,
    ):
        with publishing("orders.eu", source="p", headers={"tenant": "a"}) as headers:
            publisher.publish("orders.eu", b"x", headers=headers)
        event = subscriber.receive(timeout=30)
        delivery = worker.receive(timeout=30)
        assert event is not None
        assert delivery is not None
        assert event.headers["tenant"] == "a"
        assert event.headers["traceparent"].startswith("00-")
        with handling(event):
            pass
        with pytest.raises(ValueError, match="no"), handling(delivery.event):
            raise ValueError("no")
        delivery.ack()
    sent, first, second = spans.get_finished_spans()
    assert (sent.name, first.name) == ("publish orders.eu", "process orders.eu")
    for handled in (first, second):
        assert handled.context.trace_id == sent.context.trace_id
        assert handled.parent is not None
        assert handled.parent.span_id == sent.context.span_id
        assert handled.attributes is not None
        assert handled.attributes["messaging.message.id"] == event.id
    assert not second.status.is_ok


def test_events_without_a_trace_begin_one(spans: InMemorySpanExporter) -> None:
    """Headers that are missing or nonsense cost nothing."""
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as publisher,
        Subscriber(publisher.address, start="oldest") as subscriber,
    ):
        publisher.publish("t", b"x")
        publisher.publish("t", b"y", headers={"traceparent": "nonsense"})
        for _ in range(2):
            event = subscriber.receive(timeout=30)
            assert event is not None
            with handling(event):
                pass
    assert [span.parent for span in spans.get_finished_spans()] == [None, None]


def test_components_are_instruments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """Events, lag and loss of each announced component of the process."""
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))
    reader = InMemoryMetricReader()
    observe_components(MeterProvider([reader]).get_meter("test"))
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as publisher,
        Subscriber(publisher.address, start="oldest") as subscriber,
    ):
        for number in range(5):
            publisher.publish("t", b"%d" % number)
        for _ in range(5):
            assert subscriber.receive(timeout=30) is not None
        assert subscriber.receive(timeout=0.1) is None  # the last one is processed
        data: Any = reader.get_metrics_data()
    found = {
        (metric.name, point.attributes["kind"]): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found["brokerless.events", "direct.publisher"] == 5
    assert found["brokerless.events", "direct.subscriber"] == 5
    assert found["brokerless.lag", "direct.subscriber"] == 0
    assert found["brokerless.lost", "direct.subscriber"] == 0
