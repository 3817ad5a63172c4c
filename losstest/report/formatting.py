"""How figures are said at a cell_text, the same in the terminal, in Markdown and in HTML. Pure."""

from brokerless.losstest.analysis.stats import summarise
from brokerless.losstest.model import Row

SHORT = {
    "offline": "offline",
    "producer_crash": "crash",
    "overflow_sender": "overflow",
    "overflow_receiver": "overflow",
    "in_flight": "in flight",
    "evicted": "evicted",
    "gave_up": "gave up",
    "unattributed": "unattributed",
}
NOT_RUN = "·"
# Two ranges of three runs each lie apart by chance once in ten times; a margin of a quarter makes it rare.
ENOUGH_REPEATS, MARGIN = 3, 1.25


def percent(value: float) -> str:
    """A percentage in as few characters as are honest: nothing that was lost is shown as 0."""
    if value == 0:
        return "0"
    if value < 0.1:
        return "<0.1 %"
    return f"{value:.1f} %" if value < 9.95 else f"{value:.0f} %"


def cell_text(rows: list[Row]) -> str:
    """One cell of the matrix: lost percent (median of the repeats) and the main reason."""
    if not rows:
        return NOT_RUN
    if any(row.verdict == "unknown" for row in rows):
        return "unknown"
    summary = summarise(rows)
    value = summary.median if summary.median or not summary.lost else summary.high
    text = percent(value)
    if summary.lost:
        reasons: dict[str, int] = {}
        for row in rows:
            for reason, count in row.lost_by_reason.items():
                reasons[SHORT[reason]] = reasons.get(SHORT[reason], 0) + count
        text += f" {max(reasons, key=lambda r: reasons[r])}"
    if any(row.verdict == "fail" for row in rows):
        text += " ✗"
    return text


def seconds(value: float | None) -> str:
    """A time in seconds, or a dash for what never came."""
    return "–" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def measure_text(row: Row, name: str) -> str:
    """One measure of a row as text."""
    value = getattr(row, name)
    if value is None:
        return "–"
    if name == "latency_ms":
        return f"{value.p50:.1f} / {value.p99:.1f} / {value.p999:.1f} / {value.max:.1f}"
    if name.endswith("_percent"):
        return percent(value)
    return seconds(value) if name.endswith("_s") else f"{value:,}"


def measure_label(name: str) -> str:
    """The name of a measure as it is shown, with what the figures are if there are several."""
    return "latency_ms p50 / p99 / p99.9 / max" if name == "latency_ms" else name


def spread(rows: list[Row]) -> str:
    """What the repeats say about lost percent: median, range, interval."""
    summary = summarise(rows)
    text = f"median {percent(summary.median)}"
    if summary.runs > 1:
        text += f", range {percent(summary.low)} to {percent(summary.high)} over {summary.runs} runs"
    if summary.interval:
        low, high = summary.interval
        if not summary.lost:
            text += f", at most {high:.2g} % ({summary.method}; n = {summary.accepted:,})"
        else:
            text += f", 95 % interval {low:.2g} to {high:.2g} % ({summary.method})"
    return text


def change(before: list[Row], after: list[Row]) -> str:
    """`same`, `better` or `worse`; `differs` where so few repeats of a loss that is allowed decide nothing."""
    rank = {"pass": 0, "unknown": 1, "fail": 2}
    was, now = (max(rank[row.verdict] for row in rows) for rows in (before, after))
    if was != now:
        return "worse" if now > was else "better"
    lost_before = [row.lost_percent for row in before]
    lost_after = [row.lost_percent for row in after]
    if all(row.expected.loss == "none" for row in after) and any(lost_before) != any(lost_after):
        return "worse" if any(lost_after) else "better"
    # Losses of an outage vary from run to run; ranges that do not touch are a difference.
    word = "same"
    if min(lost_after) > max(lost_before) * MARGIN + 1:
        word = "worse"
    elif max(lost_after) < min(lost_before) / MARGIN - 1:
        word = "better"
    enough = min(len(before), len(after)) >= ENOUGH_REPEATS
    return word if enough or word == "same" else "differs"
