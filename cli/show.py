"""DataFrames and progress in a terminal."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from brokerless.spark_collector import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# More rows than this are for --json, not for eyes.
MAX_ROWS = 200


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:60]).decode("utf-8", "replace") + ("…" if len(value) > 60 else "")
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    return str(value)


def table(frame: "DataFrame") -> None:
    """Print a DataFrame as a table; numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = frame.limit(MAX_ROWS + 1).collect()
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, kind in frame.dtypes:
        number = kind in ("bigint", "int", "double", "float") or kind.startswith("decimal")
        shown.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows[:MAX_ROWS]:
        shown.add_row(*(Text(_text(value)) for value in row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(shown)
    if len(rows) > MAX_ROWS:
        console.print(f"only the first {MAX_ROWS} rows are shown; --json gives all")


def as_json(frame: "DataFrame") -> None:
    """Print a DataFrame as one JSON object per line."""
    for row in frame.toLocalIterator():
        print(json.dumps(row.asDict(recursive=True), default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


@contextlib.contextmanager
def bar() -> Iterator[Callable[[Progress], None]]:
    """A progress line with rows, rows per second and what is behind; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def tell(now: Progress) -> None:
            text = f"{now.rows:,} rows, {now.rows_per_s:,.0f}/s, {now.behind:,} behind, batch {now.batch}"
            shown.update(task, description=text)

        yield tell
