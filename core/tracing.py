"""OpenTelemetry, by the extra `otel`: traces from publish to handler, and the figures of `/metrics` as instruments.

    with publishing("orders.eu", source="orders-1") as headers:
        publisher.publish("orders.eu", data, headers=headers)

    for event in subscriber:
        with handling(event):
            …

The trace context travels as W3C `traceparent` (and `tracestate`) in the event's headers, so it also reaches consumers
that come hours later, and other implementations. Without a configured provider both do nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from brokerless.core.errors import MissingDependency
from brokerless.core.event import Event
from brokerless.core.presence import Component, announced_here
from brokerless.core.summary import summarise
from brokerless.core.version import __version__

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, Observation
except ImportError:
    raise MissingDependency("opentelemetry-api", "otel", "tracing") from None

_SCOPE = "brokerless"
# The names of OpenTelemetry's semantic conventions for messaging.
_SYSTEM = {"messaging.system": "brokerless"}


def _tracer() -> Any:
    return trace.get_tracer(_SCOPE, __version__)


@contextmanager
def publishing(
    topic: str, *, source: str = "", headers: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """A span around publishing; gives the headers to publish with: yours, and the trace context.

    `topic` and `source` name the span. An exception inside is recorded and passed on.
    """
    attributes = {**_SYSTEM, "messaging.operation.type": "send", "messaging.destination.name": topic}
    if source:
        attributes["messaging.client.id"] = source
    with _tracer().start_as_current_span(
        f"publish {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ):
        carried = dict(headers or {})
        propagate.inject(carried)
        yield carried


@contextmanager
def handling(event: Event) -> Iterator[Any]:
    """A span around the handler of an event, a child of the span that published it; gives the span.

    An exception inside is recorded and passed on.
    """
    attributes = {
        **_SYSTEM,
        "messaging.operation.type": "process",
        "messaging.destination.name": event.topic,
        "messaging.message.id": event.id,
        "messaging.message.body.size": len(event.data),
    }
    with _tracer().start_as_current_span(
        f"process {event.topic}",
        context=propagate.extract(dict(event.headers)),
        kind=trace.SpanKind.CONSUMER,
        attributes=attributes,
    ) as span:
        yield span


def observe_components(meter: Any = None) -> None:
    """Make every component of this process visible as OpenTelemetry instruments, until the process ends.

    `brokerless.lag` and `brokerless.lost` are gauges, `brokerless.events` counts what went through each component; all
    have the attributes `kind` and `name`. `meter` is the global provider's if not given. Call it once.
    """
    chosen = meter or metrics.get_meter(_SCOPE, __version__)

    def figures(pick: Callable[[Component, dict[str, Any]], int | None]) -> Any:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            for component, summary in summarise(announced_here()):
                value = pick(component, summary)
                if value is not None:
                    yield Observation(value, {"kind": component.kind, "name": component.name})

        return [callback]

    chosen.create_observable_gauge(
        "brokerless.lag", figures(lambda _, s: s["lag"]), "{event}", "events that it is behind"
    )
    chosen.create_observable_gauge(
        "brokerless.lost", figures(lambda _, s: s["lost"]), "{event}", "events declared lost or evicted"
    )
    chosen.create_observable_counter(
        "brokerless.events", figures(lambda _, s: s["done"]), "{event}", "events that went through it"
    )
