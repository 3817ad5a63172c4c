"""Tables and progress in a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from brokerless.cli.output import print_json, print_table, say
from brokerless.spark_collector.jobs.stream import Progress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# More rows than this are for --json, not for eyes.
MAX_ROWS = 200


def table(frame: "DataFrame") -> None:
    """Print a DataFrame as a table; numbers to the right."""
    rows = frame.limit(MAX_ROWS + 1).collect()
    kinds = ("bigint", "int", "double", "float")
    columns = [(name, kind in kinds or kind.startswith("decimal")) for name, kind in frame.dtypes]
    _print_table(columns, rows)


def arrow_table(found: "pa.Table") -> None:
    """Print an Arrow table; numbers to the right."""
    import pyarrow as pa

    columns = [(f.name, pa.types.is_integer(f.type) or pa.types.is_floating(f.type)) for f in found.schema]
    rows = [list(_with_maps(found, row).values()) for row in found.slice(0, MAX_ROWS + 1).to_pylist()]
    _print_table(columns, rows)


def _with_maps(found: "pa.Table", row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives a map as a list of pairs."""
    import pyarrow as pa

    return row | {f.name: dict(row[f.name] or ()) for f in found.schema if pa.types.is_map(f.type)}


def _print_table(columns: list[tuple[str, bool]], rows: Sequence[Iterable[Any]]) -> None:
    print_table(columns, rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        say(f"only the first {MAX_ROWS} rows are shown; --json gives all")


def as_json(frame: "DataFrame") -> None:
    """Print a DataFrame as one JSON object per line."""
    for row in frame.toLocalIterator():
        print_json(row.asDict(recursive=True))


def arrow_json(found: "pa.Table") -> None:
    """Print an Arrow table as one JSON object per line."""
    for row in found.to_pylist():
        print_json(_with_maps(found, row))


@contextlib.contextmanager
def progress() -> Iterator[Callable[[Progress], None]]:
    """Show at once that Spark is starting, then rows, rows per second and what is behind; on stderr."""
    if not sys.stderr.isatty():
        say("starting Spark …")
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting Spark", total=None)

        def update(now: Progress) -> None:
            text = f"{now.rows:,} rows, {now.rows_per_s:,.0f}/s, {now.behind:,} behind, batch {now.batch}"
            shown.update(task, description=text)

        yield update
