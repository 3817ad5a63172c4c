"""Which frames and rows a query wants by its options (`subscribe` …); pure.

A frame's header names its source and topics, so what is not wanted is passed over without decoding it.
"""

import re
import warnings

import msgspec

from brokerless.core import Frame
from brokerless.core.errors import ConfigError
from brokerless.core.frame import PREFIX_BYTES

# What Python's and Java's regular expressions have in common; elsewhere they differ silently.
_ESCAPE = r"\\(?:[dDwWsS]|[^a-zA-Z0-9])"
_CLASS = rf"\[\^?(?:[^\[\]\\&^]|{_ESCAPE})(?:[^\[\]\\&]|{_ESCAPE})*\]"
_QUANTIFIER = r"[*+?]|\{\d+(?:,\d*)?\}"
_PATTERN = re.compile(rf"(?:[^\\\[\](){{}}*+?^$|]|{_ESCAPE}|{_CLASS}|\(\?:|\((?!\?)|\)|\||{_QUANTIFIER})*")


class _Times(msgspec.Struct, array_like=True):
    """The first two columns of a frame: the rest is skipped, not decoded."""

    topic_index: bytes
    times: bytes


_decode_times = msgspec.msgpack.Decoder(_Times).decode


def frame_times(frame: Frame) -> memoryview:
    """The times of a frame's events, in µs, without decoding their data."""
    header_bytes = int.from_bytes(frame.raw[4:8], "little")
    return memoryview(_decode_times(memoryview(frame.raw)[PREFIX_BYTES + header_bytes :]).times).cast("q")


class Selection(msgspec.Struct, frozen=True):
    """What is wanted: names that are listed, match the pattern, or both; without either, all.

    Rows that name no topic (a ledger note about a whole source, a lost range) are always among the wanted topics.
    """

    topics: list[str] | None = None
    topic_pattern: str = ""
    sources: list[str] | None = None
    source_pattern: str = ""

    @property
    def is_all(self) -> bool:
        """Whether everything is wanted."""
        return self == Selection()

    @property
    def has_topics(self) -> bool:
        """Whether only some topics are wanted."""
        return self.topics is not None or bool(self.topic_pattern)

    def wants_topic(self, topic: str) -> bool:
        """Whether rows of this topic are wanted."""
        return not topic or _wanted(topic, self.topics, self.topic_pattern)

    def wants_source(self, source: str) -> bool:
        """Whether rows of this source are wanted."""
        return _wanted(source, self.sources, self.source_pattern)

    def wants(self, frame: Frame) -> bool:
        """Whether this frame may hold a wanted row."""
        return self.wants_source(frame.source) and any(
            self.wants_topic(topic) for topic, _, _ in frame.topics
        )


def _wanted(name: str, names: list[str] | None, pattern: str) -> bool:
    if names is not None and name not in names:
        return False
    return not pattern or re.fullmatch(pattern, name, re.ASCII | re.DOTALL) is not None


def check_pattern(option: str, pattern: str) -> str:
    """The pattern, if Python and Java read it alike. Raises ConfigError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # what it warns of is refused below
            re.compile(pattern)
    except re.error as error:
        raise ConfigError(option, f"{pattern!r} is not a regular expression: {error}") from None
    if not _PATTERN.fullmatch(pattern):
        raise ConfigError(
            option,
            f"{pattern!r}: use letters, . \\d \\w \\s [a-z] (…) (?:…) | * + ? {{m,n}} and escaped signs; "
            "the whole name is matched, so ^ and $ are not needed",
        )
    return pattern
