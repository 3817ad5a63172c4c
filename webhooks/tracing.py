"""OpenTelemetry spans by the extra `otel`: publish, and every attempt as its child, also after a restart.

The context of the span that published an event is stored with it. Attempts send their own as W3C `traceparent`, so a
receiver's spans are children of the attempt.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from brokerless.webhooks.models import Endpoint, StoredEvent

if TYPE_CHECKING:
    from brokerless.webhooks.delivery.client import Reply

# What is stored of a context: a W3C tracestate may have 512 characters.
_FIELDS = ("traceparent", "tracestate")
MAX_CONTEXT = 1024


class Tracing(Protocol):
    """What publishing and attempting ask for."""

    def publishing(self, topic: str, source: str) -> AbstractContextManager[str]:
        """A span around accepting an event; gives the context to store."""

    def attempting(
        self, endpoint: Endpoint, events: Sequence[StoredEvent], headers: dict[str, str]
    ) -> AbstractContextManager["list[Reply]"]:
        """A span around an attempt, whose context goes into the headers; the caller appends the reply."""


class Untraced:
    """Without the extra, or without `tracing`: nothing."""

    def publishing(self, topic: str, source: str) -> AbstractContextManager[str]:
        """No span, no context."""
        del topic, source
        return nullcontext("")

    def attempting(
        self, endpoint: Endpoint, events: Sequence[StoredEvent], headers: dict[str, str]
    ) -> AbstractContextManager["list[Reply]"]:
        """No span, no header."""
        del endpoint, events, headers
        return nullcontext([])


class Traced:
    """Spans of the process's own tracer provider."""

    def __init__(self) -> None:
        # MissingDependency that names the extra, when the dispatcher is made and not at the first event.
        from brokerless.core import tracing

        self._core = tracing

    @contextmanager
    def publishing(self, topic: str, source: str) -> Iterator[str]:
        """A PRODUCER span, the parent of all attempts."""
        with self._core.publishing(topic, source=source) as carried:
            found = "\n".join(f"{name}: {carried[name]}" for name in _FIELDS if name in carried)
            yield found if len(found) <= MAX_CONTEXT else ""

    @contextmanager
    def attempting(
        self, endpoint: Endpoint, events: Sequence[StoredEvent], headers: dict[str, str]
    ) -> Iterator["list[Reply]"]:
        """A CLIENT span: child of the event's publish span; in a batch linked to all of them."""
        from opentelemetry import propagate, trace

        contexts = [propagate.extract(_carrier(event.trace)) for event in events]
        attributes: dict[str, Any] = {
            "messaging.system": "brokerless",
            "messaging.operation.type": "send",
            "messaging.destination.name": events[0].topic,
            "messaging.message.id": events[0].id,
            "brokerless.webhooks.endpoint": endpoint.id,
            "http.request.method": "POST",
        }
        links = []
        if len(events) > 1:
            attributes["messaging.batch.message_count"] = len(events)
            links = [trace.Link(trace.get_current_span(context).get_span_context()) for context in contexts]
        tracer = trace.get_tracer("brokerless.webhooks")
        with tracer.start_as_current_span(
            f"deliver {events[0].topic}",
            context=contexts[0],
            kind=trace.SpanKind.CLIENT,
            attributes=attributes,
            links=links,
        ) as span:
            propagate.inject(headers)
            replies: list[Reply] = []
            yield replies
            for reply in replies:
                if reply.status is not None:
                    span.set_attribute("http.response.status_code", reply.status)
                if reply.status is None or reply.status >= 300:
                    span.set_status(trace.StatusCode.ERROR, reply.error or f"answered {reply.status}")


def _carrier(stored: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in stored.splitlines())
    return {name: value for name, _, value in pairs}


def tracing(*, enabled: bool) -> Tracing:
    """Spans if that is enabled; MissingDependency without the extra."""
    return Traced() if enabled else Untraced()
