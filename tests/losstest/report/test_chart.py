"""The timeline as SVG."""

from brokerless.losstest.model import Row, Timeline, Verdict
from brokerless.losstest.report.chart import timeline_svg


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
        timeline=Timeline(0.1, [10] * 20, [10] * 20, {"offline": [0, 5, *[0] * 18]} if lost else {}),
        due_s=2.0,
    )


def test_chart_marks_what_was_lost() -> None:
    """The fault is shaded where it was, and lost events lie where they were accepted."""
    svg = timeline_svg(row(400))
    assert '<rect class="fault" x="180.0" y="0" width="360.0"' in svg
    assert 'class="lost offline" x="36.0"' in svg
    assert timeline_svg(Row(transport="t", scenario="s", seed=1)) == ""
