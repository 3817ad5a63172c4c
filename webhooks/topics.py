"""Topic patterns of endpoints: which events an endpoint wants. No I/O."""

import re
from collections.abc import Sequence

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.core.event import check_topic

# Topics of the dispatcher's own events; a pattern must name this prefix to get them.
RESERVED = "brokerless."
# Two are enough for `a.**.b.**`; more would let a pattern cost polynomial time on every event.
MAX_DEEP = 2
MAX_PATTERNS = 100


def check_publish_topic(topic: str) -> str:
    """Return the topic if an application may publish to it, else InvalidEvent."""
    check_topic(topic)
    if topic.startswith(RESERVED):
        raise InvalidEvent("topic", f"{topic!r} is reserved: topics may not begin with {RESERVED!r}")
    return topic


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """`*` matches within one word (words are joined by dots), `**` any number of words, also none."""
    try:
        check_topic(pattern)
    except InvalidEvent as error:
        raise ConfigError("topics", f"pattern {error.problem}") from None
    words = pattern.split(".")
    if words.count("**") > MAX_DEEP:
        raise ConfigError("topics", f"{pattern!r}: '**' may stand at most {MAX_DEEP} times")
    if any("**" in word and word != "**" for word in words):
        raise ConfigError("topics", f"{pattern!r}: '**' must be a word of its own")
    if any(word.count("*") > 3 for word in words):
        raise ConfigError("topics", f"{pattern!r}: at most three '*' in a word")
    # Every word ends with a dot, and so does the text it is matched against: then `**` needs no special
    # cases.
    parts = [
        r"(?:[^.]*\.)*" if word == "**" else "[^.]*".join(map(re.escape, word.split("*"))) + r"\."
        for word in words
    ]
    return re.compile("".join(parts))


class TopicFilter:
    """The compiled patterns of one endpoint."""

    __slots__ = ("_open", "_own")

    def __init__(self, patterns: Sequence[str]) -> None:
        if not patterns:
            raise ConfigError("topics", "is empty; '**' means all")
        if len(patterns) > MAX_PATTERNS:
            raise ConfigError("topics", f"has {len(patterns)} patterns, the limit is {MAX_PATTERNS}")
        compiled = [(pattern, compile_pattern(pattern)) for pattern in patterns]
        self._open = [regex for pattern, regex in compiled if not pattern.startswith(RESERVED)]
        self._own = [regex for pattern, regex in compiled if pattern.startswith(RESERVED)]

    def matches(self, topic: str) -> bool:
        """Whether any pattern matches; own topics only by patterns that name their prefix."""
        patterns = self._own if topic.startswith(RESERVED) else self._open
        return any(regex.fullmatch(topic + ".") for regex in patterns)
