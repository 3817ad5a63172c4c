"""What names, numbers and texts are acceptable: every rule once, for library, API, OpenAPI and command line.

A rule is an `Annotated` type: msgspec validates with it and writes the JSON schema from it. `check(kind, value, field)`
applies one to a single value.
"""

import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from brokerless.core.errors import ConfigError, InvalidEvent

T = TypeVar("T")
US = 1_000_000
"""Microseconds in a second: times are stored as µs since 1970."""

# ── names ────────────────────────────────────────────────────────────────────

_ENDPOINT_ID = r"ep_[a-z2-7]{16}"
_EVENT_ID = r"msg_[0-9a-f]{32}"
TenantName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,100}$", description="Letters, digits and any of _ . @ -")
]
EndpointId = Annotated[str, Meta(pattern=rf"^{_ENDPOINT_ID}$")]
EventId = Annotated[str, Meta(pattern=rf"^{_EVENT_ID}$")]
# Made of the two ids that a delivery joins, so that it tells nobody how many deliveries there are.
DeliveryId = Annotated[str, Meta(pattern=rf"^{_EVENT_ID}\.{_ENDPOINT_ID}$")]
IdempotencyKey = Annotated[str, Meta(pattern=r"^[!-~]{1,255}$", description="1 to 255 printable characters")]

# ── endpoints ────────────────────────────────────────────────────────────────

Mode = Literal["binary", "structured", "batch"]
SignatureVersion = Literal["v1", "v1a"]
Verification = Literal["handshake", "challenge", "none"]
# What a tenant may choose; only the operator can switch verification off.
TenantVerification = Literal["handshake", "challenge"]
HeaderStyle = Literal["standard", "svix"]
DeliveryStateName = Literal["pending", "delivered", "gave_up", "evicted", "withdrawn", "skipped"]
ReplayChoice = Literal["failed", "all"]
MAX_URL = 2048
MAX_PATTERNS = 100
# Words of patterns with text around a `*`, per endpoint: these are compared one by one with every word of a topic.
MAX_GLOBS = 20
MAX_DESCRIPTION = 500
MAX_HEADERS = 20
MAX_HEADER_VALUE = 1024
MAX_CONCURRENCY = 256
MAX_RATE = 100_000.0
MAX_FILTERS = 20
_WORD = r"[A-Za-z0-9_:-]+"
_PATTERN_WORD = rf"(\*\*|\*|{_WORD}\*?|\*{_WORD})"
Url = Annotated[
    str,
    Meta(
        min_length=8,
        max_length=MAX_URL,
        pattern=r"^https?://([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?([/?][!-\"$-\[\]-~]*)?$",
        description="Where to deliver; by default https only, and public addresses only.",
    ),
]
TopicPattern = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=rf"^{_PATTERN_WORD}(\.{_PATTERN_WORD})*$",
        description="Words joined by dots; `*` matches within a word, `**` any number of words.",
    ),
]
TopicPatterns = Annotated[list[TopicPattern], Meta(min_length=1, max_length=MAX_PATTERNS)]
# Any text without control characters.
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION, pattern=r"^[^\x00-\x1f\x7f]*$")]
Rate = Annotated[float, Meta(ge=0, le=MAX_RATE, description="Requests per second; 0: no limit.")]
# JSON has one kind of number: 8.0 is a whole one too.
Concurrency = Annotated[
    float, Meta(ge=1, le=MAX_CONCURRENCY, multiple_of=1, description="Attempts at a time.")
]
# Over the API only names that cannot change how a request is read; an application may set others.
HeaderName = Annotated[str, Meta(pattern=r"^([Xx]-[A-Za-z0-9-]{1,64}|[Aa]uthorization)$")]
HeaderValue = Annotated[str, Meta(max_length=MAX_HEADER_VALUE, pattern=r"^[!-~]([ -~]*[!-~])?$")]
Headers = Annotated[dict[HeaderName, HeaderValue], Meta(max_length=MAX_HEADERS)]
OwnSecret = Annotated[
    str,
    Meta(
        pattern=r"^whsec_([A-Za-z0-9+/]{4}){8,21}([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        description="A v1 secret of your own: whsec_ and the base64 of 24 to 64 bytes.",
    ),
]
FilterPath = Annotated[
    str,
    Meta(
        max_length=200,
        pattern=r"^\$(\.[A-Za-z_][A-Za-z0-9_-]*|\[[0-9]{1,6}\])+$",
        description="A place in the data, as in JSONPath: $.order.items[0].sku",
    ),
]

# ── events ───────────────────────────────────────────────────────────────────

Topic = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=rf"^{_WORD}(\.{_WORD})*$",
        description="Words joined by dots; must not begin with `brokerless.`.",
    ),
]
ContentType = Annotated[str, Meta(max_length=100, pattern=r"^[a-z]+/[a-z0-9.+-]+$")]
Base64 = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        description="Binary data, instead of `data`.",
    ),
]
# ── tokens ───────────────────────────────────────────────────────────────────

MIN_TOKEN = 16
"""A token shorter than this can be guessed."""


def matches(kind: Any, text: str) -> bool:
    """Whether a text follows the rule."""
    try:
        msgspec.convert(text, kind)
    except msgspec.ValidationError:
        return False
    return True


def convert(value: Any, kind: type[T], *, what: str) -> T:
    """The value as a Struct that follows its rules, or ConfigError that names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, path = explain(error, kind)
        raise ConfigError(path.partition("[")[0] or what, text) from None


# What a pattern of this module means, in words.
_IN_WORDS = {
    TenantName: "must be 1 to 100 letters, digits or any of _ . @ -",
    Url: "must be an http or https address without spaces, user name or fragment",
    TopicPattern: "must be words of letters, digits, _ : - joined by dots; * and ** are wildcards",
    Topic: "must be words of letters, digits, _ : - joined by dots",
    Description: "must not contain control characters",
    HeaderName: "only headers X-… and Authorization can be set",
    HeaderValue: "must be printable ASCII that neither begins nor ends with a space",
    OwnSecret: "must be whsec_ followed by the base64 of 24 to 64 bytes",
    FilterPath: "must be a path such as $.order.items[0].sku",
    ContentType: "must be a media type in lower case, such as text/plain",
    Base64: "must be base64 with padding",
    EndpointId: "must be the id of an endpoint: ep_ and 16 characters",
    EventId: "must be the id of an event: msg_ and 32 characters",
    DeliveryId: "must be the id of a delivery: that of its event, a dot, that of its endpoint",
    IdempotencyKey: "must be 1 to 255 printable characters without spaces",
}
_BY_PATTERN = {get_args(kind)[1].pattern: text for kind, text in _IN_WORDS.items()}


# What else msgspec says, in words.
_KINDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_NAMES = r"`([^`|]+)(?: \| null)?`"
_BOUNDS = [
    (re.compile(rf"Expected {_NAMES}, got {_NAMES}"), "must be {0}, not {1}"),
    (re.compile(r"Expected `str` of length >= (\d+)"), "must have at least {0} characters"),
    (re.compile(r"Expected `str` of length <= (\d+)"), "must have at most {0} characters"),
    (re.compile(r"Expected `(?:array|object)` of length >= (\d+)"), "must have {0} or more entries"),
    (re.compile(r"Expected `(?:array|object)` of length <= (\d+)"), "must have at most {0} entries"),
    (re.compile(r"Expected `(?:int|float)` >= (\S+?)(?:\.0)?"), "must be at least {0}"),
    (re.compile(r"Expected `(?:int|float)` <= (\S+?)(?:\.0)?"), "must be at most {0}"),
    (re.compile(r"Expected `(?:int|float)` that's a multiple of 1(?:\.0)?"), "must be a whole number"),
    (re.compile(r"Expected `datetime` with .*"), "must have a time zone, as in 2026-01-31T12:00:00Z"),
    (re.compile(r"Object missing required field `([^`]+)`"), "{0} is missing"),
    (re.compile(r"Object contains unknown field `([^`]+)`"), "{0} is not known here"),
]


_PLACE = re.compile(r"(.*?)(?: - at ((?:`key` in )?`\$[^`]*`))?", re.DOTALL)


def explain(error: msgspec.ValidationError, kind: type) -> tuple[str, str]:
    """The problem of a Struct of this kind in words, and its field in msgspec's own notation: `topics[0]`."""
    found = _PLACE.fullmatch(str(error))
    problem, place = found.groups("") if found else (str(error), "")
    path = place.rpartition("$")[2].strip("`").lstrip(".")
    enum = re.fullmatch(r"Invalid enum value ('.*')", problem, re.DOTALL)
    if enum:
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        return f"must be one of {', '.join(_choices(types[path]))}, not {enum[1]}", path
    return _in_words(problem), path


def _choices(kind: Any) -> tuple[str, ...]:
    """The words that a field may have, whether it can be left out or not."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) for word in _choices(part))


def _in_words(problem: str) -> str:
    """A regular expression is replaced by what it means."""
    found = re.fullmatch(r"Expected `str` matching regex (?P<pattern>.*)", problem, re.DOTALL)
    if found:
        quoted = found["pattern"]
        for pattern, text in _BY_PATTERN.items():
            if quoted in {repr(pattern), f"'{pattern}'", pattern, f"`{pattern}`"}:
                return text
        return "contains characters that are not allowed"
    for pattern, text in _BOUNDS:
        found = pattern.fullmatch(problem)
        if found:
            return text.format(*(_KINDS.get(word, word) for word in found.groups()))
    return problem[0].lower() + problem[1:]


def check_tenant(tenant: str) -> str:
    """Return the tenant's name, or raise ConfigError."""
    if not isinstance(tenant, str) or not matches(TenantName, tenant):
        raise ConfigError("tenant", f"{tenant!r}: {_IN_WORDS[TenantName]}")
    return tenant


def check_content_type(content_type: str) -> str:
    """Return it, or raise InvalidEvent: what can stand in a header."""
    if not content_type.isascii() or not content_type.isprintable() or len(content_type) > 200:
        raise InvalidEvent("content_type", "must be printable ASCII, at most 200 characters")
    return content_type


def check_token(token: str) -> str:
    """Return the bearer token, or ConfigError."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("token", f"must be at least {MIN_TOKEN} printable characters without spaces")
    return token
