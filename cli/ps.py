"""`brokerless ps`: which components run on this machine, how fast they are, who is behind, what was lost."""

import time
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from brokerless.cli.options import Json, check_interval
from brokerless.cli.output import iso_time, print_json, print_rows, say
from brokerless.core.presence import Component, default_directory, present
from brokerless.core.summary import summarise

app = cyclopts.App(
    name="ps",
    help="List the components that run on this machine: rate, lag, loss.",
    help_epilogue="Example: brokerless ps --json",
)
COLUMNS = ["kind", "name", "pid", "up", "rate", "lag", "lost", "balanced", "state", "address"]
SPARE = ["address", "up", "balanced", "pid"]  # a terminal of 80 columns has no room for all


@app.default
def ps(
    *,
    directory: Annotated[
        Path | None, Parameter(help="another user's or container's presence directory")
    ] = None,
    interval: Annotated[float, Parameter(help="seconds over which rates are measured")] = 1.1,
    as_json: Json = False,
) -> None:
    """List publishers, subscribers, workers, servers, dispatchers, daemons and collectors with rate, lag and loss."""
    check_interval(interval)
    chosen = directory or default_directory()
    if chosen is None:
        say("presence is switched off (BROKERLESS_PRESENCE=off)")
        return
    before = present(chosen)
    time.sleep(interval)
    now = present(chosen)
    rows = [_row(component, summary) for component, summary in summarise(now, before)]
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        say(f"nothing is announced in {chosen}")
        return
    print_rows(rows, COLUMNS, as_json=False, spare=SPARE)


def _row(component: Component, summary: dict[str, Any]) -> dict[str, Any]:
    up = max(0, int(component.updated - component.started))
    return {
        "kind": component.kind,
        "name": component.name,
        "pid": component.pid,
        "host": component.host,
        "version": component.version,
        "started": iso_time(int(component.started * 1e6)),
        "up": f"{up // 3600}:{up // 60 % 60:02}:{up % 60:02}",
        **summary,
        "address": component.addresses[0] if component.addresses else "",
    }
