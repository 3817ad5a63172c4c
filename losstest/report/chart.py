"""The timeline of a run as SVG: sent, delivered, the fault shaded, lost events marked. Pure.

Shapes only, stretched to the width of the page; words stand in HTML around it, so that they stay readable
on a phone.
"""

import math
from html import escape

from brokerless.losstest.model import Row

WIDTH, HEIGHT, STRIP = 720.0, 120.0, 12.0


def timeline_svg(row: Row) -> str:
    """An <svg> element, or an empty text if there is nothing to draw."""
    line = row.timeline
    if line is None or not any(line.accepted):
        return ""
    steps = len(line.accepted)
    length = steps * line.step_s
    top = max(*line.accepted, *line.committed, 1)
    parts = []
    if row.fault:
        begin, end = (min(max(0.0, t), length) * WIDTH / length for t in row.fault)
        parts.append(
            f'<rect class="fault" x="{begin:.1f}" y="0" width="{max(1.0, end - begin):.1f}" '
            f'height="{HEIGHT + STRIP:g}"/>'
        )
    parts.append(f'<path class="delivered" d="{_area(line.committed, top)}"/>')
    parts.append(f'<path class="sent" d="{_steps(line.accepted, top)}"/>')
    parts += _lost_marks(row, length)
    title = f"{row.transport}, {row.scenario}: {row.accepted} accepted, {row.committed} committed, {row.lost} lost"
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT + STRIP:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _y(value: int, top: int) -> float:
    # The square root keeps a normal rate visible beside the spike in which a backlog is delivered.
    return HEIGHT - math.sqrt(value / top) * (HEIGHT - 4)


def _steps(values: list[int], top: int) -> str:
    """A line of steps."""
    width = WIDTH / len(values)
    path = [f"M0 {_y(values[0], top):.1f}"]
    for i, value in enumerate(values):
        path.append(f"V{_y(value, top):.1f}H{(i + 1) * width:.1f}")
    return "".join(path)


def _area(values: list[int], top: int) -> str:
    width = WIDTH / len(values)
    path = [f"M0 {HEIGHT:g}"]
    for i, value in enumerate(values):
        path.append(f"V{_y(value, top):.1f}H{(i + 1) * width:.1f}")
    return "".join(path) + f"V{HEIGHT:g}Z"


def _lost_marks(row: Row, length: float) -> list[str]:
    """Lost events when they were accepted, one mark per step and reason; the strip is shared by the reasons."""
    line = row.timeline
    assert line is not None
    width = WIDTH * line.step_s / length
    marks: list[str] = []
    for reason, counts in line.lost.items():
        for step, count in enumerate(counts):
            if count:
                share = min(1.0, count / max(1, line.accepted[step]))
                height = max(2.0, share * (STRIP - 2))
                marks.append(
                    f'<rect class="lost {reason}" x="{step * width:.1f}" y="{HEIGHT + STRIP - height:.1f}" '
                    f'width="{max(1.2, width):.1f}" height="{height:.1f}">'
                    f"<title>{step * line.step_s:.2f} s: {count} {reason}</title></rect>"
                )
    return marks
