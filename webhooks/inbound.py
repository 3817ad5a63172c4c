"""Reading the events of a verified request: CloudEvents in any mode, or any other Standard Webhooks
sender. Pure.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime

import msgspec

from brokerless.webhooks import cloudevents
from brokerless.webhooks.cloudevents import CloudEvent

# Topic of events whose sender says nothing about their type.
UNTYPED = "webhook"
# A journal's keys are short; longer ids are replaced by their digest.
MAX_KEY = 200


class Inbound(msgspec.Struct, frozen=True):
    """One event on its way into a journal. `key` is what duplicates are recognised by."""

    key: str
    topic: str
    data: bytes
    content_type: str
    time: int | None
    event: CloudEvent


def read_request(headers: Sequence[tuple[str, str]], body: bytes, message_id: str) -> list[Inbound]:
    """The events of a request whose signature was verified; CloudEventError if they cannot be read."""
    found = {name.lower(): value for name, value in headers}
    content_type = found.get("content-type", "")
    media = content_type.partition(";")[0].strip().lower()
    if media == cloudevents.BATCH:
        return [_inbound(event, event.id) for event in cloudevents.from_json_batch(body)]
    if media == cloudevents.STRUCTURED:
        return [_inbound(cloudevents.from_json(body), message_id)]
    if "ce-specversion" in found:
        return [_inbound(cloudevents.from_headers(headers, body), message_id)]
    event = CloudEvent(
        id=message_id,
        source="unknown",
        type=_type(body, media),
        datacontenttype=content_type or None,
        data=body,
    )
    return [_inbound(event, message_id)]


class _Typed(msgspec.Struct):
    type: str


def _type(body: bytes, media: str) -> str:
    """Standard Webhooks recommends a `type` in a JSON body."""
    if not cloudevents.is_json(media):
        return UNTYPED
    try:
        return msgspec.json.decode(body, type=_Typed).type or UNTYPED
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNTYPED


def _inbound(event: CloudEvent, message_id: str) -> Inbound:
    return Inbound(
        key_of(message_id),
        event.type,
        event.data or b"",
        event.datacontenttype or "",
        _micros(event.time),
        event,
    )


def key_of(message_id: str) -> str:
    """The id itself, or its digest if a journal could not take it as a key."""
    if len(message_id) <= MAX_KEY and message_id.isascii() and message_id.isprintable():
        return message_id
    return "sha256:" + hashlib.sha256(message_id.encode("utf-8", "surrogatepass")).hexdigest()


def _micros(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(datetime.fromisoformat(text.upper().replace("Z", "+00:00")).timestamp() * 1_000_000)
    except (ValueError, OverflowError):
        return None  # a leap second, or more digits than Python reads: the time of arrival will do
