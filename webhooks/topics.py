"""Topics of endpoints: which events an endpoint wants, by the patterns of `core.topics`. No I/O."""

from collections.abc import Sequence

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.core.event import check_topic
from brokerless.core.topics import Patterns, check_pattern
from brokerless.webhooks.rules import MAX_PATTERNS

# Topics of the dispatcher's own events; a pattern must name this prefix to get them.
RESERVED = "brokerless."


def check_publish_topic(topic: str) -> str:
    """Return the topic if an application may publish to it, else InvalidEvent."""
    check_topic(topic)
    if topic.startswith(RESERVED):
        raise InvalidEvent("topic", f"{topic!r} is reserved: topics may not begin with {RESERVED!r}")
    return topic


class TopicFilter:
    """The patterns of one endpoint."""

    __slots__ = ("_open", "_own")

    def __init__(self, patterns: Sequence[str]) -> None:
        if not patterns:
            raise ConfigError("topics", "is empty; '**' means all")
        if len(patterns) > MAX_PATTERNS:
            raise ConfigError("topics", f"has {len(patterns)} patterns, the limit is {MAX_PATTERNS}")
        checked = [(pattern.startswith(RESERVED), check_pattern(pattern)) for pattern in patterns]
        self._open = Patterns([words for own, words in checked if not own])
        self._own = Patterns([words for own, words in checked if own])

    def matches(self, topic: str) -> bool:
        """Whether any pattern matches; own topics only by patterns that name their prefix."""
        patterns = self._own if topic.startswith(RESERVED) else self._open
        return patterns.match(topic.split("."))
