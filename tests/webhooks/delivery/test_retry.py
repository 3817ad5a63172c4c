"""What answers mean and when to try again."""

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.webhooks.delivery.retry import MAX_RETRY_AFTER_S, Outcome, Schedule, judge, parse_retry_after


def test_default_spans_three_days() -> None:
    """The default schedule begins after 5 s and spans at least 3 days."""
    schedule = Schedule()
    assert schedule.delay_s(1, lambda: 0.0) == 5
    assert schedule.span_s >= 3 * 86400


@given(st.integers(1, 30), st.floats(0, 1, exclude_max=True))
def test_jitter_only_lengthens(failed: int, random: float) -> None:
    """Jitter never makes a delay shorter than promised or longer than 20 %; after the last delay comes None."""
    schedule = Schedule()
    delay = schedule.delay_s(failed, lambda: random)
    if failed > len(schedule.delays_s):
        assert delay is None
    else:
        base = schedule.delays_s[failed - 1]
        assert delay is not None
        assert base <= delay <= base * 1.2


@pytest.mark.parametrize(
    ("status", "outcome", "slow"),
    [
        (200, Outcome.DELIVERED, False),
        (204, Outcome.DELIVERED, False),
        (299, Outcome.DELIVERED, False),
        (301, Outcome.RETRY, False),
        (302, Outcome.RETRY, False),
        (307, Outcome.RETRY, False),
        (400, Outcome.RETRY, False),
        (404, Outcome.RETRY, False),
        (410, Outcome.GONE, False),
        (415, Outcome.REFUSED, False),
        (429, Outcome.RETRY, True),
        (500, Outcome.RETRY, False),
        (502, Outcome.RETRY, True),
        (503, Outcome.RETRY, True),
        (504, Outcome.RETRY, True),
        (None, Outcome.RETRY, True),
    ],
)
def test_judge(status: int | None, outcome: Outcome, slow: bool) -> None:
    """Each answer has the consequence that the documentation states."""
    verdict = judge(status, None, 0.0)
    assert (verdict.outcome, verdict.slow) == (outcome, slow)


@given(st.integers(0, 10**15))
def test_retry_after_seconds(seconds: int) -> None:
    """Seconds are honoured in full, up to the stated cap."""
    assert parse_retry_after(str(seconds), 0.0) == min(seconds, MAX_RETRY_AFTER_S)
    assert judge(503, str(seconds), 0.0).pause_s == min(seconds, MAX_RETRY_AFTER_S)


@given(st.integers(86400, 7_000_000_000), st.integers(-5000, 5000))
def test_retry_after_date(at: int, ahead: int) -> None:
    """HTTP dates are honoured; one in the past means: now."""
    moment = datetime.fromtimestamp(at, UTC)
    now = moment.timestamp() - ahead
    assert parse_retry_after(format_datetime(moment, usegmt=True), now) == max(0, ahead)


@given(st.text())
def test_retry_after_never_raises(text: str) -> None:
    """Any header text gives a number within bounds or None."""
    value = parse_retry_after(text, 1000.0)
    assert value is None or 0 <= value <= MAX_RETRY_AFTER_S


def test_bad_schedules_are_refused() -> None:
    """A negative delay or a jitter above 1 is a configuration error."""
    with pytest.raises(ConfigError):
        Schedule(delays_s=(-1,))
    with pytest.raises(ConfigError):
        Schedule(jitter=2)
