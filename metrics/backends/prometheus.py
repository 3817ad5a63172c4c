"""A flush in the Prometheus text format, or OpenMetrics. Pure: no sockets.

Each sample name belongs to one family of one type, and each sample is there once: who comes first keeps the plain
name, and who would collide with it gets a suffix or a label `statsd` with its own name, for as long as it lives.
"""

import re
import threading
from collections.abc import Iterable
from itertools import chain
from math import isfinite

import msgspec

from brokerless.core.counters import Counters, escape_label
from brokerless.metrics.aggregate.flush import CounterPoint, Flush, add_up
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.backends.mapping import Mapped, Mapper
from brokerless.metrics.numbers import fit_64_bits
from brokerless.metrics.parser import Number, join_series, split_series

_BAD_NAME = re.compile(r"[^a-zA-Z0-9_:]")
_BAD_LABEL = re.compile(r"[^a-zA-Z0-9_]")
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Endings of the sample names that a family of a type has.
_SAMPLES = {
    "counter": ("", "_total", "_created"),
    "gauge": ("",),
    "summary": ("", "_sum", "_count", "_created"),
    "histogram": ("", "_bucket", "_sum", "_count", "_created"),
}
# What is put behind a name that another type has. Not the type itself, which promtool objects to.
_OTHERWISE = {"counter": "_events", "gauge": "_value", "summary": "_timer", "histogram": "_timer"}
# Labels that mean something to Prometheus, or to us.
_RESERVED = ("quantile", "le", "reason", "statsd")
_HELP = {
    "counter": "StatsD counter, corrected for loss.",
    "gauge": "StatsD gauge.",
    "summary": "StatsD timer; quantiles are of the last window.",
    "histogram": "StatsD timer.",
}


class PrometheusOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the page looks like."""

    loss: bool = True
    """Beside `x_total` (corrected) also `x_raw_total`, `x_bound` and `x_grade`."""
    seconds: bool = False
    """Timers in seconds, Prometheus' base unit, under names that end in `_seconds`; otherwise as they came."""
    mapping: str = ""
    """A file with statsd_exporter's mapping rules."""


class _Family(msgspec.Struct):
    kind: str
    help: str
    # (ending, labels) → value
    samples: dict[tuple[str, str], str] = msgspec.field(default_factory=dict)


class _Published(msgspec.Struct):
    """What scrapers saw of a counter last."""

    total: Number
    raw: Number
    life: float = 0.0
    # It went down, by negative increments: no counter for Prometheus.
    decreasing: bool = False
    # StatsD counters that a rule had made part of it, and that were forgotten since: their sum.
    gone: CounterPoint | None = None


class Carried(msgspec.Struct, frozen=True):
    """What the next daemon must know of a counter on the page, beside its figures."""

    excess: Number
    """By how much what is shown is ahead of what is known now: an estimate was too high."""
    decreasing: bool
    gone: CounterPoint | None


class Registry:
    """Which family and labels a series has; remembered from page to page, so that names do not change hands."""

    def __init__(self) -> None:
        # (role, series) → (family, labels)
        self._assigned: dict[tuple[str, str], tuple[str, str]] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}
        # sample name → family, and family → type, with how many series use it
        self._names: dict[str, str] = {}
        self._families: dict[str, list[str | int]] = {}

    def assign(
        self, role: str, series: str, name: str, tags: Iterable[tuple[str, str | None]], kind: str
    ) -> tuple[str, str]:
        """Family and labels of one role (`total`, `raw`, …) of a series."""
        found = self._assigned.get((role, series))
        if found is not None and self._families[found[0]][0] == kind:
            return found
        if found is not None:
            self._release((role, series))
        family = self._family(name, kind)
        labels = clean_labels(tags)
        shown = _shown(labels)
        if (family, shown) in self._owners:
            # Two series that differ only in characters Prometheus does not allow.
            shown = _shown(labels | {"statsd": series})
        self._owners[family, shown] = (role, series)
        self._families[family][1] += 1  # type: ignore[operator]
        self._assigned[role, series] = (family, shown)
        return family, shown

    def _family(self, name: str, kind: str) -> str:
        family = _BAD_NAME.sub("_", name) or "_"
        if family[0].isdigit():
            family = "_" + family
        if kind == "counter":
            family = family.removesuffix("_total") or "_"
        while not self._is_free(family, kind):
            family += _OTHERWISE[kind]
        if family not in self._families:
            self._families[family] = [kind, 0]
            for ending in _SAMPLES[kind]:
                self._names[family + ending] = family
        return family

    def _is_free(self, family: str, kind: str) -> bool:
        have = self._families.get(family)
        if have is not None:
            return have[0] == kind
        if kind == "gauge" and family.endswith(("_total", "_sum", "_count", "_bucket", "_created")):
            return False
        return all(family + ending not in self._names for ending in _SAMPLES[kind])

    def _release(self, key: tuple[str, str]) -> None:
        family, labels = self._assigned.pop(key)
        self._owners.pop((family, labels), None)
        entry = self._families[family]
        entry[1] -= 1  # type: ignore[operator]
        if not entry[1]:
            for ending in _SAMPLES[str(entry[0])]:
                self._names.pop(family + ending, None)
            del self._families[family]

    def retain(self, alive: set[tuple[str, str]]) -> None:
        """Give back the names of all others."""
        for key in [key for key in self._assigned if key not in alive]:
            self._release(key)


class PrometheusPage:
    """Makes pages; may be called from any thread."""

    def __init__(self, options: PrometheusOptions | None = None, mapper: Mapper | None = None) -> None:
        self._options = options or PrometheusOptions()
        self._mapper = mapper
        self._registry = Registry()
        self._published: dict[str, _Published] = {}
        # With rules: which counter on the page each StatsD counter is part of, and how it stood.
        self._members: dict[tuple[str, float], tuple[str, CounterPoint]] = {}
        self.carried: dict[str, Carried] = {}
        # Of series with a time to live: the last value, and since when.
        self._changed: dict[str, tuple[Number, float]] = {}
        self._lock = threading.Lock()

    def go_on(self, before: "PrometheusPage") -> None:
        """Show counters from where the page before, with the same rules, ended."""
        self._published, self._members, self.carried = before._published, before._members, before.carried

    def resume(self, flush: Flush, carried: dict[str, Carried]) -> None:
        """Show counters from where a daemon ended that had these: to Prometheus a smaller value is a restart."""
        for key, (_, found) in _Page(self, False).groups(flush).items():
            point, more = add_up(found), carried.get(key, Carried(0, False, None))
            total, raw = point.total + more.excess, point.total_raw
            if more.gone is not None:
                total, raw = total + more.gone.total, raw + more.gone.total_raw
            self._published[key] = _Published(total, raw, point.life, more.decreasing or raw < 0, more.gone)
        self.carried = carried

    def render(
        self,
        flush: Flush,
        own: Iterable[tuple[Counters, dict[str, int]]] = (),
        *,
        openmetrics: bool = False,
    ) -> str:
        """Everything the daemon knows after a flush.

        A counter `x` is `x_total`, what was sent as far as known, since the daemon began. It never goes down: where
        an estimate proves too high, it stands still until the truth has caught up, with a bound that says so.
        Beside it are `x_raw_total` (what arrived) and the gauges `x_bound` (95 %) and `x_grade` (0 exact, 1 ledger,
        2 socket-only, 3 unknown). A counter that is decremented is a gauge. A timer is a histogram where buckets
        are configured, otherwise a summary; count and sum are cumulative.
        """
        with self._lock:
            return _Page(self, openmetrics).render(flush, own)


class _Page:
    """One page in the making."""

    def __init__(self, maker: PrometheusPage, openmetrics: bool) -> None:
        self._maker = maker
        self._options = maker._options
        self._openmetrics = openmetrics
        self._families: dict[str, _Family] = {}
        self._alive: set[tuple[str, str]] = set()

    def render(self, flush: Flush, own: Iterable[tuple[Counters, dict[str, int]]]) -> str:
        for counters, values in own:
            for entry in counters.describe():
                name = f"brokerless_{entry.component.replace('.', '_')}_{entry.name}"
                self._add(
                    "own", name, name, (), "counter", "_total", values.get(entry.name, 0), text=entry.text
                )
        refused = "brokerless_metrics_refused_lines"
        for reason, n in flush.refused.items():
            key = f"{refused};{reason}"
            family, _ = self._assign("own", key, refused, (), "counter", "StatsD lines refused, by reason.")
            self._families[family].samples["_total", _shown({"reason": reason})] = str(n)
        self._counters(flush)
        for series, value in flush.all_gauges.items():
            self._simple("gauge", series, value, flush.end)
        for series, size in flush.sets.items():
            self._simple("set", series, size, flush.end)
        self._timers(flush)
        self._maker._registry.retain(self._alive)
        return self._text()

    def _assign(
        self,
        role: str,
        series: str,
        name: str,
        tags: Iterable[tuple[str, str | None]],
        kind: str,
        text: str = "",
    ) -> tuple[str, str]:
        family, labels = self._maker._registry.assign(role, series, name, tags, kind)
        self._alive.add((role, series))
        if family not in self._families:
            self._families[family] = _Family(kind, text or _HELP[kind])
        return family, labels

    def _add(
        self,
        role: str,
        series: str,
        name: str,
        tags: Iterable[tuple[str, str | None]],
        kind: str,
        ending: str,
        value: Number,
        *,
        text: str = "",
    ) -> None:
        if isfinite(value):
            family, labels = self._assign(role, series, name, tags, kind, text)
            self._families[family].samples[ending, labels] = _value(value)

    def _mapped(self, series: str, kind: str) -> Mapped | None:
        """Name and tags under which a series is published; None if a rule drops it."""
        name, tags = split_series(series)
        if self._maker._mapper is None:
            return Mapped(name, tags)
        return self._maker._mapper.map(name, tags, kind)

    def groups(self, flush: Flush) -> dict[str, tuple[Mapped, list[CounterPoint]]]:
        """Counters by what they are on the page: those that a rule maps to the same name and labels are one."""
        groups: dict[str, tuple[Mapped, list[CounterPoint]]] = {}
        for point in chain(flush.counters, flush.stamped_counters):
            mapped = self._mapped(point.series, "counter")
            if mapped is not None:
                key = join_series(mapped.name, mapped.tags)
                groups.setdefault(key, (mapped, []))[1].append(point)
        if self._maker._mapper is not None:
            self._note_members(groups)
        return groups

    def _note_members(self, groups: dict[str, tuple[Mapped, list[CounterPoint]]]) -> None:
        """What was part of a counter and is gone, or starts over, stays in it: the counter goes on."""
        maker = self._maker
        before, maker._members = (
            maker._members,
            {
                (point.series, point.life): (key, point)
                for key, (_, found) in groups.items()
                for point in found
            },
        )
        for member, (key, point) in before.items():
            seen = maker._published.get(key)
            if seen is not None and maker._members.get(member, ("", point))[0] != key:
                seen.gone = _fitted(point if seen.gone is None else add_up([seen.gone, point]))

    def _counters(self, flush: Flush) -> None:
        groups = self.groups(flush)
        carried: dict[str, Carried] = {}
        for series, (mapped, found) in groups.items():
            point = add_up(found)
            if self._is_expired(series, mapped, point.total_raw, flush.end):
                continue
            self._counter(series, mapped, point, carried)
        self._maker._published = {
            series: seen for series, seen in self._maker._published.items() if series in groups
        }
        self._maker.carried = carried

    def _counter(self, series: str, mapped: Mapped, point: CounterPoint, carried: dict[str, Carried]) -> None:
        seen = self._maker._published.get(series)
        if seen is None or (self._maker._mapper is None and seen.life != point.life):
            seen = self._maker._published[series] = _Published(point.total, point.total_raw, point.life)
        if seen.gone is not None:
            point = add_up([point, seen.gone])
        raw, total, bound, grade = point.total_raw, point.total, point.total_bound, point.total_grade
        if not (isfinite(raw) and isfinite(total)):
            return
        seen.decreasing = seen.decreasing or raw < seen.raw or total < 0 or raw < 0
        excess: Number = 0
        if total < seen.total and not seen.decreasing:
            # An estimate was too high. To Prometheus a smaller value is a restart.
            excess, total = seen.total - total, seen.total
            grade = max(grade, Grade.LEDGER)
            bound = None if bound is None else max(bound, float(excess))
        seen.total, seen.raw = total, raw
        if excess or seen.decreasing or seen.gone is not None:
            carried[series] = Carried(fit_64_bits(excess), seen.decreasing, seen.gone)
        raw, total = raw * mapped.scale, total * mapped.scale
        bound = None if bound is None else bound * mapped.scale
        name, tags = mapped.name, mapped.tags
        kind, ending = ("gauge", "") if seen.decreasing else ("counter", "_total")
        self._add("total", series, name, tags, kind, ending, total, text=mapped.help)
        if self._options.loss:
            base = name.removesuffix("_total")
            text = "What arrived of a StatsD counter."
            self._add("raw", series, f"{base}_raw", tags, kind, ending, raw, text=text)
            if bound is not None:
                text = "Half the width of a StatsD counter's 95 % interval."
                self._add("bound", series, f"{base}_bound", tags, "gauge", "", bound, text=text)
            text = "How well a StatsD counter is known: 0 exact, 1 ledger, 2 socket-only, 3 unknown."
            self._add("grade", series, f"{base}_grade", tags, "gauge", "", int(grade), text=text)

    def _simple(self, role: str, series: str, value: Number, now: float) -> None:
        mapped = self._mapped(series, "gauge" if role == "gauge" else "set")
        if mapped is None or self._is_expired(f"{role} {series}", mapped, value, now):
            return
        name = mapped.name if role == "gauge" else f"{mapped.name}_members"
        key = join_series(mapped.name, mapped.tags)
        text = mapped.help or (
            "" if role == "gauge" else "Distinct members of a StatsD set in the last window."
        )
        self._add(role, key, name, mapped.tags, "gauge", "", value * mapped.scale, text=text)

    def _timers(self, flush: Flush) -> None:
        groups: dict[str, tuple[Mapped, list[str]]] = {}
        for series in flush.timers:
            mapped = self._mapped(series, "timer")
            if mapped is not None:
                key = join_series(mapped.name, mapped.tags)
                groups.setdefault(key, (mapped, []))[1].append(series)
        for key, (mapped, found) in groups.items():
            self._timer(flush, key, mapped, found)

    def _timer(self, flush: Flush, key: str, mapped: Mapped, found: list[str]) -> None:
        totals = [flush.timer_totals[series] for series in found if series in flush.timer_totals]
        milliseconds = any(total.milliseconds for total in totals)
        # statsd_exporter gives all timers in seconds, under whatever name its rules say.
        in_seconds = milliseconds and (self._options.seconds or self._maker._mapper is not None)
        scale = mapped.scale / 1000 if in_seconds else mapped.scale
        name = mapped.name
        if in_seconds and self._maker._mapper is None and not name.endswith("_seconds"):
            name += "_seconds"
        limits = totals[0].buckets if totals else {}
        kind = "histogram" if limits else "summary"
        count, total = sum(t.count for t in totals), sum(t.sum for t in totals) * scale
        if not (isfinite(count) and isfinite(total)) or self._is_expired(key, mapped, count, flush.end):
            return
        family, labels = self._assign("timer", key, name, mapped.tags, kind, mapped.help)
        samples = self._families[family].samples
        unit = 1000.0 if milliseconds and not in_seconds else 1.0
        # OpenMetrics has whole counts and no negative quantiles and sums, and a histogram has both or neither there.
        strict = self._openmetrics
        if strict:
            count = round(count)
        for limit in limits:
            below = sum(t.buckets.get(limit, 0) for t in totals)
            below = round(below) if strict else below
            samples["_bucket", _with(labels, f'le="{_value(limit * unit)}"')] = _value(below)
        if limits:
            samples["_bucket", _with(labels, 'le="+Inf"')] = _value(count)
        elif len(found) == 1:
            for share, value in _quantiles(flush, found[0]):
                if isfinite(value) and (value * scale >= 0 or not strict):
                    samples["", _with(labels, f'quantile="{share:g}"')] = _value(value * scale)
        negative = strict and (total < 0 or any(limit < 0 for limit in limits))
        if not negative:
            samples["_sum", labels] = _value(total)
        if not (negative and limits):
            samples["_count", labels] = _value(count)

    def _is_expired(self, key: str, mapped: Mapped, value: Number, now: float) -> bool:
        """Whether a series with a time to live has not changed for that long."""
        if not mapped.ttl_s:
            return False
        changed = self._maker._changed
        before = changed.get(key)
        if before is None or before[0] != value:
            changed[key] = (value, now)
            return False
        return now - before[1] > mapped.ttl_s

    def _text(self) -> str:
        out = []
        for name in list(self._families):
            # Taken out one by one: freeing all of them at once would hold up the thread that receives.
            family = self._families.pop(name)
            if not family.samples:
                continue
            # OpenMetrics names the family without _total, the older format with it.
            shown = name if self._openmetrics or family.kind != "counter" else f"{name}_total"
            escaped = family.help.replace("\\", r"\\").replace("\n", r"\n")
            out.append(f"# HELP {shown} {escaped}")
            out.append(f"# TYPE {shown} {family.kind}")
            for (ending, labels), value in family.samples.items():
                braces = f"{{{labels}}}" if labels else ""
                out.append(f"{name}{ending}{braces} {value}")
        if self._openmetrics:
            out.append("# EOF")
        return "".join(f"{line}\n" for line in out)


def _fitted(point: CounterPoint) -> CounterPoint:
    """What of a counter that is gone matters, so that it can be written down."""
    total, raw = fit_64_bits(point.total), fit_64_bits(point.total_raw)
    return msgspec.structs.replace(point, raw=0, corrected=0, total=total, total_raw=raw)


def _quantiles(flush: Flush, series: str) -> Iterable[tuple[float, float]]:
    for name, figure in flush.timers[series].items():
        if isinstance(figure, dict):
            continue
        if name == "median":
            yield 0.5, figure
        elif name.startswith("upper_") and name != "upper_50":
            yield float(name.removeprefix("upper_").replace("_", ".")) / 100, figure


def clean_labels(tags: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Tags as labels: values of one key joined by commas, `true` for one without, no name that is taken."""
    values: dict[str, list[str]] = {}
    for key, value in tags:
        values.setdefault(key, []).append("true" if value is None or value == "" else value)
    labels: dict[str, str] = {}
    for key, found in values.items():
        clean = _BAD_LABEL.sub("_", key) or "_"
        if clean[0].isdigit():
            clean = "_" + clean
        while clean in labels or clean in _RESERVED or clean.startswith("__"):
            clean = f"tag{clean}" if clean.startswith("__") else f"{clean}_"
        labels[clean] = ",".join(found)
    return labels


def _with(labels: str, more: str) -> str:
    return f"{labels},{more}" if labels else more


def _shown(labels: dict[str, str]) -> str:
    # Sorted, because what is the same labels for Prometheus must be the same text here.
    return ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))


def _escape(value: str) -> str:
    return escape_label(value.encode("utf-8", "replace").decode())


def _value(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
