"""Tables, wording and HTML from rows made by hand: nothing that was lost is ever shown as zero."""

import io
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from brokerless.losstest.chart import timeline_svg
from brokerless.losstest.html import heat, page
from brokerless.losstest.model import MEASURES, Promise, Row, Timeline, Verdict
from brokerless.losstest.rundir import Run, exit_code
from brokerless.losstest.table import comparison, details, markdown
from brokerless.losstest.wording import NOT_RUN, glance, percent, seconds, spread


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


@given(st.floats(0, 100))
def test_only_zero_is_shown_as_zero(value: float) -> None:
    """A percentage reads as 0 exactly when it is 0."""
    assert (percent(value) == "0") == (value == 0)


def test_what_a_cell_says() -> None:
    """Zero, loss with reason, failure, no verdict, not run: all told apart; one bad repeat is not hidden."""
    assert glance([row()]) == "0"
    assert glance([row(520)]) == "52 % offline"
    assert glance([row(3, verdict="fail")]) == "0.3 % offline ✗"
    assert glance([row(verdict="unknown")]) == "unknown"
    assert glance([]) == NOT_RUN
    assert glance([row(), row(), row(7)]) == "0.7 % offline"


def test_wording() -> None:
    """Times that never came are a dash; zero of n has its bound; repeats have a range."""
    assert (seconds(None), seconds(1.234), seconds(12.34)) == ("–", "1.23 s", "12.3 s")
    assert "at most 0.3 %" in spread([row()])
    assert "range 1.0 % to 3.0 % over 2 runs" in spread([row(10), row(30)])


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


def test_exit_codes() -> None:
    """Failure before unknown, unknown before success; no runs at all is no success."""
    assert exit_code([row()], unmet=False, undecided=False) == 0
    assert exit_code([row(), row(verdict="fail"), row(verdict="unknown")], unmet=False, undecided=False) == 1
    assert exit_code([row(verdict="unknown")], unmet=False, undecided=False) == 2
    assert exit_code([row()], unmet=True, undecided=False) == 1
    assert exit_code([row()], unmet=False, undecided=True) == 2
    assert exit_code([], unmet=False, undecided=False) == 2


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


def test_heat() -> None:
    """Zero has a colour of its own; more loss is never a cooler colour."""
    levels = [heat([row(lost)]) for lost in (0, 1, 20, 80, 200, 400, 600)]
    assert levels == [f"h{i}" for i in range(7)]
    assert heat([row(1, verdict="fail")]) == "h1 bad"


def test_page_escapes_what_others_wrote() -> None:
    """Names and problems are text, also inside the data of the page."""
    evil = row(1, transport="<script>x</script>", verdict="fail")
    evil.problems = ["</script><b>bold"]
    text = page(Run(rows=[evil], command="<i>"))
    assert "<script>x" not in text.replace('<script>"use', "")
    assert "</script><b>" not in text
    assert "<i>" not in text.replace("<i class", "")


def test_chart_marks_what_was_lost() -> None:
    """The fault is shaded where it was, and lost events lie where they were due."""
    svg = timeline_svg(row(400))
    assert '<rect class="fault" x="180.0" y="0" width="360.0"' in svg
    assert 'class="lost offline" x="7.2"' in svg
    assert timeline_svg(Row(transport="t", scenario="s", seed=1)) == ""


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
