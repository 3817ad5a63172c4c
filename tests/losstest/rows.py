"""Rows of a loss test as tests need them."""

from brokerless.losstest.model import Row, Timeline, Verdict


def row(
    lost: int = 0, transport: str = "t", scenario: str = "kill", verdict: Verdict = "pass", seed: int = 1
) -> Row:
    """A thousand events were offered; the first ones that are missing were lost while the consumer was offline."""
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
