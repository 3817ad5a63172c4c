"""statsd_exporter's mapping rules: dotted names become a name with labels. Pure, but for `load`.

The published YAML is read as it is: glob and regex matches (`$1`, `${1}`), `match_metric_type`, `action: drop`,
`ttl`, `scale`, buckets, `honor_labels`, defaults. Globs come before regular expressions; they are tried in the order of
the file, with `glob_disable_ordering: true` the most specific first. What has no meaning here (native histograms,
quantiles) is accepted and ignored.
"""

import re
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError

Tags = list[tuple[str, str | None]]
# As in Go's templates: the longest name, so that `$1_x` is not `${1}_x`.
_REFERENCE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TYPES = {"counter": "counter", "gauge": "gauge", "timer": "timer", "observer": "timer", "histogram": "timer"}
# What statsd_exporter takes for a glob, for the name of a metric and for that of a label.
_GLOB = re.compile(r"(\*|[a-zA-Z0-9_-]+)(\.(\*|[a-zA-Z0-9_-]+))*")
_NAME = re.compile(r"([a-zA-Z_:]|\$\{?\w+\}?)([a-zA-Z0-9_:]|\$\{?\w+\}?)*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# The Prometheus clients' buckets, where a rule asks for a histogram and names none.
_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]


class Mapped(msgspec.Struct):
    """What a series is published as."""

    name: str
    tags: Tags
    scale: float = 1
    help: str = ""
    ttl_s: float = 0
    buckets: list[float] = msgspec.field(default_factory=list)


class _Rule(msgspec.Struct):
    pattern: re.Pattern[str]
    kind: str
    name: str
    labels: dict[str, str]
    drop: bool
    honor_labels: bool
    scale: float
    help: str
    ttl_s: float
    buckets: list[float]


class Mapper:
    """All rules of one file; equal if these are."""

    def __init__(self, document: Any) -> None:
        self._document = document
        if not isinstance(document, dict):
            raise ConfigError("mapping", "must be a mapping with the key `mappings`")
        defaults = document.get("defaults") or {}
        rules = []
        for entry in document.get("mappings") or []:
            if not isinstance(entry, dict) or not entry.get("match"):
                raise ConfigError("mapping", f"a rule needs `match`: {entry!r}")
            rules.append((_is_glob(entry, defaults), str(entry["match"]), _rule(entry, defaults)))
        globs = [(text, rule) for glob, text, rule in rules if glob]
        if defaults.get("glob_disable_ordering"):
            # The fewest wildcards first, and those as late in the name as can be.
            globs.sort(key=lambda found: [part == "*" for part in found[0].split(".")])
        # As statsd_exporter does it: globs before regular expressions.
        self._rules = [rule for _, rule in globs] + [rule for glob, _, rule in rules if not glob]
        self._default_ttl_s = _seconds(defaults.get("ttl"))
        self._default_buckets = _buckets({}, defaults)
        self._known: dict[tuple[str, str], tuple[_Rule | None, re.Match[str] | None]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapper) and self._document == other._document

    __hash__ = None  # type: ignore[assignment]  # as of all that can change

    def map(self, name: str, tags: Tags, kind: str) -> Mapped | None:
        """Name and tags of a series by the first rule that matches; as it is if none does, None if it is dropped."""
        rule, match = self._find(name, kind)
        if rule is None or match is None:
            return Mapped(name, tags, ttl_s=self._default_ttl_s, buckets=self._default_buckets)
        if rule.drop:
            return None
        own: Tags = [(key, _filled(value, match)) for key, value in rule.labels.items()]
        keys = {key for key, _ in (tags if rule.honor_labels else own)}
        merged = [tag for tag in (own if rule.honor_labels else tags) if tag[0] not in keys]
        merged += tags if rule.honor_labels else own
        return Mapped(_filled(rule.name, match), merged, rule.scale, rule.help, rule.ttl_s, rule.buckets)

    def buckets(self, series: str) -> list[float]:
        """Upper limits of the buckets of a timer, in seconds; empty if it is to be a summary."""
        rule, _ = self._find(series.partition(";")[0], "timer")
        return rule.buckets if rule is not None else self._default_buckets

    def _find(self, name: str, kind: str) -> tuple[_Rule | None, re.Match[str] | None]:
        found = self._known.get((name, kind))
        if found is None:
            found = (None, None)
            for rule in self._rules:
                if rule.kind in ("", kind) and (match := rule.pattern.search(name)):
                    found = (rule, match)
                    break
            if len(self._known) >= 100_000:
                self._known.clear()
            self._known[name, kind] = found
        return found


def load(path: str) -> Mapper:
    """Rules from a YAML file. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("mapping", "needs PyYAML: pip install 'brokerless[metrics]'") from None
    try:
        return Mapper(yaml.safe_load(Path(path).read_text()))
    except OSError as error:
        raise ConfigError("mapping", f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, re.error, ValueError, TypeError) as error:
        raise ConfigError("mapping", f"{path}: {error}") from None


def _is_glob(entry: dict[str, Any], defaults: dict[str, Any]) -> bool:
    return (entry.get("match_type") or defaults.get("match_type") or "glob") == "glob"


def _rule(entry: dict[str, Any], defaults: dict[str, Any]) -> _Rule:
    text = str(entry["match"])
    if _is_glob(entry, defaults):
        if not _GLOB.fullmatch(text):
            raise ConfigError("mapping", f"{text!r} is no glob: names and `*` between dots")
        text = "^" + "".join("([^.]*)" if c == "*" else re.escape(c) for c in text) + "$"
    action = entry.get("action") or "map"
    if action not in ("map", "drop"):
        raise ConfigError("mapping", f"action {action!r} is neither map nor drop")
    drop = action == "drop"
    if not drop and not _NAME.fullmatch(str(entry.get("name") or "")):
        raise ConfigError("mapping", f"the rule for {entry['match']!r} needs a `name` that Prometheus allows")
    for label in entry.get("labels") or {}:
        if not _LABEL.fullmatch(str(label)):
            raise ConfigError("mapping", f"{label!r} is no name of a label")
    kind = str(entry.get("match_metric_type") or "")
    if kind and kind not in _TYPES:
        raise ConfigError("mapping", f"match_metric_type {kind!r} is none of {', '.join(_TYPES)}")
    return _Rule(
        re.compile(text),
        _TYPES.get(kind, ""),
        str(entry.get("name") or ""),
        {str(key): str(value) for key, value in (entry.get("labels") or {}).items()},
        drop,
        bool(entry.get("honor_labels")),
        float(entry.get("scale") or 1),
        str(entry.get("help") or ""),
        _seconds(entry.get("ttl")) or _seconds(defaults.get("ttl")),
        _buckets(entry, defaults),
    )


def _buckets(entry: dict[str, Any], defaults: dict[str, Any]) -> list[float]:
    """Limits of the buckets that a rule asks for; empty for a summary."""
    kinds = [table.get(key) for table in (entry, defaults) for key in ("observer_type", "timer_type")]
    kind = next(filter(None, kinds), "summary")
    if kind not in ("histogram", "summary"):
        raise ConfigError("mapping", f"observer_type {kind!r} is neither histogram nor summary")
    if kind == "summary":
        return []
    options = [(table.get("histogram_options") or {}).get("buckets") for table in (entry, defaults)]
    found = options[0] or entry.get("buckets") or options[1] or defaults.get("buckets") or _BUCKETS
    limits = [float(limit) for limit in found]
    if any(not below < above for below, above in pairwise([-inf, *limits, inf])):
        raise ConfigError("mapping", f"buckets must rise: {found}")
    return limits


def _seconds(text: Any) -> float:
    if not text:
        return 0.0
    if isinstance(text, int | float):
        return float(text) / 1e9  # Go writes durations in nanoseconds
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(str(text)))


def _filled(template: str, match: re.Match[str]) -> str:
    """A template with `$1` or `${1}` replaced by what the pattern found."""

    def group(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name.isdecimal():
            return (match[int(name)] or "") if int(name) <= match.re.groups else ""
        return match.groupdict().get(name) or ""

    return _REFERENCE.sub(group, template)
