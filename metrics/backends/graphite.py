"""Graphite: a flush in its line and pickle protocols, with the classic daemon's names, and the backend for it."""

import pickle
import re
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from brokerless.core.config import split_host_port
from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.backends.base import SEND_TIMEOUT_S, Backend
from brokerless.metrics.numbers import format_number
from brokerless.metrics.parser import Number

Point = tuple[str, Number, int]
# Points rendered and sent at once. Carbon refuses pickles above 1 MiB, and freeing a million strings in one go
# would keep the thread that receives waiting for the interpreter.
BATCH_POINTS = 500
# Space would end the name in the line protocol, and Carbon refuses the others in tags.
_REFUSED = re.compile(r"[\s!^~]")


class GraphiteNames(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where Graphite finds what; the defaults are the classic daemon's."""

    legacy: bool = True
    """`stats.<name>` and `stats_counts.<name>`, the classic daemon's default; False: `stats.counters.…`."""
    prefix: str = "stats"
    """Before every name."""
    counters: str = "counters"
    """After `prefix`, for counters; so are the next three for their kinds."""
    timers: str = "timers"
    """For timers."""
    gauges: str = "gauges"
    """For gauges."""
    sets: str = "sets"
    """For sets."""
    suffix: str = ""
    """Appended to every name, for example the host."""
    prefix_stats: str = "statsd"
    """Name of the daemon's own figures."""
    loss: bool = True
    """Also send each counter's `.corrected`, `.bound` and `.grade` (0 exact to 3 unknown).
    False gives byte for byte what the classic daemon sends."""


class GraphiteFormat:
    """Names of one configuration. Tags (`;a=b`) stay at the end of a name, where Graphite looks for them."""

    def __init__(self, names: GraphiteNames) -> None:
        self._names = names
        self._suffix = f".{names.suffix}" if names.suffix else ""
        if names.legacy:
            self._counters, self._timers = "stats.", "stats.timers."
            self._gauges, self._sets, self._own = "stats.gauges.", "stats.sets.", "stats."
        else:
            base = f"{names.prefix}." if names.prefix else ""
            self._own = base
            self._counters, self._timers, self._gauges, self._sets = (
                base + (f"{part}." if part else "")
                for part in (names.counters, names.timers, names.gauges, names.sets)
            )

    def _name(self, namespace: str, series: str, *parts: str) -> str:
        name, semicolon, tags = series.partition(";")
        tail = "".join(f".{part}" for part in parts)
        if semicolon and _REFUSED.search(tags):
            tags = _REFUSED.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode()), tags)
        # Carbon refuses a tag without a value.
        shown = "".join(f";{tag}" if "=" in tag else f";{tag}=true" for tag in tags.split(";") if tag)
        return f"{namespace}{name}{tail}{self._suffix}{shown}"

    def points(self, flush: Flush) -> Iterator[Point]:
        """Everything of one flush, as (name, value, time)."""
        now = round(flush.end)
        yield from self._counter_points(flush, now)
        for series, figures in flush.timers.items():
            for name, value in figures.items():
                if isinstance(value, dict):
                    for label, figure in value.items():
                        yield self._name(self._timers, series, name, label), figure, now
                else:
                    yield self._name(self._timers, series, name), value, now
        for series, gauge in flush.gauges.items():
            yield self._name(self._gauges, series), gauge, now
        for series, size in flush.sets.items():
            yield self._name(self._sets, series, "count"), size, now
        yield from self._timestamped_points(flush)
        own = len(flush.counters) + len(flush.timers) + len(flush.gauges) + len(flush.sets)
        stats = self._names.prefix_stats
        base = "" if self._names.legacy else self._own
        yield f"{base}{stats}.numStats{self._suffix}", own, now
        yield f"{self._own}{stats}.processing_time{self._suffix}", round(flush.processing_s * 1000), now

    def _counter_points(self, flush: Flush, now: int) -> Iterator[Point]:
        legacy, window_s = self._names.legacy, flush.window_s
        for point in flush.counters:
            if legacy:
                yield self._name(self._counters, point.series), point.raw / window_s, now
                yield self._name("stats_counts.", point.series), point.raw, now
            else:
                yield self._name(self._counters, point.series, "rate"), point.raw / window_s, now
                yield self._name(self._counters, point.series, "count"), point.raw, now
            if self._names.loss:
                namespace = "stats_counts." if legacy else self._counters
                yield self._name(namespace, point.series, "corrected"), point.corrected, now
                if point.bound is not None:
                    yield self._name(namespace, point.series, "bound"), point.bound, now
                yield self._name(namespace, point.series, "grade"), int(point.grade), now

    def _timestamped_points(self, flush: Flush) -> Iterator[Point]:
        for point in flush.timestamped:
            if point.kind == "g":
                name = self._name(self._gauges, point.series)
            elif self._names.legacy:
                name = self._name("stats_counts.", point.series)
            else:
                name = self._name(self._counters, point.series, "count")
            yield name, point.value, point.timestamp


def lines(points: list[Point]) -> bytes:
    """The line protocol: `name value time` and a newline each."""
    return "".join(f"{name} {format_number(value)} {at}\n" for name, value, at in points).encode()


def pickled(points: list[Point]) -> bytes:
    """The pickle protocol: a list of (name, (time, value)) behind its length."""
    body = pickle.dumps([(name, (at, value)) for name, value, at in points], protocol=2)
    return struct.pack("!L", len(body)) + body


class Graphite(Backend):
    """Carbon, by the line or the pickle protocol; one connection per flush, like the classic daemon."""

    def __init__(
        self, name: str, address: str, names: GraphiteNames, encode: Callable[[list[Point]], bytes]
    ) -> None:
        self._host, self._port = split_host_port(address, "graphite")
        self._format = GraphiteFormat(names)
        self._encode = encode
        super().__init__(name)

    def deliver(self, flush: Flush) -> int:
        points = self._format.points(flush)
        sent = 0
        with socket.create_connection((self._host, self._port), SEND_TIMEOUT_S) as connection:
            while batch := list(islice(points, BATCH_POINTS)):
                payload = self._encode(batch)
                connection.sendall(payload)
                sent += len(payload)
        return sent
