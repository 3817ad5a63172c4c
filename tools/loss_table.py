"""Make the table of docs/loss_table.md from a real run, or from the run directory that is given."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from brokerless.losstest import read_run
from brokerless.losstest.harness.scenarios import SCENARIOS
from brokerless.losstest.report.table import markdown

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "brokerless losstest run --quick"


def main(directory: str | None) -> None:
    if directory is None:
        directory = f"{tempfile.mkdtemp()}/run"
        words = [sys.executable, "-m", "brokerless.cli", *COMMAND.split()[1:], "--out", directory]
        if subprocess.run(words, check=False).returncode:
            sys.exit("loss table: the run did not give what the transports promise; the table stays as it is")
    run = read_run(Path(directory))
    texts = [f"`{name}`: {SCENARIOS[name].text}" for name in run.scenarios]
    accepted = sum(row.accepted for row in run.measured)
    note = (
        f"Lost, of what was accepted, with the main reason. **0** is promised, 0 merely happened, · has no meaning "
        f"there. {'. '.join(texts)}. "
        f"{len(run.rows)} runs, {accepted:,} events, controls passed, every run balanced. Runs are short here, so "
        "the percentages are those of a one-second outage in two; the zeros are what matters."
    )
    part = f"```console\n$ {COMMAND}\n```\n\n{markdown(run)}\n\n{note}\n"
    path = ROOT / "docs" / "loss_table.md"
    text = path.read_text()
    changed = re.sub(
        r"(<!-- table:begin[^\n]*\n).*?(<!-- table:end -->)",
        lambda match: match[1] + part + match[2],
        text,
        flags=re.DOTALL,
    )
    path.write_text(changed)
    print("loss table: table written")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
