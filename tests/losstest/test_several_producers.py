"""Runs with several producers: each sends its own events, and all of them are counted together."""

import asyncio
from pathlib import Path

import numpy as np

from brokerless.losstest import Options, resolve, run_matrix
from brokerless.losstest.evidence.reader import read
from brokerless.losstest.evidence.witness import Kind

NAMES = ("udp", "zmq-fanout-memory", "zmq-group-memory")


def test_three_producers_and_a_killed_consumer(tmp_path: Path) -> None:
    """Each event is offered once, by the producer whose turn it is; a journal loses nothing, plain UDP what it must."""
    times = {"rate": 240.0, "lead_s": 0.4, "offline_s": 0.6, "tail_s": 0.5, "drain_s": 20.0}
    options = Options(transports=NAMES, scenarios=("many-producers",), **times)  # type: ignore[arg-type]
    result = asyncio.run(run_matrix(options, {name: resolve(name) for name in NAMES}, tmp_path / "run"))
    rows = [row for row in result.rows if not row.control]
    assert [row.transport for row in rows] == [*NAMES]
    for row in rows:
        assert row.verdict == "pass", row.problems
        assert row.balanced
        assert bool(row.lost) == (row.transport == "udp")
        offered = [
            (index, record.n)
            for index in range(3)
            for record in read(
                tmp_path / "run/cells" / row.transport / f"many-producers/1/producer-{index}.1.wit"
            ).records
            if record.kind == Kind.OFFERED
        ]
        assert all(n % 3 == index for index, n in offered)
        assert sorted(n for _, n in offered) == np.arange(row.offered).tolist()
