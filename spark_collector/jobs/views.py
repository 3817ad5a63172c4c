"""The landed tables as SQL views."""

from typing import TYPE_CHECKING

from brokerless.core.errors import UsageError
from brokerless.spark_collector.jobs.delta import BatchTable
from brokerless.spark_collector.jobs.report import LedgerTable
from brokerless.spark_collector.jobs.stream import SparkInput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(
    spark: "SparkSession", path: str, storage_options: dict[str, str] | None = None
) -> "DataFrame":
    """The content of a landed table at this moment. Raises UsageError if there is none."""
    table = BatchTable(path, storage_options=storage_options)
    if not table.exists():
        raise UsageError(f"{path} is not a landed table")
    return table.read(spark)


def make_views(
    spark: "SparkSession",
    *,
    table: str | None = None,
    ledger: str | None = None,
    spools: tuple[str, ...] = (),
) -> list[str]:
    """Make views `events` and `quarantine` of a landed table, `loss` and `counts` of a ledger, `spool` of spools.

    Returns the names of those there are. Raises UsageError if a table is not one.
    """
    made = []
    if table is not None:
        read_table(spark, table).createOrReplaceTempView("events")
        made.append("events")
        if BatchTable(f"{BatchTable(table).path}_quarantine").exists():
            read_table(spark, f"{BatchTable(table).path}_quarantine").createOrReplaceTempView("quarantine")
            made.append("quarantine")
    if ledger is not None:
        found = LedgerTable(ledger)
        found.loss(spark).createOrReplaceTempView("loss")
        found.counts(spark).createOrReplaceTempView("counts")
        made += ["loss", "counts"]
    if spools:
        SparkInput(paths=spools).batch(spark).createOrReplaceTempView("spool")
        made.append("spool")
    return made
