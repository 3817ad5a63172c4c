"""Every measure has one definition, shown everywhere."""

import io
from pathlib import Path

import msgspec
from rich.console import Console

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import MEASURES, Row, Timeline, Verdict
from brokerless.losstest.report.html import page
from brokerless.losstest.report.table import details


def row(
    lost: int = 0, transport: str = "t", scenario: str = "kill", verdict: Verdict = "pass", seed: int = 1
) -> Row:
    return Row(
        transport=transport,
        scenario=scenario,
        seed=seed,
        offered=1000,
        accepted=1000,
        committed=1000 - lost,
        lost=lost,
        lost_percent=lost / 10,
        lost_by_reason={"offline": lost} if lost else {},
        verdict=verdict,
        balanced=True,
        fault=(0.5, 1.5),
        lost_ranges=[(10, 9 + lost, "offline")] if lost else [],
        timeline=Timeline(0.1, [10] * 20, [10] * 20),
        due_s=2.0,
    )


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
