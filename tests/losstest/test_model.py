"""Every measure has one definition, shown everywhere."""

import io
from pathlib import Path

import msgspec
from rich.console import Console

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import MEASURES
from brokerless.losstest.report.html import page
from brokerless.losstest.report.table import details
from tests.losstest.rows import row


def test_every_measure_has_its_definition_everywhere() -> None:
    """In the terminal and on the page with its definition, in the JSON as a field, on the documentation's page."""
    one = row(3)
    terminal = io.StringIO()
    Console(file=terminal, width=200).print(details(one))
    html, fields = page(Run(rows=[one])), msgspec.to_builtins(one)
    documented = (Path(__file__).resolve().parents[2] / "docs/losstest.md").read_text()
    wanted = {
        *("offered", "rejected", "unknown", "accepted", "delivered", "committed", "acked", "lost", "pending"),
        *(
            "duplicates",
            "reordered",
            "unexpected",
            "recovered",
            "unavailable_s",
            "recovery_s",
            "backlog_clear_s",
        ),
        *("rate", "latency_ms"),
    }
    assert wanted <= set(MEASURES)
    for name, definition in MEASURES.items():
        assert name in fields
        assert f"| `{name}` |" in documented, name
        for text in (terminal.getvalue(), html):
            assert name in text
            assert definition in text, name
