"""The matrix as text: for a terminal with colours, and for the README as Markdown."""

from rich.table import Table
from rich.text import Text

from brokerless.core.errors import ConfigError
from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import MEASURES, Row
from brokerless.losstest.report.formatting import NOT_RUN, cell_text, change, measure_label, measure_text

COLUMNS_AT_ONCE = 7  # that many scenarios fit beside the names in 120 characters


def matrix_tables(run: Run) -> list[Table]:
    """The matrix of what was asked for, in as many tables as the width needs."""
    scenarios = run.scenarios
    tables = []
    for at in range(0, len(scenarios), COLUMNS_AT_ONCE):
        part = scenarios[at : at + COLUMNS_AT_ONCE]
        table = Table(title="lost, of what was accepted, and the main reason" if not at else None)
        table.add_column("transport", no_wrap=True)
        for name in part:
            table.add_column(name, justify="right")
        for transport in run.transports:
            cells = [_coloured(run.cell(transport, name)) for name in part]
            if any(cell.plain != NOT_RUN for cell in cells):
                table.add_row(Text(transport), *cells)
        tables.append(table)
    return tables


def _coloured(rows: list[Row]) -> Text:
    text = cell_text(rows)
    if text == NOT_RUN:
        return Text(text, style="dim")
    verdicts = {row.verdict for row in rows}
    if "fail" in verdicts:
        return Text(text, style="bold red")
    if "unknown" in verdicts:
        return Text(text, style="bold magenta")
    return Text(text, style="green" if text == "0" else "yellow")


def markdown(run: Run, scenarios: list[str] | None = None) -> str:
    """The matrix as Markdown, of these scenarios if given; without transports for which none of them has a meaning."""
    scenarios = run.scenarios if scenarios is None else scenarios
    lines = [
        "| transport | " + " | ".join(f"`{name}`" for name in scenarios) + " |",
        "| --- |" + " ---: |" * len(scenarios),
    ]
    for transport in run.transports:
        shown = [_marked(run.cell(transport, name)) for name in scenarios]
        if set(shown) != {NOT_RUN}:
            lines.append(f"| `{transport}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _marked(rows: list[Row]) -> str:
    """A zero that the transport promises stands out from one that merely happened."""
    text = cell_text(rows)
    return f"**{text}**" if text == "0" and all(row.expected.loss == "none" for row in rows) else text


def details(row: Row) -> Table:
    """One run in full, each measure with its definition."""
    table = Table(
        title=Text(f"{row.transport} · {row.scenario} · seed {row.seed}: {row.verdict}"), show_header=False
    )
    for name, definition in MEASURES.items():
        table.add_row(measure_label(name), measure_text(row, name), definition)
        if name == "lost":
            for reason, count in row.lost_by_reason.items():
                table.add_row(f"  {reason}", f"{count:,}", "")
            if row.lost and "unattributed" not in row.lost_by_reason:
                table.add_row("  unattributed", "0", "")
    sums = (
        f"offered {row.offered:,} = {row.rejected:,} + {row.unknown:,} + {row.accepted:,}; "
        f"accepted {row.accepted:,} = {row.committed:,} + {row.lost:,} + {row.pending:,}"
    )
    table.add_row("balanced", "yes" if row.balanced else "NO", sums)
    for finding in row.findings:
        table.add_row("finding", "", Text(finding, style="yellow"))
    for problem in row.problems:
        table.add_row("problem", "", Text(problem, style="red"))
    return table


def comparison(old: Run, new: Run) -> tuple[Table, int]:
    """Cells that are in both runs, those that differ marked; and how many have become worse."""
    table = Table(title=Text(f"{old.directory} → {new.directory}"))
    for column in ("transport", "scenario", "before", "after", ""):
        table.add_column(column)
    worse = common = 0
    cells = dict.fromkeys((row.transport, row.scenario) for row in (*old.measured, *new.measured))
    for transport, scenario in cells:
        before, after = old.cell(transport, scenario), new.cell(transport, scenario)
        if not before or not after:
            where = "only before" if before else "only after"
            table.add_row(
                Text(transport), scenario, cell_text(before), cell_text(after), Text(where, style="dim")
            )
        else:
            common += 1
            word = change(before, after)
            worse += word == "worse"
            style = {"worse": "red", "better": "green", "differs": "yellow"}.get(word, "dim")
            table.add_row(
                Text(transport), scenario, cell_text(before), cell_text(after), Text(word, style=style)
            )
    if not common:
        raise ConfigError("compare", f"{old.directory} and {new.directory} have no run in common")
    return table, worse
