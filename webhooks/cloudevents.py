"""CloudEvents 1.0 over HTTP: JSON format (structured and batch) and binary mode. No I/O.

Data is always bytes here. In the JSON format it is a JSON value if its content type is JSON, a string if it is text,
and `data_base64` otherwise; reading gives the same bytes back, except that JSON may be spaced differently.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from brokerless.webhooks.errors import CloudEventError

T = TypeVar("T")
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
# Type of the event by which a sender asks whether the owner of a URL agrees; the receiver kit answers it.
CHALLENGE = "brokerless.challenge"
_NAME = re.compile(r"[a-z0-9]+")
_TIME = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[Tt](\d{2}):(\d{2}):(\d{2})(?:\.\d+)?(?:[Zz]|[+-](\d{2}):(\d{2}))"
)
_MEDIA = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    r"(?:[ \t]*;[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+=(?:\"[^\"]*\"|[!#$%&'*+.^_`|~0-9A-Za-z-]+))*"
)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!#$&-;=?-\[\]_a-z~%]+")
_URI_REFERENCE = re.compile(r"[!#$&-;=?-\[\]_a-z~%]+")
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
# Attribute value types of the JSON format; `bool` before `int`, because a bool is an int.
Value = str | int | bool
_CORE = {"id", "source", "type", "specversion", "datacontenttype", "dataschema", "subject", "time"}


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event; `check()` was passed by everything that this module returns."""

    id: str
    source: str
    type: str
    time: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    extensions: dict[str, Value] = {}
    data: bytes | None = None

    def attributes(self) -> dict[str, Value]:
        """All set attributes by name, extensions last."""
        named: dict[str, Value | None] = {
            "specversion": "1.0",
            "id": self.id,
            "source": self.source,
            "type": self.type,
            "time": self.time,
            "datacontenttype": self.datacontenttype,
            "dataschema": self.dataschema,
            "subject": self.subject,
        }
        return {name: value for name, value in named.items() if value is not None} | self.extensions


def check(event: CloudEvent) -> CloudEvent:
    """Return the event, or raise CloudEventError that names the attribute that breaks a rule."""
    for name, value in event.attributes().items():
        if not _NAME.fullmatch(name) or name == "data":
            raise CloudEventError(name, "names are lower-case letters and digits, and not 'data'")
        if name in event.extensions and name in _CORE:
            raise CloudEventError(name, "is not an extension")
        _check_value(name, value)
        rule = _RULES.get(name)
        if rule is not None and (not isinstance(value, str) or not rule[0].fullmatch(value)):
            raise CloudEventError(name, rule[1])
    if event.time is not None:
        _check_time(event.time)
    return event


_RULES: dict[str, tuple[re.Pattern[str], str]] = {
    "id": (re.compile(r".+", re.DOTALL), "must be a non-empty string"),
    "source": (_URI_REFERENCE, "must be a non-empty URI reference"),
    "type": (re.compile(r".+", re.DOTALL), "must be a non-empty string"),
    "time": (_TIME, "must be an RFC 3339 time"),
    "datacontenttype": (_MEDIA, "must be a media type"),
    "dataschema": (_URI, "must be an absolute URI"),
    "subject": (re.compile(r".+", re.DOTALL), "must be a non-empty string"),
}


def _check_value(name: str, value: object) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            raise CloudEventError(name, "integers have 32 bits")
        return
    if not isinstance(value, str):
        raise CloudEventError(name, "must be a string, an integer or a boolean")
    for character in value:
        code = ord(character)
        control = code < 0x20 or 0x7F <= code <= 0x9F
        if control or 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            raise CloudEventError(name, f"contains the character U+{code:04X}, which is not allowed")


_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _check_time(text: str) -> None:
    match = _TIME.fullmatch(text)
    assert match is not None
    year, month, day, hour, minute, second, off_hour, off_minute = (int(part or 0) for part in match.groups())
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    fine = 1 <= month <= 12 and 1 <= day <= _DAYS[month - 1] and (leap or (month, day) != (2, 29))
    # Second 60 is a leap second, which RFC 3339 allows.
    if not (fine and hour < 24 and minute < 60 and second <= 60 and off_hour < 24 and off_minute < 60):
        raise CloudEventError("time", "is not a day and time that exists")


def is_json(content_type: str | None) -> bool:
    """Whether data of this content type is JSON; without one it is, by the format's rule."""
    if not content_type:
        return True
    media = content_type.partition(";")[0].strip().lower()
    return media.endswith(("/json", "+json"))


# ── JSON format ──────────────────────────────────────────────────────────────


def to_json(event: CloudEvent) -> bytes:
    """The structured form."""
    return _encoder.encode(_document(event))


def to_json_batch(events: Iterable[CloudEvent]) -> bytes:
    """The batch form; an empty one is valid."""
    return _encoder.encode([_document(event) for event in events])


_encoder = msgspec.json.Encoder()


def _document(event: CloudEvent) -> dict[str, object]:
    document: dict[str, object] = {**check(event).attributes()}
    if event.data is not None:
        document.update(_encode_data(event.data, event.datacontenttype))
    return document


def _encode_data(data: bytes, content_type: str | None) -> dict[str, object]:
    if is_json(content_type):
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Declared as JSON and is none: the receiver gets the bytes as they are.
            return {"data_base64": base64.b64encode(data).decode()}
        return {"data": msgspec.Raw(data)}
    if (content_type or "").lower().startswith("text/"):
        try:
            return {"data": data.decode()}
        except UnicodeDecodeError:
            pass
    return {"data_base64": base64.b64encode(data).decode()}


def from_json(body: bytes) -> CloudEvent:
    """Read the structured form; CloudEventError for anything else."""
    return _read(_decode(body, dict[str, msgspec.Raw]))


def from_json_batch(body: bytes) -> list[CloudEvent]:
    """Read the batch form: all valid, or CloudEventError."""
    return [_read(document) for document in _decode(body, list[dict[str, msgspec.Raw]])]


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        # msgspec does not look into values that it passes on undecoded.
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CloudEventError("document", f"is not valid: {error}") from None


def _read(document: dict[str, msgspec.Raw]) -> CloudEvent:
    raw = {name: bytes(value) for name, value in document.items()}
    data_json, data_base64 = raw.pop("data", None), raw.pop("data_base64", None)
    if data_base64 == b"null":
        data_base64 = None
    if data_json is not None and data_base64 is not None:
        raise CloudEventError("data", "is there twice: as data and as data_base64")
    attributes: dict[str, Value] = {}
    for name, value in raw.items():
        decoded = _scalar(name, value)
        if decoded is not None:  # null means: not set
            attributes[name] = decoded
    content_type = attributes.get("datacontenttype")
    data: bytes | None = None
    if data_base64 is not None:
        data = _from_base64(data_base64)
    elif data_json is not None:
        data = _data(data_json, content_type if isinstance(content_type, str) else None)
    return _build(attributes, data)


def _scalar(name: str, raw: bytes) -> Value | None:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CloudEventError(name, f"is not valid: {error}") from None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise CloudEventError(name, "must be a string, an integer or a boolean")


def _from_base64(raw: bytes) -> bytes:
    text = _scalar("data_base64", raw)
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise CloudEventError("data_base64", "must be a base64 string") from None


def _data(raw: bytes, content_type: str | None) -> bytes:
    if is_json(content_type):
        return raw
    value = msgspec.json.decode(raw)
    # Not JSON by its content type: a string is the text itself, anything else can only be kept as it is.
    return value.encode() if isinstance(value, str) else raw


def _build(attributes: dict[str, Value], data: bytes | None) -> CloudEvent:
    if attributes.pop("specversion", None) != "1.0":
        raise CloudEventError("specversion", "must be '1.0'")
    for name in ("id", "source", "type"):
        if name not in attributes:
            raise CloudEventError(name, "is required")
    core = {name: attributes.pop(name) for name in _CORE if name in attributes}
    for name, value in core.items():
        if not isinstance(value, str):
            raise CloudEventError(name, "must be a string")
    return check(CloudEvent(**core, extensions=attributes, data=data))  # type: ignore[arg-type]


# ── binary mode ──────────────────────────────────────────────────────────────


def to_headers(event: CloudEvent) -> dict[str, str]:
    """The headers of binary mode; the body is `event.data`."""
    headers = {}
    for name, value in check(event).attributes().items():
        if name == "datacontenttype":
            headers["content-type"] = str(value)
        else:
            headers[f"ce-{name}"] = encode_header(value)
    return headers


def encode_header(value: Value) -> str:
    """A header value: percent-encoded where the HTTP binding demands it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        character
        if "!" <= character <= "~" and character not in '"%'
        else "".join(f"%{byte:02X}" for byte in character.encode())
        for character in text
    )


_PLAIN = re.compile(r"[!#$&-~]*")


def from_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]], body: bytes) -> CloudEvent:
    """Read binary mode; extension values are strings, because headers have no types."""
    attributes: dict[str, Value] = {}
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    for name, value in pairs:
        lower = name.lower()
        if lower == "content-type":
            attributes["datacontenttype"] = value
        elif lower.startswith("ce-"):
            attributes[lower[3:]] = _decode_header(lower, value)
    return _build(attributes, body)


def _decode_header(name: str, value: str) -> str:
    text = value.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = re.sub(r"\\(.)", r"\1", text[1:-1])
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise CloudEventError(name, "is not UTF-8") from None
    except UnicodeEncodeError:
        raise CloudEventError(name, "is not valid Unicode") from None
