"""The lines that make loss visible: ordinary gauges, so that any StatsD server accepts them.

Every datagram of our client begins with its number, `_bl.<client>:<number>|g`. Now and then, and at the end,
one or more datagrams hold nothing but totals since the client began, all true for their own number. These
heartbeats are numbered like all others, and how many there were is told after the point of each number, so
that of missing datagrams, too, it is known how many were heartbeats and cannot have held a counter's lines:

    _bl.<client>:412.9|g                      datagram 412; 9 of the 412 were heartbeats (none: no point)
    _bl.<client>.start:1767225600000|g        when the client began, milliseconds since 1970
    _bl.<client>.lines:16480|g                lines in all numbered datagrams so far, without these lines
    _bl.<client>.failed:0|g                   datagrams that the client's own socket refused
    _bl.<client>.counters:35|g                counters that have a total
    _bl.<client>.name.web-1-4711:1|g          for people
    _bl.<client>.t.requests:16000|g|#env:prod total of one counter
    _bl.<client>.every:5000|g                 milliseconds between heartbeats: a longer silence is no idleness
    _bl.<client>.end:1|g                      the client is closing; nothing follows
    _bl.<client>.mac:<39 digits>.<13>|g       last line of a datagram: HMAC-SHA256, 128 bits, of all before it and
                                              of the time, milliseconds since 1970, after the point

Pure: no sockets, no clock.
"""

import hmac
import re

import msgspec

from brokerless.metrics.parser import Number, ParserOptions, line_text, number, series_key

PREFIX = b"_bl."
# 8 characters of 36: 41 bits, so that 10,000 clients collide with a chance of 1 in 50,000. The length is
# fixed because worker processes are chosen by the bytes at this place in the datagram.
ID_LENGTH = 8
# A number beyond this is nobody's honest count (30 years at 10 million datagrams/s).
MAX_NUMBER = 10**16


class Heartbeat(msgspec.Struct):
    """What one datagram of totals says; `number` is the datagram's own, and None means: not said here.

    `told` are the totals as they came: name, tags and amount. Which series they are of is for those to say who read
    the lines, by the same options (`read_totals`).
    """

    number: int
    # Heartbeats up to this number, itself included.
    heartbeats: int = 0
    start_ms: int | None = None
    lines: int | None = None
    failed: int | None = None
    counters: int | None = None
    every_ms: int | None = None
    name: str | None = None
    end: bool = False
    told: list[tuple[str, str, Number]] = msgspec.field(default_factory=list)
    totals: dict[str, Number] = msgspec.field(default_factory=dict)

    def read_totals(self, options: ParserOptions) -> None:
        """Fill `totals` from `told`. A name of which nothing is left is nobody's."""
        self.totals = {
            series: n for name, tags, n in self.told if (series := series_key(name, tags, options))
        }
        self.told = []


def number_line(client: str, number_: int, heartbeats: int = 0) -> str:
    """The first line of a datagram; `heartbeats` of the numbers up to this one were heartbeats."""
    return f"_bl.{client}:{number_}.{heartbeats}|g" if heartbeats else f"_bl.{client}:{number_}|g"


def total_line(client: str, name: str, tags: str, total: Number) -> str:
    """The cumulative total of one counter."""
    return f"_bl.{client}.t.{name}:{total!r}|g{'|#' + tags if tags else ''}"


def mac_line(client: str, datagram: bytes, auth_key: bytes, now_ms: int) -> bytes:
    """The last line of a datagram, which proves that its sender holds the key; an ordinary gauge, too."""
    time = b"%013d" % (now_ms % 10**13)
    return b"_bl.%s.mac:%039d.%s|g" % (client.encode(), _mac(datagram, time, auth_key), time)


# Bytes of that line and the newline before it.
MAC_BYTES = len(b"\n_bl..mac:.|g") + ID_LENGTH + 39 + 13
_MAC_LINE = re.compile(rb"\n_bl\.[0-9a-z]{8}\.mac:([0-9]{39})\.([0-9]{13})\|g")


def _mac(datagram: bytes, time: bytes, auth_key: bytes) -> int:
    return int.from_bytes(hmac.digest(auth_key, datagram + time, "sha256")[:16], "big")


def split_mac(datagram: bytes) -> tuple[bytes, tuple[bytes, bytes] | None]:
    """A datagram without its `mac` line, and the two numbers in that; None if there is none."""
    at = len(datagram) - MAC_BYTES
    found = _MAC_LINE.fullmatch(datagram, at) if datagram[at : at + 5] == b"\n_bl." else None
    return (datagram[: found.start()], (found[1], found[2])) if found else (datagram, None)


def signed_at_ms(body: bytes, mac: tuple[bytes, bytes] | None, auth_keys: list[bytes]) -> int | None:
    """When a datagram was signed with one of the keys; None if it was not. `body` is all before its `mac` line."""
    if mac is None:
        return None
    said, time = mac
    signed = any(hmac.compare_digest(said, b"%039d" % _mac(body, time, key)) for key in auth_keys)
    return int(time) if signed else None


_HEAD = re.compile(rb"_bl\.([0-9a-z]{8}):([0-9]{1,16})(?:\.([0-9]{1,16}))?\|g(?:\n|\Z)")


def split_datagram(datagram: bytes) -> tuple[bytes, int, bytes, int] | None:
    """(client, number, rest, heartbeats) of a datagram that begins with PREFIX; None if it is not numbered."""
    found = _HEAD.match(datagram)
    if found is None:
        return None
    client, digits, beats = found.groups()
    number_, heartbeats = int(digits), int(beats) if beats else 0
    return (
        (client, number_, datagram[found.end() :], heartbeats) if heartbeats <= number_ and number_ else None
    )


def parse_totals(client: bytes, number_: int, rest: bytes, heartbeats: int = 0) -> tuple[Heartbeat, bytes]:
    """Read the lines of a heartbeat; returns it and whatever lines in `rest` are none of it."""
    beat = Heartbeat(number_, heartbeats)
    own = PREFIX + client + b"."
    others = []
    for line in rest.split(b"\n"):
        if not line.startswith(own) or not _take(beat, line_text(line[len(own) :])):
            others.append(line)
    return beat, b"\n".join(others)


def _take(beat: Heartbeat, text: str) -> bool:
    name, _, rest = text.partition(":")
    value, _, fields = rest.partition("|")
    amount = number(value)
    if amount is None or not fields.startswith("g"):
        return False
    field, _, detail = name.partition(".")
    if field == "t" and detail:
        beat.told.append((detail, fields.partition("|#")[2], amount))
        return True
    if field == "name" and detail:
        beat.name = detail
        return True
    if field == "end":
        beat.end = True
        return True
    if field not in ("start", "lines", "failed", "counters", "every") or not 0 <= amount <= MAX_NUMBER:
        return False
    setattr(beat, {"start": "start_ms", "every": "every_ms"}.get(field, field), int(amount))
    return True
