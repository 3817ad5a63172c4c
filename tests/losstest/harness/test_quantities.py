"""Durations and sizes on the command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.losstest.harness import quantities


def test_durations_and_sizes() -> None:
    """Plain numbers are seconds and bytes; units add up."""
    assert [quantities.seconds(text, "--x") for text in ("2", "0.5", "10m", "1h30m", "200ms", "1d")] == [
        *(2.0, 0.5, 600.0, 5400.0, 0.2, 86_400.0)
    ]
    assert [quantities.size(text, "--x") for text in ("1000", "64KiB", "1GiB", "2MB", "1.5kB")] == [
        *(1000, 65536, 1 << 30, 2_000_000, 1500)
    ]


@given(st.text(max_size=12))
def test_anything_else_is_refused_with_the_option(text: str) -> None:
    """Any text is a number that is not negative, or an error that names the option."""
    for parse in (quantities.seconds, quantities.size):
        try:
            value = parse(text, "--offline")
        except ConfigError as error:
            said = str(error)
        else:
            said = "--offline"
            assert value >= 0
        assert "--offline" in said


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "10 minutes", "m", ""])
def test_no_duration(text: str) -> None:
    """Numbers that are none are refused."""
    with pytest.raises(ConfigError):
        quantities.seconds(text, "--offline")
