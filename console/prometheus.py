"""Hours of history from a Prometheus server that scrapes this console, or the processes themselves."""

import json
import urllib.parse
import urllib.request
from typing import Any

from brokerless.core.summary import PROGRESS

MAX_HOURS = 24 * 31.0
# As wide as a chart on the page.
_POINTS = 120
_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 24


def queries(step_s: int) -> dict[str, str]:
    """What is asked: rate, lag and lost of every component by kind and name."""
    counters = "|".join(
        f"brokerless_{kind.replace('.', '_')}_{name}_total" for kind, name in PROGRESS.items()
    )
    # Four steps: a rate needs two samples within its range, whatever the scrape interval.
    return {
        "rate": f'sum by (kind, name) (rate({{__name__=~"{counters}"}}[{4 * step_s}s]))',
        "lag": "max by (kind, name) (brokerless_lag)",
        "lost": "sum by (kind, name) (brokerless_lost)",
    }


def query_history(url: str, hours: float, now: float) -> list[dict[str, Any]]:
    """Points `[time, value]` of rate, lag and lost, by kind and name. Raises ValueError and OSError."""
    if not 0 < hours <= MAX_HOURS:
        raise ValueError(f"hours must be above 0 and at most {MAX_HOURS:g}")
    step = max(1, round(hours * 3600 / _POINTS))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for what, query in queries(step).items():
        words = {"query": query, "start": now - hours * 3600, "end": now, "step": step}
        for series in _ask(f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(words)}"):
            kind, name = series["metric"].get("kind", ""), series["metric"].get("name", "")
            each = found.setdefault((kind, name), {"kind": kind, "name": name})
            each[what] = [[at, float(value)] for at, value in series["values"]]
    return [found[key] for key in sorted(found)]


def _ask(url: str) -> list[Any]:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the operator's own URL
        content = json.loads(answer.read(_MAX_BYTES))
    result = content.get("data", {}).get("result") if isinstance(content, dict) else None
    if not isinstance(result, list):
        raise ValueError("an answer that Prometheus would not give")
    return result
