"""One line of StatsD or DogStatsD into samples. Pure: no state, no clock, never raises on any bytes.

Understood: `name:value|type` followed, in any order, by `@rate`, `#tags`, `c:container`, `T<unix seconds>`,
`e:external data` and `card:cardinality` (DogStatsD 1.0 to 1.3); packed values `name:1:2:3|ms` (1.1); the
classic daemon's several values `name:1|c:2|ms`; tags within the name as InfluxDB (`name,tag=v`), Librato
(`name#tag=v`) and SignalFx (`name[tag=v]`) write them, and Graphite's `name;tag=v`; events `_e{…}` and service
checks `_sc|…`, which are passed on. Fields that are empty or unknown are ignored and counted, as agents do it; a
line whose name, value, type, rate or timestamp is wrong is refused whole, with one of `REASONS`.
"""

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from brokerless.metrics.limits import MAX_LINE_BYTES

Kind = Literal["c", "g", "ms", "h", "d", "s"]
KINDS: dict[str, Kind] = {"c": "c", "g": "g", "ms": "ms", "h": "h", "d": "d", "s": "s"}

REASONS = (
    "no_value",
    "no_type",
    "empty_name",
    "bad_number",
    "bad_rate",
    "bad_timestamp",
    "unknown_type",
    "bad_event",
    "bad_check",
    "too_long",
    "filtered",
    "series_limit",
    "tag_limit",
    "set_limit",
)
# Beyond this nothing is measured, and sums of squares stay finite floats.
MAX_MAGNITUDE = 1e100
# Nobody samples one in a billion; a smaller rate is a way to write infinity.
MIN_RATE = 1e-9
# Name and tags together, as the series key has them: bounds what one series costs.
MAX_SERIES_BYTES = 2048
# Integers stay integers, so that counters are exact; longer ones become floats.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SPACES = re.compile(r"\s+")
_FORBIDDEN = re.compile(r"[^a-zA-Z_\-0-9.;=]")
# What would end a tag, a key or a line in a series key; `%` itself, so that escaping can be undone.
_ESCAPED = re.compile(r"[%;\x00-\x1f\x7f]")
# These fields exist in DogStatsD alone.
_DOGSTATSD_FIELDS = ("#", "c:", "e:", "card:", "T")
_EVENT = re.compile(rb"_e\{([0-9]{1,5}),([0-9]{1,5})\}:")

Number = int | float


class Sample(msgspec.Struct, frozen=True, gc=False):
    """The values of one kind that one line carries for one series.

    `values` are numbers, for sets strings. `deltas` tells, for gauges, which values are relative.
    `weight` is what one value stands for: 1 divided by the sampling rate.
    """

    kind: Kind
    series: str
    values: tuple[Number, ...] | tuple[str, ...]
    weight: Number = 1
    deltas: tuple[bool, ...] = ()
    timestamp: int | None = None
    # Fields of the line that were empty or unknown.
    ignored: int = 0


class ParserOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a listener reads what StatsD leaves open.

    `dialect` decides what a signed gauge means: `statsd` moves the gauge, `dogstatsd` sets it (there are no
    relative gauges there), `auto` sets it if the line has a field that only DogStatsD knows, such as tags. The
    others switch the styles of tags within the name.
    """

    dialect: Literal["auto", "statsd", "dogstatsd"] = "auto"
    influx_tags: bool = True
    librato_tags: bool = True
    signalfx_tags: bool = True


DEFAULT_OPTIONS = ParserOptions()


class Passed(msgspec.Struct, frozen=True, gc=False):
    """An event (`event`) or a service check (`check`): counted and passed on as it came."""

    kind: Literal["event", "check"]
    line: bytes


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A line that is not taken, and why: one of REASONS."""

    reason: str


Parsed = list[Sample] | Passed | Refused


def sanitize(name: str) -> str:
    """The classic daemon's rule: spaces become `_`, slashes `-`, what Graphite cannot store goes."""
    if not _FORBIDDEN.search(name):
        return name
    return _FORBIDDEN.sub("", _SPACES.sub("_", name).replace("/", "-"))


def escape_tag(text: str, *, key: bool = False) -> str:
    """A tag's key or value as series keys hold it: anything goes, and different texts stay different."""
    if key:
        text = text.replace("%", "%25").replace("=", "%3D")
        return _ESCAPED.sub(lambda m: m[0] if m[0] == "%" else f"%{ord(m[0]):02X}", text)
    return _ESCAPED.sub(lambda m: f"%{ord(m[0]):02X}", text) if _ESCAPED.search(text) else text


def split_series(series: str) -> tuple[str, list[tuple[str, str | None]]]:
    """Name and tags of a series key, unescaped; the value of a tag that has none is None."""
    name, *pairs = series.split(";")
    tags: list[tuple[str, str | None]] = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        tags.append((_unescape(key), _unescape(value) if equals else None))
    return name, tags


def name_and_tags(series: str) -> tuple[str, dict[str, str]]:
    """Name and tags of a series key: several values of one tag are joined by commas, none is an empty text."""
    name, pairs = split_series(series)
    tags: dict[str, str] = {}
    for key, value in pairs:
        tags[key] = f"{tags[key]},{value or ''}" if key in tags else value or ""
    return name, tags


def _unescape(text: str) -> str:
    if "%" not in text:
        return text
    return re.sub(r"%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text)


def join_series(name: str, tags: Iterable[tuple[str, str | None]]) -> str:
    """The one name of a series: `name;tag=value;tag;…`, tags sorted, so that their order makes no difference."""
    found = set()
    for key, value in tags:
        escaped = escape_tag(key, key=True)
        found.add(escaped if value is None else f"{escaped}={escape_tag(value)}")
    return ";".join([name, *sorted(found)]) if found else name


def series_key(name: str, tags: str = "", options: ParserOptions = DEFAULT_OPTIONS) -> str:
    """The series of a name and DogStatsD's tags; empty if no name is left after cleaning it."""
    found: list[tuple[str, str | None]] = []
    if "," in name or "#" in name or "[" in name:
        name, found = _tags_in_name(name, options)
    clean = sanitize(name)
    if not (tags or found or ";" in clean):
        return clean
    base, *own = clean.split(";")
    for tag in filter(None, own):
        key, equals, value = tag.partition("=")
        found.append((key, value if equals else None))
    for tag in tags.split(","):
        key, colon, value = tag.partition(":")
        if key:
            found.append((key, value if colon and value else None))
    return join_series(base, found) if base else ""


def _tags_in_name(name: str, options: ParserOptions) -> tuple[str, list[tuple[str, str | None]]]:
    """Tags as InfluxDB, Librato and SignalFx write them; what has no `=` is dropped, as statsd_exporter does it."""
    text = ""
    opened, closed = name.find("["), name.find("]")
    if options.signalfx_tags and 0 <= opened < closed:
        name, text = name[:opened] + name[closed + 1 :], name[opened + 1 : closed]
    else:
        marks = ("," if options.influx_tags else "") + ("#" if options.librato_tags else "")
        at = min((name.find(mark) for mark in marks if mark in name), default=-1)
        if at >= 0:
            name, text = name[:at], name[at + 1 :]
    found: list[tuple[str, str | None]] = []
    for tag in text.split(","):
        key, _, value = tag.partition("=")
        if key and value:
            found.append((key, value))
    return name, found


def line_text(line: bytes) -> str:
    """A line as text, without blanks at its end: the same for lines and for the totals that clients tell of them."""
    return line.decode("utf-8", "backslashreplace").rstrip()


def parse_line(line: bytes, options: ParserOptions = DEFAULT_OPTIONS) -> Parsed:
    """Parse one line without its newline. Takes time in proportion to its length, whatever it holds."""
    if len(line) > MAX_LINE_BYTES:
        return Refused("too_long")
    if line.startswith(b"_e{"):
        return _event(line)
    if line.startswith(b"_sc|"):
        return _check(line)
    # Bytes that are no UTF-8 stay told apart.
    text = line_text(line)
    name, colon, rest = text.partition(":")
    if not colon:
        return Refused("no_value")
    if "\\" in name:
        # Of a name only ASCII is kept anyway.
        name = line.partition(b":")[0].decode("utf-8", "replace")
    values, bar, fields = rest.partition("|")
    if not bar:
        return Refused("no_type")
    kind, *extra = fields.split("|")
    if ":" in kind:
        return _classic_values(name, rest, options)
    return _sample(name, values, kind, extra, options)


def _sample(
    name: str, packed: str, kind_text: str, extra: list[str], options: ParserOptions
) -> list[Sample] | Refused:
    kind = KINDS.get(kind_text)
    if kind is None:
        return Refused("unknown_type")
    weight: Number = 1
    tags = ""
    timestamp: int | None = None
    ignored = 0
    dogstatsd = options.dialect == "dogstatsd"
    for field in extra:
        if field.startswith("@"):
            rate = number(field[1:])
            if rate is None or not MIN_RATE <= rate <= 1:
                return Refused("bad_rate")
            weight = 1 / rate if rate != 1 else 1
        elif field.startswith("T"):
            if not (field[1:].isascii() and field[1:].isdigit() and len(field) <= 13):
                return Refused("bad_timestamp")
            timestamp = int(field[1:])
        elif field.startswith("#"):
            tags = field[1:]
        elif not field.startswith(("c:", "e:", "card:")):
            ignored += 1
            continue
        dogstatsd |= options.dialect == "auto" and field.startswith(_DOGSTATSD_FIELDS)
    series = series_key(name, tags, options)
    if not series:
        return Refused("empty_name")
    if len(series) > MAX_SERIES_BYTES:
        return Refused("too_long")
    if kind == "s":
        # Sets are never packed: a member may contain a colon.
        return [Sample(kind, series, (packed or "0",), timestamp=timestamp, ignored=ignored)]
    numbers: list[Number] = []
    deltas: list[bool] = []
    for part in packed.split(":"):
        value = number(part)
        if value is None or (kind == "ms" and value < 0):
            return Refused("bad_number")
        numbers.append(value)
        deltas.append(part[0] in "+-" and not dogstatsd)
    if kind == "g":
        values = tuple(numbers)
        return [Sample(kind, series, values, deltas=tuple(deltas), timestamp=timestamp, ignored=ignored)]
    return [Sample(kind, series, tuple(numbers), weight, timestamp=timestamp, ignored=ignored)]


def _classic_values(name: str, rest: str, options: ParserOptions) -> list[Sample] | Refused:
    """`name:1|c:2|ms|@0.1|#tags`: several values, each with a type and perhaps a rate of its own."""
    body, mark, tags = rest.partition("|#")
    samples: list[Sample] = []
    for bit in body.split(":"):
        value, bar, fields = bit.partition("|")
        if not bar:
            return Refused("no_type")
        kind, *extra = fields.split("|")
        part = _sample(name, value, kind, [*extra, "#" + tags] if mark else extra, options)
        if isinstance(part, Refused):
            return part
        samples += part
    return samples


def number(text: str) -> Number | None:
    """A finite number as StatsD clients write it, integers exactly; None for anything else."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if abs(value) <= MAX_MAGNITUDE else None


def _event(line: bytes) -> Passed | Refused:
    match = _EVENT.match(line)
    if match is None:
        return Refused("bad_event")
    title, text = int(match[1]), int(match[2])
    body = line[match.end() :]
    whole = title + 1 + text
    if title == 0 or len(body) < whole or body[title : title + 1] != b"|":
        return Refused("bad_event")
    if len(body) > whole and body[whole : whole + 1] != b"|":
        return Refused("bad_event")
    return Passed("event", line)


def _check(line: bytes) -> Passed | Refused:
    parts = line.split(b"|", 3)
    if len(parts) < 3 or not parts[1] or parts[2] not in (b"0", b"1", b"2", b"3"):
        return Refused("bad_check")
    return Passed("check", line)
