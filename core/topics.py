"""Which topics a consumer wants: prefixes, checked where they enter and matched with a memory."""

from collections.abc import Sequence

from brokerless.core.errors import ConfigError

# Known topics whose match is remembered; when full, it is forgotten and worked out again.
_REMEMBERED = 65_536


class TopicPrefixes:
    """Topics by prefix, as in ZeroMQ: `orders.` matches `orders.eu`; no prefix matches every topic."""

    __slots__ = ("_known", "prefixes")

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        self.prefixes = tuple(prefixes)
        self._known: dict[str, bool] = {}

    @property
    def everything(self) -> bool:
        """Whether no topic is left out."""
        return not self.prefixes or "" in self.prefixes

    def __call__(self, topic: str) -> bool:
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[topic] = self.everything or topic.startswith(self.prefixes)
        return known


def check_topics(topics: Sequence[str], limit: int) -> tuple[str, ...]:
    """Topic prefixes as the caller gave them: a sequence of at most `limit` short str. Raises ConfigError."""
    if isinstance(topics, str):
        raise ConfigError("topics", f"must be a list of prefixes: [{topics!r}]")
    checked = tuple(topics)
    if len(checked) > limit:
        raise ConfigError("topics", f"{len(checked)} prefixes, the limit is {limit}")
    for topic in checked:
        if not isinstance(topic, str) or len(topic.encode()) > 255:
            raise ConfigError("topics", f"{topic!r} is not a str of at most 255 bytes")
    return checked
