"""The report as one HTML file that needs nothing else: matrix as a heat map, a timeline per run."""

from html import escape
from importlib.resources import files

import msgspec

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.harness.scenarios import SCENARIOS
from brokerless.losstest.model import MEASURES, REASONS, Row
from brokerless.losstest.report.chart import timeline_svg
from brokerless.losstest.report.formatting import (
    NOT_RUN,
    cell_text,
    measure_label,
    measure_text,
    percent,
    spread,
)

# Lost percent from which a cell of the heat map has the next colour; 0 has a colour of its own.
HEAT_STEPS = (0.0, 1.0, 5.0, 15.0, 30.0, 50.0)


def page(run: Run) -> str:
    """The whole report."""
    css = files("brokerless.losstest.report").joinpath("report.css").read_text("utf-8")
    script = files("brokerless.losstest.report").joinpath("report.js").read_text("utf-8")
    data = msgspec.json.encode(run.rows).decode().replace("<", "\\u003c")
    body = "".join(
        (
            _head(run),
            _tiles(run),
            _matrix(run),
            _legend(),
            _expected_note(),
            _runs(run),
            _definitions(),
            _foot(run),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>What was lost</title><style>{css}</style></head><body>{body}"
        f'<script type="application/json" id="rows">{data}</script><script>{script}</script></body></html>'
    )


def _head(run: Run) -> str:
    where = f"{run.machine.get('system', '')} · {run.machine.get('cores', '?')} cores" if run.machine else ""
    command = f"<code>{escape(run.command)}</code>" if run.command else ""
    failed = "".join(
        f'<p class="problems">Controls failed with {one["at_once"]} runs at once, and were run again with fewer: '
        f"{escape('; '.join(one['failed']))}</p>"
        for one in run.control_rounds[:-1]
    )
    return (
        '<header><div><h1>What was lost</h1><p class="lead">Real producer and consumer processes; something '
        "is broken, healed and drained; then what each process wrote down is compared.</p>"
        f'<p class="meta">{command} {escape(run.started)} {escape(where)}</p>{failed}</div>'
        '<button id="theme" type="button" aria-label="switch between light and dark">◐</button></header>'
    )


def _tiles(run: Run) -> str:
    rows = run.measured
    accepted, lost = sum(row.accepted for row in rows), sum(row.lost for row in rows)
    verdicts = {word: sum(row.verdict == word for row in run.rows) for word in ("pass", "fail", "unknown")}
    unattributed = sum(row.lost_by_reason.get("unattributed", 0) for row in rows)
    zero = sum(not row.lost and row.verdict == "pass" for row in rows)
    tiles = (
        ("runs", f"{len(run.rows):,}", f"{sum(row.control for row in run.rows)} of them controls"),
        ("as promised", f"{verdicts['pass']:,}", f"{verdicts['fail']} failed, {verdicts['unknown']} unknown"),
        ("lost nothing", f"{zero:,}", f"of {len(rows):,} runs measured"),
        ("events lost", f"{lost:,}", f"of {accepted:,} accepted"),
        ("unattributed", f"{unattributed:,}", "lost for no known reason"),
        ("balanced", f"{sum(row.balanced for row in run.rows):,}", f"of {len(run.rows):,} runs"),
    )
    cells = "".join(
        f'<div class="tile" data-tile="{name}"><b>{value}</b><span>{name}</span><small>{note}</small></div>'
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def heat(rows: list[Row]) -> str:
    """The class of a cell: none, h0 … h6, bad or unknown."""
    if not rows:
        return "none"
    verdicts = {row.verdict for row in rows}
    if "unknown" in verdicts:
        return "unknown"
    worst = max(row.lost_percent for row in rows)
    level = 0 if not worst else sum(worst > step for step in HEAT_STEPS)
    return f"h{level}" + (" bad" if "fail" in verdicts else "")


def _matrix(run: Run) -> str:
    head = "".join(
        f'<th scope="col" title="{escape(SCENARIOS[name].text) if name in SCENARIOS else ""}">{escape(name)}</th>'
        for name in run.scenarios
    )
    lines = []
    for transport in run.transports:
        cells = "".join(_cell(run, transport, name) for name in run.scenarios)
        lines.append(
            f'<tr><th scope="row"><a href="#{_slug(transport)}">{escape(transport)}</a></th>{cells}</tr>'
        )
    return (
        "<section><h2>Matrix</h2><p>Lost, of what was accepted, with the main reason. Each cell leads to its "
        'run.</p><div class="scroll"><table class="matrix"><thead><tr><th scope="col">transport</th>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _cell(run: Run, transport: str, scenario: str) -> str:
    rows = run.cell(transport, scenario)
    text = cell_text(rows)
    if text == NOT_RUN:
        return '<td class="none" title="has no meaning for this transport">·</td>'
    value, _, reason = text.removesuffix(" ✗").replace(" %", "\u202f%").partition(" ")
    failed = ' <i class="x">✗</i>' if text.endswith("✗") else ""
    lost = sum(row.lost for row in rows)
    return (
        f'<td class="{heat(rows)}" data-transport="{escape(transport)}" data-scenario="{escape(scenario)}" '
        f'data-lost="{lost}"><a href="#{_slug(transport, scenario)}" title="{escape(spread(rows))}">'
        f"<b>{value}</b>{failed}<small>{reason}</small></a></td>"
    )


def _legend() -> str:
    names = ["0", *(f"&gt; {step:g} %" for step in HEAT_STEPS)]
    swatches = "".join(f'<span><i class="h{i}"></i>{name}</span>' for i, name in enumerate(names))
    return (
        f'<p class="legend">{swatches}<span><i class="unknown"></i>did not come to rest</span>'
        "<span>✗ not what the transport promises</span><span>· has no meaning</span></p>"
    )


def _expected_note() -> str:
    return (
        "<p>A loss is not a failure: plain UDP promises nothing. A run fails when it loses what its transport "
        "promises to keep, or when the sent do not balance.</p>"
    )


def _slug(*words: str) -> str:
    return "r-" + "-".join(escape(word.replace(":", "_").replace("/", "_")) for word in words)


def _runs(run: Run) -> str:
    sections = []
    for transport in run.transports:
        rows = [row for row in run.rows if row.transport == transport]
        items = []
        for scenario in dict.fromkeys(row.scenario for row in rows):
            repeats = [row for row in rows if row.scenario == scenario]
            items += [_run(row, repeats, first=row is repeats[0]) for row in repeats]
        family = f"{rows[0].family}, journal: {rows[0].journal}"
        sections.append(
            f'<section class="transport" id="{_slug(transport)}"><h3>{escape(transport)} '
            f"<small>{escape(family)}</small></h3>{''.join(items)}</section>"
        )
    return f"<h2>Runs</h2>{''.join(sections)}"


def _run(row: Row, repeats: list[Row], first: bool) -> str:
    name = f' id="{_slug(row.transport, row.scenario)}"' if first else ""
    seed = f" · seed {row.seed}" if len(repeats) > 1 else ""
    text = SCENARIOS[row.scenario].text if row.scenario in SCENARIOS else ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in row.lost_by_reason.items())
    summary = (
        f'<summary><i class="swatch {heat([row])}"></i><b>{escape(row.scenario)}{seed}</b>'
        f'<span class="what">{escape(text)}</span><span class="figure">{percent(row.lost_percent)}</span>'
        f'<span class="badge {row.verdict}">{row.verdict}</span></summary>'
    )
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in row.problems)
    return (
        f'<details{name} data-run="{escape(row.transport)}|{escape(row.scenario)}|{row.seed}">{summary}'
        f"{_figure(row)}{f'<ul class=problems>{problems}</ul>' if problems else ''}{_figures(row, reasons)}"
        f"<p class=small>{escape(spread(repeats))}</p></details>"
    )


def _figure(row: Row) -> str:
    svg = timeline_svg(row)
    if not svg or row.timeline is None:
        return ""
    length = len(row.timeline.accepted) * row.timeline.step_s
    top = max(*row.timeline.accepted, *row.timeline.committed, 1) / row.timeline.step_s
    fault = f"fault {max(0.0, row.fault[0]):.1f}–{row.fault[1]:.1f} s" if row.fault else "no fault"
    return (
        f'<figure><div class="axis"><span>up to {top:,.0f} events/s (square-root scale)</span></div>{svg}'
        f'<div class="axis"><span>0 s</span><span class="keys"><i class="k-sent"></i>sent '
        f'<i class="k-delivered"></i>committed <i class="k-fault"></i>{fault} <i class="k-lost"></i>lost</span>'
        f"<span>{length:.1f} s</span></div></figure>"
    )


def _figures(row: Row, reasons: str) -> str:
    shown = []
    for name in MEASURES:
        shown.append(
            f'<div title="{escape(MEASURES[name])}"><dt>{measure_label(name)}</dt>'
            f'<dd data-m="{name}">{measure_text(row, name)}</dd></div>'
        )
    sums = f"{row.accepted:,} = {row.committed:,} + {row.lost:,} + {row.pending:,}"
    word = "balanced" if row.balanced else "NOT balanced"
    lost = f" · lost: {escape(reasons)}" if reasons else ""
    unattributed = row.lost_by_reason.get("unattributed", 0)
    return (
        f'<dl>{"".join(shown)}</dl><p class="small"><b>{word}</b>: accepted = committed + lost + pending: {sums}{lost}'
        f" · unattributed: {unattributed}</p>"
    )


def _definitions() -> str:
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in MEASURES.items())
    reasons = ", ".join(REASONS)
    return (
        f'<section class="definitions"><h2>Definitions</h2><dl>{items}</dl>'
        f"<p>Reasons: {reasons}: the first stage that an event did not reach.</p></section>"
    )


def _foot(run: Run) -> str:
    versions = " · ".join(f"{name} {number}" for name, number in run.versions.items())
    return f"<footer><p>{escape(versions)}</p></footer>"
