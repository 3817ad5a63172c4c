"""The one syntax of topics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.core.topics import TopicFilter, check_topics

words = st.text(st.sampled_from("ab*"), min_size=1, max_size=3).filter(lambda w: "**" not in w)
patterns = st.lists(words | st.just("**"), min_size=1, max_size=4).map(".".join)
texts = st.text(st.sampled_from("ab."), max_size=5)
prefixes = texts.map(lambda text: f"prefix:{text}") | texts.map(lambda text: f"{text}.")
topics = st.text(st.sampled_from("ab."), min_size=1, max_size=8)


def means(entry: str, topic: str) -> bool:
    """What an entry means, written plainly."""
    if entry.startswith("prefix:"):
        return topic.startswith(entry.removeprefix("prefix:"))
    if entry.endswith("."):
        return topic.startswith(entry)
    return by_words(entry.split("."), topic.split("."))


def by_words(pattern: list[str], topic: list[str]) -> bool:
    if not pattern:
        return not topic
    if pattern[0] == "**":
        return any(by_words(pattern[1:], topic[i:]) for i in range(len(topic) + 1))
    return bool(topic) and by_letters(pattern[0], topic[0]) and by_words(pattern[1:], topic[1:])


def by_letters(pattern: str, word: str) -> bool:
    if not pattern:
        return not word
    if pattern[0] == "*":
        return any(by_letters(pattern[1:], word[i:]) for i in range(len(word) + 1))
    return bool(word) and pattern[0] == word[0] and by_letters(pattern[1:], word[1:])


@given(st.lists(patterns | prefixes, min_size=1, max_size=4), topics)
def test_a_filter_means_what_its_entries_mean(entries: list[str], topic: str) -> None:
    """A topic matches if one of the entries does, and then it begins with one of `ranges`."""
    wanted = TopicFilter(check_topics(entries, 10))
    expected = any(means(entry, topic) for entry in entries)
    assert wanted(topic) is expected
    assert wanted(topic) is expected  # from its memory
    if expected and not wanted.everything:
        assert topic.startswith(wanted.ranges)
    assert wanted.everything <= expected


@pytest.mark.parametrize("entry", ["**", "prefix:"])
def test_everything(entry: str) -> None:
    """Some entries are known to leave out no topic."""
    assert TopicFilter([entry, "a"]).everything
    assert TopicFilter([]).everything
    assert not TopicFilter(["*"]).everything
    assert TopicFilter([entry]).ranges == ()


@pytest.mark.parametrize(
    "entry", ["", "a**", "**b.c", "a.***", "prefix:a.*", "*.", "a\n", "prefix:\x00", "x" * 256, "\ud800"]
)
def test_entries_that_can_match_nothing_are_refused(entry: str) -> None:
    """With ConfigError, instead of a subscriber that waits for ever."""
    with pytest.raises(ConfigError):
        check_topics([entry], 10)


@pytest.mark.parametrize("entries", ["orders.", [1], ["a"] * 3])
def test_what_is_no_list_of_entries(entries: list[str]) -> None:
    """A lone str is a frequent mistake."""
    with pytest.raises(ConfigError):
        check_topics(entries, 2)
