"""Which topics a consumer wants: the one syntax of patterns, checked where it enters and matched with a memory.

    orders.eu         that topic
    orders.*          `*` stands for any text within one word; words are joined by dots
    orders.**         `**` stands for any number of words, also none: `orders`, `orders.eu`, `orders.eu.paid`
    orders.           ends with a dot: every topic that begins so, as in ZeroMQ
    prefix:sensor-    every topic that begins with the text after the mark

Webhooks have patterns only; the two forms of plain prefixes are for `direct`, `multicast` and the collector.
"""

from collections.abc import Sequence

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.core.event import check_topic

# Known topics whose match is remembered; when full, it is forgotten and worked out again.
_REMEMBERED = 65_536
_PREFIX = "prefix:"
_EVERYTHING = ("", "**", _PREFIX)


class TopicFilter:
    """The topics that match one of some entries (see the module's docstring); no entry matches every topic."""

    __slots__ = ("_known", "_patterns", "_prefixes", "entries", "everything", "ranges")

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Raises ConfigError for an entry that matches nothing."""
        self.entries = tuple(entries)
        self.everything = not entries or any(entry in _EVERYTHING for entry in entries)
        self._prefixes: tuple[str, ...] = ()
        self._patterns: list[list[str]] = []
        if not self.everything:
            plain = [prefix_of(entry) for entry in self.entries]
            self._prefixes = tuple(prefix for prefix in plain if prefix is not None)
            self._patterns = [check_pattern(e) for e, p in zip(self.entries, plain, strict=True) if p is None]
        # Prefixes that every topic that matches begins with one of: to find the candidates in a sorted list.
        self.ranges = (*self._prefixes, *map(_literal, self._patterns))
        self._known: dict[str, bool] = {}

    def __call__(self, topic: str) -> bool:
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[topic] = self.everything or self._matches(topic)
        return known

    def _matches(self, topic: str) -> bool:
        if topic.startswith(self._prefixes):
            return True
        words = topic.split(".")
        return any(match(pattern, words) for pattern in self._patterns)


def _literal(pattern: Sequence[str]) -> str:
    """What every topic begins with that matches a pattern."""
    text, star, rest = ".".join(pattern).partition("*")
    return text.removesuffix(".") if star and rest.startswith("*") else text  # `**` may stand for nothing


def prefix_of(entry: str) -> str | None:
    """The text that an entry is marked as a plain prefix of; None if it is a pattern. Raises ConfigError."""
    prefix = entry.removeprefix(_PREFIX)
    if entry.startswith(_PREFIX) or entry.endswith("."):
        if "*" in prefix:
            problem = (
                f"{entry!r} is a plain prefix, in which '*' is only itself; without its mark it is a pattern"
            )
            raise ConfigError("topics", problem)
        if prefix:
            _check_text(prefix)
        return prefix
    return None


def check_pattern(pattern: str) -> list[str]:
    """The words of a pattern, or ConfigError if no topic can match it."""
    _check_text(pattern)
    words = pattern.split(".")
    if any("**" in word and word != "**" for word in words):
        raise ConfigError("topics", f"{pattern!r}: '**' must be a word of its own")
    return words


def _check_text(text: str) -> None:
    try:
        check_topic(text)
    except InvalidEvent as error:
        raise ConfigError("topics", f"pattern {error.problem}") from None


def match(pattern: Sequence[str], topic: Sequence[str]) -> bool:
    """Whether the words of a topic match those of a pattern.

    Keeps the set of pattern positions that are possible so far, so that the time is at most the product of both
    lengths: a regular expression could be made to take exponential time by whoever registers it.
    """
    last = len(pattern)
    positions = _skip(pattern, {0})
    for word in topic:
        following = set()
        for position in positions:
            if position < last:
                if pattern[position] == "**":
                    following.add(position)
                elif _match_word(pattern[position], word):
                    following.add(position + 1)
        positions = _skip(pattern, following)
        if not positions:
            return False
    return last in positions


def _skip(pattern: Sequence[str], positions: set[int]) -> set[int]:
    """Also the positions after `**`, which may stand for nothing."""
    for position in list(positions):
        at = position
        while at < len(pattern) and pattern[at] == "**":
            at += 1
            positions.add(at)
    return positions


def _match_word(pattern: str, word: str) -> bool:
    if "*" not in pattern:
        return pattern == word
    first, *middle, final = pattern.split("*")
    if len(word) < len(first) + len(final) or not word.startswith(first) or not word.endswith(final):
        return False
    at, end = len(first), len(word) - len(final)
    for part in middle:
        # The earliest place leaves the most room for what follows.
        found = word.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def check_topics(topics: Sequence[str], limit: int) -> tuple[str, ...]:
    """The entries of a TopicFilter as the caller gave them.

    Raises ConfigError unless they are at most `limit` str of at most 255 bytes, each with topics that match.
    """
    if isinstance(topics, str):
        raise ConfigError("topics", f"must be a list of patterns: [{topics!r}]")
    checked = tuple(topics)
    if len(checked) > limit:
        raise ConfigError("topics", f"{len(checked)} patterns, the limit is {limit}")
    for topic in checked:
        if not isinstance(topic, str) or len(topic.encode("utf-8", "replace")) > 255:
            raise ConfigError("topics", f"{topic!r} is not a str of at most 255 bytes")
        if not topic:
            raise ConfigError("topics", "'' matches no topic; '**' means all, and so does an empty list")
        if prefix_of(topic) is None:
            check_pattern(topic)
    return checked
