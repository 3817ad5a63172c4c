"""`spark.read.format("brokerless")` and `spark.readStream.format("brokerless")`; writing is in `sink`.

Planning happens in one process on the driver, reading in the executors, which need this package installed.
Filters are not pushed down here, only in the JVM: Spark 4.3 remembers what it pushed into a Python source with the
DataFrame, and applies it to the next query of the same DataFrame if that has no filter to push.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow

from brokerless.spark_collector.source.discovery import location_of
from brokerless.spark_collector.source.options import SourceOptions, parse_options
from brokerless.spark_collector.source.planning import (
    UNLIMITED,
    Offsets,
    Partition,
    Planner,
    max_rows,
    read_partition,
)
from brokerless.spark_collector.source.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class SparkPartition(InputPartition):
    """One task of a batch."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.partition = partition


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[Any]:
    if not isinstance(partition, SparkPartition):
        return iter(())  # Spark makes up one partition where there are none
    return read_partition(
        location_of(partition.partition.key, options.storage_options), partition.partition, options
    )


class BrokerlessSource(DataSource):
    """Journals and publishers as rows; see docs/spark_collector.md for the options."""

    @classmethod
    def name(cls) -> str:
        """What `format()` takes."""
        return "brokerless"

    def schema(self) -> str:
        """The one row schema."""
        return ROW_SCHEMA

    def reader(self, schema: "StructType") -> "BatchReader":
        """For `spark.read`."""
        return BatchReader(parse_options(self.options))

    def writer(self, schema: "StructType", overwrite: bool) -> "Any":
        """For `df.write`."""
        from brokerless.spark_collector.sink.writer import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "Any":
        """For `df.writeStream`."""
        from brokerless.spark_collector.sink.writer import StreamWriter

        return StreamWriter(self.options, schema, overwrite)

    def streamReader(self, schema: "StructType") -> "StreamReader":
        """For `spark.readStream`."""
        return StreamReader(parse_options(self.options))


class BatchReader(DataSourceReader):
    """Everything between startingOffsets and endingOffsets, as it is when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[SparkPartition]:
        """Ranges of offsets, one per task."""
        return [SparkPartition(partition) for partition in Planner(self.options).everything()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one range; runs in an executor."""
        return _read(self.options, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches; the checkpoint keeps a `LocationOffset` per location."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the options only."""
        return {"options": self.options, "_planner": None}

    @property
    def planner(self) -> Planner:
        """Made in the planning process."""
        if self._planner is None:
            self._planner = Planner(self.options)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return _dump(self.planner.initial())

    def getDefaultReadLimit(self) -> Any:
        """maxEventsPerTrigger, and so that maxBytesPerTrigger holds, too."""
        most = max_rows(self.options)
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is there now."""
        self.planner.fix_target({})

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        """How far the next batch goes."""
        most = getattr(limit, "max_rows", 0)
        max_bytes = self.options.max_bytes if most else 0
        return _dump(self.planner.latest(_load(start), 0 if most == UNLIMITED else most, max_bytes))

    def reportLatestOffset(self) -> dict[str, Any]:
        """What there is in all: the backlog in the query's progress."""
        return _dump(self.planner.newest())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[SparkPartition]:
        """Ranges of offsets, one per task."""
        return [SparkPartition(partition) for partition in self.planner.partitions(_load(start), _load(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one range; runs in an executor."""
        return _read(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the spool's retention does not wait for Spark.

        The checkpoint does the remembering.
        """


def _dump(offsets: Offsets) -> dict[str, Any]:
    return {key: msgspec.to_builtins(offset) for key, offset in sorted(offsets.items())}


def _load(found: dict[str, Any]) -> Offsets:
    return msgspec.convert(found, Offsets)


# Spark finds this name in the top-level module `pyspark_brokerless` by itself.
DefaultSource = BrokerlessSource
