"""What is wanted of a spool: by names and patterns."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Frame, encode_frame
from brokerless.core.errors import ConfigError
from brokerless.spark_collector.source.selection import Selection, check_pattern

names = st.sampled_from(["a", "b", "orders.new", "orders.old", ""])


def frame(source: str, topics: list[str], times: list[int]) -> Frame:
    """One event per topic."""
    return encode_frame(
        source,
        1,
        0,
        topics=[(topic, 0) for topic in topics],
        topic_index=list(range(len(topics))),
        times=times,
        datas=[b""] * len(topics),
    )


@given(
    st.none() | st.lists(names, max_size=3),
    st.sampled_from(["", "orders.*", "a|b"]),
    st.lists(names.filter(bool), min_size=1, max_size=4, unique=True),
    names.filter(bool),
)
def test_a_frame_is_passed_over_only_if_no_row_is_wanted(
    listed: list[str] | None, pattern: str, topics: list[str], source: str
) -> None:
    """Looked at name by name, of topics and of sources."""

    def wanted(name: str) -> bool:
        return (listed is None or name in listed) and (not pattern or bool(re.fullmatch(pattern, name)))

    made = frame(source, topics, [0] * len(topics))
    assert Selection(listed, pattern).wants(made) == any(map(wanted, topics))
    assert Selection(sources=listed, source_pattern=pattern).wants(made) == wanted(source)


def test_rows_without_a_topic_are_always_wanted() -> None:
    """A note about a whole source belongs to all its topics."""
    assert Selection(topics=["a"]).wants(frame("p", [""], [0]))
    assert not Selection(topics=["a"], sources=["q"]).wants(frame("p", [""], [0]))


@pytest.mark.parametrize(
    "pattern", [r"orders\..*", "a|b", "[a-c]{1,2}", r"\d+\w?", "(?:x|y)z*", "größe", "[^a]"]
)
def test_patterns_that_python_and_java_read_alike(pattern: str) -> None:
    """The common part is taken."""
    assert check_pattern("subscribePattern", pattern) == pattern


@pytest.mark.parametrize(
    "pattern",
    ["(", "(?P<x>a)", r"\p{L}", "^a$", "[a&&b]", "[[a]]", "a{,3}", r"\bx", "(?i)a", "(?=a)", r"\Aa", "*"],
)
def test_patterns_that_they_read_differently(pattern: str) -> None:
    """And the rest is refused with the option's name, not matched in two ways."""
    with pytest.raises(ConfigError, match="subscribePattern"):
        check_pattern("subscribePattern", pattern)
