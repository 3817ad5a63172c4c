"""Reading a run directory back: configuration, rows (again from the witnesses), what was never finished."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.losstest.analysis.verdict import judge
from brokerless.losstest.evidence.evidence import load
from brokerless.losstest.harness.scenarios import CONTROLS
from brokerless.losstest.model import Row, to_json

SCHEMA = 1


class Run(msgspec.Struct, kw_only=True):
    """A whole run: how it was made and what came out."""

    directory: str = ""
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}  # of packages, and of the brokers that were run
    settings: dict[str, str] = {}  # of brokers: what they keep, sync and confirm
    machine: dict[str, Any] = {}
    planned: list[str] = []
    command: str = ""
    started: str = ""
    control_rounds: list[dict[str, Any]] = []  # {at_once, failed [text]}, the last one counts
    parts: int = (
        1  # more than one if it was interrupted and resumed; of one that was killed the parts that ended
    )
    commit: str = ""  # of the source, where somebody noted it
    took_s: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)  # lowest and highest load average of the machine meanwhile
    rows: list[Row] = []

    @property
    def transports(self) -> list[str]:
        """Transports in the order of the run."""
        return list(dict.fromkeys(row.transport for row in self.rows))

    @property
    def measured(self) -> list[Row]:
        """What was asked for: all but the controls, unless one was asked for by its name."""
        asked = self.options.get("scenarios", ())
        return [row for row in self.rows if not row.control or row.scenario in asked]

    @property
    def scenarios(self) -> list[str]:
        """Scenarios that were asked for, in the order of the run."""
        return list(dict.fromkeys(row.scenario for row in self.measured))

    def cell(self, transport: str, scenario: str) -> list[Row]:
        """The repeats of one cell, empty if it was not run."""
        return [row for row in self.rows if (row.transport, row.scenario) == (transport, scenario)]

    @property
    def unfinished(self) -> int:
        """How many of the planned runs were never finished."""
        return len(self.planned) - len(self.rows)

    @property
    def failed_controls(self) -> list[Row]:
        """Controls that did not show what they must."""
        return [row for row in self.rows if row.control and row.verdict != "pass"]


def read_run(directory: Path) -> Run:
    """Judge every run in the directory again. Raises ConfigError if there is none in it."""
    try:
        run = msgspec.json.decode((directory / "run.json").read_bytes(), type=Run)
    except FileNotFoundError:
        raise ConfigError(str(directory), "holds no run (there is no run.json in it)") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(str(directory), f"run.json cannot be read: {error}") from None
    run.directory = str(directory)
    for key in run.planned:
        if (directory / "cells" / key / "cell.json").exists() and (row := _row(directory, key)) is not None:
            run.rows.append(row)
    return run


def _row(directory: Path, key: str) -> Row | None:
    """The row of one run; None if it was not finished. A damaged one is `unknown`, and takes no others along."""
    cell = directory / "cells" / key
    try:
        if (cell / "verdict.json").exists() and not any(cell.glob("*.wit")):
            return msgspec.json.decode(
                (cell / "verdict.json").read_bytes(), type=Row
            )  # pruned: it is what is left
        evidence = load(cell)
        # A run that was under way when the loss test was killed says nothing about its transport.
        ended = any(entry["what"] == "end" for entry in evidence.supervisor)
        return judge(evidence) if ended else None
    except Exception as error:  # whatever a damaged file makes of it
        transport, scenario, seed = key.rsplit("/", 2)
        problem = f"its files cannot be read: {type(error).__name__}: {error}"
        control = scenario in CONTROLS
        return Row(
            transport=transport, scenario=scenario, seed=int(seed), control=control, problems=[problem]
        )


def document(run: Run) -> bytes:
    """The JSON document of `--json`."""
    described = {
        name: getattr(run, name)
        for name in (
            *("command", "started", "options", "versions", "settings", "machine", "control_rounds"),
            *("parts", "commit", "took_s", "load"),
        )
    }
    return to_json({"schema": SCHEMA, "run": described, "rows": run.rows})


def exit_code(rows: Iterable[Row], unmet: bool, undecided: bool) -> int:
    """0 all as promised and expected, 1 not so, 5 some run is unknown."""
    verdicts = {row.verdict for row in rows}
    if unmet or "fail" in verdicts:
        return 1
    return 5 if undecided or "unknown" in verdicts or not verdicts else 0
