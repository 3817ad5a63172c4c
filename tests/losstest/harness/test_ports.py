"""Leased ports belong to one holder."""

from brokerless.losstest.harness.ports import Ports


def test_ports_are_not_given_twice(ports: Ports) -> None:
    """Two leasers on one machine never get the same port; a lease that ended can be had again."""
    other = Ports()
    taken = [ports.take() for _ in range(50)] + [other.take() for _ in range(50)]
    assert len(set(taken)) == 100
    other.close()
