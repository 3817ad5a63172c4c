"""How long a run is waited for."""

from pathlib import Path

from brokerless.losstest import Options, resolve
from brokerless.losstest.harness.engine import STRETCH, CellRun, DrainProgress
from brokerless.losstest.harness.matrix import plan
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers


def test_a_run_that_gets_on_is_given_time_and_not_for_ever() -> None:
    """Without anything new it is over after the drain time; with something new ever again, after ten times that."""
    still = DrainProgress(100.0, 5.0)
    assert not still.is_over(104.9, 7)
    assert still.is_over(110.0, 7)  # five seconds after the last that was new

    slow = DrainProgress(100.0, 5.0)
    at = [100.0 + 4 * i for i in range(20)]
    over = [t for i, t in enumerate(at) if slow.is_over(t, i)]
    assert over[0] == next(t for t in at if t > 100.0 + STRETCH * 5.0)

    assert not DrainProgress(100.0, 5.0, quiet_s=2.0).is_over(106.9, 0)  # and then it is to be seen at rest


def test_an_outage_of_an_hour_is_waited_for(tmp_path: Path) -> None:
    """Whoever waits for the other side is told to wait longer than the run can last, however long that is."""
    for offline_s in (60.0, 3600.0):
        options = Options(transports=("tcp",), scenarios=("kill",), offline_s=offline_s, drain_s=offline_s)
        cell = next(c for c in plan(options, {"tcp": resolve("tcp")}) if c.scenario == "kill")
        run = CellRun(cell, tmp_path, Workers(), Ports())
        run._cell_ports = [1]
        planned_s = cell.lead_s + cell.offline_s + cell.tail_s
        assert run._setup("producer", 0).patience_s > planned_s + cell.drain_s > 2 * offline_s
