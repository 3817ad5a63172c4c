"""Impairment of packets is a function of the seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.losstest.faults.impairment import Impairment


@given(seed=st.integers(0, 1000))
def test_impairment_is_a_function_of_the_seed(seed: int) -> None:
    """The same seed drops the same packets; about the proportion that was asked for."""

    def dropped() -> list[int]:
        impairment = Impairment(seed)
        impairment.instruct("loss 0.1")
        return [i for i in range(1000) if not impairment.delays(True)]

    assert dropped() == dropped()
    assert 50 < len(dropped()) < 160


def test_instructions() -> None:
    """Each instruction has its effect, only in its direction; an unknown one is an error."""
    impairment = Impairment(1)
    assert impairment.delays(True) == impairment.delays(False) == [0.0]
    impairment.instruct("cut to")
    assert (impairment.delays(True), impairment.delays(False)) == ([], [0.0])
    impairment.instruct("cut from")
    assert (impairment.delays(True), impairment.delays(False)) == ([0.0], [])
    impairment.instruct("cut both")
    assert (impairment.delays(True), impairment.delays(False)) == ([], [])
    impairment.instruct("uncut")
    impairment.instruct("duplicate 1")
    assert (impairment.delays(True), impairment.delays(False)) == ([0.0, 0.0], [0.0])
    impairment.instruct("reorder 1 0.5")
    assert impairment.delays(True) == [0.5]
    impairment.instruct("burst 1 3")
    assert [impairment.delays(True) for _ in range(3)] == [[], [], []]
    with pytest.raises(ConfigError):
        impairment.instruct("explode")


def test_latency_bandwidth_and_resets_begin_and_end() -> None:
    """Each holds from its instruction until `pass`; latency stays within its jitter, both ways."""
    impairment = Impairment(3)
    impairment.instruct("latency 0.05 0.02")
    delays = [impairment.delays(to_consumer)[0] for to_consumer in (True, False) for _ in range(200)]
    assert 0.03 <= min(delays) < max(delays) <= 0.07
    impairment.instruct("bandwidth 1000")
    assert (impairment.bytes_per_s, impairment.latency_s(), impairment.delays(True)) == (1000, 0.0, [0.0])
    impairment.instruct("reset 4")
    assert impairment.bytes_per_s == 0
    assert 300 < sum(impairment.resets(0.1) for _ in range(1000)) < 500
    impairment.instruct("pass")
    assert not any(impairment.resets(0.1) for _ in range(100))
    assert impairment.delays(True) == [0.0]
