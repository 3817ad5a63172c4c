"""Loss, counts and export of spools and journals in this process, without Spark: the same numbers as its jobs.

`sources` are the options of the data source: a directory, a glob, or several of them separated by commas.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brokerless.core.errors import MissingDependency, UsageError
from brokerless.spark_collector.jobs.ledger import Windows, batch_to_ledger, ledger_arrow_schema, merge_ledger
from brokerless.spark_collector.jobs.loss import counts_table, loss_table, totals_table
from brokerless.spark_collector.source.discovery import location_of
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner, read_partition
from brokerless.spark_collector.source.schema import KIND_EVENT, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

# Ledger rows are merged when there are so many, so that memory is bounded by streams and windows, not by events.
_MERGE_ROWS = 500_000
Format = Literal["parquet", "arrow", "csv"]


def read_rows(options: dict[str, str]) -> Iterator["pa.RecordBatch"]:
    """The rows of the data source with these options, batch by batch.

    Raises ConfigError for a wrong option, UsageError for a location that is not there, DataLoss and Corrupt as the
    data source does, MissingDependency without pyarrow.
    """
    _require_pyarrow()
    parsed = parse_options({"numPartitions": "1", **options})
    for partition in Planner(parsed).everything():
        yield from read_partition(location_of(partition.key, parsed.storage_options), partition, parsed)


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingDependency("pyarrow", "arrow", "reading a spool as a table") from None


def read_ledger(options: dict[str, str], windows: Windows) -> "pa.Table":
    """The ledger rows of everything that is there now."""
    _require_pyarrow()
    import pyarrow as pa

    held: list[pa.Table] = []
    rows = 0
    for batch in read_rows(options):
        part = pa.Table.from_batches([batch_to_ledger(batch, windows)])
        held.append(part)
        rows += part.num_rows
        if rows > _MERGE_ROWS:
            held = [merge_ledger(pa.concat_tables(held))]
            rows = held[0].num_rows // 2  # merged as far as it goes: wait until it has grown by half
    return pa.concat_tables(held) if held else ledger_arrow_schema().empty_table()


def loss(
    options: dict[str, str],
    *,
    windows: Windows | None = None,
    settle_s: float = 10.0,
    now_us: int | None = None,
    by: Literal["window", "topic"] = "window",
) -> "pa.Table":
    """Loss per source, topic and window, or summed per topic; columns as in the loss table of Spark."""
    windows = windows or Windows()
    now = time.time_ns() // 1000 if now_us is None else now_us
    table = loss_table(
        read_ledger(options, windows),
        window_us=windows.window_us,
        now_us=now,
        settle_us=round(settle_s * 1_000_000),
    )
    if by == "topic":
        return totals_table(table)
    return table.sort_by([(key, "ascending") for key in ("source", "epoch", "topic", "window")])


def counts(options: dict[str, str], *, window_s: float = 60.0) -> "pa.Table":
    """Events per window, source and topic, each counted once."""
    windows = Windows(window_s)
    return counts_table(read_ledger(options, windows), window_us=windows.window_us)


def export(
    options: dict[str, str],
    out: str | os.PathLike[str],
    *,
    format: Format | None = None,
    kinds: tuple[str, ...] = (KIND_EVENT,),
) -> int:
    """Write the rows of these kinds to one file; returns how many. The file appears when it is complete.

    `format` is that of the file's name by default. In CSV, data that is not UTF-8 is in the column `data_base64`, and
    headers are JSON.
    """
    chosen = format or _format_of(Path(out))
    _require_pyarrow()
    import pyarrow as pa
    import pyarrow.compute as pc

    count = 0
    with _writer(Path(out), chosen) as write:
        for batch in read_rows(options):
            wanted = batch.filter(pc.is_in(batch.column("kind"), pa.array(kinds)))
            if wanted.num_rows:
                write(wanted)
                count += wanted.num_rows
    return count


def _format_of(out: Path) -> Format:
    formats: dict[str, Format] = {
        ".parquet": "parquet",
        ".arrow": "arrow",
        ".feather": "arrow",
        ".csv": "csv",
    }
    if out.suffix not in formats:
        raise UsageError(
            f"{out}: cannot tell the format by the name; use one of {', '.join(formats)}, or --format"
        )
    return formats[out.suffix]


@contextlib.contextmanager
def _writer(out: Path, format: Format) -> Iterator[Any]:
    """A function that writes batches into a file aside, which is renamed at the end and removed after an error."""
    import pyarrow as pa

    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    made: Any
    try:
        if format == "parquet":
            import pyarrow.parquet as pq

            made = pq.ParquetWriter(aside, arrow_schema(), compression="zstd")
        elif format == "arrow":
            made = pa.ipc.new_file(str(aside), arrow_schema())
        else:
            from pyarrow import csv

            made = csv.CSVWriter(str(aside), _text_batch(arrow_schema().empty_table().to_batches()).schema)
        with made:
            yield (lambda batch: made.write(_text_batch([batch]))) if format == "csv" else made.write_batch
        os.replace(aside, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)


def _text_batch(batches: "list[pa.RecordBatch]") -> "pa.Table":
    """Rows for CSV: data as text, or as base64 where it is none; headers as JSON."""
    import base64
    import json

    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.Table.from_batches(batches, arrow_schema())
    columns: dict[str, Any] = dict.fromkeys(
        ("headers", "data", "data_base64"), pa.repeat(pa.scalar("", pa.string()), table.num_rows)
    )
    if any(len(chunk.keys) for chunk in table["headers"].chunks):
        headers = (dict(each) for each in table["headers"].to_pylist())
        columns["headers"] = [json.dumps(each, ensure_ascii=False) if each else "" for each in headers]
    try:
        columns["data"] = table["data"].cast(pa.string())
    except pa.ArrowInvalid:  # not all of it is text
        columns["data"], columns["data_base64"] = [], []
        for data in table["data"].to_pylist():
            try:
                text, encoded = data.decode(), ""
            except UnicodeDecodeError:
                text, encoded = "", base64.b64encode(data).decode()
            columns["data"].append(text)
            columns["data_base64"].append(encoded)
    for name in ("time", "received"):
        # Arrow's own text of a time with a zone is the same, and takes twenty times as long.
        told = table[name].cast(pa.timestamp("us")).cast(pa.string())
        table = table.set_column(
            table.column_names.index(name), name, pc.binary_join_element_wise(told, "Z", "")
        )
    table = table.drop_columns(["data", "headers"])
    for name, values in columns.items():
        column = pa.array(values, pa.string()) if isinstance(values, list) else values
        table = table.append_column(name, column)
    return table
