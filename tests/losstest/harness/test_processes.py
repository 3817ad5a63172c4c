"""Workers: what the supervisor orders happens when it says so, also while the process that forks has no time."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from brokerless.losstest import Options, load, resolve
from brokerless.losstest.evidence.reader import read
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.matrix import plan
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers

NS = 1_000_000_000
PERFECT = f"{Path(__file__).parents[1] / 'proof.py'}:perfect"


async def _session() -> int:
    async with Workers() as workers:
        return os.getsid(workers.pid)


def test_ctrl_c_is_not_for_the_fork_server() -> None:
    """It would die of it with a traceback while it imports: it is in no session of ours."""
    assert asyncio.run(_session()) != os.getsid(0)


def test_a_fault_does_not_wait_for_the_fork_server(tmp_path: Path) -> None:
    """A killed consumer dies at once although the fork server is stopped; its end is reported later."""
    transport = msgspec.structs.replace(resolve(PERFECT), name=PERFECT)
    times = {"rate": 300.0, "lead_s": 0.3, "offline_s": 0.5, "tail_s": 1.5, "drain_s": 20.0}
    options = Options(transports=(PERFECT,), scenarios=("kill",), **times)
    cell = next(c for c in plan(options, {PERFECT: transport}) if c.scenario == "kill")
    resumed = 0

    async def go() -> None:
        nonlocal resumed
        async with Workers() as workers:
            run = CellRun(cell, tmp_path, workers, Ports())
            running = asyncio.create_task(run.run())
            while run.phase == "starting":
                await asyncio.sleep(0.005)
            os.kill(workers.pid, signal.SIGSTOP)
            while run.phase != "fault":
                await asyncio.sleep(0.005)
            await asyncio.sleep(1.0)
            resumed = time.monotonic_ns()
            os.kill(workers.pid, signal.SIGCONT)
            await running

    asyncio.run(go())
    evidence = load(tmp_path)
    down = next(note["t"] for note in evidence.supervisor if note["what"] == "down")
    last = max(r.t for r in read(evidence.consumers[0].records.path).records)
    assert resumed - down > 0.9 * NS
    assert last - down < 0.5 * NS
    assert [log.incarnation for log in evidence.consumers] == [1, 2]
