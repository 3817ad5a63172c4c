"""Which runs are planned, and in which order."""

from brokerless.losstest import Options, resolve
from brokerless.losstest.harness.matrix import plan


def test_plan_has_controls_first_and_once() -> None:
    """Controls come before everything else, are not repeated, and cannot be left out."""
    chosen = {"udp": resolve("udp")}
    cells = plan(Options(transports=("udp",), scenarios=("kill",), repeat=3), chosen)
    assert [cell.scenario for cell in cells] == ["none", "seeded", "kill", "kill", "kill"]
    assert [cell.seed for cell in cells[2:]] == [1, 2, 3]
    assert len({cell.run for cell in cells}) == 5
