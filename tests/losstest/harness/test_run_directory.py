"""Exit codes of a finished run."""

from brokerless.losstest.harness.run_directory import exit_code
from tests.losstest.rows import row


def test_exit_codes() -> None:
    """Failure before unknown, unknown before success; no runs at all is no success."""
    assert exit_code([row()], unmet=False, undecided=False) == 0
    assert exit_code([row(), row(verdict="fail"), row(verdict="unknown")], unmet=False, undecided=False) == 1
    assert exit_code([row(verdict="unknown")], unmet=False, undecided=False) == 5
    assert exit_code([row()], unmet=True, undecided=False) == 1
    assert exit_code([row()], unmet=False, undecided=True) == 5
    assert exit_code([], unmet=False, undecided=False) == 5
