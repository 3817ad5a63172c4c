"""The matrix as text and Markdown, and the comparison of two runs."""

import msgspec

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import Promise, Row
from brokerless.losstest.report.table import comparison, markdown
from tests.losstest.rows import row


def test_markdown_table() -> None:
    """Rows are transports, columns scenarios without the controls, zeros stand out."""
    control = row(scenario="none")
    control.control = True
    run = Run(rows=[control, row(), row(520, transport="u")])
    assert markdown(run).split("\n") == [
        "| transport | `kill` |",
        "| --- | ---: |",
        "| `t` | **0** |",
        "| `u` | 52 % offline |",
    ]


def test_comparison() -> None:
    """A broken promise is worse at once; an allowed loss only if several repeats lie apart; noise is neither."""

    def changed(before: list[Row], after: list[Row]) -> tuple[str, int]:
        table, worse = comparison(Run(rows=before), Run(rows=after))
        return str(next(iter(table.columns[4].cells))), worse

    def allowed(*lost: int) -> list[Row]:
        may = Promise("may", ("offline",), "it is away")
        return [msgspec.structs.replace(row(n, seed=i), expected=may) for i, n in enumerate(lost)]

    assert changed([row()], [row(1)]) == ("worse", 1)
    assert changed([row(1)], [row()]) == ("better", 0)
    assert changed([row()], [row(verdict="fail")]) == ("worse", 1)
    assert changed([row()], [row(verdict="unknown")]) == ("worse", 1)
    assert changed(allowed(500), allowed(520)) == ("same", 0)
    assert changed(allowed(100), allowed(500)) == ("differs", 0)
    assert changed(allowed(0), allowed(50)) == ("differs", 0)
    assert changed(allowed(90, 100, 110), allowed(490, 500, 510)) == ("worse", 1)
    assert changed(allowed(490, 500, 510), allowed(90, 100, 110)) == ("better", 0)
    assert changed(allowed(90, 100, 500), allowed(110, 500, 510)) == ("same", 0)
