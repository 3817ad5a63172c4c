"""Exit codes of a finished run."""

from brokerless.losstest.harness.run_directory import exit_code
from brokerless.losstest.model import Row, Timeline, Verdict


def row(
    lost: int = 0, transport: str = "t", scenario: str = "kill", verdict: Verdict = "pass", seed: int = 1
) -> Row:
    return Row(
        transport=transport,
        scenario=scenario,
        seed=seed,
        offered=1000,
        accepted=1000,
        committed=1000 - lost,
        lost=lost,
        lost_percent=lost / 10,
        lost_by_reason={"offline": lost} if lost else {},
        verdict=verdict,
        balanced=True,
        fault=(0.5, 1.5),
        lost_ranges=[(10, 9 + lost, "offline")] if lost else [],
        timeline=Timeline(0.1, [10] * 20, [10] * 20),
        due_s=2.0,
    )


def test_exit_codes() -> None:
    """Failure before unknown, unknown before success; no runs at all is no success."""
    assert exit_code([row()], unmet=False, undecided=False) == 0
    assert exit_code([row(), row(verdict="fail"), row(verdict="unknown")], unmet=False, undecided=False) == 1
    assert exit_code([row(verdict="unknown")], unmet=False, undecided=False) == 5
    assert exit_code([row()], unmet=True, undecided=False) == 1
    assert exit_code([row()], unmet=False, undecided=True) == 5
    assert exit_code([], unmet=False, undecided=False) == 5
