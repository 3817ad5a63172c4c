"""One line of StatsD or DogStatsD into samples. Pure: no state, no clock, never raises on any bytes.

Understood: `name:value|type` followed, in any order, by `@rate`, `#tags`, `c:container`, `T<unix seconds>`,
`e:external data` and `card:cardinality` (DogStatsD 1.0 to 1.3); packed values `name:1:2:3|ms` (1.1); the
classic daemon's several values `name:1|c:2|ms`; events `_e{…}` and service checks `_sc|…`, which are passed
on. What is wrong in one part makes the whole line refused, with one of `REASONS`.
"""

import re
from typing import Literal

import msgspec

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
    "unknown_field",
    "bad_event",
    "bad_check",
    "too_long",
    "series_limit",
    "set_limit",
)
# The classic daemon takes any length. 8 KiB is what DogStatsD's largest recommended datagram (jumbo frame)
# holds, so that no honest line is longer; it bounds what one distinct line can cost in memory.
MAX_LINE_BYTES = 8192
# Beyond this nothing is measured, and sums of squares stay finite floats.
MAX_MAGNITUDE = 1e100
# Integers stay integers, so that counters are exact; longer ones become floats.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SPACES = re.compile(r"\s+")
_FORBIDDEN = re.compile(r"[^a-zA-Z_\-0-9.;=]")
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


def series_key(name: str, tags: str = "") -> str:
    """The one name of a series: `name;tag=value;…`, tags sorted, so that their order makes no difference."""
    clean = sanitize(name)
    if not tags and ";" not in clean:
        return clean
    base, *own = clean.split(";")
    found = {sanitize(tag.replace(";", "_").replace(":", "=", 1)) for tag in tags.split(",")}
    found.update(own)
    found.discard("")
    return ";".join([base, *sorted(found)]) if base else ""


def parse_line(line: bytes) -> Parsed:
    """Parse one line without its newline. Takes time in proportion to its length, whatever it holds."""
    if len(line) > MAX_LINE_BYTES:
        return Refused("too_long")
    if line.startswith(b"_e{"):
        return _event(line)
    if line.startswith(b"_sc|"):
        return _check(line)
    text = line.decode("utf-8", "replace").rstrip()
    name, colon, rest = text.partition(":")
    if not colon:
        return Refused("no_value")
    values, bar, fields = rest.partition("|")
    if not bar:
        return Refused("no_type")
    kind, *extra = fields.split("|")
    if ":" in kind:
        return _classic_values(name, rest)
    return _sample(name, values, kind, extra)


def _sample(name: str, packed: str, kind_text: str, extra: list[str]) -> list[Sample] | Refused:
    kind = KINDS.get(kind_text)
    if kind is None:
        return Refused("unknown_type")
    weight: Number = 1
    tags = ""
    timestamp: int | None = None
    for field in extra:
        if field.startswith("@"):
            rate = number(field[1:])
            if rate is None or not 0 < rate <= 1:
                return Refused("bad_rate")
            weight = 1 / rate if rate != 1 else 1
        elif field.startswith("#"):
            tags = field[1:]
        elif field.startswith("T"):
            if not (field[1:].isascii() and field[1:].isdigit() and len(field) <= 13):
                return Refused("bad_timestamp")
            timestamp = int(field[1:])
        elif not field.startswith(("c:", "e:", "card:")):
            return Refused("unknown_field")
    series = series_key(name, tags)
    if not series:
        return Refused("empty_name")
    if kind == "s":
        # Sets are never packed: a member may contain a colon.
        return [Sample(kind, series, (packed or "0",), timestamp=timestamp)]
    numbers: list[Number] = []
    deltas: list[bool] = []
    for part in packed.split(":"):
        value = number(part)
        if value is None or (kind == "ms" and value < 0):
            return Refused("bad_number")
        numbers.append(value)
        deltas.append(part[0] in "+-")
    if kind == "g":
        return [Sample(kind, series, tuple(numbers), deltas=tuple(deltas), timestamp=timestamp)]
    return [Sample(kind, series, tuple(numbers), weight, timestamp=timestamp)]


def _classic_values(name: str, rest: str) -> list[Sample] | Refused:
    """`name:1|c:2|ms|@0.1|#tags`: several values, each with a type and perhaps a rate of its own."""
    body, mark, tags = rest.partition("|#")
    samples: list[Sample] = []
    for bit in body.split(":"):
        value, bar, fields = bit.partition("|")
        if not bar:
            return Refused("no_type")
        kind, *extra = fields.split("|")
        part = _sample(name, value, kind, [*extra, "#" + tags] if mark else extra)
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
