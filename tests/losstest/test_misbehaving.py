"""A corpus of misbehaving transports: every figure and every reason is what their own truth logs say."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from misbehaving import CASES, Case

from brokerless.losstest import Options, Row, resolve
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.matrix import judge_directory, plan
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers

FILE = Path(__file__).parent / "misbehaving.py"
# The cases are run once, for all tests.
pytestmark = pytest.mark.xdist_group("misbehaving")
AT_ONCE = 6
TIMES = {"rate": 300.0, "offline_s": 0.5}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Row, Path]]:
    """All cases, run a few at a time through the real harness."""
    out = tmp_path_factory.mktemp("misbehaving")
    found: dict[str, tuple[Row, Path]] = {}

    async def one(case: Case, workers: Workers, ports: Ports, gate: asyncio.Semaphore) -> None:
        name = f"{FILE}:{case.name.replace('-', '_')}"
        transport = msgspec.structs.replace(resolve(name), name=name)
        times = TIMES | {"drain_s": case.drain_s, "lead_s": case.lead_s, "tail_s": case.tail_s}
        options = Options(transports=(name,), scenarios=(case.scenario,), **times)
        cell = next(c for c in plan(options, {name: transport}) if c.scenario == case.scenario)
        async with gate:
            await CellRun(cell, out / case.name, workers, ports).run()
        found[case.name] = judge_directory(out / case.name), out / case.name

    async def everything() -> None:
        gate, ports = asyncio.Semaphore(AT_ONCE), Ports()
        async with Workers() as workers:
            await asyncio.gather(*(one(case, workers, ports, gate) for case in CASES))

    asyncio.run(everything())
    return found


def truth(directory: Path) -> tuple[dict[int, str], Counter[str]]:
    """What the transport itself wrote down: lost events with their reasons, and how often everything else happened."""
    lost: dict[int, str] = {}
    others: Counter[str] = Counter()
    path = directory / "state/shared/secret-truth"
    for line in path.read_text().splitlines() if path.exists() else ():
        word, *rest = line.split()
        if word == "lost":
            lost[int(rest[0])] = rest[1]
        elif word == "found":
            lost.pop(int(rest[0]), None)
        else:
            others[word] += 1
    return lost, others


def test_there_are_enough_of_them() -> None:
    """At least forty, all with different names."""
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_row_is_the_truth(results: dict[str, tuple[Row, Path]], case: Case) -> None:
    """Lost events one by one with their reasons, every count, the verdict, and what is said about the product."""
    row, directory = results[case.name]
    lost, others = truth(directory)
    inexplicable = "unattributed" in lost.values()
    assert row.verdict == ("fail" if inexplicable else case.verdict), row.problems
    assert row.balanced
    if case.verdict == "unknown":
        assert row.lost == 0  # nothing is called lost that may still come
    else:
        reported = {n: reason for first, last, reason in row.lost_ranges for n in range(first, last + 1)}
        if row.unknown and case.scenario == "producer-kill":
            # In send() when it was killed: in its memory, and not accepted. Neither lost nor delivered.
            for n in set(lost) - set(reported):
                lost.pop(n)
                assert row.unknown > 0
        assert reported == lost
        assert row.lost == len(lost)
    expected = {
        "rejected": others["refused"],
        "rejected_delivered": others["refused-delivered"],
        "indeterminate": others["maybe"],
        "unknown_delivered": others["maybe-delivered"],
        "unexpected": others["unexpected"],
        "premature": others["premature"],
    }
    if case.exact:
        expected |= {"duplicates": others["duplicate"], "reordered": others["late"]}
    assert {name: getattr(row, name) for name in expected} == expected
    said = "; ".join(row.findings)
    assert all(text in said for text in case.findings), said
    assert bool(case.findings) == bool(row.findings), said
    problems = "; ".join(row.problems)
    assert all(text in problems for text in case.problems), problems
