"""How every command prints: results on standard output, everything else on standard error, times in ISO 8601."""

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from brokerless.core import Account, Event, Lost

if TYPE_CHECKING:
    from rich.table import Table


def say(text: str) -> None:
    """Print progress or a summary for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one JSON object on one line of standard output."""
    print(json.dumps(value, ensure_ascii=False, default=_plain).translate(_CONTROLS), flush=True)


# What JSON leaves as it is and a terminal may obey.
_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def result(fields: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: `fields` as JSON, or `text` for people."""
    if as_json:
        print_json(fields)
    else:
        print(printable(text, keep="\n"), flush=True)


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped: what others sent must not move a terminal's cursor or set its title."""
    return "".join(
        character
        if character in keep or not (character < " " or "\x7f" <= character <= "\x9f")
        else f"\\x{ord(character):02x}"
        for character in text
    )


def facts_text(facts: Mapping[str, Any]) -> str:
    """Facts about one thing for people: a line each, and a line per part where there are several."""
    width = max(map(len, facts), default=0)
    lines = []
    for name, value in facts.items():
        if name == "epochs":
            parts = [f"{epoch} from offset {first}" for epoch, first in value]
        elif isinstance(value, Mapping):
            parts = [f"{printable(str(key))}: {cell(inner)}" for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [cell(inner) for inner in value]
        else:
            parts = [cell(value, name)]
        lines += [f"{'' if number else name:{width}}   {part}" for number, part in enumerate(parts or ["–"])]
    return "\n".join(lines)


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool, spare: Sequence[str] = ()
) -> None:
    """Print rows: one JSON object per line for programs, or a table for people.

    Where a terminal is too narrow for all columns, those of `spare` are left out, the first of them first.
    """
    if as_json:
        for row in rows:
            print_json(row)
        return
    print_table(*as_table(rows, columns), spare=spare)


def as_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> tuple[list[tuple[str, bool]], list[list[Any]]]:
    """Columns, each with whether it has numbers alone, and rows, for a table."""
    numbers = [all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in columns]
    return list(zip(columns, numbers, strict=True)), [[row.get(name) for name in columns] for row in rows]


# Folded in the middle, a number, a duration or a state cannot be read: only wider columns than this are folded.
_WHOLE = 13
_GAP = 2  # between two columns


def print_table(
    columns: Sequence[tuple[str, bool]], rows: Iterable[Iterable[Any]], *, spare: Sequence[str] = ()
) -> None:
    """Print a table with a line per row, the same in a terminal and in a pipe; numbers (True) to the right."""
    from rich.console import Console

    # Only a terminal has an edge at which cells must be folded, or columns left out.
    console = Console(width=None if sys.stdout.isatty() else 100_000)
    table = make_table(columns, rows, width=console.width, spare=spare)
    console.print(table)
    shown = {column.header for column in table.columns}
    left_out = [name for name, _ in columns if name not in shown]
    if left_out:
        say(f"the terminal is too narrow for: {', '.join(left_out)} (--json has them)")


def make_table(
    columns: Sequence[tuple[str, bool]],
    rows: Iterable[Iterable[Any]],
    *,
    width: int,
    spare: Sequence[str] = (),
) -> "Table":
    """A table for a terminal of this width. Columns of `spare` are left out, the first of them first, until it fits."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    texts = [[cell(value, name) for value, (name, _) in zip(row, columns, strict=True)] for row in rows]
    needs = [max(map(cell_len, each)) for each in zip([name for name, _ in columns], *texts, strict=True)]
    least = [
        need if number or need <= _WHOLE else cell_len(name)
        for need, (name, number) in zip(needs, columns, strict=True)
    ]
    shown = list(range(len(columns)))
    for name in spare:
        if sum(needs[at] + _GAP for at in shown) - _GAP > width:
            shown = [at for at in shown if columns[at][0] != name]
    fits = sum(least[at] + _GAP for at in shown) - _GAP <= width
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for at in shown:
        name, number = columns[at]
        justify: Literal["left", "right"] = "right" if number else "left"
        whole = fits and least[at] == needs[at]
        table.add_column(
            name, justify=justify, overflow="fold", no_wrap=whole, min_width=least[at] if fits else None
        )
    for row in texts:
        table.add_row(*(Text(row[at]) for at in shown))
    return table


# Numbers that are names: nobody counts them, but people paste them into the next command.
_IDENTIFIERS = frozenset({"pid", "port", "epoch", "offset", "first", "last"})


def cell(value: Any, column: str = "") -> str:
    """Text of one cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if column in _IDENTIFIERS else f"{value:,}"
    if isinstance(value, datetime):
        return str(_plain(value))
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, (bytes, bytearray)):
        return printable(bytes(value[:60]).decode("utf-8", "replace")) + ("…" if len(value) > 60 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(cell(inner) for inner in value)
    return printable(str(value))


def iso_time(microseconds: int) -> str:
    """A time of an event (µs since 1970) in ISO 8601, in UTC."""
    moment = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def event_fields(event: Event, attempt: int = 1) -> dict[str, object]:
    """An event as every command prints it in JSON; data that is not UTF-8 is in `data_base64`."""
    fields: dict[str, object] = {
        "id": event.id,
        "source": event.source,
        "epoch": event.epoch,
        "offset": event.offset,
        "topic": event.topic,
        "seq": event.seq,
        "time": iso_time(event.time),
    }
    if event.key:
        fields["key"] = event.key
    if event.content_type:
        fields["content_type"] = event.content_type
    if event.headers:
        fields["headers"] = dict(event.headers)
    if attempt > 1:
        fields["attempt"] = attempt
    try:
        fields["data"] = event.data.decode()
    except UnicodeDecodeError:
        fields["data_base64"] = base64.b64encode(event.data).decode()
    return fields


def account_text(account: Account) -> str:
    """What a consumer's ledger says at the end, in one line."""
    reasons = ", ".join(f"{n} {reason}" for reason, n in account.lost_by_reason.items() if n)
    return (
        f"{account.delivered} delivered, {account.lost} lost{reasons and f' ({reasons})'}, {account.pending} pending, "
        f"{account.duplicates} duplicates"
        + (f", {account.compacted} compacted" if account.compacted else "")
        + ("" if account.balanced else " (the accounting does not balance)")
    )


def say_lost(lost: Lost) -> None:
    """Report a lost range on standard error."""
    say(f"lost: offsets {lost.first} to {lost.last} of {lost.source} ({lost.count} events, {lost.reason})")


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else str(value)
