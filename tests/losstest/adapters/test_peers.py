"""Other libraries beside ours: each does under a killed consumer what its promise says."""

import asyncio
from pathlib import Path

import pytest

from brokerless.losstest import Options, resolve, run_matrix
from brokerless.losstest.registry import why_missing


@pytest.mark.parametrize("name", ["zenoh", "nng-pubsub", "nng-pushpull", "zmq-epgm"])
def test_a_killed_consumer(tmp_path: Path, name: str) -> None:
    """Controls pass; what was lost has the reasons that the transport states."""
    found = resolve(name)
    if missing := why_missing(found):
        pytest.skip(f"not here: {missing}")
    options = Options(
        transports=(name,), scenarios=("kill",), rate=200.0, lead_s=0.3, offline_s=0.6, tail_s=0.6
    )
    result = asyncio.run(run_matrix(options, {name: found}, tmp_path / "run"))
    assert not result.control_failed, result.control_failed
    [row] = [row for row in result.rows if not row.control]
    assert row.verdict == "pass", row.problems
    assert bool(row.lost) or name != "nng-pubsub"
