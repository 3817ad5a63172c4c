"""`brokerless metrics top`: what the daemon receives, what is lost, and who loses it, refreshed in place."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brokerless.cli.options import Interval, Json, Looks, Rows, check_live_table
from brokerless.core.errors import Fault, UsageError


def top(
    address: str = "127.0.0.1:9125",
    *,
    interval: Interval = 1.0,
    count: Looks = 0,
    rows: Rows = 10,
    prefix: str = "",
    as_json: Json = False,
) -> None:
    """A live table of rates, losses, worst clients and kernel drops of a running daemon.

    Parameters
    ----------
    address
        The daemon's --http address.
    prefix
        Show only series that begin with this.
    """
    check_live_table(interval, rows, count)
    base = address.rstrip("/") if "://" in address else f"http://{address}"
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"{address} is neither host:port nor an http address")
    url = f"{base}/state?limit={rows}&prefix={urllib.parse.quote(prefix, safe='')}"
    with suppress(KeyboardInterrupt):  # how a person ends it
        _show(url, interval=interval, count=count, rows=rows, as_json=as_json)


def _show(url: str, *, interval: float, count: int, rows: int, as_json: bool) -> None:
    state = _fetch(url)
    if as_json:
        looks = 1
        print(json.dumps(state))
        while count == 0 or looks < count:
            time.sleep(interval)
            print(json.dumps(_fetch(url)), flush=True)
            looks += 1
        return
    console = Console()
    looks = 1
    with Live(render(state, rows), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while count == 0 or looks < count:
            time.sleep(interval)
            try:
                shown = render(_fetch(url), rows)
            except Fault as error:
                # It may be restarting: the view goes on as soon as it is back.
                shown = Group(Text(str(error), style="red"))
            live.update(shown, refresh=True)
            looks += 1


def _fetch(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # http, built above
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError, HTTPException, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise Fault(
            f"no daemon answers at {url.partition('/state')[0]}: {reason}; is it run with --http?"
        ) from None


def render(state: dict[str, Any], rows: int) -> Group:
    """The whole screen for one look."""
    window = state.get("window")
    if window is None or not window["seconds"]:
        return Group(Text("no window has ended yet"))
    return Group(_summary(state, window), _counters(state, rows), _clients(state, rows), _refused(state))


def _summary(state: dict[str, Any], window: dict[str, Any]) -> Text:
    seconds = window["seconds"]
    sent = window["datagrams"] + window["lost_datagrams"]
    share = 100 * window["lost_datagrams"] / sent if sent else 0.0
    series = state["series"]
    text = Text()
    text.append(
        f"{window['lines'] / seconds:,.0f} lines/s  {window['datagrams'] / seconds:,.0f} datagrams/s  "
        f"window {seconds:.1f} s  "
    )
    lost = f"lost {window['lost_datagrams']:,} ({share:.2f} %)  kernel drops {window['kernel_drops']:,}"
    text.append(lost, style="bold red" if window["lost_datagrams"] or window["kernel_drops"] else "green")
    text.append(
        f"\nsince start: {state['rollup']['lines']:,} lines, {state['rollup']['lost_datagrams']:,} datagrams lost, "
        f"{state['receive']['kernel_drops']:,} kernel drops, {state['rollup']['refused']:,} lines refused   series: "
        f"{series['counters']} counters {series['timers']} timers {series['gauges']} gauges {series['sets']} sets"
    )
    for backend in state["backends"]:
        if backend["last_error"] and backend["dropped"] + backend["errors"]:
            text.append(
                f"\n{backend['name']}: {backend['errors']} errors: {backend['last_error']}", style="red"
            )
    return text


def _counters(state: dict[str, Any], rows: int) -> Table:
    table = Table(title="busiest counters, last window", title_justify="left")
    for column, justify in (
        ("counter", "left"),
        ("per s", "right"),
        ("raw", "right"),
        ("corrected", "right"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for column in ("± 95 %", "grade", "total"):
        table.add_column(column, justify="right")
    for name, point in list(state["counters"].items())[:rows]:
        bound = "?" if point["bound"] is None else f"{point['bound']:,.1f}"
        table.add_row(
            Text(name),  # no markup, whatever is in it
            f"{point['rate']:,.1f}",
            f"{point['raw']:,.6g}",
            f"{point['corrected']:,.6g}",
            bound,
            point["grade"],
            f"{point['total']:,.10g}",
        )
    return table


def _clients(state: dict[str, Any], rows: int) -> Table:
    table = Table(title="clients that lost most", title_justify="left")
    for column in ("client", "name"):
        table.add_column(column)
    for column in ("sent", "received", "lost", "%", "failed to send", "duplicates", "late", "idle s"):
        table.add_column(column, justify="right")
    for client in state["clients"][:rows]:
        share = 100 * client["lost"] / client["sent"] if client["sent"] else 0.0
        table.add_row(
            Text(client["client"]),
            Text(client["name"]),
            f"{client['sent']:,}",
            f"{client['received']:,}",
            f"{client['lost']:,}",
            f"{share:.2f}",
            f"{client['failed']:,}",
            f"{client['duplicates']:,}",
            f"{client['late']:,}",
            f"{client['idle_s']:.0f}",
        )
    return table


def _refused(state: dict[str, Any]) -> Text:
    if not state["refused"]:
        return Text("")
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in state["refused"].items())
    sample = state["refused_samples"][0]["line"] if state["refused_samples"] else ""
    return Text(f"refused: {reasons}; last: {sample[:60]!r}", style="yellow")
