"""Landing events in a Delta or Iceberg table, exactly once; payloads as columns if wanted."""

from typing import TYPE_CHECKING, Literal

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.jobs.dedupe import LandedOffsets, drop_landed, offset_islands
from brokerless.spark_collector.jobs.delta import BatchTable
from brokerless.spark_collector.jobs.iceberg import IcebergTable
from brokerless.spark_collector.jobs.parse import check_json_schema, parse_json, split_parsed
from brokerless.spark_collector.jobs.ranges import range_reader
from brokerless.spark_collector.jobs.stream import SparkInput
from brokerless.spark_collector.jobs.table import ExactlyOnceTable, TaskReader
from brokerless.spark_collector.source.schema import COLUMNS, KIND_EVENT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Days since 1970 of the event's time: independent of the session's time zone.
_DATE = "date_add(date'1970-01-01', cast(floor(unix_micros(time) / 86400000000) as int))"

# Delta has no partitions of bytes and of maps.
_NO_PARTITIONS = ("data", "headers")


class LandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How events are landed.

    `partition_by`: the table's partitions; `date` is the UTC day of the event's time. Add `topic` if there are few
    topics: each batch writes at least one file per value.
    `dedupe`: drop events that were landed before, by (source, epoch, offset); needed when several collectors have the
    same producer, costs one more pass over the batch.
    `json_schema`: a Spark DDL string, or `"infer"` (the table's own if it has one, else from the first batch): the
    payload becomes the columns `json.*`, and what does not parse goes to the quarantine table.
    `kinds`: which rows are landed.
    `storage_options`: what the object store of the table needs.
    `format`: `"iceberg"` takes the table's name in the catalogue of pyiceberg's own configuration instead of a path.
    Raises ConfigError for impossible partitions.
    """

    partition_by: tuple[str, ...] = ("date",)
    dedupe: bool = False
    json_schema: str | None = None
    kinds: tuple[str, ...] = (KIND_EVENT,)
    storage_options: dict[str, str] = {}
    format: Literal["delta", "iceberg"] = "delta"

    def __post_init__(self) -> None:
        for name in self.partition_by:
            if name not in (*COLUMNS, "date"):
                raise ConfigError(
                    "partition_by", f"there is no such column as {name!r}: {', '.join(COLUMNS)}, date"
                )
            if name in _NO_PARTITIONS:
                raise ConfigError("partition_by", f"{name} cannot be a table's partition")
            if self.partition_by.count(name) > 1:
                raise ConfigError("partition_by", f"{name} is there twice")


class Lander:
    """The batch function of `brokerless spark land`.

    Writes the table `path`, `<path>_quarantine` for payloads that do not parse, and `<path>_landed` for what
    `dedupe` remembers. `landed` and `quarantined` count the rows that this object committed. Raises ConfigError if
    the options contradict each other or the table that is there.
    """

    def __init__(self, path: str, options: LandOptions | None = None) -> None:
        self.options = options or LandOptions()
        self.table = open_table(path, self.options)
        self.quarantine = self.table.sibling("_quarantine", self.options.partition_by)
        self.table.check()
        self.landed = 0
        self.quarantined = 0
        self._schema = self.options.json_schema
        if self._schema is not None:
            self._schema = check_json_schema(self._schema, self.table)
        self._reader: TaskReader | None = None
        self._landed: LandedOffsets | None = None
        if self.options.dedupe:
            self._landed = LandedOffsets(self.table.sibling("_landed"))

    @property
    def checkpoint(self) -> str:
        """Where the query that feeds this keeps its checkpoint. Raises UsageError for a table in an object store."""
        return self.table.checkpoint

    def stream(self, source: SparkInput, spark: "SparkSession") -> "DataFrame":
        """The stream to feed this with, and nothing else, from now on.

        Where rows are landed as they are, it has the ranges of each batch only: the tasks read these and write them as
        files, and Spark carries no rows, which would take most of the time. Rows that are parsed, de-duplicated or may
        be missing come as rows.
        """
        as_they_are = self._landed is None and self._schema is None
        if not as_they_are or not source.fail_on_data_loss or source.quarantine_corrupt:
            return source.stream(spark)
        self._reader = range_reader(source.options(), self.options.kinds)
        return source.stream(spark, ranges=True)

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Land one micro-batch; doing it again changes nothing."""
        if self._reader is not None:
            self.landed += self.table.append(rows, batch, query, reader=self._reader)
            return
        wanted = prepare(rows, self.options.kinds)
        keep = self._landed is not None or self._schema is not None
        if keep:
            wanted = wanted.persist()
        try:
            if self._landed is None:
                self._land(wanted, batch, query)
                return
            islands = offset_islands(wanted)
            self._land(drop_landed(wanted, islands, self._landed.before(batch, query)), batch, query)
            self._landed.add(islands, batch, query)
        finally:
            if keep:
                wanted.unpersist()

    def _land(self, rows: "DataFrame", batch: int, query: str) -> None:
        if self._schema is None:
            self.landed += self.table.append(rows, batch, query)
            return
        parsed, self._schema = parse_json(rows, self._schema)
        good, bad = split_parsed(parsed)
        self.landed += self.table.append(good, batch, query)
        self.quarantined += self.quarantine.append(bad, batch, query)


def open_table(path: str, options: LandOptions) -> ExactlyOnceTable:
    """The table to land in; it need not exist. Raises ConfigError for a place or name that cannot be one."""
    kind = IcebergTable if options.format == "iceberg" else BatchTable
    return kind(path, partition_by=options.partition_by, storage_options=options.storage_options)


def prepare(rows: "DataFrame", kinds: tuple[str, ...] = (KIND_EVENT,)) -> "DataFrame":
    """The rows of these kinds, with the UTC day of their time as the column `date`."""
    from pyspark.sql import functions as F

    date: Column = F.expr(_DATE)
    return rows.where(F.col("kind").isin(*kinds)).withColumn("date", date)
