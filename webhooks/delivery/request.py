"""The request that carries an event: signature, CloudEvents headers and body in the endpoint's format. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from brokerless.webhooks import cloudevents
from brokerless.webhooks.cloudevents import CloudEvent
from brokerless.webhooks.models import Endpoint, StoredEvent
from brokerless.webhooks.signing import Key, parse_secret, signature_header

USER_AGENT = "brokerless-webhooks/1 (+https://www.standardwebhooks.com)"
# Names that the sender itself sets, or that change how the request is framed.
FORBIDDEN_HEADERS = frozenset(
    {
        "host",
        "connection",
        "content-length",
        "content-type",
        "content-encoding",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "user-agent",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
    }
)


class RequestWriter:
    """Prepares what is the same in all requests to an endpoint, once per change of the endpoint."""

    def __init__(self, endpoint: Endpoint, source: str) -> None:
        self.endpoint = endpoint
        self.url = endpoint.url
        self._source = source
        self._keys: list[tuple[Key, int | None]] = [
            (parse_secret(secret.key), secret.expires) for secret in endpoint.secrets
        ]
        self._base = {"user-agent": USER_AGENT, **endpoint.headers}
        self._binary = {
            **self._base,
            "ce-specversion": "1.0",
            "ce-source": cloudevents.encode_header(source),
        }
        # Topics repeat: their header form is kept, up to a bound.
        self._types: dict[str, str] = {}

    def request(self, events: Sequence[StoredEvent], now: float) -> tuple[dict[str, str], bytes]:
        """Headers and body for one event, or for a batch in batch mode; `now` in seconds since 1970."""
        mode = self.endpoint.mode
        if mode == "binary":
            event = events[0]
            body = event.data
            headers = self._binary.copy()
            headers["ce-id"] = headers["webhook-id"] = message_id = event.id
            headers["ce-type"] = self._types.get(event.topic) or self._type(event.topic)
            headers["ce-time"] = rfc3339(event.time)
            headers["ce-sequence"] = str(event.time)
            if event.content_type:
                headers["content-type"] = event.content_type
        else:
            headers = self._base.copy()
            if mode == "structured":
                message_id = events[0].id
                body = cloudevents.to_json(self.cloud_event(events[0]))
                headers["content-type"] = cloudevents.STRUCTURED
            else:
                message_id = batch_id([event.id for event in events])
                body = cloudevents.to_json_batch(self.cloud_event(event) for event in events)
                headers["content-type"] = cloudevents.BATCH
            headers["webhook-id"] = message_id
        self.sign(headers, message_id, body, now)
        return headers, body

    def sign(self, headers: dict[str, str], message_id: str, body: bytes, now: float) -> None:
        """Add time and signature; keys that were rotated out sign until they expire."""
        timestamp = int(now)
        keys = [key for key, expires in self._keys if expires is None or now * 1e6 < expires]
        headers["webhook-timestamp"] = str(timestamp)
        headers["webhook-signature"] = signature_header(keys, message_id, timestamp, body)
        if self.endpoint.header_style == "svix":
            headers["svix-id"] = message_id
            headers["svix-timestamp"] = headers["webhook-timestamp"]
            headers["svix-signature"] = headers["webhook-signature"]

    def base_headers(self) -> Mapping[str, str]:
        """What every request to the endpoint carries."""
        return self._base

    def cloud_event(self, event: StoredEvent) -> CloudEvent:
        """The event as a CloudEvent; `sequence` orders events by time, and tells nothing about other tenants."""
        return CloudEvent(
            id=event.id,
            source=self._source,
            type=event.topic,
            time=rfc3339(event.time),
            datacontenttype=event.content_type or None,
            extensions={"sequence": str(event.time)},
            data=event.data,
        )

    def _type(self, topic: str) -> str:
        if len(self._types) >= 1000:
            self._types.clear()
        encoded = self._types[topic] = cloudevents.encode_header(topic)
        return encoded


def batch_id(ids: Sequence[str]) -> str:
    """The same events in the same order have the same `webhook-id`; one event alone has its own."""
    if len(ids) == 1:
        return ids[0]
    return "batch_" + hashlib.sha256("\n".join(ids).encode()).hexdigest()[:32]


def rfc3339(time_us: int) -> str:
    """UTC with microseconds."""
    seconds, micros = divmod(time_us, 1_000_000)
    return f"{_second(seconds)}.{micros:06d}Z"


_last_second: tuple[int, str] = (-1, "")


def _second(seconds: int) -> str:
    """Formatting a second is ten times the work of the rest, and neighbours share it."""
    global _last_second  # noqa: PLW0603 (a cache of one entry, replaced as a whole)
    known, text = _last_second
    if known != seconds:
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        _last_second = (seconds, text)
    return text
