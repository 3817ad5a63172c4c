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
        patterns: list[list[str]] = []
        if not self.everything:
            plain = [prefix_of(entry) for entry in self.entries]
            self._prefixes = tuple(prefix for prefix in plain if prefix is not None)
            patterns = [check_pattern(e) for e, p in zip(self.entries, plain, strict=True) if p is None]
        # Prefixes that every topic that matches begins with one of: to find the candidates in a sorted list.
        self.ranges = (*self._prefixes, *map(_literal, patterns))
        self._patterns = Patterns(patterns)
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
        return self._patterns.match(topic.split("."))


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


class Patterns:
    """Some patterns, matched together: bit `n` of a state says that a topic so far leads to place `n` in one of them.

    A few operations per word of a topic, whatever the patterns are: patterns may be a stranger's, and matching them one
    by one, or as regular expressions, could be made to take seconds. Only words with text around a `*` are looked at
    one by one.
    """

    __slots__ = ("_any", "_ends", "_globs", "_many", "_start", "_words")

    def __init__(self, patterns: Sequence[Sequence[str]]) -> None:
        self._start = self._ends = self._any = self._many = 0
        self._words: dict[str, int] = {}
        globs: dict[str, int] = {}
        place = 1
        for pattern in dict.fromkeys(map(tuple, patterns)):
            self._start |= place
            for index, word in enumerate(pattern):
                if word == "**":
                    if index and pattern[index - 1] == "**":
                        continue  # says no more than one of them
                    self._many |= place
                elif word == "*":
                    self._any |= place
                else:
                    kind = globs if "*" in word else self._words
                    kind[word] = kind.get(word, 0) | place
                place <<= 1
            self._ends |= place
            place <<= 1
        self._globs = list(globs.items())

    def match(self, topic: Sequence[str]) -> bool:
        """Whether the words of a topic match one of the patterns."""
        many = self._many
        # `**` may stand for nothing: the place after it is reached, too.
        state = self._start | (self._start & many) << 1
        for word in topic:
            steps = self._any | self._words.get(word, 0)
            for glob, places in self._globs:
                if state & places and _match_word(glob, word):
                    steps |= places
            state = (state & steps) << 1 | (state & many)
            if not state:
                return False
            state |= (state & many) << 1
        return bool(state & self._ends)


def _match_word(pattern: str, word: str) -> bool:
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
