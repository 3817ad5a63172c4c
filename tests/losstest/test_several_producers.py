"""Runs with several producers: each sends its own events, and all of them are counted together."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from brokerless.losstest import Options, resolve, run_matrix
from brokerless.losstest.evidence.reader import read
from brokerless.losstest.evidence.witness import Kind


@pytest.mark.parametrize("name", ["udp", "zmq-fanout-memory", "zmq-group-memory"])
def test_three_producers_and_a_killed_consumer(tmp_path: Path, name: str) -> None:
    """Each event is offered once, by the producer whose turn it is; a journal loses nothing, plain UDP what it must."""
    times = {"rate": 240.0, "lead_s": 0.4, "offline_s": 0.6, "tail_s": 0.5, "drain_s": 20.0}
    options = Options(transports=(name,), scenarios=("many-producers",), **times)  # type: ignore[arg-type]
    result = asyncio.run(run_matrix(options, {name: resolve(name)}, tmp_path / "run"))
    [row] = [row for row in result.rows if not row.control]
    assert row.verdict == "pass", row.problems
    assert row.balanced
    directory = tmp_path / "run/cells" / name / "many-producers/1"
    numbers = []
    for index in range(3):
        own = [
            record.n
            for record in read(directory / f"producer-{index}.1.wit").records
            if record.kind == Kind.OFFERED
        ]
        assert all(n % 3 == index for n in own)
        numbers += own
    assert sorted(numbers) == np.arange(row.offered).tolist()
    assert bool(row.lost) == (name == "udp")
