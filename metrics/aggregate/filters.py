"""Which series are taken, and what is added to their names. Pure."""

import re
from fnmatch import translate

import msgspec

from brokerless.metrics.parser import escape_tag, split_series

# Values of one tag that are remembered to hold its limit.
_MAX_VALUES = 100_000


class FilterConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Rules for names and tags; globs (`*`, `?`, `[…]`) match the whole name."""

    allow: list[str] = msgspec.field(default_factory=list)
    """Names to take, as globs; empty takes all. What is not taken is refused as `filtered`."""
    deny: list[str] = msgspec.field(default_factory=list)
    """Names to refuse although `allow` takes them."""
    deny_tags: list[str] = msgspec.field(default_factory=list)
    """`key` or `key:value` globs: series with such a tag are refused as `filtered`."""
    tag_limits: dict[str, int] = msgspec.field(default_factory=dict)
    """How many values a tag may have; series with a further value are refused as `tag_limit`."""
    namespace: str = ""
    """Put before every published name, with a dot."""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    """Added to every published series that has no such tag."""
    host_tag: str = ""
    """Value of the tag `host`, added like `tags`."""


class SeriesFilter:
    """Decides for one series at a time; remembers the values of tags that have a limit."""

    def __init__(self, config: FilterConfig | None = None) -> None:
        config = config or FilterConfig()
        self._allow, self._deny = _globs(config.allow), _globs(config.deny)
        self._deny_tags = _globs(config.deny_tags)
        self._limits = config.tag_limits
        self._values: dict[str, set[str]] = {key: set() for key in config.tag_limits}
        self._active = bool(config.allow or config.deny or config.deny_tags or config.tag_limits)

    def refusal(self, series: str) -> str | None:
        """The reason for which a series is refused; None if it is taken."""
        if not self._active:
            return None
        name, tags = split_series(series)
        if (self._allow and not self._allow.match(name)) or (self._deny and self._deny.match(name)):
            return "filtered"
        for key, value in tags if self._deny_tags or self._limits else ():
            if self._deny_tags and (
                self._deny_tags.match(key) or self._deny_tags.match(f"{key}:{value or ''}")
            ):
                return "filtered"
        for key, value in tags if self._limits else ():
            seen = self._values.get(key)
            if seen is not None and (value or "") not in seen:
                if len(seen) >= min(self._limits[key], _MAX_VALUES):
                    return "tag_limit"
                seen.add(value or "")
        return None


class SeriesNames:
    """Adds the namespace and the global tags to series when they are published."""

    def __init__(self, config: FilterConfig) -> None:
        self._start = f"{config.namespace}." if config.namespace else ""
        tags = {**config.tags, **({"host": config.host_tag} if config.host_tag else {})}
        self._tags = {escape_tag(key, key=True): escape_tag(value) for key, value in tags.items()}
        self.changes = bool(self._start or self._tags)

    def published(self, series: str) -> str:
        """The name under which a series is published."""
        if not self.changes:
            return series
        name, *pairs = series.split(";")
        have = {pair.partition("=")[0] for pair in pairs}
        pairs += [f"{key}={value}" for key, value in self._tags.items() if key not in have]
        return ";".join([self._start + name, *sorted(pairs)])


def _globs(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(translate(pattern) for pattern in patterns)) if patterns else None
