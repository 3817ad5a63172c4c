"""The ledger table: islands of what came, per batch, from which loss and counts are computed at any time."""

import time
from typing import TYPE_CHECKING

import msgspec

from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector.jobs.delta import BatchTable
from brokerless.spark_collector.jobs.ledger import (
    LEDGER_SCHEMA,
    Windows,
    ledger_arrow_schema,
    ledger_rows,
    merge_ledger,
)
from brokerless.spark_collector.jobs.loss import counts_frame, loss_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A ledger of hundreds of small files reads slowly, and merging is exact.
MERGE_FILES = 32


class LedgerTable:
    """The batch function of `brokerless spark loss` and `counts`: a Delta table of ledger rows.

    The windows are fixed when the table is made, and kept in its description. Raises ConfigError if `windows` does
    not fit them.
    """

    def __init__(
        self, path: str, windows: Windows | None = None, *, storage_options: dict[str, str] | None = None
    ) -> None:
        self._batches = 0
        description = msgspec.json.encode(windows).decode() if windows is not None else ""
        self.table = BatchTable(path, storage_options=storage_options, description=description)
        found = self.table.open()
        if found is None:
            if windows is None:
                raise UsageError(f"{path} is not a ledger")
            self.windows = windows
            return
        try:
            self.windows = msgspec.json.decode(found.metadata().description or "", type=Windows)
        except msgspec.DecodeError:
            raise UsageError(f"{path} is not a ledger") from None
        if windows is not None and windows.window_us % self.windows.window_us:
            raise ConfigError(
                "window",
                f"must be a multiple of the ledger's {self.windows.window_s} s (in {self.table.path}); "
                "use another ledger folder for another window",
            )

    @property
    def checkpoint(self) -> str:
        """Where the query that feeds this keeps its checkpoint."""
        return self.table.checkpoint

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Add the islands of one micro-batch; doing it again changes nothing."""
        self.table.append(ledger_rows(rows, self.windows), batch, query, summary=True)
        self._batches += 1
        if self._batches % MERGE_FILES == 0:
            self.merge()

    def rows(self, spark: "SparkSession") -> "DataFrame":
        """All ledger rows."""
        return self.table.read(spark) if self.table.exists() else spark.createDataFrame([], LEDGER_SCHEMA)

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
        window = window_s or self.windows.window_s
        return loss_frame(self.rows(spark), window_s=window, now_us=now, settle_s=settle_s)

    def counts(self, spark: "SparkSession", *, window_s: float | None = None) -> "DataFrame":
        """Distinct events per window, source and topic: de-duplicated, with the islands as the only state."""
        return counts_frame(self.rows(spark), window_s=window_s or self.windows.window_s)

    def merge(self) -> int:
        """Join the islands of all batches, if there are many files; returns how many files that saved.

        Only the job that writes the ledger may call it.
        """
        files = self.table.files()
        if files <= MERGE_FILES:
            return 0
        self.table.replace_arrow(merge_ledger(self.table.read_arrow().cast(ledger_arrow_schema())))
        return files - 1
