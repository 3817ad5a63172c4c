"""A flush in the Prometheus text format, or OpenMetrics. Pure: no sockets."""

import re
from collections.abc import Callable, Iterable
from math import isnan

from brokerless.core.counters import Counters
from brokerless.metrics.flush import Flush
from brokerless.metrics.parser import Number

_BAD_NAME = re.compile(r"[^a-zA-Z0-9_:]")
_BAD_LABEL = re.compile(r"[^a-zA-Z0-9_]")
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# quantile label → figure of a timer
_MEDIAN = "median"


class Page:
    """Collects families so that each name has one type and each sample is there once."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        # family → (type, help, samples); samples: (suffix, labels) → text of the value
        self._families: dict[str, tuple[str, str, dict[tuple[str, str], str]]] = {}

    def family(self, series: str, kind: str, suffix: str = "", text: str = "") -> "Adder":
        """A family for a series; returned is what adds samples: `add(value, sample_suffix, **labels)`."""
        raw_name, *pairs = series.split(";")
        name = _BAD_NAME.sub("_", raw_name) or "_"
        if name[0].isdigit():
            name = "_" + name
        name += suffix
        entry = self._families.get(name)
        while entry is not None and entry[0] != kind:
            # StatsD allows a counter and a gauge of one name, Prometheus does not.
            name += f"_{kind}"
            entry = self._families.get(name)
        if entry is None:
            entry = self._families[name] = (kind, text, {})
        labels = _labels(pairs)
        samples = entry[2]

        def add(value: Number, sample: str = "", **extra: str) -> None:
            shown = _shown(labels | extra)
            if (sample, shown) in samples:
                # Two series that differ only in characters Prometheus does not allow.
                shown = _shown(labels | extra | {"statsd": series})
            samples[sample, shown] = _value(value)

        return add

    def counters(self, counters: Counters, values: dict[str, int]) -> None:
        """The daemon's own counters."""
        for entry in counters.describe():
            name = f"brokerless_{entry.component.replace('.', '_')}_{entry.name}"
            self.family(name, "counter", text=entry.text)(values.get(entry.name, 0), "_total")

    def render(self) -> str:
        """The whole page."""
        out = []
        for name in list(self._families):
            # Taken out one by one: freeing all of them at once would hold up the thread that receives.
            kind, text, samples = self._families.pop(name)
            # OpenMetrics names the family without _total, the older format with it.
            shown = name if self._openmetrics or kind != "counter" else f"{name}_total"
            if text:
                out.append(f"# HELP {shown} {text}")
            out.append(f"# TYPE {shown} {kind}")
            for (suffix, labels), value in samples.items():
                braces = f"{{{labels}}}" if labels else ""
                out.append(f"{name}{suffix}{braces} {value}")
        if self._openmetrics:
            out.append("# EOF")
        return "".join(f"{line}\n" for line in out)


Adder = Callable[..., None]


def page(
    flush: Flush,
    own: Iterable[tuple[Counters, dict[str, int]]],
    timer_totals: dict[str, tuple[float, float]],
    *,
    openmetrics: bool = False,
) -> str:
    """Everything the daemon knows after a flush.

    A counter `x` is `x_total` (what arrived, cumulative) with the gauges `x_corrected`, `x_bound` (95 %) and
    `x_grade` (0 exact, 1 ledger, 2 socket-only, 3 unknown). A timer is a summary whose quantiles are of the
    last window and whose count and sum are cumulative.
    """
    result = Page(openmetrics=openmetrics)
    for counters, values in own:
        result.counters(counters, values)
    for reason, n in flush.refused.items():
        result.family("brokerless_metrics_refused_lines", "counter")(n, "_total", reason=reason)
    for point in flush.counters:
        result.family(point.series, "counter")(point.total_raw, "_total")
        result.family(point.series, "gauge", "_corrected")(point.total)
        bound = float("nan") if point.total_bound is None else point.total_bound
        result.family(point.series, "gauge", "_bound")(bound)
        result.family(point.series, "gauge", "_grade")(int(point.total_grade))
    for series, value in flush.gauges.items():
        result.family(series, "gauge")(value)
    for series, size in flush.sets.items():
        result.family(series, "gauge", "_members")(size)
    for series, figures in flush.timers.items():
        add = result.family(series, "summary")
        for name, figure in figures.items():
            if isinstance(figure, dict):
                continue
            if name == _MEDIAN:
                add(figure, quantile="0.5")
            elif name.startswith("upper_"):
                share = float(name.removeprefix("upper_").replace("_", ".")) / 100
                add(figure, quantile=f"{share:g}")
        count, total = timer_totals.get(series, (0, 0.0))
        add(total, "_sum")
        add(count, "_count")
    return result.render()


def _labels(pairs: list[str]) -> dict[str, str]:
    """Tags as labels; names that are taken, by another tag or by us, get an underscore."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        clean = _BAD_LABEL.sub("_", name) or "_"
        if clean[0].isdigit():
            clean = "_" + clean
        while clean in labels or clean in ("quantile", "reason", "statsd"):
            clean += "_"
        labels[clean] = value
    return labels


def _shown(labels: dict[str, str]) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def _value(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    if isnan(value):
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
