"""The README tells the truth: its examples run as printed, its links lead somewhere, its table still holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.losstest import resolve, transport_names
from brokerless.losstest.scenarios import MAIN, SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def examples() -> list[tuple[str, str]]:
    """Title and code of every Python example."""
    return re.findall(r"^### (\w+)\n```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run_example(code: str, directory: Path) -> None:
    (directory / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# prints (.*)$", code, flags=re.MULTILINE)
    expected = [line for line in promised if not line.startswith("nothing")]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


@pytest.mark.parametrize(("title", "code"), [e for e in examples() if e[0] != "Spark"])
def test_example(title: str, code: str, tmp_path: Path) -> None:
    """An example runs by itself in an empty directory and prints what its comments say."""
    run_example(code, tmp_path)


@pytest.mark.spark
def test_spark_example(tmp_path: Path) -> None:
    """The Spark example counts what the journal holds."""
    code = dict(examples())["Spark"]
    run_example(code, tmp_path)


def test_there_is_an_example_per_transport() -> None:
    """None of the packages is missing."""
    assert {title for title, _ in examples()} == {"direct", "multicast", "webhooks", "metrics", "Spark"}


def test_links_lead_somewhere() -> None:
    """Every local link of the README is a file."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def table() -> dict[str, dict[str, str]]:
    """The README's table: transport → scenario → what it says."""
    part = README.partition("<!-- table:begin")[2].partition("<!-- table:end")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.split("\n")
        if line.startswith("|")
    ]
    names = [name.strip("`") for name in lines[0][1:]]
    return {row[0].strip("`"): dict(zip(names, row[1:], strict=True)) for row in lines[2:]}


def test_the_table_has_every_transport_and_main_scenario() -> None:
    """Rows are the transports that need nothing installed, columns the scenarios of the quick profile."""
    expected = [name for name in transport_names() if resolve(name).traits.family != "broker"]
    assert list(table()) == expected
    columns = [s for s in MAIN if any(SCENARIOS[s].fits(resolve(name).traits) for name in expected)]
    assert all(list(row) == columns for row in table().values())


@pytest.mark.serial
def test_every_zero_still_is_zero(tmp_path: Path) -> None:
    """The command above the table, run again: what the README says loses nothing, loses nothing."""
    command = re.search(r"^\$ (brokerless losstest run .*)$", README, flags=re.MULTILINE)
    assert command is not None
    words = [sys.executable, "-m", "brokerless.cli", *command[1].split()[1:], "--json", "now.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "now.json").read_text())["rows"]
    now = {(row["transport"], row["scenario"]): row for row in rows if not row["control"]}
    assert all(row["balanced"] and row["verdict"] == "pass" for row in rows)
    zeros = [(t, s) for t, row in table().items() for s, cell in row.items() if cell == "**0**"]
    assert len(zeros) > 40
    assert {key: now[key]["lost"] for key in zeros} == dict.fromkeys(zeros, 0)
    # And what has no meaning for a transport was not run.
    assert set(now) == {(t, s) for t, row in table().items() for s, cell in row.items() if cell != "·"}
