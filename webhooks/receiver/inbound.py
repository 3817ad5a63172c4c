"""Reading the events of a verified request: CloudEvents in any mode, or any other Standard Webhooks sender. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from brokerless.core.event import microseconds
from brokerless.webhooks import cloudevents
from brokerless.webhooks.cloudevents import CHALLENGE, CloudEvent
from brokerless.webhooks.errors import CloudEventError

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
        return [_inbound(event, event.id, event.source) for event in cloudevents.from_json_batch(body)]
    if media == cloudevents.STRUCTURED:
        structured = cloudevents.from_json(body)
        return [_inbound(structured, message_id, structured.source)]
    if "ce-specversion" in found:
        binary = cloudevents.from_headers(headers, body)
        return [_inbound(binary, message_id, binary.source)]
    event = CloudEvent(
        id=message_id,
        source="unknown",
        type=_type(body, media),
        datacontenttype=content_type or None,
        data=body,
    )
    return [_inbound(event, message_id, "")]


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


def _inbound(event: CloudEvent, message_id: str, source: str) -> Inbound:
    return Inbound(
        key_of(message_id, source),
        event.type,
        event.data or b"",
        event.datacontenttype or "",
        _micros(event.time),
        event,
    )


def key_of(message_id: str, source: str = "") -> str:
    """What makes an event unique: its source and id, or their digest if a journal could not take that as a key.

    CloudEvents: two events of different sources may have the same id.
    """
    key = f"{source}#{message_id}" if source else message_id
    if len(key) <= MAX_KEY and key.isascii() and key.isprintable():
        return key
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def challenge_of(headers: Mapping[str, str], body: bytes) -> bytes | None:
    """The answer to a sender's challenge, or None if the request is an ordinary one."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != cloudevents.STRUCTURED:
        return None
    try:
        event = cloudevents.from_json(body)
    except CloudEventError:
        return None
    return event.data if event.type == CHALLENGE else None


def _micros(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return microseconds(datetime.fromisoformat(text.upper().replace("Z", "+00:00")))
    except (ValueError, OverflowError):
        return None  # a leap second, or more digits than Python reads: the time of arrival will do
