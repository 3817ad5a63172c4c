"""Expectations: the small language says what it means, and anything else is an error that names the place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.losstest.analysis.expect import FIELDS, Expectation
from brokerless.losstest.model import Latency, Row


def row(**changes: object) -> Row:
    fields: dict[str, object] = {"transport": "direct-disk", "scenario": "kill", "seed": 1, "journal": "disk"}
    fields |= {"verdict": "pass", "balanced": True, "accepted": 1000, "committed": 1000}
    return Row(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("lost == 0 when journal == disk", True),
        ("lost==0 when journal==disk", True),
        ("lost > 0", False),
        ("lost == 0 when journal == memory", False),  # fits no run
        ("lost_percent < 5 and unattributed == 0 when scenario in (kill, stop)", True),
        ("not (duplicates > 0) when transport == direct-disk", True),
        ("committed == accepted - lost", True),
        ("committed * 2 > accepted + 500", True),
        ("accepted / 0 > 1", False),
        ("recovery_s < 1", False),  # never measured: neither small nor large
        ("latency_p50_ms < 5 or lost == 0", True),
        ("balanced == true and verdict == pass", True),
        ("lost == 0 when transport == 'direct-disk' or transport == \"x\"", True),
        ("offline + evicted == 0", True),
        ("lost > -1", True),
        ("balanced", True),
        ("not not balanced", True),
        ("1 + 2 * 3 == 7", True),
    ],
)
def test_what_it_says(text: str, met: bool) -> None:
    """Each form of the language gives what it reads like."""
    assert Expectation(text).check([row()]).met is met


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "missing at the end"),
        ("lost ==", "missing at the end"),
        ("lots == 0", "there is no field 'lots'"),
        ("lost == 0 when", "missing at the end"),
        ("lost = 0", "not understood"),
        ("lost == 0 extra", "unexpected 'extra'"),
        ("(lost == 0", "a ')' is missing"),
        ("scenario in kill", "in parentheses"),
        ("__import__('os')", "there is no field"),
        ("lost == 0; import os", "not understood"),
        ("(" * 60 + "lost" + ")" * 60, "nested too deeply"),
        ("and lost == 0", "unexpected 'and'"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    """A text that is no expectation is refused with the reason."""
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        Expectation(text)


@given(st.text(max_size=60))
def test_any_text_is_an_expectation_or_a_config_error(text: str) -> None:
    """Whatever is given, it is parsed and can be tried, or is a ConfigError: nothing else comes out."""
    try:
        expectation = Expectation(text)
    except ConfigError:
        return
    expectation.check([row()])


@given(
    st.lists(
        st.sampled_from(
            [*sorted(FIELDS)[:6], "and", "or", "not", "in", "(", ")", ",", "==", "<", "3", "-", "when"]
        ),
        max_size=12,
    )
)
def test_any_tokens(tokens: list[str]) -> None:
    """The same for random sequences of real tokens."""
    test_any_text_is_an_expectation_or_a_config_error.hypothesis.inner_test(" ".join(tokens))  # type: ignore[attr-defined]


def test_unknown_runs_are_undecided() -> None:
    """A run without a verdict neither meets nor fails an expectation."""
    outcome = Expectation("lost == 0").check([row(), row(verdict="unknown")])
    assert (outcome.met, len(outcome.undecided), outcome.unmet) == (False, 1, [])


def test_unmet_rows_are_told() -> None:
    """The rows that do not meet it are the ones given back, with latency fields usable."""
    bad = row(lost=3, lost_by_reason={"evicted": 3}, latency_ms=Latency(1, 2, 3))
    outcome = Expectation("evicted == 0 and latency_p99_ms < 5").check(
        [row(latency_ms=Latency(1, 2, 3)), bad]
    )
    assert outcome.unmet == [bad]
