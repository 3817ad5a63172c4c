"""How long a run is waited for."""

from brokerless.losstest.harness.engine import STRETCH, DrainProgress


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
