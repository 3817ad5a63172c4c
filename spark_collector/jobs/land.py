"""Landing events in a Parquet table, exactly once; payloads as columns if wanted."""

from typing import TYPE_CHECKING

import msgspec

from brokerless.spark_collector.jobs.dedupe import Seen, drop_seen, offset_islands
from brokerless.spark_collector.jobs.parse import parse_json, split_parsed
from brokerless.spark_collector.schema import KIND_EVENT
from brokerless.spark_collector.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class LandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How events are landed.

    `partition_by`: columns of the folder names; `date` is the UTC day of the event's time. With thousands of
    topics leave `topic` out, or every batch writes thousands of files.
    `dedupe`: drop events that were landed before, by (source, epoch, offset); needed when several collectors
    have the same producer, costs one more pass over the batch.
    `json_schema`: a Spark DDL string (or `"infer"`, from the first batch): the payload becomes the columns
    `json.*`, and what does not parse goes to the quarantine table.
    `kinds`: which rows are landed.
    """

    partition_by: tuple[str, ...] = ("date", "topic")
    dedupe: bool = False
    json_schema: str | None = None
    kinds: tuple[str, ...] = (KIND_EVENT,)


class Lander:
    """The batch function of `brokerless spark land`: tables `<path>` and `<path>/_brokerless/…` beside it."""

    def __init__(self, path: str, options: LandOptions | None = None) -> None:
        self.options = options or LandOptions()
        self.table = Table(path)
        self.table.recover()
        self.quarantine = Table(f"{self.table.path}_quarantine")
        self._seen = Seen(Table(f"{self.table.path}_seen")) if self.options.dedupe else None
        self._schema = self.options.json_schema

    @property
    def checkpoint(self) -> str:
        """Where the query that feeds this keeps its checkpoint."""
        return self.table.checkpoint

    @property
    def quarantined(self) -> int:
        """Rows in the quarantine table."""
        return self.quarantine.notes().get("rows", 0)

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Land one micro-batch; doing it again changes nothing."""
        from pyspark.sql import functions as F

        wanted = rows.where(F.col("kind").isin(*self.options.kinds))
        keep = self._seen is not None or self._schema is not None
        if keep:
            wanted = wanted.persist()
        try:
            if self._seen is not None:
                islands = offset_islands(wanted)
                fresh = drop_seen(wanted, islands, self._seen.before(batch))
                self._land(fresh, batch, query)
                self._seen.add(wanted.sparkSession, islands, batch, query)
            else:
                self._land(wanted, batch, query)
        finally:
            if keep:
                wanted.unpersist()

    def _land(self, rows: "DataFrame", batch: int, query: str) -> None:
        if self._schema is None:
            self._write(self.table, rows, batch, query)
            return
        parsed, self._schema = parse_json(rows, self._schema)
        good, bad = split_parsed(parsed)
        self._write(self.table, good, batch, query)
        self._write(self.quarantine, bad, batch, query)

    def _write(self, table: Table, rows: "DataFrame", batch: int, query: str) -> None:
        if table.batches().get(query, -1) >= batch:
            return
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        staged = table.stage()
        counted = Observation()
        dated = rows.withColumn("date", F.to_date("time")).observe(counted, F.count(F.lit(1)).alias("rows"))
        dated.write.mode("overwrite").partitionBy(*self.options.partition_by).parquet(staged)
        table.commit(staged, query=query, batch=batch, notes={"rows": counted.get["rows"]})


def read_table(spark: "SparkSession", path: str) -> "DataFrame":
    """The exact content of a landed table at this moment, whatever its writer is doing."""
    table = Table(path)
    paths = table.paths()
    if not paths:
        raise FileNotFoundError(path)
    # A topic named 007 is text; Spark would read the folder's name as the number 7.
    guessing = "spark.sql.sources.partitionColumnTypeInference.enabled"
    before = spark.conf.get(guessing)
    spark.conf.set(guessing, "false")
    try:
        reader = spark.read.option("basePath", str(table.path)).option("mergeSchema", "true")
        found = reader.parquet(*paths)
    finally:
        spark.conf.set(guessing, before or "true")
    return found.withColumn("date", found["date"].cast("date")) if "date" in found.columns else found
