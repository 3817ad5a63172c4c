"""Figures in words: nothing that was lost is shown as zero."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.report.formatting import NOT_RUN, cell_text, percent, seconds, spread
from tests.losstest.rows import row


@given(st.floats(0, 100))
def test_only_zero_is_shown_as_zero(value: float) -> None:
    """A percentage reads as 0 exactly when it is 0."""
    assert (percent(value) == "0") == (value == 0)


def test_what_a_cell_says() -> None:
    """Zero, loss with reason, failure, no verdict, not run: all told apart; one bad repeat is not hidden."""
    assert cell_text([row()]) == "0"
    assert cell_text([row(520)]) == "52 % offline"
    assert cell_text([row(3, verdict="fail")]) == "0.3 % offline ✗"
    assert cell_text([row(verdict="unknown")]) == "unknown"
    assert cell_text([]) == NOT_RUN
    assert cell_text([row(), row(), row(7)]) == "0.7 % offline"


def test_figures_in_words() -> None:
    """Times that never came are a dash; zero of n has its bound where losses are independent; repeats have a range."""
    assert (seconds(None), seconds(1.234), seconds(12.34)) == ("–", "1.23 s", "12.3 s")
    assert "at most" not in spread([row()])
    independent = row()
    independent.independent = True
    assert "at most 0.3 %" in spread([independent])
    assert "range 1.0 % to 3.0 % over 2 runs" in spread([row(10), row(30)])
