"""Topic patterns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.webhooks.topics import TopicFilter, check_publish_topic

words = st.text(st.sampled_from("abc*"), min_size=1, max_size=3).filter(lambda w: "**" not in w)
topics = (
    st.lists(st.text(st.sampled_from("abc"), max_size=3), min_size=1, max_size=5).map(".".join).filter(bool)
)
patterns = st.lists(words | st.just("**"), min_size=1, max_size=5)


def reference(pattern: list[str], topic: list[str]) -> bool:
    """The meaning of patterns, written as slowly and plainly as possible."""
    if not pattern:
        return not topic
    if pattern[0] == "**":
        return any(reference(pattern[1:], topic[i:]) for i in range(len(topic) + 1))
    return bool(topic) and word(pattern[0], topic[0]) and reference(pattern[1:], topic[1:])


def word(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(word(pattern[1:], text[i:]) for i in range(len(text) + 1))
    return bool(text) and pattern[0] == text[0] and word(pattern[1:], text[1:])


@given(patterns, topics)
def test_matches_reference(pattern: list[str], topic: str) -> None:
    """The compiled pattern means what the plain recursive definition means."""
    assert TopicFilter([".".join(pattern)]).matches(topic) == reference(pattern, topic.split("."))


def test_own_topics_need_their_prefix() -> None:
    """`**` does not bring the dispatcher's own events; a pattern that names them does."""
    assert not TopicFilter(["**", "*.*.*"]).matches("brokerless.endpoint.disabled")
    assert TopicFilter(["brokerless.**"]).matches("brokerless.endpoint.disabled")


@pytest.mark.parametrize("bad", [[], [""], ["a**"], ["****"], ["a\n"], ["x" * 300]])
def test_bad_patterns_are_refused(bad: list[str]) -> None:
    """Patterns that mean nothing are configuration errors."""
    with pytest.raises(ConfigError):
        TopicFilter(bad)


def test_applications_may_not_use_own_topics() -> None:
    """An application cannot forge the dispatcher's own events."""
    with pytest.raises(InvalidEvent):
        check_publish_topic("brokerless.endpoint.disabled")
    assert check_publish_topic("brokerlessness") == "brokerlessness"


def test_hostile_patterns_take_no_time() -> None:
    """Patterns made to explode a backtracking matcher are answered at once."""
    topic = ".".join("a" * 1 for _ in range(127))
    assert not TopicFilter([".".join(["**", "a"] * 50) + ".b"]).matches(topic)
    assert not TopicFilter(["*a" * 120 + "b"]).matches("a" * 255)
