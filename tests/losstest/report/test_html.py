"""The HTML report from rows made by hand."""

from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import Promise
from brokerless.losstest.report.html import heat, page
from tests.losstest.rows import row


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


def test_a_zero_by_luck_is_not_a_promised_one() -> None:
    """A cell that lost nothing says whether that was promised."""
    promised, lucky = row(), row(scenario="late")
    lucky.expected = Promise("may", ("offline",), "who knows")
    text = page(Run(rows=[promised, lucky]))
    assert '<td class="h0" data-transport="t" data-scenario="kill"' in text
    assert '<td class="h0 lucky" data-transport="t" data-scenario="late"' in text


def test_two_runs_cell_by_cell() -> None:
    """With another run, a cell says what it was and whether it has become worse."""
    text = page(Run(rows=[row(400)]), Run(rows=[row()], directory="old"))
    assert '<td class="h5 change-worse"' in text
    assert "was 0<" in text
    assert "change-" not in page(Run(rows=[row(400)])).partition("<body>")[2]


def test_nothing_is_there_twice() -> None:
    """The lost ranges, which may be thousands, are not in the page; figures are in its data only."""
    one = row(400)
    one.lost_ranges = [(n, n, "offline") for n in range(0, 8000, 2)]
    assert len(page(Run(rows=[one]))) < len(page(Run(rows=[]))) + 5_000
