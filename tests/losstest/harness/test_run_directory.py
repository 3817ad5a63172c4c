"""Reading a run back, damaged files included, and the exit codes of a finished one."""

from pathlib import Path

from brokerless.losstest.harness.run_directory import exit_code, read_run
from brokerless.losstest.model import to_json
from tests.losstest.rows import row


def test_exit_codes() -> None:
    """Failure before unknown, unknown before success; no runs at all is no success."""
    assert exit_code([row()], unmet=False, undecided=False) == 0
    assert exit_code([row(), row(verdict="fail"), row(verdict="unknown")], unmet=False, undecided=False) == 1
    assert exit_code([row(verdict="unknown")], unmet=False, undecided=False) == 5
    assert exit_code([row()], unmet=True, undecided=False) == 1
    assert exit_code([row()], unmet=False, undecided=True) == 5
    assert exit_code([], unmet=False, undecided=False) == 5


def test_a_damaged_run_does_not_take_the_others_along(tmp_path: Path) -> None:
    """It is `unknown` with what is wrong in words, as a control it is a failed one; the others are read."""
    keys = ["t/none/1", "t/kill/1", "t/kill/2", "t/kill/3"]
    (tmp_path / "run.json").write_bytes(to_json({"planned": keys}))
    for key in keys:
        (tmp_path / "cells" / key).mkdir(parents=True)
        (tmp_path / "cells" / key / "cell.json").write_text("{")
    whole = row(scenario="kill", verdict="pass")
    (tmp_path / "cells/t/kill/2/verdict.json").write_bytes(to_json(whole))
    (tmp_path / "cells/t/kill/3/verdict.json").write_text("no row")
    run = read_run(tmp_path)
    assert [one.verdict for one in run.rows] == ["unknown", "unknown", "pass", "unknown"]
    assert all("cannot be read" in one.problems[0] for one in run.rows if one.verdict == "unknown")
    assert [one.scenario for one in run.failed_controls] == ["none"]
    assert run.unfinished == 0
