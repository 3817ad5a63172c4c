"""The ledger table: islands of what came, per batch, from which loss and counts are computed at any time."""

import time
from typing import TYPE_CHECKING

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.jobs.ledger import LEDGER_SCHEMA, Windows, ledger_rows
from brokerless.spark_collector.jobs.loss import loss, received
from brokerless.spark_collector.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class LedgerTable:
    """The batch function of `brokerless spark loss` and `counts`.

    The windows are fixed when the table is made.
    """

    def __init__(self, path: str, windows: Windows) -> None:
        self.table = Table(path)
        self.table.recover()
        self.windows = self._fix(windows)

    @classmethod
    def open(cls, path: str) -> "LedgerTable":
        """A ledger that is there already, with its own windows, for reading."""
        self = cls.__new__(cls)
        self.table = Table(path)
        raw = (self.table.path / "_brokerless" / "windows.json").read_bytes()
        self.windows = msgspec.json.decode(raw, type=Windows)
        return self

    def _fix(self, windows: Windows) -> Windows:
        file = self.table.path / "_brokerless" / "windows.json"
        if file.exists():
            made = msgspec.json.decode(file.read_bytes(), type=Windows)
            if windows.window_us % made.window_us:
                raise ConfigError(
                    "window",
                    f"must be a multiple of the ledger's {made.window_s} s (in {self.table.path}); "
                    "use another ledger folder for another window",
                )
            return made
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(windows))
        return windows

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Add the islands of one micro-batch; doing it again changes nothing."""
        if self.table.batches().get(query, -1) >= batch:
            return
        staged = self.table.stage()
        ledger_rows(rows, self.windows).coalesce(1).write.mode("overwrite").parquet(staged)
        self.table.commit(staged, query=query, batch=batch)

    def rows(self, spark: "SparkSession") -> "DataFrame":
        """All ledger rows."""
        paths = self.table.paths()
        if not paths:
            return spark.createDataFrame([], LEDGER_SCHEMA)
        return spark.read.schema(LEDGER_SCHEMA).parquet(*paths)

    def loss(
        self,
        spark: "SparkSession",
        *,
        window_s: float | None = None,
        settle_s: float = 10.0,
        now_us: int | None = None,
    ) -> "DataFrame":
        """The loss table as of now."""
        now = time.time_ns() // 1000 if now_us is None else now_us
        return loss(
            self.rows(spark), window_s=window_s or self.windows.window_s, now_us=now, settle_s=settle_s
        )

    def counts(self, spark: "SparkSession", *, window_s: float | None = None) -> "DataFrame":
        """Distinct events per window, source and topic: de-duplicated, with the islands as the only state."""
        from pyspark.sql import functions as F

        size = round((window_s or self.windows.window_s) * 1_000_000)
        table = received(self.rows(spark), size)
        return (
            table.groupBy(F.timestamp_micros("slot").alias("window"), "source", "topic")
            .agg(F.sum("received").alias("events"), F.sum("duplicates").alias("duplicates"))
            .orderBy("window", "source", "topic")
        )

    def merge(self, spark: "SparkSession") -> int:
        """Put the islands of all batches together into few; returns how many files that saved."""
        from brokerless.spark_collector.jobs.compact import merge_ledger

        return merge_ledger(spark, self)
