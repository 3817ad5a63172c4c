"""A flush in Graphite's line and pickle protocols, with the classic daemon's names. Pure: no sockets."""

import pickle
import struct

from brokerless.metrics.config import GraphiteNames
from brokerless.metrics.flush import Flush
from brokerless.metrics.numbers import show
from brokerless.metrics.parser import Number

Point = tuple[str, Number, int]


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
        return f"{namespace}{name}{tail}{self._suffix}{semicolon}{tags}"

    def points(self, flush: Flush) -> list[Point]:
        """Everything of one flush, as (name, value, time)."""
        now = round(flush.end)
        out: list[Point] = []
        self._counter_points(flush, now, out)
        for series, figures in flush.timers.items():
            for name, value in figures.items():
                if isinstance(value, dict):
                    out += [(self._name(self._timers, series, name, k), v, now) for k, v in value.items()]
                else:
                    out.append((self._name(self._timers, series, name), value, now))
        out += [(self._name(self._gauges, s), value, now) for s, value in flush.gauges.items()]
        out += [(self._name(self._sets, s, "count"), value, now) for s, value in flush.sets.items()]
        for point in flush.stamped:
            if point.kind == "g":
                name = self._name(self._gauges, point.series)
            elif self._names.legacy:
                name = self._name("stats_counts.", point.series)
            else:
                name = self._name(self._counters, point.series, "count")
            out.append((name, point.value, point.timestamp))
        own = len(flush.counters) + len(flush.timers) + len(flush.gauges) + len(flush.sets)
        stats = self._names.prefix_stats
        base = "" if self._names.legacy else self._own
        out.append((f"{base}{stats}.numStats{self._suffix}", own, now))
        took_ms = round(flush.processing_s * 1000)
        out.append((f"{self._own}{stats}.processing_time{self._suffix}", took_ms, now))
        return out

    def _counter_points(self, flush: Flush, now: int, out: list[Point]) -> None:
        legacy, window_s = self._names.legacy, flush.window_s
        for point in flush.counters:
            if legacy:
                out.append((self._name(self._counters, point.series), point.raw / window_s, now))
                out.append((self._name("stats_counts.", point.series), point.raw, now))
            else:
                out.append((self._name(self._counters, point.series, "rate"), point.raw / window_s, now))
                out.append((self._name(self._counters, point.series, "count"), point.raw, now))
            if self._names.loss:
                namespace = "stats_counts." if legacy else self._counters
                out.append((self._name(namespace, point.series, "corrected"), point.corrected, now))
                if point.bound is not None:
                    out.append((self._name(namespace, point.series, "bound"), point.bound, now))
                out.append((self._name(namespace, point.series, "grade"), int(point.grade), now))


def lines(points: list[Point]) -> bytes:
    """The line protocol: `name value time` and a newline each."""
    return "".join(f"{name} {show(value)} {at}\n" for name, value, at in points).encode()


# Carbon refuses pickles above 1 MiB; 500 points are some 50 KB.
PICKLE_POINTS = 500


def pickles(points: list[Point]) -> bytes:
    """The pickle protocol: lists of (name, (time, value)), each behind its length."""
    out = []
    for at in range(0, len(points), PICKLE_POINTS):
        batch = [(name, (when, value)) for name, value, when in points[at : at + PICKLE_POINTS]]
        body = pickle.dumps(batch, protocol=2)
        out.append(struct.pack("!L", len(body)) + body)
    return b"".join(out)
