"""`brokerless top`, `groups`, `lag`, `dead-letters`, `forget`: administering a publisher that runs elsewhere."""

import base64
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from brokerless.cli.client_keys import Curve, ServerKey, client_keys
from brokerless.cli.exit_codes import FAILED
from brokerless.cli.options import Interval, Json, Looks, Rows, check_live_table
from brokerless.cli.output import as_table, facts_text, make_table, print_json, print_rows, result
from brokerless.core.errors import ConfigError, PeerError
from brokerless.direct import AdminClient

if TYPE_CHECKING:
    from rich.table import Table

Address = Annotated[str, Parameter(help="The publisher's address.")]
GroupName = Annotated[str, Parameter("--group", help="Only letters of this group.")]
Every = Annotated[bool, Parameter("--all", negative="", help="All letters, or all of --group.")]
Numbers = Annotated[int, Parameter(help="Numbers of letters, as `list` prints them.")]

top = cyclopts.App(
    name="top",
    help="A live table of a publisher's subscribers and groups.",
    help_epilogue="Example: brokerless top tcp://127.0.0.1:5555",
)
groups = cyclopts.App(
    name="groups",
    help="Show a publisher's groups.",
    help_epilogue="Example: brokerless groups list tcp://127.0.0.1:5555",
)
lag = cyclopts.App(
    name="lag",
    help="How far a publisher's consumers are behind.",
    help_epilogue="Example: brokerless lag tcp://127.0.0.1:5555 --json",
)
letters = cyclopts.App(
    name="dead-letters",
    help="List, show, retry and drop a publisher's dead letters.",
    help_epilogue="Example: brokerless dead-letters list tcp://127.0.0.1:5555",
)
forget = cyclopts.App(
    name="forget",
    help="Forget a group or a durable subscriber that will not come back.",
    help_epilogue="Example: brokerless forget tcp://127.0.0.1:5555 --group billing",
)
_GROUP_SPARE = ["lag_s", "waiting", "leased"]  # where a terminal is too narrow
_GROUP_COLUMNS = [
    "name",
    "workers",
    "lag",
    "lag_s",
    "leased",
    "waiting",
    "acked",
    "dead_lettered",
    "lost",
    "balanced",
]
_LAG_COLUMNS = ["kind", "name", "position", "lag", "lag_s", "connected"]
_LETTER_COLUMNS = ["number", "group", "attempts", "id", "topic", "key", "time", "bytes"]


@contextlib.contextmanager
def _connected(address: str, curve: Path | None, server_key: Path | None) -> Iterator[AdminClient]:
    with AdminClient(address, curve=client_keys(curve, server_key)) as client:
        yield client


@top.default
def show_top(
    address: Address,
    *,
    interval: Interval = 1.0,
    count: Looks = 0,
    rows: Rows = 20,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """A live table of the subscribers and groups of the publisher at ADDRESS: position, lag, leases, dead letters."""
    check_live_table(interval, rows, count)
    with _connected(address, curve, server_key) as client, contextlib.suppress(KeyboardInterrupt):
        status = client.status()
        if as_json:
            print_json(status)
            for _ in _looks(interval, count):
                print_json(client.status())
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        console = Console()
        before, at = status, time.monotonic()
        shown = render(status, 0.0, rows, console.width)
        with Live(shown, console=console, auto_refresh=False, screen=console.is_terminal) as live:
            for _ in _looks(interval, count):
                try:
                    status, now = client.status(), time.monotonic()
                    rate = max(0, status["next"] - before["next"]) / (now - at)
                    shown = render(status, rate, rows, console.width)
                    before, at = status, now
                except PeerError as error:
                    # It may be restarting: the view goes on as soon as it is back.
                    shown = Group(Text(str(error), style="red"))
                live.update(shown, refresh=True)


def _looks(interval: float, count: int) -> Iterator[None]:
    looks = 1
    while count == 0 or looks < count:
        time.sleep(interval)
        yield
        looks += 1


def render(status: dict[str, Any], rate: float, rows: int, width: int) -> Any:
    """The whole screen for one look, on a terminal of this width."""
    from rich.console import Group
    from rich.text import Text

    head = (
        f"{status['source']}  epoch {status['epoch']}  offsets {status['oldest']:,} to {status['next']:,}  "
        f"{rate:,.0f} events/s  evicted {status['evicted']:,}  dead letters {status['dead_letters']:,}"
    )
    consumers = _consumers(status)
    return Group(
        Text(head),
        _table("groups", status["groups"], _GROUP_COLUMNS, rows, width, _GROUP_SPARE),
        _table("subscribers, those furthest behind first", consumers, _LAG_COLUMNS, rows, width),
    )


def _table(
    title: str,
    rows: list[dict[str, Any]],
    columns: list[str],
    most: int,
    width: int,
    spare: Sequence[str] = (),
) -> "Table":
    table = make_table(*as_table(rows[:most], columns), width=width, spare=spare)
    table.title, table.title_justify = title, "left"
    return table


def _consumers(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Subscribers and durable names, those furthest behind first."""
    rows = [
        {**row, "kind": "subscriber", "name": row["durable"] or row["client"], "connected": True}
        for row in status["subscribers"]
        if not row["durable"]
    ]
    rows += [{**row, "kind": "durable"} for row in status["durable"]]
    return sorted(rows, key=lambda row: -(row["lag"] or 0))


@lag.default
def show_lag(
    address: Address, *, curve: Curve = None, server_key: ServerKey = None, as_json: Json = False
) -> None:
    """Print position and lag, in events and seconds, of every subscriber, durable name and group."""
    with _connected(address, curve, server_key) as client:
        status = client.status()
    rows = _consumers(status)
    rows += [
        {**row, "kind": "group", "position": row["cursor"], "connected": row["workers"] > 0}
        for row in status["groups"]
    ]
    shown = [{name: row.get(name) for name in _LAG_COLUMNS} for row in rows]
    print_rows(shown, _LAG_COLUMNS, as_json=as_json)


@groups.command(name="list", help_epilogue="Example: brokerless groups list tcp://127.0.0.1:5555")
def list_groups(
    address: Address, *, curve: Curve = None, server_key: ServerKey = None, as_json: Json = False
) -> None:
    """Print the accounting of every group."""
    with _connected(address, curve, server_key) as client:
        print_rows(client.status()["groups"], _GROUP_COLUMNS, as_json=as_json, spare=_GROUP_SPARE)


@groups.command(name="show", help_epilogue="Example: brokerless groups show tcp://127.0.0.1:5555 billing")
def show_group(
    address: Address,
    name: str,
    *,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Print a group's policy, its workers, what they hold and when their leases end.

    Parameters
    ----------
    name
        The group's name.
    """
    with _connected(address, curve, server_key) as client:
        found = [group for group in client.status()["groups"] if group["name"] == name]
    if not found:
        raise ConfigError("NAME", f"there is no group {name!r}")
    if as_json:
        print_json(found[0])
        return
    members = found[0].pop("members")
    result({}, facts_text(found[0]), as_json=False)
    print_rows(members, ["worker", "held", "credit", "suspended", "lease_ends_s"], as_json=False)


@letters.command(name="list", help_epilogue="Example: brokerless dead-letters list tcp://127.0.0.1:5555")
def list_letters(
    address: Address,
    *,
    group: GroupName = "",
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Print the dead letters: what was given up, by which group, after how many attempts."""
    with _connected(address, curve, server_key) as client:
        print_rows(list(client.dead_letters(group)), _LETTER_COLUMNS, as_json=as_json)


@letters.command(name="show", help_epilogue="Example: brokerless dead-letters show tcp://127.0.0.1:5555 7")
def show_letters(
    address: Address,
    *numbers: Numbers,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Print whole letters, with the event's data."""
    if not numbers:
        raise ConfigError("NUMBERS", "is missing")
    with _connected(address, curve, server_key) as client:
        found = client.show(numbers)
    for row in found:
        try:
            row["data"] = row["data"].decode()
        except UnicodeDecodeError:
            row["data_base64"] = base64.b64encode(row.pop("data")).decode()
        result(row, facts_text(row), as_json=as_json)


@letters.command(
    name="retry", help_epilogue="Example: brokerless dead-letters retry tcp://127.0.0.1:5555 7 8"
)
def retry_letters(
    address: Address,
    *numbers: Numbers,
    group: GroupName = "",
    every: Every = False,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Deliver the events of letters again, to their group alone. Exit code 1 if some cannot be."""
    with _connected(address, curve, server_key) as client:
        done = client.retry(_chosen(client, numbers, group, every))
    lines = [f"{len(done['retried'])} retried"]
    lines += [f"{number}: {problem}" for number, problem in done["refused"].items()]
    result(done, "\n".join(lines), as_json=as_json)
    if done["refused"]:
        raise SystemExit(FAILED)


@letters.command(name="drop", help_epilogue="Example: brokerless dead-letters drop tcp://127.0.0.1:5555 7 8")
def drop_letters(
    address: Address,
    *numbers: Numbers,
    group: GroupName = "",
    every: Every = False,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Do not list letters any more; their events stay in the journal as long as it keeps them."""
    with _connected(address, curve, server_key) as client:
        chosen = _chosen(client, numbers, group, every)
        client.drop(chosen)
    result({"dropped": chosen}, f"{len(chosen)} dropped", as_json=as_json)


def _chosen(client: AdminClient, numbers: tuple[int, ...], group: str, every: bool) -> list[int]:
    if bool(numbers) == every:
        raise ConfigError("--all", "give numbers of letters, or --all")
    return [row["number"] for row in client.dead_letters(group)] if every else list(numbers)


@forget.default
def forget_one(
    address: Address,
    *,
    group: str = "",
    subscriber: str = "",
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Forget a group or a durable subscriber, so that it no longer holds the journal of the publisher at ADDRESS.

    Parameters
    ----------
    group
        The group's name.
    subscriber
        The durable subscriber's name.
    """
    if bool(group) == bool(subscriber):
        raise ConfigError("--group", "give --group or --subscriber")
    with _connected(address, curve, server_key) as client:
        if group:
            client.forget_group(group)
        else:
            client.forget_subscriber(subscriber)
    name = group or subscriber
    result({"forgotten": name}, f"{name} is forgotten", as_json=as_json)
