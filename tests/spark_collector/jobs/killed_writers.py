"""Writers of one table that are killed with SIGKILL, one after the other, in the middle of their batches."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa

from brokerless.spark_collector.jobs.table import ExactlyOnceTable
from tests.conftest import Until

# Imports once, and forks a writer for each line: to import all that takes longer than such a writer lives.
_WRITERS = """
import os, sys
import pyarrow as pa
{imports}
for _ in sys.stdin:
    if pid := os.fork():
        print("writer", pid, flush=True)
        os.waitpid(pid, 0)
        continue
    table = {table}
    print("up", flush=True)
    while True:
        batch = table.last_batch("q") + 1
        rows = {{"batch": [batch] * 40, "n": list(range(40)), "part": ["a/%", "b"] * 20}}
        table.append_arrow(pa.table(rows), batch, "q")
        print("committed", batch, flush=True)
"""


def kill_writers(
    tmp_path: Path, imports: str, table: str, environment: dict[str, str], until: Until, *, kills: int = 8
) -> list[int]:
    """Kill writers of the table that this expression makes; the batches that they said were committed."""
    rng, said = random.Random(5), tmp_path / "said"

    def told(what: str) -> list[list[str]]:
        return [line.split() for line in said.read_text().splitlines() if line.startswith(what)]

    with (
        said.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-c", _WRITERS.format(imports=imports, table=table)],
            stdin=subprocess.PIPE,
            stdout=out,
            text=True,
            env=os.environ | environment,
        ) as writers,
    ):
        assert writers.stdin is not None
        for n in range(1, kills + 1):
            writers.stdin.write("go\n")
            writers.stdin.flush()
            until(lambda n=n: len(told("up")) == n == len(told("writer")), 120, "a writer")
            try:
                if n == kills:
                    until(lambda: told("committed"), 120, "a batch of any of them")
                time.sleep(rng.uniform(0.02, 1.0))
            finally:
                os.kill(int(told("writer")[-1][1]), signal.SIGKILL)
        writers.stdin.close()
    return [int(batch) for _, batch in told("committed")]


def check_each_once(table: ExactlyOnceTable, committed: list[int]) -> None:
    """What was said to be committed is there, the next batch fits, and every batch is there once and whole."""
    last = table.last_batch("q")
    assert last >= max(committed)
    rows = {"batch": [last + 1] * 40, "n": list(range(40)), "part": ["a/%", "b"] * 20}
    table.append_arrow(pa.table(rows), last + 1, "q")
    found = table.read_arrow()
    counted = Counter(zip(found["batch"].to_pylist(), found["n"].to_pylist(), strict=True))
    assert counted == {(batch, n): 1 for batch in range(last + 2) for n in range(40)}
