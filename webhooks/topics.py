"""Topic patterns of endpoints: which events an endpoint wants. No I/O."""

from collections.abc import Sequence

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.core.event import check_topic
from brokerless.webhooks.rules import MAX_PATTERNS

# Topics of the dispatcher's own events; a pattern must name this prefix to get them.
RESERVED = "brokerless."


def check_publish_topic(topic: str) -> str:
    """Return the topic if an application may publish to it, else InvalidEvent."""
    check_topic(topic)
    if topic.startswith(RESERVED):
        raise InvalidEvent("topic", f"{topic!r} is reserved: topics may not begin with {RESERVED!r}")
    return topic


def check_pattern(pattern: str) -> list[str]:
    """The words of a pattern, or ConfigError."""
    try:
        check_topic(pattern)
    except InvalidEvent as error:
        raise ConfigError("topics", f"pattern {error.problem}") from None
    words = pattern.split(".")
    if any("**" in word and word != "**" for word in words):
        raise ConfigError("topics", f"{pattern!r}: '**' must be a word of its own")
    return words


def match(pattern: Sequence[str], topic: Sequence[str]) -> bool:
    """`*` matches within one word (words are joined by dots), `**` any number of words, also none.

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


class TopicFilter:
    """The patterns of one endpoint."""

    __slots__ = ("_open", "_own")

    def __init__(self, patterns: Sequence[str]) -> None:
        if not patterns:
            raise ConfigError("topics", "is empty; '**' means all")
        if len(patterns) > MAX_PATTERNS:
            raise ConfigError("topics", f"has {len(patterns)} patterns, the limit is {MAX_PATTERNS}")
        checked = [(pattern.startswith(RESERVED), check_pattern(pattern)) for pattern in patterns]
        self._open = [words for own, words in checked if not own]
        self._own = [words for own, words in checked if own]

    def matches(self, topic: str) -> bool:
        """Whether any pattern matches; own topics only by patterns that name their prefix."""
        patterns = self._own if topic.startswith(RESERVED) else self._open
        words = topic.split(".")
        return any(match(pattern, words) for pattern in patterns)
