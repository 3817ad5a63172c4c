"""How a loss test shows that it is alive: a live display, or lines."""

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.matrix import Progress
from brokerless.losstest.model import Row
from brokerless.losstest.report.formatting import cell_text

MAX_LIVE_LINES = 24  # more runs than this are under way only on large machines; the bar still counts them


class Display(Progress, AbstractContextManager["Display"]):
    """Base of the displays; itself it shows nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _line(run: CellRun) -> str:
    watch = run.watch
    return (
        f"{run.cell.label} · {run.cell.scenario} · {run.phase}: offered {watch.offered:,}, "
        f"delivered {watch.delivered:,}"
    )


class Cells(Display):
    """One line per finished run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = 0
        self._total = 0

    def tick(self, running: Sequence[CellRun], done: int, total: int) -> None:
        self._total = total

    def finished(self, run: CellRun, row: Row) -> None:
        self._done += 1
        self._console.print(
            f"[{self._done}/{self._total}] {row.transport} · {row.scenario}: {row.verdict}, lost {cell_text([row])}",
            highlight=False,
            markup=False,
        )


class Lines(Cells):
    """A line per second for every run, too."""

    def tick(self, running: Sequence[CellRun], done: int, total: int) -> None:
        super().tick(running, done, total)
        for run in running:
            self._console.print(_line(run), highlight=False, markup=False)


class LiveDisplay(Display):
    """A line per run that is under way, renewed every second, and a bar over the whole matrix."""

    def __init__(self, console: Console) -> None:
        # No thread: workers are forked by another process, but one clock is enough.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = time.monotonic()
        self._failed = 0

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def finished(self, run: CellRun, row: Row) -> None:
        self._failed += row.verdict != "pass"

    def tick(self, running: Sequence[CellRun], done: int, total: int) -> None:
        lines = Table.grid(padding=(0, 2))
        for run in running[:MAX_LIVE_LINES]:
            watch = run.watch
            lines.add_row(
                run.cell.label,
                run.cell.scenario,
                Text(run.phase, style="yellow" if run.phase == "fault" else "dim"),
                f"offered {watch.offered:,}",
                f"delivered {watch.delivered:,}",
            )
        bar = Table.grid(padding=(0, 1))
        failed = f", {self._failed} not passed" if self._failed else ""
        bar.add_row(
            ProgressBar(total=max(1, total), completed=done, width=40),
            f"{done}/{total} runs, {time.monotonic() - self._began:.0f} s{failed}",
        )
        self._live.update(Group(lines, bar), refresh=True)


def make_progress(wanted: str, console: Console) -> Display:
    """The display for `--progress`; `auto` is live in a terminal, and a line per finished run elsewhere."""
    if wanted == "auto":
        wanted = "live" if sys.stderr.isatty() else "cells"
    if wanted == "none":
        return Display()
    return {"live": LiveDisplay, "lines": Lines, "cells": Cells}[wanted](console)
