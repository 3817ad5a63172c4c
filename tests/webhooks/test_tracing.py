"""OpenTelemetry: one trace from publish to every attempt, also over a restart, and on to the receiver."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from brokerless.webhooks import Dispatcher

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        # A process has one provider for good.
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    yield exporter
    processor.shutdown()


async def test_one_trace_from_publish_to_every_attempt(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, spans: InMemorySpanExporter
) -> None:
    """A failed attempt and its repetition by another dispatcher are children of publish; each sends its own context."""
    target = await targets(lambda _got, _number: 500)
    first = await dispatchers(tracing=True)
    await first.add_endpoint(target.url, ["**"])
    accepted = await first.publish("order.paid", b"{}")
    await eventually(lambda: target.got)
    await first.stop()
    target.answer = lambda _got, _number: 200
    second = await dispatchers(tracing=True)
    await eventually(lambda: second.counters.delivered == 1)
    found = spans.get_finished_spans()
    published = [span for span in found if span.name == "publish order.paid"]
    attempts = [span for span in found if span.name == "deliver order.paid"]
    assert len(published) == 1
    assert len(attempts) == len(target.got) >= 2
    parent = published[0].get_span_context()
    for span, got in zip(attempts, target.got, strict=True):
        context = span.get_span_context()
        assert span.parent is not None
        assert (span.parent.span_id, context.trace_id) == (parent.span_id, parent.trace_id)
        assert got.headers["traceparent"].startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == accepted.id
    assert attempts[0].attributes is not None
    assert attempts[0].attributes["http.response.status_code"] == 500
    assert not attempts[0].status.is_ok
    assert attempts[-1].attributes is not None
    assert attempts[-1].attributes["http.response.status_code"] == 200


async def test_a_batch_is_linked_to_all_its_events(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, spans: InMemorySpanExporter
) -> None:
    """One request with several events is one span with a link to each of their publish spans."""
    target = await targets()
    dispatcher = await dispatchers(tracing=True)
    await dispatcher.add_endpoint(target.url, ["**"], mode="batch", rate=1)
    for n in range(5):
        await dispatcher.publish("t", b"%d" % n)
    await eventually(lambda: dispatcher.counters.delivered == 5)
    found = spans.get_finished_spans()
    published = {span.get_span_context().span_id for span in found if span.name == "publish t"}
    linked = {link.context.span_id for span in found if span.name == "deliver t" for link in span.links}
    assert len(published) == 5
    assert linked
    assert linked <= published


async def test_nothing_is_sent_without_it(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, spans: InMemorySpanExporter
) -> None:
    """By default there are no spans and no header."""
    target = await targets()
    dispatcher = await dispatchers()
    await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"{}")
    await eventually(lambda: target.got)
    assert "traceparent" not in target.got[0].headers
    assert spans.get_finished_spans() == ()
