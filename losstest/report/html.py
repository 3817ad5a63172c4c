"""The report as one HTML file that needs nothing else: matrix as a heat map, a timeline per run."""

from html import escape
from importlib.resources import files

import msgspec

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.harness.scenarios import SCENARIOS
from brokerless.losstest.model import MEASURES, REASONS, Row
from brokerless.losstest.report.formatting import (
    NOT_RUN,
    cell_text,
    change,
    percent,
    spread,
)

# Lost percent from which a cell of the heat map has the next colour; 0 has a colour of its own.
HEAT_STEPS = (0.0, 1.0, 5.0, 15.0, 30.0, 50.0)


# What each reason means, in words.
REASON_WORDS = {
    "offline": "accepted while no consumer was there",
    "producer_crash": "died with the producer that had accepted it",
    "overflow_sender": "dropped by a full buffer at the sender",
    "overflow_receiver": "dropped by a full buffer at the receiver",
    "in_flight": "on the way when something broke",
    "evicted": "dropped from a journal or queue that was full or too old",
    "gave_up": "not sent again after too many failures",
    "unattributed": "nothing that was observed explains it",
}
# What the script needs of a row.
_SHOWN = (
    *(
        "transport",
        "scenario",
        "verdict",
        "findings",
        "problems",
        "lost_by_reason",
        "expected",
        "timeline",
        "fault",
    ),
    *(
        "price",
        "at_once",
        "compress",
        "balanced",
        "latency_before_ms",
        "latency_during_ms",
        "latency_after_ms",
    ),
    *MEASURES,
)


def page(run: Run, before: Run | None = None) -> str:
    """The whole report; with another run, each cell also says what it was `before`."""
    css = files("brokerless.losstest.report").joinpath("report.css").read_text("utf-8")
    script = files("brokerless.losstest.report").joinpath("report.js").read_text("utf-8")
    rows = [{name: getattr(row, name) for name in _SHOWN} for row in run.rows]
    told = {"rows": rows, "measures": MEASURES, "reasons": REASON_WORDS}
    data = msgspec.json.encode(told).decode().replace("<", "\\u003c")
    body = "".join(
        (
            _head(run),
            _tiles(run),
            _matrix(run, before),
            _legend(before),
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


def _matrix(run: Run, before: Run | None) -> str:
    head = "".join(
        f'<th scope="col" title="{escape(SCENARIOS[name].text) if name in SCENARIOS else ""}">'
        f'<button type="button" data-sort="{escape(name)}">{escape(name)}</button></th>'
        for name in run.scenarios
    )
    lines = []
    for transport in run.transports:
        cells = "".join(_cell(run, before, transport, name) for name in run.scenarios)
        lines.append(
            f'<tr><th scope="row"><a href="#{_slug(transport)}">{escape(transport)}</a></th>{cells}</tr>'
        )
    since = f" Compared with <code>{escape(before.directory)}</code>." if before is not None else ""
    return (
        "<section><h2>Matrix</h2><p>Lost, of what was accepted, with the main reason. Each cell leads to its "
        f"run; a scenario's name sorts by it.{since}</p>"
        '<p class="tools"><input id="find" type="search" placeholder="filter: disk kill offline" aria-label="filter">'
        '<select id="show" aria-label="show"><option value="all">all runs</option><option value="lost">that lost '
        'something</option><option value="failed">failed or unknown</option><option value="lucky">zero by luck'
        "</option></select></p>"
        '<div class="scroll"><table class="matrix"><thead><tr><th scope="col">transport</th>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _cell(run: Run, before: Run | None, transport: str, scenario: str) -> str:
    rows = run.cell(transport, scenario)
    text = cell_text(rows)
    if text == NOT_RUN:
        return '<td class="none" title="has no meaning for this transport">·</td>'
    value, _, reason = text.removesuffix(" ✗").replace(" %", "\u202f%").partition(" ")
    failed = ' <i class="x">✗</i>' if text.endswith("✗") else ""
    lost = sum(row.lost for row in rows)
    reasons = {reason: sum(row.lost_by_reason.get(reason, 0) for row in rows) for reason in REASONS}
    main = max(reasons, key=lambda name: reasons[name])
    dot = f'<i class="dot {main}"></i>' if lost else ""
    words = spread(rows) if lost else "promised" if _promised(rows) else "nothing was promised: luck"
    was = ""
    old = before.cell(transport, scenario) if before is not None else []
    kind = ""
    if old:
        kind = f" change-{change(old, rows)}"
        if cell_text(old) != text:
            was = f'<small class="was">was {escape(cell_text(old))}</small>'
    return (
        f'<td class="{heat(rows)}{"" if lost or _promised(rows) else " lucky"}{kind}" '
        f'data-transport="{escape(transport)}" data-scenario="{escape(scenario)}" '
        f'data-percent="{max(row.lost_percent for row in rows):g}" '
        f'data-reasons="{" ".join(name for name, count in reasons.items() if count)}" '
        f'data-lost="{lost}"><a href="#{_slug(transport, scenario)}" title="{escape(words)}">'
        f"<b>{value}</b>{failed}<small>{dot}{reason}</small>{was}</a></td>"
    )


def _promised(rows: list[Row]) -> bool:
    return all(row.expected.loss == "none" for row in rows)


def _legend(before: Run | None) -> str:
    names = ["0, promised", *(f"&gt; {step:g} %" for step in HEAT_STEPS)]
    swatches = "".join(f'<span><i class="h{i}"></i>{name}</span>' for i, name in enumerate(names))
    reasons = "".join(
        f'<span title="{escape(words)}"><i class="dot {reason}"></i>{reason}</span>'
        for reason, words in REASON_WORDS.items()
    )
    changes = "".join(
        f'<span><i class="change-{word}"></i>{word}</span>' for word in ("better", "worse", "differs")
    )
    return (
        f'<p class="legend">{swatches}<span><i class="h0 lucky"></i>0 by luck: nothing was promised</span>'
        '<span><i class="unknown"></i>did not come to rest</span>'
        "<span>✗ not what the transport promises</span><span>· has no meaning</span></p>"
        f'<p class="legend">{reasons}</p>'
        + (f'<p class="legend">{changes}</p>' if before is not None else "")
    )


def _expected_note() -> str:
    return (
        "<p>A loss is not a failure: plain UDP promises nothing. A run fails when it loses what its transport "
        "promises to keep, or when its sums do not balance.</p>"
    )


def _slug(*words: str) -> str:
    return "r-" + "-".join(escape(word.replace(":", "_").replace("/", "_")) for word in words)


def _runs(run: Run) -> str:
    sections = []
    numbers = {id(row): number for number, row in enumerate(run.rows)}
    for transport in run.transports:
        rows = [row for row in run.rows if row.transport == transport]
        items = []
        for scenario in dict.fromkeys(row.scenario for row in rows):
            repeats = [row for row in rows if row.scenario == scenario]
            items += [_run(row, repeats, numbers[id(row)]) for row in repeats]
        family = f"{rows[0].family}, journal: {rows[0].journal}"
        sections.append(
            f'<section class="transport" id="{_slug(transport)}"><h3>{escape(transport)} '
            f"<small>{escape(family)}</small></h3>{''.join(items)}</section>"
        )
    return f"<h2>Runs</h2>{''.join(sections)}"


def _run(row: Row, repeats: list[Row], number: int) -> str:
    """One run, folded; the script fills it when it is opened."""
    cell = _slug(row.transport, row.scenario)
    name = cell if row is repeats[0] else f"{cell}-{row.seed}"
    seed = f" · seed {row.seed}" if len(repeats) > 1 else ""
    text = SCENARIOS[row.scenario].text if row.scenario in SCENARIOS else ""
    return (
        f'<details id="{name}" data-row="{number}" '
        f'data-run="{escape(row.transport)}|{escape(row.scenario)}|{row.seed}">'
        f'<summary><i class="swatch {heat([row])}"></i><b>{escape(row.scenario)}{seed}</b>'
        f'<span class="what">{escape(text)}</span><span class="figure">{percent(row.lost_percent)}</span>'
        f'<span class="badge {row.verdict}">{row.verdict}</span></summary></details>'
    )


def _definitions() -> str:
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in MEASURES.items())
    reasons = "; ".join(f"<b>{name}</b>, {words}" for name, words in REASON_WORDS.items())
    return (
        f'<section class="definitions"><h2>Definitions</h2><dl>{items}</dl>'
        f"<p>Reasons: {reasons}. It is the first stage that an event did not reach.</p></section>"
    )


def _foot(run: Run) -> str:
    versions = " · ".join(f"{name} {number}" for name, number in run.versions.items())
    return f"<footer><p>{escape(versions)}</p></footer>"
