"""Rows that tasks read by themselves: Spark hands them ranges of locations, with the option `ranges` of the source."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from brokerless.core.errors import Fault
from brokerless.spark_collector.jobs.table import TaskReader
from brokerless.spark_collector.source.discovery import location_of
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Partition, read_partition
from brokerless.spark_collector.source.schema import KIND_RANGE, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def range_reader(options: dict[str, str], kinds: tuple[str, ...]) -> TaskReader:
    """Of the rows of a stream of ranges with these options otherwise: what `land.prepare` makes of the rows there."""
    import pyarrow as pa

    parse_options(options)
    schema = pa.schema([field.with_nullable(True) for field in arrow_schema()])

    def read(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for batch in batches:
            yield from read_ranges(batch, options, kinds)

    return TaskReader(schema.append(pa.field("date", pa.date32())), read)


def read_ranges(
    batch: "pa.RecordBatch", options: dict[str, str], kinds: tuple[str, ...]
) -> Iterator["pa.RecordBatch"]:
    """The rows of these kinds in the ranges that these rows name, with the UTC day of their time as the column `date`.

    Raises Fault for a row that names none, and what `read_partition` raises.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    parsed = parse_options(options)
    for kind, data in zip(batch.column("kind").to_pylist(), batch.column("data").to_pylist(), strict=True):
        if kind != KIND_RANGE:
            raise Fault(
                f"a row of kind {kind!r} where a range was expected: feed a Lander with its own stream"
            )
        partition = msgspec.json.decode(data, type=Partition)
        location = location_of(partition.key, parsed.storage_options)
        rows: pa.RecordBatch
        for rows in read_partition(location, partition, parsed):
            wanted = rows.filter(pc.is_in(rows.column("kind"), pa.array(kinds)))
            yield wanted.append_column("date", pc.cast(wanted.column("time"), pa.date32()))
