"""What the benchmarks share: timing, the table of results, and the file they are written to."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from brokerless.core import ACCELERATED

OUT = Path(__file__).resolve().parent.parent / "build" / "bench"


def best_rate(work: Callable[[], object], items: int, *, repeat: int = 7) -> float:
    """Items per second of the fastest of `repeat` runs: the one that the machine disturbed least."""
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return items / best


def human(value: float) -> str:
    """A rate or a size in few digits."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:.2f}"


class Report:
    """Rows `what, value, unit, against, ratio, goal, met`; prints a table and writes build/bench/NAME.json."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, object]] = []

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        against: str = "",
        ratio: float = 0.0,
        goal: str = "",
        met: bool | None = None,
    ) -> None:
        """One measured line. `ratio` is against the peer named in `against`, measured in this run."""
        self.rows.append(
            {
                "what": what,
                "value": value,
                "unit": unit,
                "against": against,
                "ratio": ratio,
                "goal": goal,
                "met": met,
            }
        )

    def close(self) -> None:
        """Print and write."""
        how = "with the C module" if ACCELERATED else "pure Python"
        table = Table(title=f"bench/{self.name}.py ({how})")
        for column in ("what", "value", "unit", "against", "ratio", "goal", ""):
            table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
        for row in self.rows:
            mark = {True: "met", False: "MISSED", None: ""}[row["met"]]  # type: ignore[index]
            ratio = f"{row['ratio']:.2f}×" if row["ratio"] else ""
            value = human(float(row["value"]))  # type: ignore[arg-type]
            table.add_row(
                str(row["what"]), value, str(row["unit"]), str(row["against"]), ratio, str(row["goal"]), mark
            )
        Console(width=None if sys.stdout.isatty() else 150).print(table)
        OUT.mkdir(parents=True, exist_ok=True)
        machine = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "accelerated": ACCELERATED,
            "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "load": os.getloadavg()[0],
            "arguments": sys.argv[1:],
        }
        result = {
            "name": self.name,
            "brokerless": version("brokerless"),
            "machine": machine,
            "rows": self.rows,
        }
        (OUT / f"{self.name}.json").write_text(json.dumps(result, indent=1))
